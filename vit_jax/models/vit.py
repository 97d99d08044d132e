"""The Vision Transformer of section 3.1, equations 1 to 4.

Dimensions are named as everywhere in this package: `B` batch, `H W` pixels,
`h w` patch grid, `L` tokens, `D` width, `N` heads, `K` head dimension, `M` MLP,
`C` classes. Parameter names are those of the published .npz files, so that
reading one is a renaming and nothing more.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import posemb, resnet

Array = jax.Array

# The originals' epsilon; Flax's default happens to be equal, timm's too,
# PyTorch's is not, so it is said.
LAYER_NORM_EPSILON = 1e-6


def _dropout(x: Array, rate: float, key: Array | None) -> Array:
  # The key is passed by hand because `make_rng` folds in the module's path,
  # which differs between scanned and unrolled layers.
  return nn.Dropout(rate, deterministic=key is None)(x, rng=key)


class MlpBlock(nn.Module):
  """The MLP of equation 3: two dense layers with a GELU between them."""

  mlp_dim: int
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
    # The originals use the tanh approximation; the exact GELU moves the logits
    # of B/16 by 1e-3.
    x_BLM = nn.gelu(x_BLM, approximate=True)
    x_BLM = _dropout(x_BLM, self.dropout, key_0)
    y_BLD = nn.Dense(x_BLD.shape[-1], name='Dense_1', **dense)(x_BLM)
    return _dropout(y_BLD, self.dropout, key_1)


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


class MultiHeadSelfAttention(nn.Module):
  """Multi-head self-attention (MSA): equations 5 to 8 of appendix A."""

  heads: int
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_BLD: Array) -> tuple[Array, Array]:
    """Returns the attended tokens and the weights BNLL, float32."""
    D = x_BLD.shape[-1]
    projections = [
      HeadProjection(self.heads, name=name)(D)
      for name in ('query', 'key', 'value')
    ]
    # One product for q, k and v reads x once: 8 % of a training step on CPU.
    kernel_D3NK = jnp.stack([k for k, _ in projections], axis=1)
    bias_3NK = jnp.stack([b for _, b in projections])
    q_BNLK, k_BNLK, v_BNLK = jnp.einsum(
      'BLD,DcNK->cBNLK',
      x_BLD.astype(self.dtype),
      kernel_D3NK.astype(self.dtype),
    ) + bias_3NK[:, None, :, None].astype(self.dtype)
    q_BNLK = q_BNLK * (D // self.heads) ** -0.5
    # The softmax works in float32 at any compute dtype.
    weights_BNLL = jax.nn.softmax(
      jnp.einsum(
        'BNqK,BNkK->BNqk',
        q_BNLK,
        k_BNLK,
        preferred_element_type=jnp.float32,
      )
    )
    y_BLNK = jnp.einsum(
      'BNqk,BNkK->BqNK', weights_BNLL.astype(self.dtype), v_BNLK
    )
    y_BLD = nn.DenseGeneral(
      D,
      axis=(-2, -1),
      dtype=self.dtype,
      kernel_init=nn.initializers.xavier_uniform(),
      name='out',
    )(y_BLNK)
    return y_BLD, weights_BNLL


class EncoderBlock(nn.Module):
  """One layer of the encoder: equations 2 and 3."""

  mlp_dim: int
  heads: int
  dropout: float = 0.0
  dtype: Any = jnp.float32
  capture: tuple[str, ...] = ()

  @nn.compact
  def __call__(
    self, x_BLD: Array, key: Array | None = None
  ) -> tuple[Array, dict[str, Array]]:
    """Returns the tokens after this layer and what `capture` names of it."""
    key_msa, key_mlp = (None, None) if key is None else jax.random.split(key)
    captured = {}

    y_BLD = nn.LayerNorm(
      epsilon=LAYER_NORM_EPSILON, dtype=self.dtype, name='LayerNorm_0'
    )(x_BLD)
    y_BLD, weights_BNLL = MultiHeadSelfAttention(
      self.heads, self.dtype, name='MultiHeadDotProductAttention_1'
    )(y_BLD)
    x_BLD = x_BLD + _dropout(y_BLD, self.dropout, key_msa)

    y_BLD = nn.LayerNorm(
      epsilon=LAYER_NORM_EPSILON, dtype=self.dtype, name='LayerNorm_2'
    )(x_BLD)
    x_BLD = x_BLD + MlpBlock(
      self.mlp_dim, self.dropout, self.dtype, name='MlpBlock_3'
    )(y_BLD, key_mlp)

    if 'attention' in self.capture:
      captured['attention'] = weights_BNLL
    if 'blocks' in self.capture:
      captured['blocks'] = x_BLD
    return x_BLD, captured


class Encoder(nn.Module):
  """Position embeddings, `depth` layers and the final LayerNorm."""

  depth: int
  mlp_dim: int
  heads: int
  dropout: float = 0.0
  dtype: Any = jnp.float32
  scan: bool = False
  remat: str = 'none'
  capture: tuple[str, ...] = ()

  @nn.compact
  def __call__(
    self, x_BLD: Array, key: Array | None = None
  ) -> tuple[Array, dict[str, Array]]:
    """Returns the encoded tokens BLD and the captured, stacked by layer."""
    keys = None if key is None else jax.random.split(key, self.depth + 1)
    x_BLD = posemb.Learned1D(name='posembed_input')(x_BLD)
    x_BLD = _dropout(x_BLD, self.dropout, None if keys is None else keys[-1])
    layer_keys = None if keys is None else keys[:-1]

    block = EncoderBlock
    if self.remat != 'none':
      block = nn.remat(
        block, policy=remat_policy(self.remat), prevent_cse=not self.scan
      )
    fields = {
      'mlp_dim': self.mlp_dim,
      'heads': self.heads,
      'dropout': self.dropout,
      'dtype': self.dtype,
      'capture': self.capture,
    }
    if self.scan:
      scanned = nn.scan(
        block,
        variable_axes={'params': 0},
        split_rngs={'params': True},
        length=self.depth,
      )
      x_BLD, captured = scanned(name='encoderblock', **fields)(
        x_BLD, layer_keys
      )
    else:
      layers = []
      for i in range(self.depth):
        x_BLD, one = block(name=f'encoderblock_{i}', **fields)(
          x_BLD, None if layer_keys is None else layer_keys[i]
        )
        layers.append(one)
      captured = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    x_BLD = nn.LayerNorm(
      epsilon=LAYER_NORM_EPSILON, dtype=self.dtype, name='encoder_norm'
    )(x_BLD)
    return x_BLD, captured


class ViT(nn.Module):
  """Images to class logits.

  Attributes:
    num_classes: C; 0 returns the representation y of equation 4 itself.
    patch_size: P, side of a patch in pixels (of the feature map where there is
      a convolutional stem).
    width: D.
    depth: number of encoder layers.
    mlp_dim: M.
    heads: N; must divide D.
    pool: 'cls' for the class token, 'gap' for the mean of all tokens.
    representation_size: width of the hidden tanh layer of the pre-training
      head; 0 for the single linear layer of fine-tuning.
    dropout: rate after every dense layer but q, k, v, and after adding the
      position embeddings (appendix B.1).
    head_bias: initial bias of the head; -10 for the sigmoid loss, so that
      training does not start with thousands of confident negatives.
    stem_width: 0, or the width of a weight-standardised convolutional root
      that stands before the patches.
    dtype: of the computation; parameters are always float32.
    scan: one compiled layer looped over stacked parameters, which compiles
      `depth` times faster, instead of `depth` unrolled layers.
    remat: name of a policy of `jax.checkpoint_policies` for what a layer keeps
      for the backward pass, or 'none' to keep everything.
  """

  num_classes: int
  patch_size: int
  width: int
  depth: int
  mlp_dim: int
  heads: int
  pool: str = 'cls'
  representation_size: int = 0
  dropout: float = 0.0
  head_bias: float = 0.0
  stem_width: int = 0
  dtype: Any = jnp.float32
  scan: bool = False
  remat: str = 'none'

  @nn.compact
  def __call__(
    self,
    images_BHWC: Array,
    *,
    train: bool = False,
    capture: tuple[str, ...] = (),
  ) -> tuple[Array, dict[str, Array]]:
    """Computes equations 1 to 4.

    Args:
      images_BHWC: images in [-1, 1]; H and W are multiples of the patch size.
      train: whether to drop out, which needs the random key 'dropout'.
      capture: more intermediates to return: 'attention' (the softmax weights,
        depth x BNLL) and 'blocks' (tokens after each layer, depth x BLD).

    Returns:
      Logits BC in float32 and a dict with `stem` (patch embeddings BhwD),
      `tokens` (encoded, BLD), `pre_logits` (what the head sees) and the
      captured.
    """
    x = images_BHWC.astype(self.dtype)
    if self.stem_width:
      x = resnet.root_v1(x, self.stem_width, self.dtype)
    x_BhwD = nn.Conv(
      self.width,
      (self.patch_size, self.patch_size),
      strides=self.patch_size,
      padding='VALID',
      dtype=self.dtype,
      name='embedding',
    )(x)
    aux = {'stem': x_BhwD}
    B = x_BhwD.shape[0]
    x_BLD = x_BhwD.reshape(B, -1, self.width)
    if self.pool == 'cls':
      cls_11D = self.param('cls', nn.initializers.zeros, (1, 1, self.width))
      cls_B1D = jnp.broadcast_to(cls_11D.astype(x.dtype), (B, 1, self.width))
      x_BLD = jnp.concatenate([cls_B1D, x_BLD], axis=1)

    key = self.make_rng('dropout') if train and self.dropout else None
    x_BLD, captured = Encoder(
      self.depth,
      self.mlp_dim,
      self.heads,
      self.dropout,
      self.dtype,
      self.scan,
      self.remat,
      capture,
      name='Transformer',
    )(x_BLD, key)
    aux |= captured | {'tokens': x_BLD}

    y_BD = x_BLD[:, 0] if self.pool == 'cls' else jnp.mean(x_BLD, axis=1)
    if self.representation_size:
      y_BD = nn.tanh(
        nn.Dense(self.representation_size, dtype=self.dtype, name='pre_logits')(
          y_BD
        )
      )
    aux['pre_logits'] = y_BD
    if not self.num_classes:
      return y_BD, aux
    # The head works in float32 at any compute dtype: bfloat16 logits have too
    # few digits for a loss over thousands of classes.
    logits_BC = nn.Dense(
      self.num_classes,
      kernel_init=nn.initializers.zeros,
      bias_init=nn.initializers.constant(self.head_bias),
      name='head',
    )(y_BD.astype(jnp.float32))
    return logits_BC, aux


def remat_policy(name: str):
  """Returns the policy of `jax.checkpoint_policies` called `name`."""
  return getattr(jax.checkpoint_policies, name)
