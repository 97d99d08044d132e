"""The encoder: equations 2 and 3 of section 3.1 for all layers."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import layers, posemb
from vit_jax.models.axial import AxialBlock
from vit_jax.models.model import Loop

Array = jax.Array

LAYERS = Loop('encoderblock_', 0, 'encoderblock')


class Encoder(nn.Module):
  """Position embeddings, `depth` layers and the final norm."""

  fields: layers.EncoderFields
  capture: tuple[str, ...] = ()

  @nn.compact
  def __call__(
    self,
    x_BLD: Array,
    grid: tuple[int, int],
    key: Array | None = None,
    visible_BK: Array | None = None,
  ) -> tuple[Array, dict[str, Any]]:
    """Encodes tokens.

    Args:
      x_BLD: tokens; the patches come last, in raster order.
      grid: (h, w) of the patch grid.
      key: random key for dropout and stochastic depth; None disables both.
      visible_BK: indices of the patches to encode, in the order of the result;
        None for all. If given, `posemb_at` must be 'input', `rope` and `axial`
        must be off, and `posemb` must not be 'relative'.

    Returns:
      The encoded tokens BLD, and the captured intermediates, stacked by layer.
    """
    f = self.fields
    extra = x_BLD.shape[1] - grid[0] * grid[1]
    keys = None if key is None else jax.random.split(key, f.depth + 1)
    x_BLD, positions_XLD = self._add_positions(x_BLD, grid)
    if visible_BK is not None:
      patches_BKD = jnp.take_along_axis(
        x_BLD[:, extra:], visible_BK[..., None], axis=1
      )
      x_BLD = jnp.concatenate([x_BLD[:, :extra], patches_BKD], axis=1)
    x_BLD = layers.dropout(x_BLD, f.dropout, None if keys is None else keys[-1])
    if f.pre_norm:
      x_BLD = layers.norm(x_BLD, f, 'pre_norm')

    rates = None
    if f.stochastic_depth and keys is not None:
      rates = jnp.linspace(0, f.stochastic_depth, f.depth)
    inputs = (None if keys is None else keys[:-1], positions_XLD, rates)

    of_block: dict[str, Any] = {
      'fields': f,
      'relative': extra if f.posemb == 'relative' else None,
      'capture': self.capture,
    }
    block: Any = layers.EncoderBlock
    if f.axial:
      block, of_block['grid'] = AxialBlock, grid
    x_BLD, captured = layers.repeated(
      block,
      LAYERS,
      x_BLD,
      inputs,
      (self._rotation(x_BLD, grid),),
      of=f,
      depth=f.depth,
      is_initializing=self.is_initializing(),
      fields=of_block,
    )
    if f.final_norm and not f.norm_pooled:
      x_BLD = layers.norm(x_BLD, f, 'encoder_norm')
    return x_BLD, captured

  def _add_positions(
    self, x_BLD: Array, grid: tuple[int, int]
  ) -> tuple[Array, Array | None]:
    """Adds positions to the tokens, or returns positions XLD for the layers."""
    f = self.fields
    if f.posemb in ('none', 'relative'):
      return x_BLD, None
    _, L, D = x_BLD.shape
    extra = L - grid[0] * grid[1] - f.registers
    table_XLD = posemb.PositionEmbedding(
      f.posemb,
      f.depth if f.posemb_at == 'every_layer' else 1,
      name='posembed_input',
    )(grid, extra, D)
    if f.registers:
      nothing = jnp.zeros((len(table_XLD), f.registers, D))
      parts = [table_XLD[:, :extra], nothing, table_XLD[:, extra:]]
      table_XLD = jnp.concatenate(parts, axis=1)
    if f.posemb_at == 'input':
      return x_BLD + table_XLD.astype(x_BLD.dtype), None
    return x_BLD, jnp.broadcast_to(table_XLD, (f.depth, L, D))

  def _rotation(
    self, x_BLD: Array, grid: tuple[int, int]
  ) -> posemb.Rotation | None:
    """Returns the rotation of registers (if rotated) and patches, or None."""
    f = self.fields
    if not f.rope:
      return None
    K = x_BLD.shape[-1] // f.heads
    found = posemb.rotation(grid, K, f.rope, f.rope_side)
    if not f.rope_registers:
      return found
    side = math.isqrt(f.registers)
    first = posemb.rotation((side, side), K, f.rope_registers, side)
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), first, found)
