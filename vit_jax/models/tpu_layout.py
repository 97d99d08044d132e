"""Layouts for the TPU's compiler, and their measured gains.

A TPU keeps an array's last axis along the 128 lanes of its registers and the
axis before it in tiles of 8 or 16 rows. Other shapes are padded, and copied on
their way in and out. None of this changes parameters or results. Shares are of
a training step.

Heads. Arrays with an axis N of heads and an axis K of 64 or 80 leave up to half
of the lanes empty:

- `layers.Projection` multiplies one D x D matrix, and no D x N x K array as
  `nn.DenseGeneral` does.
- Scanned layers' kernels are matrices outside the loop (`as_matrices`) and
  arrays of heads (`of_heads`) inside, where each has been sliced out.
- Kernels that are gathered or scattered over the mesh are matrices on the way
  (`as_matrix`): 7 % of a step of L/16 on v3. The barrier in it keeps the
  compiler from gathering first and seeing a matrix afterwards, when all of it
  is copied: 3 % of a step of H/14 and L/16.
- Where heads fill the lanes evenly, XLA adds a bias on the way to the heads,
  and otherwise on the way out of the product (`add_bias`): 6 % of a step of
  H/14, whose heads have 80, and 2 % of one of L/16.
- `attention.attend` has heads after tokens, B L N K: heads first would be
  copied, 4 % of a step of H/14.
- `attention` computes logits with queries last, B N L Q, as the compiler lays
  them out in any case, and sums exponentials by a product with ones
  (`sum_keys`), forward and backward: 6 % of a layer of L/16 on v5e and 7 % on
  v6e by the compiler's estimate, which overrates sums; nothing and 2 % by its
  analysis of the schedule (docs/results/tpu.md).

Others:

- `vit.PatchEmbedding` is written as the product that it is, because the whole
  batch is copied for a convolution.
- `Dense_1` of an MLP is not split along its output in `layers.PARTITIONS`,
  because what is gathered would be transposed.
- `layers.dropout` keeps what it draws by a barrier, because the compiler would
  draw it again in every product that reads it: 60 % of an encoder layer of DETR
  on v6e.
- `posemb.RelativeKeys` picks its logits by reshaping them, because a gather of
  that size is slow.
"""

from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.models.model import Axes

Array = jax.Array


def add_bias(y: Array, bias: Array) -> Array:
  """Returns the rows of a product plus a bias, in the shape of the bias."""
  shape = (*y.shape[:-1], *bias.shape)
  if 128 % bias.shape[-1]:
    rows = jnp.broadcast_to(bias.reshape(-1), y.shape)
    return (y + rows).reshape(shape)
  return y.reshape(shape) + jnp.broadcast_to(bias, shape)


def sum_keys(x_BNLQ: Array) -> Array:
  """Returns the sums over L, BN1Q."""
  return jax.lax.platform_dependent(
    x_BNLQ,
    tpu=sum_by_product,
    default=lambda x_BNLQ: jnp.sum(x_BNLQ, axis=-2, keepdims=True),
  )


def sum_by_product(x_BNLQ: Array) -> Array:
  """Returns what `sum_keys` does, from a product with ones."""
  B, N, L, _ = x_BNLQ.shape
  # One column, and the compiler would make it a sum again.
  ones_BLNK = jnp.ones((B, L, N, 8), x_BNLQ.dtype)
  return jnp.einsum('BNLQ,BLNK->BNKQ', x_BNLQ, ones_BLNK)[:, :, :1]


def as_matrices(params: Any) -> Any:
  """Returns parameters with the kernels of attention as D x D matrices."""
  return _reshaped(params, (-1,), 2)


def of_heads(params: Any, heads: int) -> Any:
  """Undoes `as_matrices`."""
  return _reshaped(params, (heads, -1), 1)


def _reshaped(params: Any, new: tuple[int, ...], replaced: int) -> Any:
  """Gives kernels of attention `new` axes for the `replaced` ones of heads."""

  def one(path: tuple[Any, ...], x: Array) -> Array:
    *_, module, name = (entry.key for entry in path)
    if name != 'kernel' or module not in ('query', 'key', 'value', 'out'):
      return x
    axis = x.ndim - replaced - (module == 'out')
    return x.reshape(*x.shape[:axis], *new, *x.shape[axis + replaced :])

  return jax.tree_util.tree_map_with_path(one, params)


def as_matrix(
  x: Array, spec: tuple[Axes, ...]
) -> tuple[Array, tuple[Axes, ...]]:
  """Returns a parameter and what splits it, both as of a matrix if of heads.

  `spec` splits the last dimensions; those of a kernel of attention are D x N x
  K, or N x K x D, of which K is never split. A scan's parameters have one more.
  """
  if len(spec) != 3 or x.ndim < 3:
    return x, spec
  first = not spec[1]  # N x K x D
  axis = x.ndim - 3 if first else x.ndim - 2
  matrix = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
  spec = tuple(axes for i, axes in enumerate(spec) if i != (1 if first else 2))
  return jax.lax.optimization_barrier(matrix), spec
