"""Noisy Student (1911.04252): learn from labels and from pseudo-labels.

A batch has B labelled images and r B pseudo-labelled images. The latter are
drawn from images that the teacher classifies with confidence; see `balanced`.
Let y be the label of an image, and q the softmax of the teacher's logits for
the image without noise. The loss is the mean over all (1 + r) B images of

  CE(softmax(student(noised image)), y or q).

The file of soft labels is a NumPy archive: `probabilities` has q of all images,
float32 NC, and the other arrays say what q was computed from; see `kept`.

The paper's noise is `data.augment`, `model.dropout` and
`model.stochastic_depth`.
"""

import dataclasses
import io
import logging
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from vit_jax.checkpoints import classes, opening, saving
from vit_jax.checkpoints.saving import absolute
from vit_jax.data import atomic_files, bad_images, device_augmentation
from vit_jax.data.sources import Record, Source
from vit_jax.models.fields import field
from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives import teachers
from vit_jax.objectives.objective import Example
from vit_jax.projects.few_labels.s4l import TwoStreams
from vit_jax.training import features, sharding

_log = logging.getLogger(__name__)

BATCH_SIZE = 256


@dataclasses.dataclass(frozen=True)
class PseudoLabels(TwoStreams):
  """Learns from labels and from a teacher's soft labels.

  Attributes:
    teacher: the checkpoint that labels the images. None for `eval_only`, if an
      earlier stage of the run has yet to train it, or if `config.teacher` is
      empty and the file of soft labels exists.
  """

  unused = {'loss.name': 'softmax'}

  labels: str = field('', 'File of soft labels; made if it is missing.')
  threshold: float = field(
    0.3, 'Minimum probability of the likeliest class.', valid='[0, 1]'
  )
  images_a_class: int = field(
    0, 'Images per class; 0: as many as the largest class.', valid='[0, inf)'
  )
  ratio: int = field(
    1, 'r, pseudo-labelled images per labelled image.', valid='[1, inf)'
  )
  teacher: opening.Checkpoint | None = None

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    labels, teacher = config.objective.labels, None
    if not labels:
      raise ValueError(
        'objective.labels is empty. Name the file for the soft labels: '
        '--config.objective.labels=PATH.npz.'
      )
    if config.teacher or not absolute(labels).exists():
      teacher = teachers.teacher_of(config)
    made = super().from_config(config, image_size)
    return dataclasses.replace(made, teacher=teacher)

  def train_transform(self) -> Any:
    """Returns the function from a record to an example with r more images.

    Adds r random pseudo-labelled images, 'unlabelled' uint8 [r, H, W, 3], and
    their soft labels, 'soft' float32 [r, C]. If the file of soft labels is
    missing, the teacher makes it first.

    Raises ValueError if the teacher or the file does not fit the classes or the
    unlabelled images, or if no image reaches `threshold`.
    """
    if self.teacher:
      classes.check_same(self.teacher, self.class_names, self.data.class_order)
    source = bad_images.open_checked(self.data, self.data.split)
    soft_labels_NC = kept(
      self.labels, self.teacher, source, self.data, self.class_names
    )
    rows = balanced(soft_labels_NC, self.threshold, self.images_a_class)
    known = np.unique(soft_labels_NC[rows].argmax(1))
    _log.info(
      'Using the soft labels of %d of %d images, in %d classes.',
      len(np.unique(rows)),
      len(source),
      len(known),
    )
    transform, ratio = super().train_transform(), self.ratio

    def example(record: Record, rng: np.random.Generator) -> Example:
      labelled = transform(record, rng)
      drawn = rows[rng.integers(len(rows), size=ratio)]
      images = [transform(source[int(row)], rng)['image'] for row in drawn]
      soft = soft_labels_NC[drawn]
      return {**labelled, 'unlabelled': np.stack(images), 'soft': soft}

    return example

  @property
  def images_seen(self) -> int:
    """Images per example: one labelled and r pseudo-labelled."""
    return 1 + self.ratio

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = super().batch_shapes(size)
    image = shapes['image']
    B, *rest = image.shape
    return shapes | {
      'unlabelled': jax.ShapeDtypeStruct((B, self.ratio, *rest), image.dtype),
      'soft': jax.ShapeDtypeStruct(
        (B, self.ratio, self.model.num_classes), np.float32
      ),
    }

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Joins each labelled image with its r pseudo-labelled images.

    Normalises, augments and mixes images. Smooths labels, but not soft labels.

    Returns:
      `image`: float32 [B, 1 + r, H, W, 3]; `label`: float32 [B, 1 + r, C];
      `taught`, the teacher's classes before mixing: int32 [B, r].
    """
    key_flip, key_mixup = jax.random.split(key)
    labels_BC = optax.smooth_labels(self._labels(batch), self.label_smoothing)
    labels = jnp.concatenate([labels_BC[:, None], batch['soft']], axis=1)
    images = self.augmented(
      jnp.concatenate([batch['image'][:, None], batch['unlabelled']], axis=1),
      key_flip,
    )
    images_NHWC, labels_NC = device_augmentation.mixup_or_cutmix(
      key_mixup,
      images.reshape(-1, *images.shape[2:]),
      labels.reshape(-1, labels.shape[-1]),
      self.mixup,
      self.cutmix,
    )
    return {
      'image': images_NHWC.reshape(images.shape),
      'label': labels_NC.reshape(labels.shape),
      'taught': jnp.argmax(batch['soft'], -1),
    }

  def loss(
    self, params: Params, batch: Batch, key: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean loss of an augmented batch, and its metrics.

    `agreement` is the share of pseudo-labelled images for which student and
    teacher predict the same class. Only the student sees mixed images.
    """
    labels = batch['label']
    logits_NC, _ = self._outputs(params, batch['image'], key)
    logits = logits_NC.reshape(labels.shape)
    losses = self._losses(logits, labels)
    loss = jnp.mean(losses)
    told = jnp.argmax(logits, -1)
    return loss, {
      'loss': loss,
      'pseudo_loss': jnp.mean(losses[:, 1:]),
      'accuracy': jnp.mean(told[:, 0] == jnp.argmax(labels[:, 0], -1)),
      'agreement': jnp.mean(told[:, 1:] == batch['taught']),
    }


