"""Operations of ResNets whose gradients XLA computes slowly on CPUs.

On CPUs, these operations have the gradient of an equal function, which XLA
computes several times as fast (docs/results/speed.md). Gradients change only by
rounding, except that equal maxima of a window share its gradient. On other
devices, the compiled program stays the same. Forward-mode differentiation
(`jax.jvp`) is not supported.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Array = jax.Array


def convolve_pixels(
  x_BHWC: Array,
  kernel_11CD: Array,
  strides: Sequence[int],
  *args: Any,
  **kwargs: Any,
) -> Array:
  """Computes a 1x1 convolution; on CPUs, with a matrix product's gradient.

  The arguments are those of `jax.lax.conv_general_dilated`. That gradient uses
  only the strides, so the other options must not matter for 1x1 kernels.
  Returns BhwD.
  """

  def convolution(x_BHWC: Array, kernel_11CD: Array) -> Array:
    return jax.lax.conv_general_dilated(
      x_BHWC, kernel_11CD, strides, *args, **kwargs
    )

  def product(x_BHWC: Array, kernel_11CD: Array) -> Array:
    x_BhwC = x_BHWC[:, :: strides[0], :: strides[1]]
    # The gradient of a product with a single axis of positions is faster.
    y_ND = x_BhwC.reshape(-1, x_BhwC.shape[-1]) @ kernel_11CD[0, 0]
    return y_ND.reshape(*x_BhwC.shape[:-1], -1)

  return _replace_gradient(convolution, product)(x_BHWC, kernel_11CD)


def max_pool(x_BHWC: Array, version: int) -> Array:
  """Computes 3x3 max-pooling with stride 2; on CPUs, with another gradient.

  `version` is that of `resnet.ResNet`. In version 1, inputs must be at least 0,
  because the other gradient pads with zeros instead of -inf. Returns BhwC.
  """

  def windows(x: Array) -> Array:
    if version == 1:
      return nn.max_pool(x, (3, 3), (2, 2), padding='SAME')
    # Pads with zeros, not -inf, as BiT does. In version 2 a zero can be the
    # maximum, because the inputs may be negative.
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return nn.max_pool(x, (3, 3), (2, 2))

  def shifted(x: Array) -> Array:
    """Takes maxima of three neighbouring rows, then of three columns."""
    for axis in (1, 2):
      size = x.shape[axis]
      n = -(-size // 2)
      before = size % 2 if version == 1 else 1
      pads = [(0, 0)] * 4
      pads[axis] = (before, 2 * (n + 1) - size - before)
      x = jnp.pad(x, pads)
      x = x.reshape(*x.shape[:axis], n + 1, 2, *x.shape[axis + 1 :])
      even, odd = jnp.moveaxis(x, axis + 1, 0)
      first, second, third = (
        jax.lax.slice_in_dim(part, i, i + n, axis=axis)
        for part, i in ((even, 0), (odd, 0), (even, 1))
      )
      x = jnp.maximum(jnp.maximum(first, second), third)
    return x

  return _replace_gradient(windows, shifted)(x_BHWC)


def _replace_gradient(
  function: Callable[..., Array], equal: Callable[..., Array]
) -> Callable[..., Array]:
  """Returns `function`; on CPUs, its gradient is that of `equal`."""

  @jax.custom_vjp
  def result(*args: Array) -> Array:
    return function(*args)

  def backward(args: tuple[Array, ...], grad: Array) -> tuple[Array, ...]:
    return jax.lax.platform_dependent(
      *args,
      cpu=lambda *args: jax.vjp(equal, *args)[1](grad),
      default=lambda *args: jax.vjp(function, *args)[1](grad),
    )

  result.defvjp(lambda *args: (function(*args), args), backward)
  return result
