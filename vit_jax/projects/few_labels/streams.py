"""Base of objectives with two streams: labelled and unlabelled images."""

import dataclasses
from typing import Self

import jax
from ml_collections import ConfigDict

from vit_jax.models.fields import field
from vit_jax.objectives.classification import Classification


@dataclasses.dataclass(frozen=True)
class TwoStreams(Classification):
  """Learns from the labelled images of `config.data` and unlabelled images.

  Attributes:
    data: `config.data`, but with the name and split of the unlabelled images.
  """

  one_class = True

  unlabelled: str = field('train', 'Split of the unlabelled images.')
  unlabelled_data: str = field(
    '', 'Dataset of the unlabelled images; empty: `data.name`.'
  )
  data: ConfigDict = None

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    made = super().from_config(config, image_size)
    o, data = config.objective, config.data.copy_and_resolve_references()
    data.update(name=o.unlabelled_data or data.name, split=o.unlabelled)
    return dataclasses.replace(made, data=data)

  def augmented(self, images: jax.Array, key: jax.Array) -> jax.Array:
    """Normalises and augments images, uint8 [..., H, W, C], to float32."""
    images_NHWC = images.reshape(-1, *images.shape[-3:])
    return self.images.augmented(
      self.images.normalize(images_NHWC), key
    ).reshape(images.shape)
