"""VIVI (1912.02783): learn from labelled images and from videos.

A batch has B labelled images and B clips. A clip has S shots in order, each
shot has F frames, and each frame has K independently augmented copies. Let z be
the head's input for a copy, scaled to length 1, and c the mean of z over a
shot. The model predicts the next shot from each copy. Let g be the mean of the
predictions over a shot, scaled to length 1. d is the squared distance, m the
margin, t the temperature and w the weight. The loss is

  mean CE(classes of labelled images) + w (frames + shots + videos)

  frames = mean max(0, m + max d(z, copies of the same frame)
                         - min d(z, frames of other videos))
  shots  = mean |z - c|^2
  videos = mean -log softmax(g . c' / t), where c' is c of the next shot of the
           same video and the softmax is over the next shots of all videos.

Videos are compared within `objective.group` rows of the batch. The three terms
follow section 3: `frames` is the triplet loss of `s4l`, `shots` makes the
frames of a shot alike, and `videos` is InfoNCE between shots. The paper
predicts from all earlier shots with an LSTM or an MLP. Here a linear layer
predicts each shot from the shot before.
"""

import dataclasses
import pathlib
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax.data import bad_images, folder, image_files
from vit_jax.data.source import Record, Source
from vit_jax.models.fields import field
from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Example
from vit_jax.projects.few_labels.s4l import (
  Exemplar,
  triplet_gaps,
  unit_vectors,
)
from vit_jax.projects.few_labels.second_heads import VideoViT


@dataclasses.dataclass(frozen=True)
class VideoInvariances(Exemplar):
  """Learns from labelled images and from clips of videos."""

  trained = VideoViT
  # Frames of videos take the place of unlabelled images.
  unused = {
    **Exemplar.unused,
    'objective.unlabelled': 'train',
    'objective.unlabelled_data': '',
  }

  copies: int = field(2, 'K, copies per frame.', valid='[2, inf)')
  group: int = field(16, 'G, rows whose videos are compared.', valid='[2, inf)')
  videos: str = field('', 'Folder with a folder of frames per video.')
  shots: int = field(2, 'S, shots per clip.', valid='[2, inf)')
  frames: int = field(2, 'F, frames per shot.', valid='[2, inf)')
  length: int = field(16, 'Maximum number of frames that a shot spans.')
  temperature: float = field(0.1, 't, temperature.', valid='(0, inf)')

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    o = config.objective
    if not o.videos:
      raise ValueError(
        'objective.videos is empty. Name a folder with one folder of frames '
        'per video, as in --config.objective.videos=./clips.'
      )
    if o.length < o.frames:
      raise ValueError(
        f'objective.length is {o.length}; it must be at least '
        f'objective.frames={o.frames}. Raise length or lower frames.'
      )
    return super().from_config(config, image_size)

  def train_transform(self) -> Any:
    """Returns the function from a record to an example with a random clip.

    Adds 'clip', uint8 [S, F, K, H, W, 3], and 'video', int32, the index of the
    clip's video.

    Raises the errors of `open_videos`, and ValueError if a video has fewer than
    S F frames.
    """
    videos = open_videos(self.videos, self.data.on_bad_image)
    lengths, least = np.diff(videos.edges), self.shots * self.frames
    if min(lengths) < least:
      first = videos.edges[np.argmin(lengths)]
      raise ValueError(
        f'The video that begins with {videos.frames[int(first)]["name"]} has '
        f'{min(lengths)} frames; objective.shots={self.shots} x '
        f'objective.frames={self.frames} need {least}. Remove the video, or '
        'lower shots or frames.'
      )
    labelled = Classification.train_transform(self)
    transform = self.images.train_transform()
    clip, copies = (self.shots, self.frames, self.length), self.copies

    def example(record: Record, rng: np.random.Generator) -> Example:
      found = labelled(record, rng)
      video = int(rng.integers(len(videos)))
      rows_SF = videos.clip(video, *clip, rng)
      frames = (videos.frames[int(row)] for row in rows_SF.flat)
      images = np.stack(
        [transform(x, rng)['image'] for x in frames for _ in range(copies)]
      )
      shape = *rows_SF.shape, copies, *images.shape[1:]
      return {**found, 'clip': images.reshape(shape), 'video': np.int32(video)}

    return example

  @property
  def images_seen(self) -> int:
    """Images per example: one labelled image and a clip."""
    return 1 + self.shots * self.frames * self.copies

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = Classification.batch_shapes(self, size)
    B, *rest = shapes['image'].shape
    shape = B, self.shots, self.frames, self.copies, *rest
    return shapes | {
      'clip': jax.ShapeDtypeStruct(shape, np.uint8),
      'video': jax.ShapeDtypeStruct((B,), np.int32),
    }

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Augments images, and arranges the rows in groups, as `Exemplar` does.

    Returns:
      `image`: float32 [B / G, G, 1 + S F K, H, W, 3], each labelled image
      followed by the clip of its row; `label`: float32 [B / G, G, C] for C
      classes; `video`: int32 [B / G, G].
    """
    labels = optax.smooth_labels(self._labels(batch), self.label_smoothing)
    image, G = batch['image'], self.group
    B, *rest = image.shape
    images = jnp.concatenate(
      [image[:, None], batch['clip'].reshape(B, -1, *rest)], axis=1
    )
    return {
      'image': self.augmented(images, key).reshape(B // G, G, -1, *rest),
      'label': labels.reshape(B // G, G, -1),
      'video': batch['video'].reshape(B // G, G),
    }

  def loss(
    self, params: Params, batch: Batch, key: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean loss of an augmented batch, and its metrics.

    `predicted` is the share of shots whose prediction is more similar to the
    true next shot than to the next shots of other videos of the group.
    """
    images, labels = batch['image'], batch['label']
    logits_NC, aux = self._outputs(params, images, key)
    rows = images.shape[:3]  # (groups, G, 1 + S F K)
    logits = logits_NC.reshape(*rows, -1)[:, :, 0]
    labelled = jnp.mean(self._losses(logits, labels))
    y, following = (
      aux[name].reshape(*rows, -1)[:, :, 1:]
      for name in ('pre_logits', 'next_shot')
    )
    frames, shots = self._alike(y, batch['video'])
    videos, told = self._predicted(y, following, batch['video'])
    loss = labelled + self.weight * (frames + shots + videos)
    return loss, {
      'loss': loss,
      'frame_loss': frames,
      'shot_loss': shots,
      'video_loss': videos,
      'accuracy': jnp.mean(jnp.argmax(logits, -1) == jnp.argmax(labels, -1)),
      'predicted': told,
    }

  def _alike(
    self, y: jax.Array, video: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the losses `frames` and `shots` of the module's docstring.

    `y` is [groups, G, S F K, D]; `video` [groups, G] is the video of each row.
    """
    groups, G, copies, D = y.shape
    gaps = triplet_gaps(
      y.reshape(groups, -1, self.copies, D),
      jnp.repeat(video, self.shots * self.frames, axis=1),
    )
    z = unit_vectors(y).reshape(groups, G, self.shots, -1, D)
    apart = z - jnp.mean(z, axis=3, keepdims=True)
    return (
      jnp.mean(jax.nn.relu(self.margin + gaps)),
      jnp.mean(jnp.sum(jnp.square(apart), axis=-1)),
    )

  def _predicted(
    self, y: jax.Array, following: jax.Array, video: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the loss `videos`, and the share of shots predicted correctly.

    `y` and `following` are [groups, G, S F K, D]. Two clips of the same video
    are not negatives of each other.
    """
    groups, G, copies, D = y.shape
    shape = groups, G, self.shots, -1, D
    shots = jnp.mean(unit_vectors(y).reshape(shape), axis=3)
    guessed = unit_vectors(jnp.mean(following.reshape(shape), axis=3))
    similarity = jnp.einsum(
      'gbsd,gcsd->gsbc', guessed[:, :, :-1], shots[:, :, 1:]
    )
    is_other = ~jnp.eye(G, dtype=bool)[None]
    again = (video[:, :, None] == video[:, None]) & is_other
    similarity = jnp.where(again[:, None], -jnp.inf, similarity)
    own = jnp.broadcast_to(jnp.arange(G)[None, None], similarity.shape[:3])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      similarity / self.temperature, own
    )
    return jnp.mean(losses), jnp.mean(jnp.argmax(similarity, -1) == own)


