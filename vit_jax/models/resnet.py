"""Weight-standardised convolutions with GroupNorm: the root of the hybrids."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

GROUP_NORM_EPSILON = 1e-6


class StdConv(nn.Conv):
  """Convolution whose kernel is standardised (Qiao et al., 2019).

  The originals' form: over height, width and input channels, population
  deviation, epsilon 1e-5 added to the deviation and not to the variance.
  """

  def param(self, name, *args, **kwargs):
    value = super().param(name, *args, **kwargs)
    if name == 'kernel':
      value = value - jnp.mean(value, axis=(0, 1, 2))
      value = value / (jnp.std(value, axis=(0, 1, 2)) + 1e-5)
    return value


def root_v1(x_BHWC: jax.Array, width: int, dtype: Any) -> jax.Array:
  """Convolves 7x7/2, normalises, and max-pools 3x3/2: BHWC to B H/4 W/4 width.

  A function and not a module, so that the parameters `conv_root` and `gn_root`
  stand where the published files have them: beside the caller's own.
  """
  x = StdConv(
    width, (7, 7), (2, 2), use_bias=False, dtype=dtype, name='conv_root'
  )(x_BHWC)
  x = nn.GroupNorm(32, epsilon=GROUP_NORM_EPSILON, dtype=dtype, name='gn_root')(
    x
  )
  return nn.max_pool(nn.relu(x), (3, 3), (2, 2), padding='SAME')
