"""Axial attention (appendix D.6): along rows, then along columns.

The cost of axial attention grows with L * (h + w) instead of L * L.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models import layers, posemb

Array = jax.Array

# Wang et al. (2020b) use 8 heads at every stage.
HEADS = 8


class AxialBlock(nn.Module):
  """A layer of Axial-ViT: row attention and MLP, column attention and MLP.

  It takes the arguments of `EncoderBlock`, but ignores `drop_rate` and
  `rotation`. Tokens are the patches in raster order, without a class token.
  Captured attention is a dict with `row` (BhNww) and `column` (BwNhh).
  """

  grid: tuple[int, int]
  fields: layers.EncoderFields
  relative: int | None = None
  capture: tuple[str, ...] = ()

  @nn.compact
  def __call__(
    self,
    x_BLD: Array,
    key: Array | None = None,
    positions_LD: Array | None = None,
    drop_rate: Array | None = None,
    rotation: posemb.Rotation | None = None,
  ) -> tuple[Array, dict[str, Any]]:
    del drop_rate, rotation  # `ViT` refuses the fields that would set them
    B, L, D = x_BLD.shape
    h, w = self.grid
    keys = (None, None) if key is None else jax.random.split(key)
    if positions_LD is not None:
      x_BLD = x_BLD + positions_LD.astype(x_BLD.dtype)[None]

    def along(name: str, x_BxyD: Array, key: Array | None) -> tuple[Array, Any]:
      """Applies a block along y, independently for each x."""
      B, x, y, D = x_BxyD.shape
      block = layers.EncoderBlock(
        self.fields,
        self.relative,
        tuple(c for c in self.capture if c == 'attention'),
        name=name,
      )
      out, captured = block(x_BxyD.reshape(B * x, y, D), key)
      return out.reshape(B, x, y, D), jax.tree.map(
        lambda weights: weights.reshape(B, x, *weights.shape[1:]), captured
      )

    x_BhwD, rows = along('row', x_BLD.reshape(B, h, w, D), keys[0])
    x_BwhD, columns = along('column', x_BhwD.swapaxes(1, 2), keys[1])
    x_BLD = x_BwhD.swapaxes(1, 2).reshape(B, L, D)

    captured = {'row': rows, 'column': columns}
    found = {
      'attention': {k: x.get('attention') for k, x in captured.items()},
      'blocks': x_BLD,
    }
    return x_BLD, {name: found[name] for name in self.capture}


class PositionSensitiveAttention(nn.Module):
  """Attention along one axis of Axial-ResNet (Wang et al. 2020b, eq. 4).

    y_o = sum_p a_op (v_p + r^v_{p-o})
    a_op = softmax_p(q_o k_p + q_o r^q_{p-o} + k_p r^k_{p-o})

  Here o is an output position and p an input position along the axis. Queries
  and keys are half as wide as values, and all heads share the embeddings r. The
  logits are divided by the square root of the key width. The authors apply
  BatchNorm to the three terms instead.
  """

  features: int
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_BxyC: Array) -> Array:
    """Attends along y, independently for each x; returns BxyF."""
    V = self.features // HEADS
    K = V // 2
    y = x_BxyC.shape[2]
    # Index of the offset p - o among all 2 y - 1 offsets.
    offset_op = np.arange(y) - np.arange(y)[:, None] + y - 1

    def project(name: str, width: int) -> Array:
      return nn.DenseGeneral(
        (HEADS, width),
        use_bias=False,
        dtype=self.dtype,
        kernel_init=nn.initializers.lecun_normal(),
        name=name,
      )(x_BxyC)

    def relative(name: str, width: int) -> Array:
      r = self.param(
        name, nn.initializers.normal(width**-0.5), (2 * y - 1, width)
      )
      return r[offset_op].astype(self.dtype)

    q_BxyNK, k_BxyNK = project('query', K), project('key', K)
    v_BxyNV = project('value', V)
    rq_opK, rk_opK = relative('relative_query', K), relative('relative_key', K)
    logits_BxNop = (
      jnp.einsum('BxoNK,BxpNK->BxNop', q_BxyNK, k_BxyNK)
      + jnp.einsum('BxoNK,opK->BxNop', q_BxyNK, rq_opK)
      + jnp.einsum('BxpNK,opK->BxNop', k_BxyNK, rk_opK)
    ).astype(jnp.float32)
    weights_BxNop = jax.nn.softmax(logits_BxNop * K**-0.5).astype(self.dtype)
    rv_opV = relative('relative_value', V)
    y_BxoNV = jnp.einsum('BxNop,BxpNV->BxoNV', weights_BxNop, v_BxyNV)
    y_BxoNV += jnp.einsum('BxNop,opV->BxoNV', weights_BxNop, rv_opV)
    return y_BxoNV.reshape(*x_BxyC.shape[:3], self.features)


class AxialConv(nn.Module):
  """Row attention, then column attention, instead of a 3x3 convolution.

  This is the layer of Axial-ResNet. A stride becomes average pooling at the
  end, as in the authors' code.
  """

  features: int
  stride: int = 1
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_BhwC: Array) -> Array:
    attention = functools.partial(
      PositionSensitiveAttention, self.features, self.dtype
    )
    x = attention(name='row')(x_BhwC)
    x = layers.GroupNorm(layers.EPSILON, name='gn_row')(x)
    x = attention(name='column')(x.swapaxes(1, 2)).swapaxes(1, 2)
    if self.stride > 1:
      window = (self.stride, self.stride)
      # avg_pool divides by float32 pixel counts, so its result is float32.
      x = nn.avg_pool(
        x, window, window, padding='SAME', count_include_pad=False
      ).astype(self.dtype)
    return x
