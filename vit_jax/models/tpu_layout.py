"""Array layouts for the TPU compiler, and the gains that it estimates.

A TPU stores an array's last axis along the 128 lanes of its registers, and the
axis before the last in tiles of 8 or 16 rows. Arrays that do not fill lanes and
tiles are padded, and copied when they are read and written. The layouts of this
package avoid this, and change results only by rounding. Percentages are the
estimated time saved per training step, unless stated otherwise.

Heads. Arrays whose last axes are heads N and a head dimension K of 64 or 80
leave up to half of the lanes empty:

- `layers.Projection` multiplies by one D x D matrix, where `nn.DenseGeneral`
  uses a D x N x K array.
- Kernels of scanned layers are matrices outside the loop (`as_matrices`). The
  loop slices one layer's matrix and reshapes it to heads (`of_heads`).
- Kernels are gathered and scattered over the mesh as matrices (`as_matrix`):
  7 % for L/16 on v3. The barrier in `as_matrix` prevents the compiler from
  gathering first and reshaping afterwards, which would copy the whole array:
  3 % for H/14 and L/16.
- `add_bias` adds a bias after the reshape to heads if K divides 128, otherwise
  before it: 6 % for H/14, where K is 80, and 2 % for L/16.
- `attention.attend` has heads after tokens, B L N K, because arrays with heads
  first would be copied: 4 % for H/14.
- In training, `attention.attend` computes logits with queries last, B N L Q,
  forward and backward. With queries first, the compiler would copy the array.
  The forward pass sums exponentials by a product with ones (`sum_keys`);
  docs/results/tpu.md has the estimated gains.

Other layouts:

- `vit.PatchEmbedding` is a matrix product, because a convolution would copy the
  whole batch.
- `layers.PARTITIONS` does not shard `Dense_1` of an MLP along its output,
  because the gathered kernel would have to be transposed.
- `layers.dropout` stores its random mask behind a barrier. Without it, the
  compiler draws the mask again in every product that reads it: 60 % of an
  encoder layer of DETR on v6e.
- `posemb.RelativeKeys` selects its logits by reshapes, because a gather of so
  many numbers is slow.
"""

from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.models.model import Axes

Array = jax.Array


def add_bias(y: Array, bias: Array) -> Array:
  """Adds a bias to a product (..., D); returns (..., *bias.shape)."""
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
  """Returns the sums over L, BN1Q, by a product with ones."""
  B, N, L, _ = x_BNLQ.shape
  # 8 columns, because the compiler turns a product with one column into a sum.
  ones_BLNK = jnp.ones((B, L, N, 8), x_BNLQ.dtype)
  return jnp.einsum('BNLQ,BLNK->BNKQ', x_BNLQ, ones_BLNK)[:, :, :1]


def as_matrices(params: Any) -> Any:
  """Reshapes the attention kernels among parameters to D x D matrices."""
  return _reshaped(params, (-1,), 2)


def of_heads(params: Any, heads: int) -> Any:
  """Undoes `as_matrices`."""
  return _reshaped(params, (heads, -1), 1)


def _reshaped(params: Any, new: tuple[int, ...], replaced: int) -> Any:
  """Reshapes attention kernels: `replaced` head axes become the axes `new`."""

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
  """Reshapes an attention kernel to a matrix, and its sharding `spec` too.

  Returns other parameters unchanged. `spec` shards the last dimensions: D x N x
  K or N x K x D for an attention kernel, where K is never sharded. Parameters
  of a scan have one more dimension in front.
  """
  if len(spec) != 3 or x.ndim < 3:
    return x, spec
  first = not spec[1]  # N x K x D
  axis = x.ndim - 3 if first else x.ndim - 2
  matrix = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
  spec = tuple(axes for i, axes in enumerate(spec) if i != (1 if first else 2))
  return jax.lax.optimization_barrier(matrix), spec
