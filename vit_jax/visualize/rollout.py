"""Attention rollout (Abnar & Zuidema, 2005.00928).

How much of each patch reaches the output, if every layer passes on half of its
input as it is and half as its attention mixes it:

  R = a_X ... a_2 a_1,  a = (A + I) / 2 with rows divided by their sums

where A are a layer's weights with the heads fused. The map is what the output
reads of R's rows: that of the class token, the mean of both where DeiT has two,
that of all where the tokens are averaged, or as the pooling head attends to
them.

For a class, A are the weights times their gradients, negative products set to 0
(Chefer et al., 2103.15679), divided by the largest row sum of the image. The
gradients of a logit have no scale of their own; after the division the row that
matters most to the class weighs as much as the residual connection.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.visualize.attention_maps import Layers

Array = jax.Array

FUSIONS: dict[str, Any] = {'mean': jnp.mean, 'min': jnp.min, 'max': jnp.max}


def rollout(
  layers: Layers,
  fusion: str = 'mean',
  discard: float = 0.0,
  class_B: Any = None,
) -> Array:
  """Returns maps Bhw, the largest value of each of which is 1 (or 0).

  Args:
    layers: a model at work on images.
    fusion: of the heads: 'mean', 'min' or 'max'.
    discard: share of a layer's fused weights, the lowest ones of each image,
      that are set to 0.
    class_B: index of the class to explain, for each image; None for what the
      image as a whole passes on.
  """
  if class_B is None:
    found = [fuse(x_BNLL, fusion, discard) for x_BNLL in layers.attention()]
  else:
    # They come from the last layer to the first.
    found = [
      fuse(x_BNLL, fusion, discard, gradients_BNLL)
      for x_BNLL, gradients_BNLL in layers.gradients(class_B)
    ][::-1]
  return maps(found, layers.read_BL, layers.grid)


def fuse(
  weights_BNQL: Array,
  fusion: str = 'mean',
  discard: float = 0.0,
  gradients_BNQL: Array | None = None,
) -> Array:
  """Returns one BQL for all heads."""
  if gradients_BNQL is not None:
    weights_BNQL = jax.nn.relu(weights_BNQL * gradients_BNQL)
  fused_BQL = FUSIONS[fusion](weights_BNQL, axis=1)
  B = fused_BQL.shape[0]  # which an exported program does not know
  flat = fused_BQL.reshape(B, -1)
  if count := int(discard * flat.shape[1]):
    lowest = jnp.argsort(flat, axis=1)[:, :count]
    flat = flat.at[jnp.arange(B)[:, None], lowest].set(0)
    fused_BQL = flat.reshape(fused_BQL.shape)
  if gradients_BNQL is not None:
    sums_BQ = jnp.sum(fused_BQL, axis=-1)
    most_B11 = jnp.max(sums_BQ, axis=1)[:, None, None]
    fused_BQL = fused_BQL / jnp.where(most_B11 > 0, most_B11, 1)
  return fused_BQL


def mixing(fused_BLL: Array) -> Array:
  """Returns (A + I) / 2 with rows divided by their sums."""
  a_BLL = fused_BLL + jnp.eye(fused_BLL.shape[-1], dtype=fused_BLL.dtype)[None]
  return a_BLL / jnp.sum(a_BLL, axis=-1, keepdims=True)


def maps(
  fused: Sequence[Array], read_BL: Array, grid: tuple[int, int]
) -> Array:
  """Returns the maps Bhw of layers whose heads are fused.

  Args:
    fused: weights BLL of each layer, from the first to the last.
    read_BL: how much the output reads of each token, those of patches last.
    grid: (h, w) of the patches.
  """
  h, w = grid
  row: Any = read_BL  # one row of the product needs no product of matrices
  for fused_BLL in reversed(fused):
    row = jnp.einsum('BQ,BQL->BL', row, mixing(fused_BLL))
  row = row[:, row.shape[1] - h * w :]
  # Where all has been discarded on the way, the map is 0 everywhere.
  max_B1 = jnp.maximum(jnp.max(row, axis=-1, keepdims=True), 1e-30)
  # XLA may divide by multiplying with an inverse, which leaves 1 - 6e-8.
  row = jnp.where(row == max_B1, 1.0, row / max_B1)
  return row.reshape(-1, h, w)
