"""Pixel prediction, "Generative Pretraining from Pixels" (ICML 2020).

A causal iGPT predicts each pixel from the pixels before it. Otherwise it
predicts masked pixels from the visible ones (BERT).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from vit_jax.data import device_augmentation
from vit_jax.data.images import Images
from vit_jax.models.fields import field
from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives.objective import (
  OF_CLASSES,
  Best,
  Objective,
  sums,
)
from vit_jax.projects.igpt.model import IGPT


@dataclasses.dataclass(frozen=True)
class Pixels(Objective):
  """Learns the colours of pixels.

  Attributes:
    model: predicts every pixel.
    images: how images are preprocessed.
    class_names: always empty.
  """

  unused: ClassVar[Mapping[str, Any]] = OF_CLASSES
  metrics: ClassVar[Mapping[str, Best]] = {'loss': 'lowest'}

  model: IGPT
  images: Images
  rate: float = field(0.15, 'Share of masked pixels (BERT).', valid='(0, 1]')
  class_names: tuple[str, ...] = ()

  @classmethod
  def _arguments(
    cls, config: ConfigDict, image_size: tuple[int, int]
  ) -> dict[str, Any]:
    if config.model.name != IGPT.kind:
      raise ValueError(
        f'model.name is {config.model.name!r}, and only iGPT predicts pixels. '
        'Choose a variant such as igpt_s.'
      )
    found = super()._arguments(config, image_size)
    images = found['images'].preprocessing
    if (images.mean, images.std) != (
      device_augmentation.MEAN,
      device_augmentation.STD,
    ):
      raise ValueError(
        f'data.mean is {images.mean} and data.std is {images.std}. A palette '
        f'needs images in [-1, 1]: set both to {device_augmentation.MEAN}.'
      )
    return found

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Flips and normalises images and, for BERT, draws the masked pixels.

    Returns:
      The batch with `image` float32 BHWC and, for BERT, `hidden` bool BL.
    """
    key_flip, key_hidden = jax.random.split(key)
    images_BHWC = self.images.flipped(batch['image'], key_flip)
    keys_B = jax.random.split(key_hidden, len(images_BHWC))
    return self._prepared(batch | {'image': images_BHWC}, keys_B)

  def loss(
    self,
    params: Params,
    fixed: Params,
    batch: Batch,
    key: jax.Array,
    *,
    train: bool,
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean cross-entropy per predicted pixel in nats."""
    del fixed, key, train
    loss = jnp.mean(self._losses(params, batch))
    return loss, {'loss': loss}

  def evaluate(self, params: Params, fixed: Params, batch: Batch) -> Metrics:
    """Returns sums over the images whose `mask` is 1.

    The masked pixels of an image depend only on its `index` in the data, so
    every evaluation masks the same pixels.
    """
    del fixed
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(
      jax.random.key(0), batch['index']
    )
    losses_B = self._losses(params, self._prepared(batch, keys_B))
    return sums(batch['mask'], {'loss': losses_B})

  def _prepared(self, batch: Batch, keys_B: jax.Array) -> Batch:
    found = batch | {'image': self.images.normalize(batch['image'])}
    if not self.model.causal:
      H, W = self.images.size
      found['hidden'] = jax.vmap(
        lambda key: jax.random.bernoulli(key, self.rate, (H * W,))
      )(keys_B)
    return found

  def _losses(self, params: Params, batch: Batch) -> jax.Array:
    """Returns the mean nats per predicted pixel of each image, B.

    Causal: the mean of -log p(pixel i | pixels before i). BERT: the mean of
    -log p(pixel i | visible pixels) over masked pixels, 0 without any.
    """
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
