"""Classes of a few images and rotations of many: S4L-Rotation (1905.03670).

A batch has two streams: examples of `config.data`, whose labels are learned,
and as many images drawn from `objective.unlabelled`, whose labels nobody looks
at. All of them are turned by 0, 90, 180 and 270 degrees; with w the weight,

  mean CE(classes of the labelled, each of its four turns)
    + w mean CE(turn of all images, each of their four turns).
"""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax.data.sources import Record, Source
from vit_jax.data.transforms import TrainTransform
from vit_jax.models.fields import field
from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives.objective import Example
from vit_jax.projects.few_labels.second_heads import TURNS, RotationViT
from vit_jax.projects.few_labels.streams import TwoStreams


@dataclasses.dataclass(frozen=True)
class WithAnother:
  """An example of a record, and of another image drawn at random.

  Attributes:
    transform: of both.
    unlabelled: where the other is drawn from.
  """

  transform: TrainTransform
  unlabelled: Source

  def __call__(self, record: Record, rng: np.random.Generator) -> Example:
    """Returns 'image' and 'label' of the record, and 'unlabelled'."""
    example = self.transform(record, rng)
    other = self.unlabelled[int(rng.integers(len(self.unlabelled)))]
    return {**example, 'unlabelled': self.transform(other, rng)['image']}


@dataclasses.dataclass(frozen=True)
class Rotation(TwoStreams):
  """Learns `batch['label']`, and how `batch['unlabelled']` is turned."""

  second_head: ClassVar[str] = RotationViT.kind

  weight: float = field(1.0, 'w, of the rotations.', valid='[0, inf)')

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    """Returns the objective of `config.objective`.

    Raises:
      ValueError: for fields that cannot work.
    """
    height, width = image_size
    if height != width:
      raise ValueError(
        f'data.image_size is {height}x{width}: an image that is turned is as '
        'wide as it was high, so it has to be square.'
      )
    return super().from_config(config, image_size)

  def train_transform(self) -> Any:
    """Returns the function that makes an example of both streams.

    Raises:
      ValueError: if the unlabelled images cannot be opened.
      FileNotFoundError: likewise.
    """
    return WithAnother(super().train_transform(), self.open_unlabelled())

  @property
  def images_seen(self) -> int:
    """The turns of both streams."""
    return 2 * TURNS

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns images uint8 BHWC of both streams, and labels int32 B."""
    shapes = super().batch_shapes(size)
    return shapes | {'unlabelled': shapes['image']}

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Returns what `Classification` does, and `unlabelled` float32 BHWC."""
    key, key_unlabelled = jax.random.split(key)
    unlabelled_BHWC = self.varied(batch['unlabelled'], key_unlabelled)
    return super().augment(batch, key) | {'unlabelled': unlabelled_BHWC}

  def loss(
    self,
    params: Params,
    fixed: Params,
    batch: Batch,
    key: jax.Array,
    *,
    train: bool,
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean loss of an augmented batch, and its metrics."""
    del fixed
    B = len(batch['image'])
    images_NHWC = jnp.concatenate([batch['image'], batch['unlabelled']])
    # Each image's turns beside it, on the device where it is.
    turned_N4HWC = jnp.stack(
      [jnp.rot90(images_NHWC, k, axes=(1, 2)) for k in range(TURNS)], axis=1
    )
    logits, aux = self._outputs(params, turned_N4HWC, key, train)
    logits_B4C = logits.reshape(2 * B, TURNS, -1)[:B]
    turns_N4T = aux['logits_rotation'].reshape(2 * B, TURNS, TURNS)
    labelled = jnp.mean(self._losses(logits_B4C, batch['label'][:, None]))
    rotation = jnp.mean(
      optax.softmax_cross_entropy_with_integer_labels(
        turns_N4T, jnp.broadcast_to(jnp.arange(TURNS)[None], (2 * B, TURNS))
      )
    )
    loss = labelled + self.weight * rotation
    hit_B = self._hits(logits_B4C[:, 0], batch['label'])
    told_N4 = jnp.argmax(turns_N4T, -1) == jnp.arange(TURNS)[None]
    return loss, {
      'loss': loss,
      'rotation_loss': rotation,
      'accuracy': jnp.mean(hit_B),
      'rotation_accuracy': jnp.mean(told_N4),
    }
