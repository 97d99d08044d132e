"""Parameters and images of a ResNet whose gradients are robust to rounding.

A gradient jumps where an activation passes the kink of its ReLU, or where two
entries of a max-pool change places. A small model has a hundred thousand
activations, and some are close to a kink. Devices and compilers that round
differently end up on different sides of it, with gradients percents apart.
"""

from unittest import mock

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models import cpu_gradients, layers

# How far the activations are from a kink, as a share of their array's largest.
# Rounding is seen to move them by 3e-6.
MARGIN = 1e-5
# A ReLU's zero moves among this share of a channel's activations, the nearest
# ones, so that both signs stay about equally frequent.
NEAREST = 1 / 8


def avoid(model, params, images, rng):
  """Returns parameters and images that keep the margin.

  Images are drawn again while two entries of their max-pool are too near, and
  then the biases of normalisations put the zeros of ReLUs into gaps.
  """
  images = images.copy()
  margins = jax.jit(lambda images: pool_margins(model, params, images))
  # Twice the margin, as the biases change what is the largest.
  while (is_near_B := np.asarray(margins(images)) < 2 * MARGIN).any():
    images[is_near_B] = rng.uniform(-1, 1, images[is_near_B].shape)
  params = flax.traverse_util.flatten_dict(params)
  for path, move_C in moves(model, params, images).items():
    params[path] = params[path] + np.asarray(move_C)
  return flax.traverse_util.unflatten_dict(params), images


def moves(model, params, images):
  """Returns the numbers to add to biases, by path."""

  @jax.jit
  def run(params):
    norms, moves, relu = [], {}, nn.relu

    def note(call, args, kwargs, context):
      if isinstance(context.module, layers.GroupNorm):
        norms.append(context.module.path)
      return call(*args, **kwargs)

    def moved(x_BhwC):
      # The last bias before a ReLU is that of the normalisation.
      move_C = moves[*norms[-1], 'bias'] = -widest_gap(x_BhwC)
      return relu(x_BhwC + move_C[None, None, None])

    with nn.intercept_methods(note), mock.patch.object(nn, 'relu', moved):
      model.apply({'params': params}, images)
    return moves

  return run(flax.traverse_util.unflatten_dict(params))


def widest_gap(x_BhwC):
  """Returns the middle of the widest gap around zero, for each channel."""
  x_NC = x_BhwC.reshape(-1, x_BhwC.shape[-1])
  order_NC = jnp.argsort(jnp.abs(x_NC), axis=0)
  nearest_NC = order_NC[: int(NEAREST * len(x_NC))]
  x_NC = jnp.sort(jnp.take_along_axis(x_NC, nearest_NC, axis=0), axis=0)
  widest_C = jnp.argmax(jnp.diff(x_NC, axis=0), axis=0)
  columns_C = jnp.arange(x_NC.shape[1])
  return (x_NC[widest_C, columns_C] + x_NC[widest_C + 1, columns_C]) / 2


def pool_margins(model, params, images):
  """Returns the smallest difference of two maxima, for each image."""
  margins_B, max_pool = [], cpu_gradients.max_pool

  def note(x_BHWC, version):
    entries = jax.lax.conv_general_dilated_patches(
      x_BHWC,
      (3, 3),
      (2, 2),
      'SAME' if version == 1 else ((1, 1), (1, 1)),
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
    entries = entries.reshape(*entries.shape[:-1], x_BHWC.shape[-1], -1)
    first, second = jnp.moveaxis(jax.lax.top_k(entries, 2)[0], -1, 0)
    # Zeros are of the border or behind a ReLU, where no gradient goes.
    gaps = jnp.where((first == 0) & (second == 0), jnp.inf, first - second)
    margins_B.append(gaps.min((1, 2, 3)) / jnp.abs(x_BHWC).max())
    return max_pool(x_BHWC, version)

  with mock.patch.object(cpu_gradients, 'max_pool', note):
    model.apply({'params': params}, images)
  return margins_B[0]
