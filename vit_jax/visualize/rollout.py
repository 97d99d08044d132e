"""Attention rollout (Abnar & Zuidema, 2005.00928).

How much of each patch reaches the output, if every layer passes on half of its
input as it is and half as its attention mixes it.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def rollout(attention_XBNLL: Array, grid: tuple[int, int]) -> Array:
  """Returns maps Bhw, the largest value of each of which is 1.

  R = I; for every layer, with A the mean over its heads, R = aR, where a is
  (A + I) / 2 with rows divided by their sums. The map is the row of R that
  belongs to the class token; without one, the mean over the rows of all tokens,
  which is what average pooling sees.

  Args:
    attention_XBNLL: softmax weights of every layer, as a model captures them.
    grid: (h, w) of the patches, which are the last tokens.
  """
  layers, B, _, L, _ = attention_XBNLL.shape
  h, w = grid
  a_XBLL = (jnp.mean(attention_XBNLL, axis=2) + jnp.eye(L)) / 2
  a_XBLL /= jnp.sum(a_XBLL, axis=-1, keepdims=True)
  # A row of the product needs no product of matrices.
  extra = L - h * w
  row_L = jnp.eye(L)[0] if extra else jnp.full(L, 1 / L)
  row_BL = jnp.broadcast_to(row_L, (B, L))
  for i in reversed(range(layers)):
    row_BL = jnp.einsum('BQ,BQL->BL', row_BL, a_XBLL[i])
  row_BL = row_BL[:, extra:]
  max_B1 = jnp.max(row_BL, axis=-1, keepdims=True)
  # XLA may divide by multiplying with an inverse, which leaves 1 - 6e-8.
  row_BL = jnp.where(row_BL == max_B1, 1.0, row_BL / max_B1)
  return row_BL.reshape(B, h, w)
