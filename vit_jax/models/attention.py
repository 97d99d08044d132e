"""Attention (equations 6 and 7 of the ViT paper) without storing its weights.

The weights A have L x L entries for each head; for long sequences they are the
largest arrays of a layer. As in FlashAttention (2205.14135), the forward pass
stores the logarithm of each softmax's denominator instead of A, and the
backward pass recomputes A. With y = A v, the gradient of the logits S is

  dS = A * (dy v^T - sum over K of dy * y)

Long sequences are processed in chunks of queries, so that memory grows linearly
with the number of tokens (in inference up to 32,768 tokens). In bfloat16 the
logits are rounded to bfloat16, as in PyTorch's autocast. cuDNN's kernels do not
round them. The softmax works in float32.

A mask BQL is true where a query may attend to a key; its B and Q may be 1. For
a query without such keys, the result and the gradient are zero.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.models import tpu_layout
from vit_jax.models.model import BATCH_AXES

Array = jax.Array

# `checkpoint_name` of arrays that the policy 'cheap' of `layers.remat` saves.
NAME = 'attention'
# Queries per chunk. With K = 64 and M = 4 D, the logits of 1,024 queries have
# four times as many elements as the hidden activations of the layer's MLP.
MAX_QUERIES = 1024
# Maximum number of chunks in inference. Each chunk is traced separately, so the
# chunks of a huge image size in a checkpoint would trace for too long.
MAX_UNROLLED = 32

_PORTABLE = contextvars.ContextVar('portable', default=False)


@contextlib.contextmanager
def portable() -> Iterator[None]:
  """Traces without GPU kernels, for programs that run on other machines."""
  token = _PORTABLE.set(True)
  try:
    yield
  finally:
    _PORTABLE.reset(token)


def on_gpu() -> bool:
  """Whether the traced program runs on the GPUs of this machine."""
  return jax.default_backend() == 'gpu' and not _PORTABLE.get()


def _has_cudnn_attention() -> bool:
  """Whether these GPUs are Ampere or newer, as cuDNN's attention needs."""
  capability = getattr(jax.local_devices()[0], 'compute_capability', '8.0')
  major = capability.partition('.')[0]  # not a number on AMD's GPUs
  return major.isdecimal() and int(major) >= 8


def attend(
  q_BQNK: Array, k_BLNK: Array, v_BLNK: Array, mask_BQL: Array | None = None
) -> Array:
  """Returns softmax(q k^T / sqrt(K)) v, BQNK, in the dtype of v.

  May use cuDNN's fused kernels for bfloat16 on GPUs.
  """
  _, Q, _, K = q_BQNK.shape
  if (
    on_gpu()
    and q_BQNK.dtype == jnp.bfloat16
    and _has_cudnn_attention()
    and K % 8 == 0
    and K <= 128
    # cuDNN lacks gradients for masks of odd lengths.
    and (mask_BQL is None and Q > 1 or _even(q_BQNK, k_BLNK))
  ):
    return _cudnn(q_BQNK, k_BLNK, v_BLNK, mask_BQL)
  # `tpu_layout` explains why heads do not come first.
  qkv = (checkpoint_name(x, NAME) for x in (q_BQNK, k_BLNK, v_BLNK))
  return _attend(*qkv, mask_BQL)


def logits(q_BQNK: Array, k_BLNK: Array) -> Array:
  """Returns q k^T / sqrt(K), BNQL, in float32 or better."""
  logits_BNQL = jnp.einsum('BQNK,BLNK->BNQL', q_BQNK, k_BLNK)
  dtype = jnp.promote_types(logits_BNQL.dtype, jnp.float32)
  return logits_BNQL.astype(dtype) * q_BQNK.shape[-1] ** -0.5


def softmax(logits_BNQL: Array, mask_BQL: Array | None = None) -> Array:
  """Returns the attention weights A, BNQL."""
  mask_BNQL = None if mask_BQL is None else mask_BQL[:, None]
  return jax.nn.softmax(logits_BNQL, where=mask_BNQL)


def weighted(weights_BNQL: Array, v_BLNK: Array) -> Array:
  """Returns A v, BQNK."""
  return _product('BNQL,BLNK->BNQK', weights_BNQL.astype(v_BLNK.dtype), v_BLNK)


def _product(axes: str, *arrays: Array) -> Array:
  """Computes an `einsum` with a result such as BNQK, transposed to BQNK.

  An `einsum` with the result BQNK would multiply its operands in reverse order.
  On CPUs this takes up to a tenth of a training step of Ti/16.
  """
  return jnp.einsum(axes, *arrays).swapaxes(1, 2)


