"""Attention rollout (Abnar & Zuidema, 2005.00928).

Rollout estimates how much of each patch reaches the output. It models a layer
as the mean of the residual connection and the attention:

  R = a_X ... a_2 a_1,  a = (A + I) / 2 with rows divided by their sums

where A is a layer's attention matrix, combined over heads, and X is the number
of layers. The map is the average of R's rows, weighted by `Layers.read_BL`. For
example, it is the class token's row if the model reads only the class token.

To explain a class (Chefer et al., 2103.15679), the weights are multiplied by
the gradients of the class's logit, and negative products are set to 0. After
heads are combined, each image's A is divided by its largest row sum, since
logits have an arbitrary scale. The row with the largest sum then weighs as much
as the residual connection.
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
  """Returns maps Bhw with maximum 1; a map is 0 if no patch reaches the output.

  Args:
    layers: the attention of a model for a batch.
    fusion: operation that combines the heads, a key of `FUSIONS`.
    discard: share of a layer's combined weights that is set to 0 in each image,
      lowest weights first.
    class_B: index of the class to explain for each image; None for rollout
      without a class.
  """
  if class_B is None:
    found = [fuse(x_BNLL, fusion, discard) for x_BNLL in layers.attention()]
  else:
    both = layers.gradients(class_B)  # from the last layer to the first
    found = [fuse(x, fusion, discard, dx) for x, dx in both][::-1]
  return maps(found, layers.read_BL, layers.grid)


def fuse(
  weights_BNQL: Array,
  fusion: str = 'mean',
  discard: float = 0.0,
  gradients_BNQL: Array | None = None,
) -> Array:
  """Combines the weights of all heads, BQL; see `rollout` for the options."""
  if gradients_BNQL is not None:
    weights_BNQL = jax.nn.relu(weights_BNQL * gradients_BNQL)
  fused_BQL = FUSIONS[fusion](weights_BNQL, axis=1)
  B = fused_BQL.shape[0]  # symbolic in an exported program
  flat = fused_BQL.reshape(B, -1)
  if count := int(discard * flat.shape[1]):
    # Shapes must not depend on `count`: JAX would compile for each `discard`.
    largest_B1 = jnp.sort(flat, axis=1)[:, jnp.array([count - 1])]
    low, same = flat < largest_B1, flat == largest_B1
    room_B1 = count - jnp.sum(low, axis=1, keepdims=True)
    low |= same & (jnp.cumsum(same, axis=1) <= room_B1)
    fused_BQL = jnp.where(low, 0, flat).reshape(fused_BQL.shape)
  if gradients_BNQL is not None:
    sums_BQ = jnp.sum(fused_BQL, axis=-1)
    most_B11 = jnp.max(sums_BQ, axis=1)[:, None, None]
    fused_BQL = fused_BQL / jnp.where(most_B11 > 0, most_B11, 1)
  return fused_BQL


def maps(
  fused: Sequence[Array], read_BL: Array, grid: tuple[int, int]
) -> Array:
  """Returns the maps Bhw from the combined weights BLL of each layer.

  Layers go from the first to the last; patches follow all other tokens.
  """
  h, w = grid
  # Multiplying a vector by each matrix is cheaper than multiplying matrices.
  row: Any = read_BL
  for fused_BLL in reversed(fused):
    identity_LL = jnp.eye(fused_BLL.shape[-1], dtype=fused_BLL.dtype)
    a_BLL = fused_BLL + identity_LL[None]
    a_BLL = a_BLL / jnp.sum(a_BLL, axis=-1, keepdims=True)
    row = jnp.einsum('BQ,BQL->BL', row, a_BLL)
  row = row[:, row.shape[1] - h * w :]
  # The bound avoids 0 / 0. A map is 0 if no patch reaches the output, as when
  # a class token attends only to itself.
  max_B1 = jnp.maximum(jnp.max(row, axis=-1, keepdims=True), 1e-30)
  # XLA may multiply by the inverse, which gives 1 - 6e-8 instead of 1.
  row = jnp.where(row == max_B1, 1.0, row / max_B1)
  return row.reshape(-1, h, w)
