"""Videos, whose frames are records: files, folders of frames, moving images.

Frames lie video after video in their order, so that a frame is read as every
other image is. A shot is a stretch of neighbouring frames.
"""

import dataclasses
import pathlib
import re

import cv2
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import (
  bad_images,
  cores,
  decode,
  folder,
  image_files,
  transforms,
)
from vit_jax.data.source import Record, RecordsByIndex, Source

# Extensions of video files, and how many frames a file may lack at its end.
FILES = ('.mp4', '.m4v', '.mov', '.avi', '.mkv', '.webm')
_MOST_LACKING = 10
# How far an image moves: across and down in shares of the side, turned by
# degrees, and grown by the logarithm of the size. A shot changes one of the
# tuples of columns, in so many frames; smaller images are enlarged.
_MOST = np.array([0.25, 0.25, 30.0, 0.3])
_SHOTS, _FRAMES, _SIDE = ((0, 1), (2,), (3,)), 8, 16


@dataclasses.dataclass(frozen=True)
class Videos:
  """Videos of any length.

  Attributes:
    frames: of all of them.
    edges: int64 [V + 1], video v has the frames from edges[v] to before
      edges[v + 1].
  """

  frames: RecordsByIndex
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
    """Returns the frames [shots, frames] of a part of a video, in order.

    Each of as many equal parts of the video has a shot, at most `length`
    neighbouring frames anywhere in it, of which `frames` are drawn.
    """
    first, end = self.edges[video : video + 2]
    bounds = first + (end - first) * np.arange(shots + 1) // shots
    found = []
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
      within = min(length, high - low)
      low = low + rng.integers(high - low - within + 1)
      found.append(low + np.sort(rng.choice(within, frames, replace=False)))
    return np.stack(found)

  def check(self, shots: int, frames: int) -> None:
    """Refuses videos that are too short for clips.

    Raises:
      ValueError: naming the shortest.
    """
    lengths = np.diff(self.edges)
    shortest = int(np.argmin(lengths))
    if lengths[shortest] < shots * frames:
      name = self.frames[int(self.edges[shortest])]['name']
      raise ValueError(
        f'The video that begins with {name} has {lengths[shortest]} frames: '
        f'objective.shots={shots} of objective.frames={frames} take '
        f'{shots * frames}. Remove it, or take fewer.'
      )


def open_videos(path: str, data: ConfigDict) -> Videos:
  """Opens the videos of a folder, or makes some of images; frames are checked.

  Args:
    path: of a folder with video files, or with a folder of frames for each
      video, which come in the order of their numbers. Empty for a video of
      every image of `data`, which moves.
    data: as `config.data`.

  Raises:
    ValueError: if there is no video, or one or its frames are unreadable.
    FileNotFoundError: if there is no folder.
  """
  if not path:
    images = bad_images.open_checked(data, data.split)
    edges = np.arange(len(images) + 1) * len(_SHOTS) * _FRAMES
    return Videos(MovingImages(images), edges)
  root = pathlib.Path(path).expanduser()
  if not root.is_dir():
    raise FileNotFoundError(f'No folder {root}; give a folder with videos.')
  files = [
    entry.path
    for entry in image_files.visible(root)
    if entry.name.lower().endswith(FILES) and entry.is_file()
  ]
  folders = image_files.sub_folders(root)
  if bool(files) == bool(folders):
    raise ValueError(
      f'{root} has {len(files)} video files ({", ".join(FILES)}) and '
      f'{len(folders)} folders of frames: give a folder with one kind of them.'
    )
  if files:
    found = VideoFiles(files)
    return Videos(found, found.edges)
  frames = bad_images.checked(FrameFolders(root), data.on_bad_image)
  # Videos without a readable frame are left out.
  labels = frames.labels()  # type: ignore[attr-defined]
  starts = np.unique(labels, return_index=True)[1]
  return Videos(frames, np.append(starts, len(frames)))


class FrameFolders(folder.LabelledFiles):
  """The frames of a folder's folders, each a video, in the order of names."""

  def __init__(self, root: pathlib.Path):
    """Lists them.

    Raises:
      ValueError: a folder has no frames.
    """
    names = image_files.sub_folders(root)
    files, _ = folder.list_files(root, names)
    # Frame 10 comes after frame 9, whether or not that is called 09.
    files.sort(
      key=lambda file: (
        file[1],
        re.sub('[0-9]+', lambda m: m[0].zfill(20), pathlib.Path(file[0]).name),
      )
    )
    paths, videos = map(list, zip(*files, strict=True))
    super().__init__(paths, videos, names)


