"""Boxes: (centre x, centre y, width, height) and corners (x0, y0, x1, y1)."""

import jax
import jax.numpy as jnp

# Below any area that float32 can tell from none, and its square above 0, so
# that boxes without area have gradients.
_LEAST_AREA = 1e-12


def corners(boxes_X4: jax.Array) -> jax.Array:
  """Returns (x0, y0, x1, y1) of (cx, cy, w, h)."""
  centre_X2, size_X2 = jnp.split(boxes_X4, 2, axis=-1)
  return jnp.concatenate(
    [centre_X2 - size_X2 / 2, centre_X2 + size_X2 / 2], axis=-1
  )


def generalized_iou(a_X4: jax.Array, b_X4: jax.Array) -> jax.Array:
  """Returns the GIoU of boxes given by their corners, in [-1, 1].

  Intersection over union, less the share of the smallest box around both that
  neither covers (1902.09630, algorithm 1). Leading dimensions broadcast. Boxes
  without area give finite values and gradients.
  """

  def area(low_X2: jax.Array, high_X2: jax.Array) -> jax.Array:
    return jnp.prod(jnp.maximum(high_X2 - low_X2, 0), axis=-1)

  a0_X2, a1_X2 = jnp.split(a_X4, 2, axis=-1)
  b0_X2, b1_X2 = jnp.split(b_X4, 2, axis=-1)
  both_X = area(jnp.maximum(a0_X2, b0_X2), jnp.minimum(a1_X2, b1_X2))
  around_X = area(jnp.minimum(a0_X2, b0_X2), jnp.maximum(a1_X2, b1_X2))
  either_X = area(a0_X2, a1_X2) + area(b0_X2, b1_X2) - both_X
  either_X = jnp.maximum(either_X, _LEAST_AREA)
  around_X = jnp.maximum(around_X, _LEAST_AREA)
  return both_X / either_X - (around_X - either_X) / around_X


def likeliest(
  logits_BQC: jax.Array, boxes_BQ4: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns each query's likeliest class of an object, and its box.

  Args:
    logits_BQC: of C - 1 classes and of no object.
    boxes_BQ4: (cx, cy, w, h) as shares of the image without padding.

  Returns:
    Probabilities float32 BQ, classes int32 BQ, and corners float32 BQ4 as
    shares of the image.
  """
  p_BQC = jax.nn.softmax(logits_BQC.astype(jnp.float32))[..., :-1]
  labels_BQ = jnp.argmax(p_BQC, axis=-1)
  return jnp.max(p_BQC, axis=-1), labels_BQ, corners(boxes_BQ4)