def _cudnn(
  q_BQNK: Array, k_BLNK: Array, v_BLNK: Array, mask_BQL: Array | None
) -> Array:
  if mask_BQL is None:
    way = _fused if _even(q_BQNK, k_BLNK) else _odd
    return way(q_BQNK, k_BLNK, v_BLNK)
  B, _, L = mask_BQL.shape
  attends_BQ = jnp.any(mask_BQL, axis=-1)
  # A query with an all-false mask would get NaN gradients. It attends to all
  # keys instead, and its result is set to zero.
  mask_BNQL = (mask_BQL | ~attends_BQ[..., None])[:, None]
  mask_BNQL = jnp.broadcast_to(mask_BNQL, (B, 1, q_BQNK.shape[1], L))
  y_BQNK = _fused(q_BQNK, k_BLNK, v_BLNK, mask=mask_BNQL)
  return jnp.where(attends_BQ[..., None, None], y_BQNK, 0)


def _even(q_BQNK: Array, k_BLNK: Array) -> bool:
  return q_BQNK.shape[1] % 2 == k_BLNK.shape[1] % 2 == 0


def _fused(*qkv: Array, **more: Any) -> Array:
  return jax.nn.dot_product_attention(*qkv, implementation='cudnn', **more)


@jax.custom_vjp
def _odd(q_BQNK: Array, k_BLNK: Array, v_BLNK: Array) -> Array:
  return _fused(q_BQNK, k_BLNK, v_BLNK)


def _odd_forward(*qkv: Array) -> tuple[Array, Any]:
  padded: Any = _padded
  mesh = jax.sharding.get_abstract_mesh()
  B, _, N, _ = qkv[0].shape
  parts = math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)
  if mesh.size > 1 and B % parts == 0:
    # JAX cannot partition calls with sequence lengths automatically.
    heads = None if N % mesh.shape['tensor'] else 'tensor'
    spec = jax.sharding.PartitionSpec(BATCH_AXES, None, heads)
    padded = jax.shard_map(
      padded, in_specs=spec, out_specs=spec, check_vma=False
    )
  return jax.vjp(padded, *qkv)


def _padded(q_BQNK: Array, k_BLNK: Array, v_BLNK: Array) -> Array:
  """Pads sequences to even lengths and passes cuDNN the unpadded lengths.

  cuDNN has gradients for odd lengths, but JAX 0.10 to 0.12 does not call them.
  """
  B, Q, *_ = q_BQNK.shape
  arrays = (
    jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))
    for x in (q_BQNK, k_BLNK, v_BLNK)
  )
  return _fused(
    *arrays,
    query_seq_lengths=jnp.full(B, Q, jnp.int32),
    key_value_seq_lengths=jnp.full(B, k_BLNK.shape[1], jnp.int32),
  )[:, :Q]


_odd.defvjp(_odd_forward, lambda vjp, dy_BQNK: vjp(dy_BQNK))


@jax.custom_vjp
def _attend(
  q_BQNK: Array, k_BLNK: Array, v_BLNK: Array, mask_BQL: Array | None
) -> Array:
  def attend(q_BQNK: Array, mask_BQL: Array | None) -> Array:
    return weighted(softmax(logits(q_BQNK, k_BLNK), mask_BQL), v_BLNK)

  Q = q_BQNK.shape[1]
  if Q <= MAX_QUERIES:
    return attend(q_BQNK, mask_BQL)
  # Unrolled, because converters to other formats do not support XLA loops.
  rows = max(MAX_QUERIES, math.ceil(Q / MAX_UNROLLED))
  differs = _differs(mask_BQL)
  parts = []
  for i in range(0, Q, rows):
    mask = differs[0][:, i : i + rows] if differs else mask_BQL
    parts.append(attend(q_BQNK[:, i : i + rows], mask))
  return jnp.concatenate(parts, axis=1)


def _differs(mask_BQL: Array | None) -> tuple[Array, ...]:
  """Returns (mask,) if the mask has a row for each query, otherwise ()."""
  return () if mask_BQL is None or mask_BQL.shape[1] == 1 else (mask_BQL,)


def _logits(q_BQNK: Array, k_BLNK: Array, mask_BQL: Array | None) -> Array:
  """Returns k q^T / sqrt(K), BNLQ, with -inf where the mask is false."""
  # `tpu_layout` explains why queries come last.
  logits_BNLQ = logits(k_BLNK, q_BQNK)
  if mask_BQL is None:
    return logits_BNLQ
  return jnp.where(mask_BQL.swapaxes(1, 2)[:, None], logits_BNLQ, -jnp.inf)


