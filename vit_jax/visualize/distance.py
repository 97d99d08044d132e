"""Mean attention distance (ViT paper, figures 7 right and 11, appendix D.7).

This is the mean distance between a patch and the patches that it attends to,
weighted by attention. Distances are Euclidean, between patch centres, in pixels
of the image. Other tokens, such as the class token, have no position. They are
left out, and the remaining weights are renormalised.
"""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.visualize.attention_maps import Layers

Array = jax.Array


def mean_distances(
  layers: Layers, pixels_per_patch: float, images: int | None = None
) -> np.ndarray:
  """Returns the distances of all layers and heads, XN, in pixels.

  The mean is over the first `images` images of the batch; None means all.
  `pixels_per_patch` is the distance between neighbouring patch centres.
  """
  return np.stack(
    [
      of_weights(x_BNLL, layers.grid, pixels_per_patch)[:images].mean(0)
      for x_BNLL in layers.attention()
    ]
  )


def of_weights(
  weights_BNLL: Array, grid: tuple[int, int], pixels_per_patch: float
) -> Array:
  """Returns the mean distance of each image and head, BN, in pixels.

  In `weights_BNLL`, the softmax weights, patches follow all other tokens.
  """
  h, w = grid
  extra = weights_BNLL.shape[-1] - h * w
  weights_BNLL = weights_BNLL[..., extra:, extra:]
  distance_LL = between(grid) * pixels_per_patch
  sums_BNL = jnp.sum(weights_BNLL, axis=-1)
  # A patch that attends to no patch gets the distance 0.
  mean_BNL = jnp.einsum(
    '...QL,QL->...Q', weights_BNLL, distance_LL.astype(weights_BNLL.dtype)
  ) / jnp.where(sums_BNL > 0, sums_BNL, 1)
  return jnp.mean(mean_BNL, axis=-1)


def between(grid: tuple[int, int]) -> np.ndarray:
  """Returns the distances between patches of a grid, LL, in patches."""
  at_L2 = np.indices(grid).reshape(2, -1).T
  return np.linalg.norm(at_L2[:, None] - at_L2[None], axis=-1)
