"""The layers that encoders and heads are made of: section 3.1, appendix A.

Dimensions are named as everywhere in this package: `B` batch, `H W` pixels,
`h w` patch grid, `L` tokens, `D` width, `N` heads, `K` head dimension, `M` MLP,
`C` classes, `X` one or all layers. Parameter names are those of the published
.npz files, so that reading one is a renaming and nothing more.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import posemb

Array = jax.Array

# The originals' epsilon of LayerNorm, timm's too; transformers has 1e-12.
EPSILON = 1e-6
# Python builds a model layer by layer, which takes forever where a file claims
# a billion of them.
MAX_LAYERS = 1000
# The originals compute the approximation by tanh, timm and transformers x times
# the normal distribution function itself; on B/16 the logits differ by 1e-3.
GELUS = ('tanh', 'exact')


def dropout(x: Array, rate: float, key: Array | None) -> Array:
  """Drops out with a key, and not without."""
  # The key is passed by hand because `make_rng` folds in the module's path,
  # which differs between scanned and unrolled layers.
  return nn.Dropout(rate, deterministic=key is None)(x, rng=key)


def layer_norm(x: Array, epsilon: float, dtype: Any, name: str) -> Array:
  """Normalises the last dimension with the parameters called `name`."""
  return nn.LayerNorm(epsilon=epsilon, dtype=dtype, name=name)(x)


def group_norm(
  x_BhwC: Array,
  epsilon: float,
  name: str,
  scale_init: Any = nn.initializers.ones,
) -> Array:
  """Normalises images in 32 groups of channels (BiT, 1912.11370).

  With the variance from the differences to the mean: as the mean of the squares
  less the square of the mean, which Flax takes unless told, it costs a
  ResNet's logits a decimal place.
  """
  return nn.GroupNorm(
    32,
    epsilon=epsilon,
    dtype=x_BhwC.dtype,
    scale_init=scale_init,
    use_fast_variance=False,
    name=name,
  )(x_BhwC)


def remat(block: Any, policy: str, *, in_loop: bool) -> Any:
  """Returns a module class whose activations are computed again going back.

  Args:
    block: the module class.
    policy: name in `jax.checkpoint_policies` of what is kept nevertheless, or
      'none' to keep everything.
    in_loop: whether a scan goes around it, which keeps the two computations
      apart already.
  """
  if policy == 'none':
    return block
  return nn.remat(
    block,
    policy=getattr(jax.checkpoint_policies, policy),
    prevent_cse=not in_loop,
  )


class MlpBlock(nn.Module):
  """The MLP of equation 3: two dense layers with a GELU between them."""

  mlp_dim: int
  gelu: str = 'tanh'
  dropout: float = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_BLD: Array, key: Array | None = None) -> Array:
    key_0, key_1 = (None, None) if key is None else jax.random.split(key)
    dense = {
      'dtype': self.dtype,
      'kernel_init': nn.initializers.xavier_uniform(),
      'bias_init': nn.initializers.normal(1e-6),
    }
    x_BLM = nn.Dense(self.mlp_dim, name='Dense_0', **dense)(x_BLD)
    x_BLM = nn.gelu(x_BLM, approximate=self.gelu == 'tanh')
    x_BLM = dropout(x_BLM, self.dropout, key_0)
    y_BLD = nn.Dense(x_BLD.shape[-1], name='Dense_1', **dense)(x_BLM)
    return dropout(y_BLD, self.dropout, key_1)


class HeadProjection(nn.Module):
  """Parameters of one of the projections q, k and v, split into heads."""

  heads: int

  @nn.compact
  def __call__(self, D: int) -> tuple[Array, Array]:
    """Returns the kernel DNK and the bias NK."""
    shape = (D, self.heads, D // self.heads)

    def init(key: Array, shape: tuple[int, ...]) -> Array:
      # All heads make up one D x D matrix, which decides the scale.
      return nn.initializers.xavier_uniform()(key, (D, D)).reshape(shape)

    kernel_DNK = self.param('kernel', init, shape)
    bias_NK = self.param('bias', nn.initializers.zeros, shape[1:])
    return kernel_DNK, bias_NK


class MultiHeadAttention(nn.Module):
  """Multi-head attention (MSA): equations 5 to 8 of appendix A.

  Attributes:
    heads: N.
    relative: None, or the number of tokens before the patches where relative
      position embeddings are added (appendix D.4).
    dtype: of the computation; the softmax works in float32 in any case.
  """

  heads: int
  relative: int | None = None
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x_BLD: Array, probe_BQD: Array | None = None
  ) -> tuple[Array, Array]:
    """Attends to x from the probe, or else from x itself.

    Returns:
      The attended tokens BQD and the weights BNQL in float32.
    """
    D = x_BLD.shape[-1]
    q, k, v = (
      HeadProjection(self.heads, name=name)(D)
      for name in ('query', 'key', 'value')
    )
    if probe_BQD is None:
      # One product for q, k and v reads x once: 8 % of a training step on CPU.
      q_BNQK, k_BNLK, v_BNLK = self._project(x_BLD, q, k, v)
    else:
      (q_BNQK,) = self._project(probe_BQD, q)
      k_BNLK, v_BNLK = self._project(x_BLD, k, v)
    q_BNQK = q_BNQK * (D // self.heads) ** -0.5
    logits_BNQL = jnp.einsum(
      'BNQK,BNLK->BNQL', q_BNQK, k_BNLK, preferred_element_type=jnp.float32
    )
    if self.relative is not None:
      logits_BNQL += posemb.RelativeKeys(name='relative')(q_BNQK, self.relative)
    weights_BNQL = jax.nn.softmax(logits_BNQL)
    y_BQNK = jnp.einsum(
      'BNQL,BNLK->BQNK', weights_BNQL.astype(self.dtype), v_BNLK
    )
    y_BQD = nn.DenseGeneral(
      D,
      axis=(-2, -1),
      dtype=self.dtype,
      kernel_init=nn.initializers.xavier_uniform(),
      name='out',
    )(y_BQNK)
    return y_BQD, weights_BNQL

  def _project(self, x_BLD: Array, *projections: tuple[Array, Array]) -> Array:
    kernel_DcNK = jnp.stack([kernel for kernel, _ in projections], axis=1)
    bias_cNK = jnp.stack([bias for _, bias in projections])
    return jnp.einsum(
      'BLD,DcNK->cBNLK',
      x_BLD.astype(self.dtype),
      kernel_DcNK.astype(self.dtype),
    ) + bias_cNK[:, None, :, None].astype(self.dtype)


class EncoderBlock(nn.Module):
  """One layer of the encoder: equations 2 and 3."""

  mlp_dim: int
  heads: int
  gelu: str = 'tanh'
  epsilon: float = EPSILON
  dropout: float = 0.0
  relative: int | None = None
  dtype: Any = jnp.float32
  capture: tuple[str, ...] = ()

  @nn.compact
  def __call__(
    self,
    x_BLD: Array,
    key: Array | None = None,
    positions_LD: Array | None = None,
  ) -> tuple[Array, dict[str, Any]]:
    """Returns the tokens after this layer and what `capture` names of it.

    Args:
      x_BLD: tokens.
      key: for dropout; None does not drop out.
      positions_LD: position embeddings that this layer adds to its input.
    """
    key_msa, key_mlp = (None, None) if key is None else jax.random.split(key)
    captured = {}
    if positions_LD is not None:
      x_BLD = x_BLD + positions_LD.astype(x_BLD.dtype)

    y_BLD = layer_norm(x_BLD, self.epsilon, self.dtype, 'LayerNorm_0')
    y_BLD, weights_BNLL = MultiHeadAttention(
      self.heads,
      self.relative,
      self.dtype,
      name='MultiHeadDotProductAttention_1',
    )(y_BLD)
    x_BLD = x_BLD + dropout(y_BLD, self.dropout, key_msa)

    y_BLD = layer_norm(x_BLD, self.epsilon, self.dtype, 'LayerNorm_2')
    x_BLD = x_BLD + MlpBlock(
      self.mlp_dim, self.gelu, self.dropout, self.dtype, name='MlpBlock_3'
    )(y_BLD, key_mlp)

    if 'attention' in self.capture:
      captured['attention'] = weights_BNLL
    if 'blocks' in self.capture:
      captured['blocks'] = x_BLD
    return x_BLD, captured
