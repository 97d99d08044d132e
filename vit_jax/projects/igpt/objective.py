"""Pixel prediction of "Generative Pretraining from Pixels" (ICML 2020)."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from vit_jax.data import device_augmentation
from vit_jax.models.fields import field
from vit_jax.models.model import Batch, Params
from vit_jax.objectives.reconstruction import Reconstruction
from vit_jax.projects.igpt.model import IGPT


@dataclasses.dataclass(frozen=True)
class Pixels(Reconstruction):
  """Learns to predict the colours of pixels."""

  trained = IGPT

  model: IGPT
  rate: float = field(
    0.15, 'Probability of masking a pixel (BERT).', valid='(0, 1]'
  )

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    made = super().from_config(config, image_size)
    images = made.images.preprocessing
    if (images.mean, images.std) != (
      device_augmentation.MEAN,
      device_augmentation.STD,
    ):
      raise ValueError(
        f'data.mean is {images.mean} and data.std is {images.std}. A palette '
        f'needs images in [-1, 1]: set both to {device_augmentation.MEAN}.'
      )
    return made

  def hide(self, images_BHWC: jax.Array, keys_B: jax.Array) -> Batch:
    """Returns normalised `image` BHWC and, for BERT, `hidden` bool BL.

    Each pixel is hidden with probability `rate`.
    """
    found = {'image': self.images.normalize(images_BHWC)}
    if not self.model.causal:
      H, W = self.images.size
      found['hidden'] = jax.vmap(
        lambda key: jax.random.bernoulli(key, self.rate, (H * W,))
      )(keys_B)
    return found

  def losses(
    self, params: Params, batch: Batch, key: jax.Array | None
  ) -> jax.Array:
    """Returns each image's mean cross-entropy in nats per predicted pixel, B.

    For causal models it is the mean of -log p(pixel i | pixels before i) over
    all pixels. For BERT it is the mean of -log p(pixel i | visible pixels) over
    the masked pixels; 0 if no pixel is masked.
    """
    del key  # iGPT has no dropout
    _, aux = self.model.apply(
      {'params': params},
      batch['image'],
      capture=('pixels',),
      hidden_BL=batch.get('hidden'),
    )
    nats_BL = optax.softmax_cross_entropy_with_integer_labels(
      aux['pixels'], aux['colours']
    )
    if self.model.causal:
      return jnp.mean(nats_BL, axis=1)
    hidden_BL = batch['hidden']
    count_B = jnp.maximum(jnp.sum(hidden_BL, axis=1), 1)
    return jnp.sum(nats_BL * hidden_BL, axis=1) / count_B
