"""DETR's panoptic head: a mask for every query (2005.12872, section 4.4)."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import attention
from vit_jax.models.layers import GroupNorm, Projection
from vit_jax.projects.detr import segments

Array = jax.Array

EPSILON, GROUPS = 1e-5, 8  # of GroupNorm
# Number of backbone feature maps that refine the masks: the stages before the
# map that the encoder reads.
FINER = 3


def nearest(x: Array, size: tuple[int, ...], axis: int = 1) -> Array:
  """Resizes len(size) axes, starting at `axis`, by nearest neighbour."""
  for i, new in enumerate(size, axis):
    old = x.shape[i]
    if new % old == 0:
      x = jnp.repeat(x, new // old, i)
    else:
      x = jnp.take(x, segments.nearest(old, new), i)
  return x


def channels(width: int) -> tuple[int, ...]:
  """Returns the output channels of `lay2` to `lay5` in `MaskHead`."""
  return tuple(width // 2**i for i in range(1, FINER + 2))


class AttentionMap(nn.Module):
  """Attention weights of each query and head, without values."""

  heads: int
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, queries_BQD: Array, tokens_BLD: Array, mask_B1L: Array | None
  ) -> Array:
    """Returns weights BQLN, which sum to 1 over L and N for each query.

    `mask_B1L` is true for tokens that may be attended to; None for all.
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
  """3x3 convolution of image features concatenated with attention maps.

  It has the parameters of `nn.Conv`. A convolution is a sum over its input
  channels. The features are the same for all queries of an image, so their part
  of the sum, which is most of the work, is computed once.
  """

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_BhwD: Array, seen_BQhwN: Array) -> Array:
    """Returns features BQhwM, where M is D + N."""
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
  """Convolutions that turn each query's attention maps into mask logits."""

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x_BhwD: Array, seen_BQhwN: Array, finer: Sequence[Array]
  ) -> Array:
    """Returns logits BQhw in float32, at the resolution of the finest map.

    `seen_BQhwN` are attention weights over the cells of `x_BhwD`, the feature
    map that the encoder reads. `finer` has `FINER` maps BhwC, coarsest first.
    """
    B, Q = seen_BQhwN.shape[:2]
    init: dict[str, Any] = {
      'kernel_init': nn.initializers.lecun_uniform(),
      'dtype': self.dtype,
    }

    def activated(y_BQhwC: Array, i: int) -> Array:
      y = y_BQhwC.reshape(B * Q, *y_BQhwC.shape[2:])
      groups = min(GROUPS, y.shape[-1])
      y = GroupNorm(EPSILON, groups=groups, name=f'gn{i}')(y)
      return nn.relu(y).reshape(y_BQhwC.shape)

    y = JoinedConv(self.dtype, name='lay1')(x_BhwD, seen_BQhwN)
    y = activated(y, 1)
    for i, C in enumerate(channels(x_BhwD.shape[-1])):
      if i:
        map_BhwC = finer[i - 1]
        adapter = nn.Conv(y.shape[-1], (1, 1), name=f'adapter{i}', **init)
        y = nearest(y, map_BhwC.shape[1:3], axis=2)
        y += adapter(map_BhwC)[:, None]
      y = activated(nn.Conv(C, (3, 3), name=f'lay{i + 2}', **init)(y), i + 2)
    y = nn.Conv(1, (3, 3), name='out_lay', **init)(y)
    return y[..., 0].astype(jnp.float32)