def kept(
  path: str,
  teacher: opening.Checkpoint | None,
  source: Source,
  data: ConfigDict,
  class_names: tuple[str, ...],
) -> np.ndarray:
  """Reads the probabilities float32 NC of a file; makes the file if missing.

  All processes must call this together, with a path on shared storage. The
  teacher sees images as in evaluation, without noise; it may be None if the
  file exists. `data` is a `config.data` with the name and split of the images.

  Raises ValueError if the file is damaged, or was made for other images, other
  classes, another split seed or another teacher.
  """
  place = absolute(path)
  found = multihost_utils.broadcast_one_to_all(np.int32(place.exists()))
  wanted: dict[str, Any] = {
    'images': f'{data.name} {data.split}',
    'class_names': class_names,
    'split_seed': data.split_seed,
  }
  if identity := source.identity():
    wanted['identity'] = identity
  if teacher:
    wanted['teacher'] = saving.checksums(teacher.params)
  if not found:
    assert teacher  # `from_config` opens the teacher if the file is missing
    probabilities_NC = _labelled(teacher, source, data.workers)
    if jax.process_index() == 0:
      file = io.BytesIO()
      np.savez(file, probabilities=probabilities_NC, **wanted)
      place.parent.mkdir(parents=True, exist_ok=True)
      atomic_files.replace(place, file.getvalue())
    multihost_utils.sync_global_devices('soft labels are kept')
  try:
    with place.open('rb') as file, np.load(file) as stored:
      probabilities_NC = stored['probabilities']
      # Older files lack split_seed, identity and teacher.
      held = {name: stored[name] for name in ('images', 'class_names')}
      held |= {x: stored[x] for x in wanted if x in stored}
  except (OSError, MemoryError):
    raise
  except Exception as e:
    raise ValueError(
      f'{path} is not a file of soft labels, or damaged: {e!r}. Remove it, or '
      'name another file: --config.objective.labels=PATH.'
    ) from e
  other = [
    name
    for name, x in held.items()
    if not np.array_equal(x, wanted[name])
    # The same images may have moved.
    and (name != 'images' or 'identity' not in held)
  ]
  if other or probabilities_NC.shape != (len(source), len(class_names)):
    raise ValueError(
      f'{path} has soft labels of shape {probabilities_NC.shape} for '
      f'{held["images"]}; the run needs {len(source):,} images of '
      f'{wanted["images"]} and {len(class_names):,} classes'
      + (f' (different {" and ".join(other)})' if other else '')
      + '. Remove it, or name another file: --config.objective.labels=PATH.'
    )
  return probabilities_NC


def _labelled(
  teacher: opening.Checkpoint, source: Source, workers: int
) -> np.ndarray:
  """Returns the teacher's probabilities NC, in every process."""
  mesh = sharding.make_mesh({'data': -1, 'fsdp': 1, 'tensor': 1})
  batch_size = -(-BATCH_SIZE // mesh.size) * mesh.size
  params = sharding.place(teacher.params, sharding.replicated(mesh))

  def probabilities(params: Any, images_BHWC: jax.Array) -> jax.Array:
    logits_BC, _ = teacher.model.apply({'params': params}, images_BHWC)
    return jax.nn.softmax(logits_BC.astype(jnp.float32))

  label = features.Extractor(
    probabilities,
    teacher.images,
    batch_size=batch_size,
    mesh=mesh,
    workers=workers,
  )
  return label(params, source, 'Labelling images')


def balanced(
  probabilities_NC: np.ndarray, threshold: float, images_a_class: int
) -> np.ndarray:
  """Returns the indices of the images to learn from, with repeats, int64.

  An image qualifies if its highest probability is at least `threshold`. It
  counts for its likeliest class. Each class contributes `images_a_class`
  images, the most probable first; 0 means as many as the largest class has. A
  class with fewer images repeats them; a class without images is left out.

  Raises ValueError if no image reaches the threshold.
  """
  top_N, classes_N = probabilities_NC.max(1), probabilities_NC.argmax(1)
  rows = np.argsort(-top_N, kind='stable')
  rows = rows[top_N[rows] >= threshold]
  if not rows.size:
    raise ValueError(
      f'objective.threshold is {threshold}, and the highest probability that '
      f'the teacher gives to any image is {top_N.max():.3f}. Lower the '
      'threshold.'
    )
  members = [rows[classes_N[rows] == c] for c in np.unique(classes_N[rows])]
  n = images_a_class or max(map(len, members))
  return np.concatenate([np.resize(each, n) for each in members])