class VideoFiles:
  """The frames of video files, each decoded when it is asked for.

  Attributes:
    edges: as in `Videos`.
  """

  def __init__(self, paths: list[str]):
    """Counts the frames, and checks that the last one can be decoded.

    Raises:
      ValueError: naming the files that cannot be decoded.
    """
    bar = cores.progress('Checking videos', len(paths), 'videos')
    lengths = list(
      cores.in_threads(lambda i: _length(paths[i]), range(len(paths)), bar)
    )
    bad = [path for path, n in zip(paths, lengths, strict=True) if not n]
    if bad:
      raise ValueError(
        f'{len(bad)} of {len(paths)} videos cannot be decoded: '
        f'{", ".join(bad[:5])}. Repair or remove them.'
      )
    self._paths, self.edges = paths, np.cumsum([0, *lengths])

  def __len__(self) -> int:
    return int(self.edges[-1])

  def __getitem__(self, index: int) -> Record:
    video = int(np.searchsorted(self.edges, index, 'right')) - 1
    path, frame = self._paths[video], index - int(self.edges[video])
    image = _frame(path, frame)
    if image is None:
      raise decode.UnreadableImage(path, f'frame {frame} cannot be decoded')
    return {'image': image, 'name': f'{path}, frame {frame}'}


def _length(path: str) -> int:
  """Returns the number of frames, which may be less than a file says."""
  said = int(cv2.VideoCapture(path).get(cv2.CAP_PROP_FRAME_COUNT))
  counts = range(said, max(said - _MOST_LACKING, 0), -1)
  return next((n for n in counts if _frame(path, n - 1) is not None), 0)


def _frame(path: str, frame: int) -> np.ndarray | None:
  """Returns the pixels of a frame, RGB; None if it cannot be decoded."""
  capture = cv2.VideoCapture(path)
  capture.set(cv2.CAP_PROP_POS_FRAMES, frame)
  found, image = capture.read()
  return cv2.cvtColor(image, cv2.COLOR_BGR2RGB) if found else None


class MovingImages:
  """A video of each image: it drifts, turns and grows, a shot each.

  The first frame is the image; the shots come in random order, and each goes on
  evenly from the end of the shot before. Pixels from outside mirror the image.
  A video follows from the name of its image.
  """

  def __init__(self, images: Source):
    """Takes the images."""
    self._images = images

  def __len__(self) -> int:
    return len(self._images) * len(_SHOTS) * _FRAMES

  def __getitem__(self, index: int) -> Record:
    video, frame = divmod(index, len(_SHOTS) * _FRAMES)
    record = self._images[video]
    image = decode.decode(record['image'], record['name'])
    pose = poses(transforms.seed_of(record['name']))[frame]
    across, down, turn, grow = pose
    height, width = image.shape[:2]
    scale = max(1.0, _SIDE / min(height, width))
    size = round(width * scale), round(height * scale)
    centre = (width - 1) / 2, (height - 1) / 2
    matrix = cv2.getRotationMatrix2D(centre, turn, scale * np.exp(grow))
    matrix[:, 2] += (
      (size[0] - width) / 2 + across * size[0],
      (size[1] - height) / 2 + down * size[1],
    )
    moved = cv2.warpAffine(image, matrix, size, borderMode=cv2.BORDER_REFLECT)
    return {'image': moved, 'name': f'{record["name"]}, frame {frame}'}


def poses(seed: int) -> np.ndarray:
  """Returns (across, down, turn, grow) of the frames of a moving image."""
  rng = np.random.RandomState(seed)
  pose, found = np.zeros(len(_MOST)), []
  for shot in rng.permutation(len(_SHOTS)):
    columns = list(_SHOTS[shot])
    ends = rng.uniform(-1, 1, len(columns)) * _MOST[columns]
    for share in np.linspace(0, 1, _FRAMES):
      pose[columns] = share * ends
      found.append(pose.copy())
  return np.array(found)
