"""Classes of a few images, and what a teacher says of many (1911.04252).

The student of Noisy Student. A batch has B labelled images and r times as many
that a teacher has labelled: those of which it is sure enough, as many of each
class. With y the labels and q the teacher's probabilities of the image without
noise, the loss is the mean over all (1 + r) B of

  CE(softmax(student(noised image)), y or q).

The noise is what the config has of it: `data.augment`, `model.dropout`,
`model.stochastic_depth`.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax.checkpoints import classes, opening
from vit_jax.checkpoints.saving import absolute
from vit_jax.data import device_augmentation
from vit_jax.data.sources import Record, Source
from vit_jax.data.transforms import TrainTransform
from vit_jax.models.fields import field
from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives import teachers
from vit_jax.objectives.objective import Example
from vit_jax.projects.few_labels import soft_labels
from vit_jax.projects.few_labels.streams import TwoStreams

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WithPseudoLabels:
  """An example of a record, and of images drawn from those with soft labels.

  Attributes:
    transform: of all.
    unlabelled: the images.
    soft_labels_NC: of all of them.
    rows: which are drawn from.
    ratio: r, images to a record.
  """

  transform: TrainTransform
  unlabelled: Source
  soft_labels_NC: np.ndarray
  rows: np.ndarray
  ratio: int

  def __call__(self, record: Record, rng: np.random.Generator) -> Example:
    """Returns 'image', 'label', 'unlabelled' [r, H, W, 3], 'soft' [r, C]."""
    example = self.transform(record, rng)
    rows = self.rows[rng.integers(len(self.rows), size=self.ratio)]
    images = [
      self.transform(self.unlabelled[int(row)], rng)['image'] for row in rows
    ]
    return {
      **example,
      'unlabelled': np.stack(images),
      'soft': self.soft_labels_NC[rows],
    }


@dataclasses.dataclass(frozen=True)
class PseudoLabels(TwoStreams):
  """Learns `batch['label']` and `batch['soft']`.

  Attributes:
    teacher: None where its labels are in the file, or a stage of the run has
      yet to train it.
  """

  one_class: ClassVar[bool] = True
  unused: ClassVar[Mapping[str, Any]] = {'loss.name': 'softmax'}

  labels: str = field('', 'File of soft labels; made if it is missing.')
  threshold: float = field(
    0.3, 'Least probability of the likeliest class.', valid='[0, 1]'
  )
  images_a_class: int = field(
    0, 'As `soft_labels.balanced` has it.', valid='[0, inf)'
  )
  ratio: int = field(
    1, 'r, pseudo-labelled images to a labelled one.', valid='[1, inf)'
  )
  teacher: opening.Checkpoint | None = None

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    """Returns the objective of `config.objective` and `config.teacher`.

    Raises:
      ValueError: for fields that cannot work.
      FileNotFoundError: if there is no teacher.
    """
    labels, teacher = config.objective.labels, None
    if not labels:
      raise ValueError(
        'objective.labels is empty: name the file that the soft labels are '
        'kept in, --config.objective.labels=PATH.npz.'
      )
    if config.teacher or not absolute(labels).exists():
      teacher = teachers.named(config)
    return dataclasses.replace(
      super().from_config(config, image_size), teacher=teacher
    )

  def train_transform(self) -> Any:
    """Returns the function that makes an example, once images are labelled.

    Raises:
      ValueError: if the unlabelled images cannot be opened, or the labels be
        used.
      FileNotFoundError: likewise.
    """
    if self.teacher:
      classes.check_same(self.teacher, self.class_names, self.data.class_order)
    source = self.open_unlabelled()
    soft_labels_NC = soft_labels.kept(
      self.labels, self.teacher, source, self.data, self.class_names
    )
    rows = soft_labels.balanced(
      soft_labels_NC, self.threshold, self.images_a_class
    )
    known = np.unique(soft_labels_NC[rows].argmax(1))
    _log.info(
      'Soft labels: %d of %d images, of %d classes.',
      len(np.unique(rows)),
      len(source),
      len(known),
    )
    return WithPseudoLabels(
      super().train_transform(), source, soft_labels_NC, rows, self.ratio
    )

  @property
  def images_seen(self) -> int:
    """A labelled one and its r others."""
    return 1 + self.ratio

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns images uint8 BHWC, labels int32 B, BrHWC and float32 BrC."""
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
    """Returns both streams together, a labelled image and its r in a row.

    Returns:
      `image`: float32 [B, 1 + r, H, W, C]; `label`: float32 [B, 1 + r, C].
    """
    key_flip, key_mixup = jax.random.split(key)
    labels_BC = optax.smooth_labels(self._labels(batch), self.label_smoothing)
    labels = jnp.concatenate([labels_BC[:, None], batch['soft']], axis=1)
    images = self.varied(
      jnp.concatenate([batch['image'][:, None], batch['unlabelled']], axis=1),
      key_flip,
    )
    images_NHWC, labels_NC = device_augmentation.mixed(
      key_mixup,
      images.reshape(-1, *images.shape[2:]),
      labels.reshape(-1, labels.shape[-1]),
      self.mixup,
      self.cutmix,
    )
    return {
      'image': images_NHWC.reshape(images.shape),
      'label': labels_NC.reshape(labels.shape),
    }

  def loss(
    self,
    params: Params,
    fixed: Params,
    batch: Batch,
    key: jax.Array,
    *,
    train: bool,
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean loss of an augmented batch, and its metrics.

    `agreement` is the share of the pseudo-labelled images that student and
    teacher call the same.
    """
    del fixed
    labels = batch['label']
    logits_NC, _ = self._outputs(params, batch['image'], key, train)
    logits = logits_NC.reshape(labels.shape)
    losses = self._losses(logits, labels)
    loss = jnp.mean(losses)
    hit = jnp.argmax(logits, -1) == jnp.argmax(labels, -1)
    return loss, {
      'loss': loss,
      'pseudo_loss': jnp.mean(losses[:, 1:]),
      'accuracy': jnp.mean(hit[:, 0]),
      'agreement': jnp.mean(hit[:, 1:]),
    }
