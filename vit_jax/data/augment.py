"""What happens to a batch on the device: scaling, flips and mixup."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# Of each channel, for values in [0, 1]: takes them to [-1, 1], as in the paper.
MEAN = STD = (0.5, 0.5, 0.5)


def normalize(
  images_BHWC: jax.Array,
  mean: Sequence[float] = MEAN,
  std: Sequence[float] = STD,
) -> jax.Array:
  """Returns uint8 RGB images as float32, with the mean 0 and deviation 1.

  Mean and deviation of each channel are those of values in [0, 1].
  """
  mean_111C, std_111C = (
    np.float32(255 * np.array(x)).reshape(1, 1, 1, -1) for x in (mean, std)
  )
  return (images_BHWC.astype(jnp.float32) - mean_111C) / std_111C


def random_flip(key: jax.Array, images_BHWC: jax.Array) -> jax.Array:
  """Mirrors each image left to right with probability one half."""
  flip_B = jax.random.bernoulli(key, 0.5, images_BHWC.shape[:1])
  return jnp.where(
    flip_B[:, None, None, None], images_BHWC[:, :, ::-1], images_BHWC
  )


def mixup(
  key: jax.Array,
  images_BHWC: jax.Array,
  labels_BC: jax.Array,
  alpha: float,
) -> tuple[jax.Array, jax.Array]:
  """Mixes each example with its neighbour in the batch (1710.09412).

  One share a batch, drawn from Beta(alpha, alpha) and folded to the larger
  half, so that the first image always dominates. Images are of floating point,
  labels probabilities of the classes.
  """
  share = jax.random.beta(key, alpha, alpha)
  share = jnp.maximum(share, 1 - share)

  def mix(x: jax.Array) -> jax.Array:
    # A roll by one moves a single row between devices; a random permutation
    # would gather the whole batch on each.
    return share * x + (1 - share) * jnp.roll(x, 1, axis=0)

  return mix(images_BHWC), mix(labels_BC)