@dataclasses.dataclass(frozen=True)
class Videos:
  """Videos as one sequence of frames.

  Attributes:
    frames: the frames of all videos, video by video.
    edges: int64 [V + 1]; video v has the frames edges[v] to edges[v + 1] - 1.
  """

  frames: Source
  edges: np.ndarray

  def __len__(self) -> int:
    return len(self.edges) - 1

  def clip(
    self,
    video: int,
    shots: int,
    frames: int,
    length: int,
    rng: np.random.Generator,
  ) -> np.ndarray:
    """Draws the frames of a clip.

    Divides the video into `shots` nearly equal parts. Each part has one shot:
    `frames` frames drawn from a random range of at most `length` frames.

    Returns:
      Indices in `self.frames`, int64 [shots, frames], ascending.
    """
    first, end = self.edges[video : video + 2]
    bounds = first + (end - first) * np.arange(shots + 1) // shots
    found = []
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
      within = min(length, high - low)
      low = low + rng.integers(high - low - within + 1)
      found.append(low + np.sort(rng.choice(within, frames, replace=False)))
    return np.stack(found)


def open_videos(path: str, on_bad_image: str) -> Videos:
  """Opens a folder with one folder of numbered frames per video.

  Raises ValueError if there are no videos or a video has no frames; or if
  frames are unreadable, and `on_bad_image` is 'error' or no frame is left.
  Raises OSError if a folder cannot be read.
  """
  root = pathlib.Path(path).expanduser()
  if not (names := image_files.sub_folders(root)):
    raise ValueError(
      f'{root} has no folders of frames. Write the frames of each video into '
      f'its own folder, as with mkdir -p {root}/clip && ffmpeg -i clip.mp4 '
      f'{root}/clip/%06d.jpg.'
    )
  files, _ = folder.list_files(root, names)
  # Sorts a video's frames by the length of the path first, so that 10.jpg comes
  # after 9.jpg.
  files.sort(key=lambda file: (file[1], len(file[0]), file[0]))
  paths, videos = map(list, zip(*files, strict=True))
  frames = bad_images.checked(
    folder.LabelledFiles(paths, videos, names), on_bad_image
  )
  # Videos without a readable frame are left out.
  labels = frames.labels()  # type: ignore[attr-defined]
  starts = np.unique(labels, return_index=True)[1]
  return Videos(frames, np.append(starts, len(frames)))