def _forward(
  q_BQNK: Array, k_BLNK: Array, v_BLNK: Array, mask_BQL: Array | None
) -> tuple[Array, tuple[Array | None, ...]]:
  def forward(
    q_BQNK: Array, mask_BQL: Array | None = mask_BQL
  ) -> tuple[list[Array], list[Array]]:
    logits_BNLQ = _logits(q_BQNK, k_BLNK, mask_BQL)
    max_BN1Q = jnp.max(logits_BNLQ, axis=-2, keepdims=True)
    if mask_BQL is not None:  # avoids -inf - (-inf)
      max_BN1Q = jnp.maximum(max_BN1Q, jnp.finfo(max_BN1Q.dtype).min)
    exp_BNLQ = jnp.exp(logits_BNLQ - max_BN1Q)
    sum_BN1Q = tpu_layout.sum_keys(exp_BNLQ)
    if mask_BQL is not None:  # avoids 0 / 0; all other sums are 1 or more
      sum_BN1Q = jnp.maximum(sum_BN1Q, 1)
    y_BQNK = _product(
      'BNLQ,BLNK->BNQK', exp_BNLQ, v_BLNK.astype(exp_BNLQ.dtype)
    )
    sum_BQN1, lse_BQN1 = (
      jnp.moveaxis(x, -1, 1) for x in (sum_BN1Q, max_BN1Q + jnp.log(sum_BN1Q))
    )
    return [(y_BQNK / sum_BQN1).astype(v_BLNK.dtype), lse_BQN1], []

  found, _ = _by_chunks(forward, q_BQNK, *_differs(mask_BQL))
  y_BQNK, lse_BQN1 = (checkpoint_name(x, NAME) for x in found)
  return y_BQNK, (q_BQNK, k_BLNK, v_BLNK, mask_BQL, y_BQNK, lse_BQN1)


def _backward(
  kept: tuple[Any, ...], dy_BQNK: Array
) -> tuple[Array, Array, Array, None]:
  q_BQNK, k_BLNK, v_BLNK, mask_BQL, y_BQNK, lse_BQN1 = kept
  sum_BQN1 = jnp.sum(
    dy_BQNK.astype(jnp.float32) * y_BQNK.astype(jnp.float32),
    axis=-1,
    keepdims=True,
  )

  def backward(
    q_BQNK: Array,
    dy_BQNK: Array,
    lse_BQN1: Array,
    sum_BQN1: Array,
    mask_BQL: Array | None = mask_BQL,
  ) -> tuple[list[Array], list[Array]]:
    lse_BN1Q, sum_BN1Q = (jnp.moveaxis(x, 1, -1) for x in (lse_BQN1, sum_BQN1))
    logits_BNLQ = _logits(q_BQNK, k_BLNK, mask_BQL)
    weights_BNLQ = jnp.exp(logits_BNLQ - lse_BN1Q)
    dweights_BNLQ = jnp.einsum(
      'BLNK,BQNK->BNLQ', v_BLNK, dy_BQNK, preferred_element_type=jnp.float32
    )
    dlogits_BNLQ = weights_BNLQ * (dweights_BNLQ - sum_BN1Q)
    dlogits_BNLQ = (dlogits_BNLQ * q_BQNK.shape[-1] ** -0.5).astype(
      q_BQNK.dtype
    )
    weights_BNLQ = weights_BNLQ.astype(v_BLNK.dtype)
    return [_product('BNLQ,BLNK->BNQK', dlogits_BNLQ, k_BLNK)], [
      _product('BNLQ,BQNK->BNLK', dlogits_BNLQ, q_BQNK),
      _product('BNLQ,BQNK->BNLK', weights_BNLQ, dy_BQNK),
    ]

  parts = (q_BQNK, dy_BQNK, lse_BQN1, sum_BQN1, *_differs(mask_BQL))
  (dq_BQNK,), (dk_BLNK, dv_BLNK) = _by_chunks(backward, *parts)
  return dq_BQNK, dk_BLNK, dv_BLNK, None


_attend.defvjp(_forward, _backward)


def _by_chunks(
  function: Callable[..., tuple[list[Array], list[Array]]], *arrays: Array
) -> tuple[list[Array], list[Array]]:
  """Applies a function to chunks of at most `MAX_QUERIES` queries.

  The function takes arrays BQ... and returns a list of arrays BQN..., which are
  joined along Q, and a list of sums over queries, which are added up.
  """
  B, Q, N, _ = arrays[0].shape
  n = math.ceil(Q / MAX_QUERIES)
  if n == 1:
    return function(*arrays)
  rows = math.ceil(Q / n)

  # Padded queries add nothing to the sums, because their q and dy are zero.
  def split(x: Array) -> Array:
    x = jnp.pad(x, ((0, 0), (0, n * rows - Q), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(len(x), n, rows, *x.shape[2:]), 1, 0)

  def join(x: Array) -> Array:
    return jnp.moveaxis(x, 0, 1).reshape(B, n * rows, N, -1)[:, :Q]

  def step(totals: list[Array], parts: Any) -> tuple[list[Array], list[Array]]:
    joined, sums = function(*parts)
    totals = [x + y.astype(x.dtype) for x, y in zip(totals, sums, strict=True)]
    return totals, joined

  parts = tuple(map(split, arrays))
  _, shapes = jax.eval_shape(function, *(x[0] for x in parts))
  zeros = [jnp.zeros(x.shape, jnp.float32) for x in shapes]
  totals, joined = jax.lax.scan(step, zeros, parts)
  sums = jax.tree.map(lambda x, shape: x.astype(shape.dtype), totals, shapes)
  return [*map(join, joined)], sums
