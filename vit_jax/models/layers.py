"""Layers of the encoders and heads (section 3.1, appendix A).

Dimension letters in this package: `B` batch, `H W` pixels, `h w` patch grid,
`L` tokens, `Q` queries, `D` width, `N` heads, `K` head dimension, `M` MLP,
`P` side of a patch, `C` channels or classes, `X` any other dimension, such as
layers. Parameters of the original ViT have the names of its .npz files.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from vit_jax.models import attention, posemb, tpu_layout
from vit_jax.models.model import Loop, Partitions

Array = jax.Array
Initializer = Callable[..., Array]

# `tpu_layout` explains why Dense_1 is not sharded along its output.
PARTITIONS: Partitions = (
  (r'(query|key|value)/kernel$', ('fsdp', 'tensor', None)),
  (r'(query|key|value)/bias$', ('tensor', None)),
  (r'out/kernel$', ('tensor', None, 'fsdp')),
  (r'Dense_0/kernel$', ('fsdp', 'tensor')),
  (r'Dense_0/bias$', ('tensor',)),
  (r'Dense_1/kernel$', (('tensor', 'fsdp'), None)),
)
# LayerNorm epsilon of the original code and timm; transformers uses 1e-12.
EPSILON = 1e-6
# Bounded, because a checkpoint file may claim a billion layers.
DEPTHS = '[1, 1000]'
# See `ViT.encoder_fields`.
EncoderFields = Any


def check_heads(model: Any, prefix: str = 'model.') -> None:
  """Raises ValueError if the heads cannot share the width equally."""
  if model.width % model.heads:
    raise ValueError(
      f'{prefix}width {model.width} is not a multiple of {prefix}heads '
      f'{model.heads}: choose a multiple.'
    )


def constrain(x: Array, axes: str) -> Array:
  """Constrains the sharding of an array, and its layout on GPUs.

  `axes` has one letter per dimension, such as 'BLD'. `sharding.activations`
  maps B to mesh axes; without it, the sharding is not constrained.

  On GPUs the layout is row-major. Otherwise the compiler would keep the layout
  that it chooses for adding position embeddings, with the batch innermost.
  """
  if attention.on_gpu():
    x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
  return nn.with_logical_constraint(x, tuple(axes))


def dropout(x: Array, rate: float, key: Array | None) -> Array:
  """Applies dropout at a rate below 1; without a key, returns `x`."""
  # Callers pass keys, because `make_rng` folds in the module's path, which
  # differs between scanned and unrolled layers.
  if key is None or not rate:
    return x
  kept = jax.random.bernoulli(key, 1 - rate, x.shape)
  # `tpu_layout` explains the barrier.
  kept = jax.lax.optimization_barrier(kept)
  return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def drop_branch(y_BLD: Array, rate: Array | None, key: Array | None) -> Array:
  """Applies stochastic depth (1603.09382).

  Zeroes the output of a residual branch in random examples and scales up the
  remaining examples. Without a key or a rate, returns `y_BLD`.
  """
  if rate is None or key is None:
    return y_BLD
  # Dropout uses the key itself, so this mask needs another key.
  key = jax.random.fold_in(key, 1)
  kept_B11 = jax.random.bernoulli(key, 1 - rate, (len(y_BLD), 1, 1))
  return y_BLD * (kept_B11 / (1 - rate)).astype(y_BLD.dtype)


def norm(x: Array, fields: EncoderFields, name: str) -> Array:
  """Applies LayerNorm or RMSNorm (1910.07467) to the last dimension."""
  module: Any = {'layer': nn.LayerNorm, 'rms': nn.RMSNorm}[fields.norm]
  epsilon = fields.layer_norm_epsilon
  return module(epsilon=epsilon, dtype=fields.dtype, name=name)(x)


class GroupNorm(nn.Module):
  """GroupNorm, by default with 32 groups as in BiT (1912.11370).

  Equals `nn.GroupNorm(use_fast_variance=False)`, which is more exact than
  Flax's default (docs/understand/numerics.md). Averages first over the image,
  then over the channels of a group. On CPUs this is several times as fast as
  one mean over both.
  """

  epsilon: float
  scale_init: Any = nn.initializers.ones
  groups: int = 32

  @nn.compact
  def __call__(self, x_BhwC: Array) -> Array:
    """Normalises in float32; the result has the input's shape and dtype."""
    C = x_BhwC.shape[-1]
    scale_C = self.param('scale', self.scale_init, (C,))
    bias_C = self.param('bias', nn.initializers.zeros, (C,))
    x = x_BhwC.astype(jnp.float32)
    x -= self._mean(x)
    x *= jax.lax.rsqrt(self._mean(x * x) + self.epsilon)
    x = x * scale_C[None, None, None] + bias_C[None, None, None]
    return x.astype(x_BhwC.dtype)

  def _mean(self, x_BhwC: Array) -> Array:
    """Returns the mean over the image and the channels of a group, B11C."""
    B, _, _, C = x_BhwC.shape
    mean_BG = x_BhwC.mean((1, 2)).reshape(B, self.groups, -1).mean(-1)
    return jnp.repeat(mean_BG, C // self.groups, axis=1)[:, None, None]


def remat(block: Any, policy: str, *, in_loop: bool) -> Any:
  """Returns a module class that recomputes activations in the backward pass.

  `Model.remat` documents `policy`. In a loop (a scan), XLA cannot merge the
  recomputation with the forward pass, so `prevent_cse` is False.
  """
  if policy == 'none':
    return block
  policies = jax.checkpoint_policies
  if policy == 'cheap':
    kept = policies.save_from_both_policies(
      policies.dots_with_no_batch_dims_saveable,
      policies.save_only_these_names(attention.NAME),
    )
  else:
    kept = getattr(policies, policy)
  return nn.remat(block, policy=kept, prevent_cse=not in_loop)


def repeated(
  block: Any,
  loop: Loop,
  x_BLD: Array,
  inputs: tuple[Any, ...],
  shared: tuple[Any, ...],
  *,
  of: Any,
  depth: int,
  is_initializing: bool,
  fields: dict[str, Any],
) -> tuple[Array, dict[str, Any]]:
  """Applies layers of equal shapes; returns tokens BLD and intermediates.

  Call this function in a compact method of the module that owns the parameters.
  The intermediates of all layers are stacked along a first axis.

  Args:
    block: class of a layer, which takes tokens, one layer's part of `inputs`,
      and `shared`.
    loop: parameter names of the layers.
    x_BLD: tokens.
    inputs: arrays with one entry per layer along the first axis, or None.
    shared: arrays that every layer takes whole, or None.
    of: object with the model's fields `heads`, `scan` and `remat`.
    depth: number of layers.
    is_initializing: whether the calling module is initialising.
    fields: constructor arguments of every layer.
  """
  # The scan slices kernels as matrices; see `tpu_layout`.
  in_loop = of.scan and not is_initializing
  if in_loop:
    block = nn.map_variables(
      block, 'params', functools.partial(tpu_layout.of_heads, heads=of.heads)
    )
  block = remat(block, of.remat, in_loop=of.scan)
  if of.scan:
    block = nn.scan(
      block,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=(0,) * len(inputs) + (nn.broadcast,) * len(shared),
      length=depth,
    )
    if in_loop:
      block = nn.map_variables(block, 'params', tpu_layout.as_matrices)
    return block(name=loop.stacked, **fields)(x_BLD, *inputs, *shared)
  layers = []
  for i in range(depth):
    x_BLD, one = block(name=f'{loop.prefix}{loop.first + i}', **fields)(
      x_BLD, *jax.tree.map(lambda x, i=i: x[i], inputs), *shared
    )
    layers.append(one)
  return x_BLD, jax.tree.map(lambda *xs: jnp.stack(xs), *layers)


class LayerScale(nn.Module):
  """Multiplies a branch by a learned factor per channel (2103.17239)."""

  initial: float

  @nn.compact
  def __call__(self, y_BLD: Array) -> Array:
    scale_init = nn.initializers.constant(self.initial)
    scale_D = self.param('scale', scale_init, y_BLD.shape[-1:])
    return y_BLD * scale_D.astype(y_BLD.dtype)[None, None]


class MlpBlock(nn.Module):
  """The MLP of equation 3: two dense layers with a GELU between them.

  With `swiglu` (2002.05202) the first layer is twice as wide. With its halves
  a and b, silu(a) * b replaces the GELU. `norm` has the fields of an additional
  norm before the second layer (NormFormer, 2110.09456); None disables it.
  """

  mlp_dim: int
  gelu: str = 'tanh'
  swiglu: bool = False
  dropout: float = 0.0
  dtype: Any = jnp.float32
  bias: bool = True
  kernel_init: Initializer = nn.initializers.xavier_uniform()
  norm: EncoderFields | None = None

  @nn.compact
  def __call__(self, x_BLD: Array, key: Array | None = None) -> Array:
    key_0, key_1 = (None, None) if key is None else jax.random.split(key)
    dense = {
      'dtype': self.dtype,
      'use_bias': self.bias,
      'kernel_init': self.kernel_init,
      'bias_init': nn.initializers.normal(1e-6),
    }
    features = self.mlp_dim * (2 if self.swiglu else 1)
    x_BLM = nn.Dense(features, name='Dense_0', **dense)(x_BLD)
    if self.swiglu:
      M = self.mlp_dim
      x_BLM = nn.silu(x_BLM[..., :M]) * x_BLM[..., M:]
    elif self.gelu == 'quick':
      x_BLM = x_BLM * nn.sigmoid(1.702 * x_BLM)
    else:
      x_BLM = nn.gelu(x_BLM, approximate=self.gelu == 'tanh')
    x_BLM = dropout(x_BLM, self.dropout, key_0)
    if self.norm is not None:
      x_BLM = norm(x_BLM, self.norm, 'inner_norm')
    y_BLD = nn.Dense(x_BLD.shape[-1], name='Dense_1', **dense)(x_BLM)
    return dropout(y_BLD, self.dropout, key_1)


class Projection(nn.Module):
  """A dense layer from tokens to heads or back, computed as one matrix product.

  Contracts the last `axes` dimensions of the input to `features`: (N, K) or
  (D,). It has the parameters of `nn.DenseGeneral`, which is slower on TPUs; see
  `tpu_layout`.
  """

  features: tuple[int, ...]
  axes: int = 1
  dtype: Any = jnp.float32
  bias: bool = True
  kernel_init: Initializer = nn.initializers.xavier_uniform()

  @nn.compact
  def __call__(self, x: Array) -> Array:
    batch, rows = x.shape[: -self.axes], x.shape[-self.axes :]
    matrix = math.prod(rows), math.prod(self.features)

    def init(key: Array, shape: tuple[int, ...]) -> Array:
      # Initial values are scaled for the matrix of all heads, D x D.
      return self.kernel_init(key, matrix).reshape(shape)

    kernel = self.param('kernel', init, (*rows, *self.features))
    kernel = kernel.astype(self.dtype).reshape(matrix)
    y = x.astype(self.dtype).reshape(*batch, -1) @ kernel
    if not self.bias:
      return y.reshape(*batch, *self.features)
    bias = self.param('bias', nn.initializers.zeros, self.features)
    return tpu_layout.add_bias(y, bias.astype(self.dtype))


class MultiHeadAttention(nn.Module):
  """Multi-head attention (MSA): equations 5 to 8 of appendix A.

  Attributes:
    relative: number of tokens before the patches; None disables relative
      position embeddings (appendix D.4).
    dtype: dtype of the computation; the softmax always works in float32.
    weights: whether to return the attention weights.
    bias: whether queries, keys and values have a bias.
    norm: fields of the norm of queries and keys (2302.05442); None for no norm.
    dropout: dropout rate of the attention weights.
    out_norm: fields of the norm of the joined heads (2210.06423); None for no
      norm.
  """

  heads: int
  relative: int | None = None
  dtype: Any = jnp.float32
  weights: bool = False
  bias: bool = True
  norm: EncoderFields | None = None
  dropout: float = 0.0
  out_norm: EncoderFields | None = None

  @nn.compact
  def __call__(
    self,
    queries_BQD: Array,
    keys_BLD: Array | None = None,
    values_BLD: Array | None = None,
    mask_BQL: Array | None = None,
    rotation: posemb.Rotation | None = None,
    key: Array | None = None,
  ) -> tuple[Array, Array | None]:
    """Applies attention.

    Args:
      queries_BQD: tokens to compute queries from.
      keys_BLD: tokens to compute keys from; None for `queries_BQD`.
      values_BLD: tokens to compute values from; None for `keys_BLD`.
      mask_BQL: true where a query may attend to a key; B and Q may be 1.
      rotation: rotary embeddings of the tokens at the end, or None; see
        `posemb.rotate`.
      key: random key for dropout; None disables it.

    Returns:
      The attended tokens BQD; and the weights BNQL in float32, or None if the
      computation does not need them.
    """
    keys_BLD = queries_BQD if keys_BLD is None else keys_BLD
    values_BLD = keys_BLD if values_BLD is None else values_BLD
    D = queries_BQD.shape[-1]

    def project(name: str, x_BLD: Array) -> Array:
      heads = (self.heads, D // self.heads)
      return Projection(heads, 1, self.dtype, self.bias, name=name)(x_BLD)

    q_BQNK = project('query', queries_BQD)
    k_BLNK, v_BLNK = project('key', keys_BLD), project('value', values_BLD)
    if self.norm is not None:
      q_BQNK = norm(q_BQNK, self.norm, 'query_norm')
      k_BLNK = norm(k_BLNK, self.norm, 'key_norm')
    if rotation is not None:
      q_BQNK = posemb.rotate(q_BQNK, rotation)
      k_BLNK = posemb.rotate(k_BLNK, rotation)
    weights_BNQL = None
    drops = key is not None and self.dropout > 0
    if self.relative is None and not self.weights and not drops:
      y_BQNK = attention.attend(q_BQNK, k_BLNK, v_BLNK, mask_BQL)
    else:
      logits_BNQL = attention.logits(q_BQNK, k_BLNK)
      if self.relative is not None:
        relative = posemb.RelativeKeys(name='relative')
        logits_BNQL += relative(q_BQNK, self.relative)
      weights_BNQL = attention.softmax(logits_BNQL, mask_BQL)
      # Lets `visualize` differentiate with respect to the weights. `perturb`
      # would add a collection to the result of `init`.
      if self.has_variable('perturbations', 'weights'):
        weights_BNQL += self.get_variable('perturbations', 'weights')
      kept_BNQL = dropout(weights_BNQL, self.dropout, key)
      y_BQNK = attention.weighted(kept_BNQL, v_BLNK)
    if self.out_norm is not None:
      y_BQD = norm(y_BQNK.reshape(queries_BQD.shape), self.out_norm, 'out_norm')
      y_BQNK = y_BQD.reshape(y_BQNK.shape)
    y_BQD = Projection((D,), axes=2, dtype=self.dtype, name='out')(y_BQNK)
    return y_BQD, weights_BNQL


class EncoderBlock(nn.Module):
  """One layer of the encoder: equations 2 and 3.

  `MultiHeadAttention` documents `relative`, and `ViT` documents `capture`.
  """

  fields: EncoderFields
  relative: int | None = None
  capture: tuple[str, ...] = ()

  @nn.compact
  def __call__(
    self,
    x_BLD: Array,
    key: Array | None = None,
    positions_LD: Array | None = None,
    drop_rate: Array | None = None,
    rotation: posemb.Rotation | None = None,
  ) -> tuple[Array, dict[str, Any]]:
    """Returns the tokens BLD after this layer, and captured intermediates.

    Args:
      x_BLD: tokens.
      key: random key for dropout and stochastic depth; None disables both.
      positions_LD: position embeddings to add to the input, or None.
      drop_rate: stochastic depth rate of both branches, or None.
      rotation: rotary embeddings of the tokens at the end, or None; see
        `posemb.rotate`.
    """
    f = self.fields
    key_msa, key_mlp = (None, None) if key is None else jax.random.split(key)
    x_BLD = constrain(x_BLD, 'BLD')
    if positions_LD is not None:
      x_BLD = x_BLD + positions_LD.astype(x_BLD.dtype)[None]

    y_BLD = norm(x_BLD, f, 'LayerNorm_0')
    y_BLD, weights_BNLL = MultiHeadAttention(
      f.heads,
      self.relative,
      f.dtype,
      'attention' in self.capture,
      f.qkv_bias,
      f if f.qk_norm else None,
      out_norm=f if f.attention_norm else None,
      name='MultiHeadDotProductAttention_1',
    )(y_BLD, rotation=rotation)
    y_BLD = dropout(y_BLD, f.dropout, key_msa)
    if f.layer_scale:
      y_BLD = LayerScale(f.layer_scale, name='LayerScale_0')(y_BLD)
    x_BLD = constrain(x_BLD + drop_branch(y_BLD, drop_rate, key_msa), 'BLD')

    y_BLD = norm(x_BLD, f, 'LayerNorm_2')
    y_BLD = MlpBlock(
      f.mlp_dim,
      f.gelu,
      f.swiglu,
      f.dropout,
      f.dtype,
      norm=f if f.mlp_norm else None,
      name='MlpBlock_3',
    )(y_BLD, key_mlp)
    if f.layer_scale:
      y_BLD = LayerScale(f.layer_scale, name='LayerScale_1')(y_BLD)
    x_BLD = x_BLD + drop_branch(y_BLD, drop_rate, key_mlp)

    found = {'attention': weights_BNLL, 'blocks': x_BLD}
    return x_BLD, {name: found[name] for name in self.capture}
