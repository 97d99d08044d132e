"""Objectives of two streams: labelled examples, and images without labels."""

import dataclasses
from typing import Any, ClassVar

import jax
from ml_collections import ConfigDict

from vit_jax.data import bad_images
from vit_jax.data.sources import Source
from vit_jax.models.fields import field
from vit_jax.objectives.classification import Classification


@dataclasses.dataclass(frozen=True)
class TwoStreams(Classification):
  """Learns the classes of `config.data`, and more of other images.

  Attributes:
    data: `config.data`, with the name and split of the unlabelled images.
    second_head: the architecture that takes the place of a ViT: a ViT with a
      head for the unlabelled images. Empty for the config's own.
  """

  second_head: ClassVar[str] = ''

  unlabelled: str = field('train', 'Split of the images without labels.')
  unlabelled_data: str = field('', 'Their data; empty for `config.data.name`.')
  data: ConfigDict = None

  @classmethod
  def _arguments(
    cls, config: ConfigDict, image_size: tuple[int, int]
  ) -> dict[str, Any]:
    config = config.copy_and_resolve_references()
    o, data = config.objective, config.data
    if cls.second_head:
      if config.model.name != 'vit':
        raise ValueError(
          f'model.name is {config.model.name!r}: objective.name={o.name} is '
          'learned by a ViT with a second head. Choose a variant such as b16.'
        )
      config.model.name = cls.second_head
    found = super()._arguments(config, image_size)
    data.update(name=o.unlabelled_data or data.name, split=o.unlabelled)
    return found | {'data': data}

  def open_unlabelled(self) -> Source:
    """Opens the images without labels.

    Raises:
      ValueError: if they cannot be opened.
      FileNotFoundError: likewise.
    """
    return bad_images.open_checked(self.data, self.data.split)

  def varied(self, images: jax.Array, key: jax.Array) -> jax.Array:
    """Normalises and varies uint8 images [..., H, W, C], each by itself."""
    images_NHWC = images.reshape(-1, *images.shape[-3:])
    return self.images.varied(self.images.normalize(images_NHWC), key).reshape(
      images.shape
    )
