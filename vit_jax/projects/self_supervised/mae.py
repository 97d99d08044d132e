"""Masked autoencoders learn to paint hidden patches (MAE, arXiv 2111.06377)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data.images import Images
from vit_jax.models import flops
from vit_jax.models.fields import Valid, field
from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives.masked import cells
from vit_jax.objectives.objective import OF_CLASSES, Best, Objective, sums
from vit_jax.projects.self_supervised.mae_model import MAEViT

_DECODER = ('decoder_width', 'decoder_depth', 'decoder_heads')
# Added to the variance of a patch's pixels, as in the original.
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class MaskedAutoencoder(Objective):
  """Learns the pixels of hidden patches from the visible ones.

  Attributes:
    model: encodes visible patches and predicts every patch.
    images: how images are brought to the model.
    class_names: none.
  """

  defaults: ClassVar[Mapping[str, Any]] = {
    f.name: f.default for f in MAEViT.own_fields() if f.name in _DECODER
  }
  valid: ClassVar[Mapping[str, Valid]] = {}
  unused: ClassVar[Mapping[str, Any]] = OF_CLASSES
  metrics: ClassVar[Mapping[str, Best]] = {'loss': 'lowest'}

  model: MAEViT
  images: Images
  rate: float = field(0.75, 'Share of hidden patches.', valid='(0, 1)')
  normalized: bool = field(
    True, "Whether each patch's pixels are brought to mean 0 and deviation 1."
  )
  class_names: tuple[str, ...] = ()

  @classmethod
  def _arguments(
    cls, config: ConfigDict, image_size: tuple[int, int]
  ) -> dict[str, Any]:
    if config.model.name != 'vit':
      raise ValueError(
        f'model.name is {config.model.name!r}: the encoder of a masked '
        'autoencoder is a ViT. Choose a variant such as b16.'
      )
    config = config.copy_and_resolve_references()
    with config.unlocked():
      config.model.update(
        name=MAEViT.kind, **{name: config.objective[name] for name in _DECODER}
      )
    return super()._arguments(config, image_size)

  @property
  def _patches(self) -> int:
    h, w = self.model.grid(self.images.size)
    return h * w

  @property
  def visible(self) -> int:
    """How many patches of an image the encoder sees."""
    patches = self._patches
    return min(max(1, round((1 - self.rate) * patches)), patches - 1)

  @property
  def images_seen(self) -> float:
    """The share of an image's operations that remain with hidden patches."""
    size = self.images.size
    masked = flops.count(
      lambda params, batch: self._predict(params, batch, None, train=False),
      flops.param_shapes(self.model, size),
      {
        'image': jax.ShapeDtypeStruct((1, *size, 3), np.float32),
        'order': jax.ShapeDtypeStruct((1, self._patches), np.int32),
      },
    )
    return masked / flops.forward_flops(self.model, size)

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Returns images and the order of their patches.

    Returns:
      `image`: float32 BHWC, normalised; `order`: int32 BL, a permutation of the
      patches of each image, of which the first are visible.
    """
    key_flip, key_order = jax.random.split(key)
    images_BHWC = self.images.flipped(batch['image'], key_flip)
    return self._prepared(
      images_BHWC, jax.random.split(key_order, len(images_BHWC))
    )

  def loss(
    self,
    params: Params,
    fixed: Params,
    batch: Batch,
    key: jax.Array,
    *,
    train: bool,
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean over images of their `_losses`."""
    del fixed
    loss = jnp.mean(self._losses(params, batch, key, train=train))
    return loss, {'loss': loss}

  def evaluate(self, params: Params, fixed: Params, batch: Batch) -> Metrics:
    """Returns sums over the images whose `mask` is 1.

    The hidden patches of an image follow from its `index` in the data.
    """
    del fixed
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(
      jax.random.key(0), batch['index']
    )
    prepared = self._prepared(batch['image'], keys_B)
    losses_B = self._losses(params, prepared, None, train=False)
    return sums(batch['mask'], {'loss': losses_B})

  def _prepared(self, images_BHWC: jax.Array, keys_B: jax.Array) -> Batch:
    order_BL = jax.vmap(jax.random.permutation, (0, None))(
      keys_B, self._patches
    )
    return {'image': self.images.normalize(images_BHWC), 'order': order_BL}

  def _predict(
    self, params: Params, batch: Batch, key: jax.Array | None, *, train: bool
  ) -> jax.Array:
    """Returns the predicted pixels of every patch, BLX."""
    predicted_BLX, _ = self.model.apply(
      {'params': params},
      batch['image'],
      train=train,
      order_BL=batch['order'],
      visible=self.visible,
      rngs=None if key is None else {'dropout': key},
    )
    return predicted_BLX

  def _losses(
    self, params: Params, batch: Batch, key: jax.Array | None, *, train: bool
  ) -> jax.Array:
    """Returns the mean squared error over each image's hidden patches, B."""
    target_BLX = cells(batch['image'], *self.model.grid(self.images.size))
    if self.normalized:
      mean_BL1 = jnp.mean(target_BLX, axis=-1, keepdims=True)
      variance_BL1 = jnp.var(target_BLX, axis=-1, keepdims=True, ddof=1)
      target_BLX = (target_BLX - mean_BL1) / jnp.sqrt(variance_BL1 + _EPSILON)
    predicted_BLX = self._predict(params, batch, key, train=train)
    errors_BL = jnp.mean(jnp.square(predicted_BLX - target_BLX), axis=-1)
    hidden_BX = batch['order'][:, self.visible :]
    return jnp.mean(jnp.take_along_axis(errors_BL, hidden_BX, axis=1), axis=1)
