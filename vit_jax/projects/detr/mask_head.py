"""DETR's panoptic head: a mask for every query (2005.12872, section 4.4)."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import attention
from vit_jax.models.layers import Projection, group_norm
from vit_jax.projects.detr import segments

Array = jax.Array

EPSILON, GROUPS = 1e-5, 8  # of GroupNorm
# Feature maps that masks are refined with, besides the encoder's.
FINER = 3


def nearest(x: Array, size: tuple[int, ...], axis: int = 1) -> Array:
  """Resizes two axes to (h, w) pixels, as PyTorch's 'nearest' does.

  Of the pixels of x, those of `segments.nearest`.
  """
  for i, new in enumerate(size, axis):
    old = x.shape[i]
    if new % old == 0:
      x = jnp.repeat(x, new // old, i)
    else:
      x = jnp.take(x, segments.nearest(old, new), i)
  return x


def channels(width: int) -> tuple[int, ...]:
  """Returns those that the convolutions after the first put out."""
  return tuple(width // 2**i for i in range(1, FINER + 2))


class AttentionMap(nn.Module):
  """Where queries look, by heads: attention without its values."""

  heads: int
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, queries_BQD: Array, tokens_BLD: Array, mask_B1L: Array | None
  ) -> Array:
    """Returns weights BQLN, which are 1 for a query in all.

    The mask is true where may be looked.
    """
    B, Q, D = queries_BQD.shape
    shape = (self.heads, D // self.heads)
    q_BQNK = Projection(shape, dtype=self.dtype, name='q_linear')(queries_BQD)
    k_BLNK = Projection(shape, dtype=self.dtype, name='k_linear')(tokens_BLD)
    logits_BQLN = jnp.moveaxis(attention.logits(q_BQNK, k_BLNK), 1, -1)
    if mask_B1L is not None:
      mask_B1L = jnp.repeat(mask_B1L, self.heads, axis=-1)
    weights = attention.softmax(logits_BQLN.reshape(B, 1, Q, -1), mask_B1L)
    return weights.reshape(logits_BQLN.shape)


class JoinedConv(nn.Module):
  """The 3x3 convolution of features beside what a query sees of them.

  It has the parameters of `nn.Conv`. The features are the same for all queries,
  and their share of the sum, nearly all of it, is computed once.
  """

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_BhwD: Array, seen_BQhwN: Array) -> Array:
    """Returns BQhwM, where M is D + N."""
    D, N = x_BhwD.shape[-1], seen_BQhwN.shape[-1]
    M = D + N
    init = nn.initializers.lecun_uniform()
    kernel = self.param('kernel', init, (3, 3, M, M)).astype(self.dtype)
    bias_M = self.param('bias', nn.initializers.zeros, (M,)).astype(self.dtype)

    def convolved(x: Array, kernel: Array) -> Array:
      return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
      )

    flat = seen_BQhwN.astype(self.dtype).reshape(-1, *seen_BQhwN.shape[2:])
    y_BQhwM = convolved(flat, kernel[:, :, D:]).reshape(
      *seen_BQhwN.shape[:-1], M
    )
    y_BhwM = convolved(x_BhwD, kernel[:, :, :D]) + bias_M[None, None, None]
    return y_BQhwM + y_BhwM[:, None]


class MaskHead(nn.Module):
  """Convolutions from where a query looks to the mask of what it found."""

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x_BhwD: Array, seen_BQhwN: Array, finer: Sequence[Array]
  ) -> Array:
    """Returns logits BQhw in float32, as fine as the finest map.

    Args:
      x_BhwD: features that the encoder sees.
      seen_BQhwN: attention of the queries to their places.
      finer: feature maps BhwC of the backbone, each finer than the one before.
    """
    B, Q = seen_BQhwN.shape[:2]
    init: dict[str, Any] = {
      'kernel_init': nn.initializers.lecun_uniform(),
      'dtype': self.dtype,
    }

    def activated(y_BQhwC: Array, i: int) -> Array:
      y = y_BQhwC.reshape(B * Q, *y_BQhwC.shape[2:])
      groups = min(GROUPS, y.shape[-1])
      y = group_norm(y, EPSILON, f'gn{i}', groups=groups)
      return nn.relu(y).reshape(y_BQhwC.shape)

    y = JoinedConv(self.dtype, name='lay1')(x_BhwD, seen_BQhwN)
    y = activated(y, 1)
    for i, C in enumerate(channels(x_BhwD.shape[-1])):
      if i:
        map_BhwC = finer[i - 1]
        side_BhwC = nn.Conv(y.shape[-1], (1, 1), name=f'adapter{i}', **init)(
          map_BhwC
        )
        y = nearest(y, map_BhwC.shape[1:3], axis=2) + side_BhwC[:, None]
      y = activated(nn.Conv(C, (3, 3), name=f'lay{i + 2}', **init)(y), i + 2)
    y = nn.Conv(1, (3, 3), name='out_lay', **init)(y)
    return y[..., 0].astype(jnp.float32)
