"""Masked patch prediction (section 4.6 and appendix B.1.2 of the paper).

The paper reports only the target 'mean_colour', which had the best few-shot
accuracy. 'downsized' worked well too, and 'pixels' slightly worse.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from vit_jax.models.fields import field
from vit_jax.models.masked_vit import (
  KEPT,
  MASKED,
  OTHER,
  SAME,
  SMALL,
  MaskedViT,
)
from vit_jax.models.model import Batch, Params, run
from vit_jax.objectives.reconstruction import Reconstruction


@dataclasses.dataclass(frozen=True)
class MaskedPatches(Reconstruction):
  """Learns to predict the colours of corrupted patches.

  The mask token or another patch replaces most corrupted patches. The other
  corrupted patches stay unchanged, and the model predicts them too.
  """

  trained = MaskedViT

  model: MaskedViT
  rate: float = field(0.5, 'Share of patches to corrupt.', valid='(0, 1]')
  mask: float = field(
    0.8, 'Share of corrupted patches set to the mask token.', valid='[0, 1]'
  )
  other: float = field(
    0.1, 'Share of corrupted patches set to another patch.', valid='[0, 1]'
  )

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    o = config.objective
    if o.mask + o.other > 1:
      raise ValueError(
        f'objective.mask is {o.mask} and objective.other is {o.other}: the sum '
        'of these shares of the corrupted patches must be at most 1.'
      )
    return super().from_config(config, image_size)

  def hide(self, images_BHWC: jax.Array, keys_B: jax.Array) -> Batch:
    """Returns normalised `image` BHWC, `kind` and `other` BL, and `target`."""
    h, w = self.model.grid(self.images.size)
    kind_BL, other_BL = jax.vmap(lambda key: self.corruption(key, h * w))(
      keys_B
    )
    normalized_BHWC = self.images.normalize(images_BHWC)
    return {
      'image': normalized_BHWC,
      'kind': kind_BL,
      'other': other_BL,
      'target': target(self.model, images_BHWC, normalized_BHWC),
    }

  def corruption(
    self, key: jax.Array, patches: int
  ) -> tuple[jax.Array, jax.Array]:
    """Draws the corruption of one image of at least two patches.

    Returns the kind of each patch, and the index of the patch that replaces it
    if its kind is `OTHER`; both int32 L. The kind is `MASKED`, `OTHER` or
    `SAME` for the share `rate` of the patches (at least one), else `KEPT`.
    """
    key_rank, key_kind, key_other = jax.random.split(key, 3)
    count = max(1, round(self.rate * patches))
    order_L = jnp.argsort(jax.random.uniform(key_rank, (patches,)))
    is_corrupted_L = jnp.zeros(patches, bool).at[order_L[:count]].set(True)
    u_L = jax.random.uniform(key_kind, (patches,))
    kind_L = jnp.where(
      u_L < self.mask,
      MASKED,
      jnp.where(u_L < self.mask + self.other, OTHER, SAME),
    )
    # The offset is at least 1, so that no patch replaces itself.
    step_L = jax.random.randint(key_other, (patches,), 1, patches)
    other_L = (jnp.arange(patches) + step_L) % patches
    return jnp.where(is_corrupted_L, kind_L, KEPT), other_L

  def losses(
    self, params: Params, batch: Batch, key: jax.Array | None
  ) -> jax.Array:
    """Returns the mean loss over the corrupted patches of each image, B.

    The loss of a patch is the mean cross-entropy of its colours in nats, or the
    mean squared error of its pixels.
    """
    corruption = batch['kind'], batch['other']
    predicted, _ = run(
      self.model, params, batch['image'], key, corruption=corruption
    )
    if self.model.target == 'pixels':
      losses = jnp.square(predicted - batch['target'])
    else:
      losses = optax.softmax_cross_entropy_with_integer_labels(
        predicted, batch['target']
      )
    losses_BL = losses.reshape(*batch['kind'].shape, -1).mean(-1)
    return jnp.mean(losses_BL, axis=1, where=batch['kind'] != KEPT)


def target(
  model: MaskedViT, images_BHWC: jax.Array, normalized_BHWC: jax.Array
) -> jax.Array:
  """Returns the prediction targets of every patch.

  The target is 'mean_colour', int32 BL; 'downsized', int32 BLS for S = 16
  parts; or normalised 'pixels', float32 BLX. Parts and RGB pixels are in raster
  order. A colour of the uint8 images is the integer 64 r + 8 g + b, where r, g
  and b are the upper three bits of the mean red, green and blue. Integer
  arithmetic gives the same targets on all machines.
  """
  _, H, W, _ = images_BHWC.shape
  h, w = model.grid((H, W))
  if model.target == 'pixels':
    return cells(normalized_BHWC, h, w)
  if model.target == 'mean_colour':
    return colours(cells(images_BHWC, h, w))
  parts_BlC = colours(cells(images_BHWC, SMALL * h, SMALL * w))
  return cells(parts_BlC.reshape(-1, SMALL * h, SMALL * w, 1), h, w)


def cells(x_BHWC: jax.Array, h: int, w: int) -> jax.Array:
  """Cuts images into h x w equal parts and flattens each: BLX."""
  B, H, W, C = x_BHWC.shape
  x_BhPwQC = x_BHWC.reshape(B, h, H // h, w, W // w, C)
  return x_BhPwQC.swapaxes(2, 3).reshape(B, h * w, -1)


def colours(pixels_BLX: jax.Array) -> jax.Array:
  """Returns the mean colour of each part as an integer from 0 to 511, BL."""
  B, L, X = pixels_BLX.shape
  pixels_BLXC = pixels_BLX.reshape(B, L, X // 3, 3).astype(jnp.int32)
  red_BL, green_BL, blue_BL = jnp.moveaxis(
    jnp.sum(pixels_BLXC, axis=2) // (32 * X // 3), 2, 0
  )
  return 64 * red_BL + 8 * green_BL + blue_BL
