"""Masked autoencoders (MAE, 2111.06377): predict pixels of hidden patches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models import flops
from vit_jax.models.fields import field
from vit_jax.models.model import Batch, Params, run
from vit_jax.objectives.masked import cells
from vit_jax.objectives.reconstruction import Reconstruction
from vit_jax.projects.self_supervised.mae_model import MAEViT

# Added to the variance of a patch's pixels, as in the original code.
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class MaskedAutoencoder(Reconstruction):
  """Learns the pixels of hidden patches from the visible ones."""

  trained = MAEViT

  model: MAEViT
  rate: float = field(0.75, 'Share of hidden patches.', valid='(0, 1)')
  normalized: bool = field(
    True, 'Scale the target pixels of a patch to mean 0 and variance 1.'
  )

  @property
  def _patches(self) -> int:
    h, w = self.model.grid(self.images.size)
    return h * w

  @property
  def visible(self) -> int:
    """Number of patches of an image that the encoder sees."""
    patches = self._patches
    return min(max(1, round((1 - self.rate) * patches)), patches - 1)

  @property
  def images_seen(self) -> float:
    """FLOPs of a masked forward pass, relative to a pass over all patches."""
    size = self.images.size
    masked = flops.count(
      lambda params, batch: self._predict(params, batch, None),
      flops.param_shapes(self.model, size),
      {
        'image': jax.ShapeDtypeStruct((1, *size, 3), np.float32),
        'order': jax.ShapeDtypeStruct((1, self._patches), np.int32),
      },
    )
    return masked / flops.forward_flops(self.model, size)

  def hide(self, images_BHWC: jax.Array, keys_B: jax.Array) -> Batch:
    """Normalises images, and chooses visible patches at random.

    Returns:
      `image`: float32 BHWC; `order`: int32 BL, a random permutation of each
      image's patches, the visible ones first.
    """
    order_BL = jax.vmap(jax.random.permutation, (0, None))(
      keys_B, self._patches
    )
    return {'image': self.images.normalize(images_BHWC), 'order': order_BL}

  def _predict(
    self, params: Params, batch: Batch, key: jax.Array | None
  ) -> jax.Array:
    """Returns the predicted pixels of every patch, float32 BLX."""
    hidden = {'order_BL': batch['order'], 'visible': self.visible}
    predicted_BLX, _ = run(self.model, params, batch['image'], key, **hidden)
    return predicted_BLX

  def losses(
    self, params: Params, batch: Batch, key: jax.Array | None
  ) -> jax.Array:
    """Returns the mean squared error over each image's hidden patches, B.

    If `normalized` is set, the target pixels of each patch are normalised.
    """
    target_BLX = cells(batch['image'], *self.model.grid(self.images.size))
    if self.normalized:
      mean_BL1 = jnp.mean(target_BLX, axis=-1, keepdims=True)
      variance_BL1 = jnp.var(target_BLX, axis=-1, keepdims=True, ddof=1)
      target_BLX = (target_BLX - mean_BL1) / jnp.sqrt(variance_BL1 + _EPSILON)
    predicted_BLX = self._predict(params, batch, key)
    errors_BL = jnp.mean(jnp.square(predicted_BLX - target_BLX), axis=-1)
    hidden_BX = batch['order'][:, self.visible :]
    return jnp.mean(jnp.take_along_axis(errors_BL, hidden_BX, axis=1), axis=1)
