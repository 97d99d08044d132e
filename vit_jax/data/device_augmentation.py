"""Augmentation on the device: normalisation, flips, erasing, mixing."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# These values map pixels from [0, 1] to [-1, 1], as in the ViT authors' code.
MEAN = STD = (0.5, 0.5, 0.5)


def normalize(
  images_BHWC: jax.Array,
  mean: Sequence[float] = MEAN,
  std: Sequence[float] = STD,
) -> jax.Array:
  """Normalises images of any dtype with values 0..255; returns float32.

  `mean` and `std` are per channel, for pixels scaled to [0, 1].
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


def random_erasing(
  key: jax.Array, images_BHWC: jax.Array, probability: float
) -> jax.Array:
  """Replaces a random rectangle of some images by noise (1708.04896).

  Each image gets a rectangle with this `probability`. The rectangle's area is
  uniform between 2 % and a third of the image's area. Its aspect ratio is
  log-uniform between 0.3 and 1/0.3. The first of ten draws that fits into the
  image is used. The noise is standard normal, as in DeiT. Images are
  normalised, float32.
  """
  B, H, W, _ = images_BHWC.shape
  keys = jax.random.split(key, 6)
  area_BT = (
    H * W * jax.random.uniform(keys[0], (B, 10), minval=0.02, maxval=1 / 3)
  )
  aspect_BT = jnp.exp(
    jax.random.uniform(
      keys[1], (B, 10), minval=jnp.log(0.3), maxval=-jnp.log(0.3)
    )
  )
  h_BT = jnp.round(jnp.sqrt(area_BT * aspect_BT))
  w_BT = jnp.round(jnp.sqrt(area_BT / aspect_BT))
  fits_BT = (h_BT < H) & (w_BT < W)
  first_B1 = jnp.argmax(fits_BT, axis=1)[:, None]
  h_B1, w_B1 = (jnp.take_along_axis(x, first_B1, 1) for x in (h_BT, w_BT))
  erased_B1 = jax.random.bernoulli(keys[2], probability, (B, 1))
  erased_B1 &= jnp.any(fits_BT, axis=1, keepdims=True)

  def within(key: jax.Array, size_B1: jax.Array, side: int) -> jax.Array:
    start_B1 = jax.random.uniform(key, (B, 1)) * (side - size_B1 + 1)
    place_1X = jnp.arange(side)[None]
    start_B1 = jnp.floor(start_B1)
    return (place_1X >= start_B1) & (place_1X < start_B1 + size_B1)

  inside_BHW = (
    within(keys[3], h_B1, H)[:, :, None]
    & within(keys[4], w_B1, W)[:, None, :]
    & erased_B1[:, :, None]
  )
  noise_BHWC = jax.random.normal(keys[5], images_BHWC.shape)
  return jnp.where(inside_BHW[..., None], noise_BHWC, images_BHWC)


def cutmix(
  key: jax.Array,
  images_BHWC: jax.Array,
  labels_BC: jax.Array,
  alpha: float,
) -> tuple[jax.Array, jax.Array]:
  """Pastes a rectangle of the previous example into each example (1905.04899).

  The whole batch uses one rectangle with a uniform centre. Its share of the
  image area is drawn from Beta(alpha, alpha). Then the rectangle is clipped to
  the image. Labels are class probabilities, mixed by the clipped area.
  """
  _, H, W, _ = images_BHWC.shape
  key_share, key_y, key_x = jax.random.split(key, 3)
  side = jnp.sqrt(jax.random.beta(key_share, alpha, alpha))

  def within(key: jax.Array, size: int) -> jax.Array:
    half = jnp.floor(size * side) // 2
    offset_X = jnp.arange(size) - jax.random.randint(key, (), 0, size)
    return (offset_X >= -half) & (offset_X < half)

  pasted_HW = within(key_y, H)[:, None] & within(key_x, W)[None, :]
  share = jnp.mean(pasted_HW, dtype=labels_BC.dtype)
  images_BHWC = jnp.where(
    pasted_HW[None, :, :, None], jnp.roll(images_BHWC, 1, axis=0), images_BHWC
  )
  neighbours_BC = jnp.roll(labels_BC, 1, axis=0)
  return images_BHWC, (1 - share) * labels_BC + share * neighbours_BC


def mixup_or_cutmix(
  key: jax.Array,
  images_BHWC: jax.Array,
  labels_BC: jax.Array,
  mixup_alpha: float,
  cutmix_alpha: float,
) -> tuple[jax.Array, jax.Array]:
  """Applies mixup or CutMix to the batch, each with probability one half.

  A method whose alpha is 0 is never drawn.
  """
  args = images_BHWC, labels_BC
  if not cutmix_alpha:
    return mixup(key, *args, mixup_alpha) if mixup_alpha else args
  if not mixup_alpha:
    return cutmix(key, *args, cutmix_alpha)
  key_which, key = jax.random.split(key)
  return jax.lax.cond(
    jax.random.bernoulli(key_which),
    lambda: mixup(key, *args, mixup_alpha),
    lambda: cutmix(key, *args, cutmix_alpha),
  )


def mixup(
  key: jax.Array,
  images_BHWC: jax.Array,
  labels_BC: jax.Array,
  alpha: float,
) -> tuple[jax.Array, jax.Array]:
  """Mixes each example with the previous one in the batch (1710.09412).

  The whole batch uses one share s, drawn from Beta(alpha, alpha). The larger of
  s and 1 - s is the weight of the example itself, so that it always dominates.
  Images are floating point; labels are class probabilities.
  """
  share = jax.random.beta(key, alpha, alpha)
  share = jnp.maximum(share, 1 - share)

  def mix(x: jax.Array) -> jax.Array:
    # A roll by one moves one example between devices. A random permutation
    # would gather the whole batch on every device.
    return share * x + (1 - share) * jnp.roll(x, 1, axis=0)

  return mix(images_BHWC), mix(labels_BC)
