"""The Vision Transformer of section 3.1, equations 1 to 4.

Images are cut into patches, or a ResNet's feature map is (the hybrids); every
patch becomes a token, position embeddings are added, the encoder's layers
follow, and a head. The dimension letters are those of `layers`.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import heads, layers, posemb, resnet
from vit_jax.models.axial import AxialBlock
from vit_jax.models.model import Loop, Model

Array = jax.Array


LAYERS = Loop('encoderblock_', 0, 'encoderblock')


class Encoder(nn.Module):
  """Position embeddings, `depth` layers and the final LayerNorm."""

  fields: layers.EncoderFields
  registers: int = 0
  capture: tuple[str, ...] = ()

  @nn.compact
  def __call__(
    self,
    x_BLD: Array,
    grid: tuple[int, int],
    key: Array | None = None,
    mask_BQL: Array | None = None,
  ) -> tuple[Array, dict[str, Any]]:
    """Returns the encoded tokens BLD and the captured, stacked by layer.

    `x_BLD` has the tokens of the patches, a grid (h, w), last and in raster
    order. Without a key for dropout nothing is dropped out. `mask_BQL` is as
    `layers.MultiHeadAttention` takes it.
    """
    f = self.fields
    extra = x_BLD.shape[1] - grid[0] * grid[1]
    keys = None if key is None else jax.random.split(key, f.depth + 1)
    x_BLD, positions_XLD = self._add_positions(x_BLD, grid)
    x_BLD = layers.dropout(x_BLD, f.dropout, None if keys is None else keys[-1])
    if f.pre_norm:
      x_BLD = layers.norm(x_BLD, f, 'pre_norm')
    rates = None
    if f.stochastic_depth and keys is not None:
      rates = jnp.linspace(0, f.stochastic_depth, f.depth)
    # What differs from layer to layer.
    inputs = (None if keys is None else keys[:-1], positions_XLD, rates)

    fields: dict[str, Any] = {
      'fields': f,
      'relative': extra if f.posemb == 'relative' else None,
      'capture': self.capture,
    }
    block: Any = layers.EncoderBlock
    if f.axial:
      block, fields['grid'] = AxialBlock, grid
    x_BLD, captured = layers.repeated(
      block,
      LAYERS,
      x_BLD,
      inputs,
      (mask_BQL, self._rotation(x_BLD, grid)),
      heads=f.heads,
      depth=f.depth,
      scan=f.scan,
      policy=f.remat,
      is_initializing=self.is_initializing(),
      fields=fields,
    )
    if not f.norm_pooled:
      x_BLD = layers.norm(x_BLD, f, 'encoder_norm')
    return x_BLD, captured

  def _add_positions(
    self, x_BLD: Array, grid: tuple[int, int]
  ) -> tuple[Array, Array | None]:
    """Returns the tokens, and the embeddings XLD that the layers add."""
    f = self.fields
    if f.posemb in ('none', 'relative'):
      return x_BLD, None
    _, L, D = x_BLD.shape
    extra = L - grid[0] * grid[1] - self.registers
    table_XLD = posemb.PositionEmbedding(
      f.posemb,
      f.depth if f.posemb_at == 'every_layer' else 1,
      name='posembed_input',
    )(grid, extra, D)
    if self.registers:
      nothing = jnp.zeros((len(table_XLD), self.registers, D))
      parts = [table_XLD[:, :extra], nothing, table_XLD[:, extra:]]
      table_XLD = jnp.concatenate(parts, axis=1)
    if f.posemb_at == 'input':
      return x_BLD + table_XLD.astype(x_BLD.dtype), None
    return x_BLD, jnp.broadcast_to(table_XLD, (f.depth, L, D))

  def _rotation(
    self, x_BLD: Array, grid: tuple[int, int]
  ) -> posemb.Rotation | None:
    """Returns how the layers turn the queries and keys of the last tokens."""
    f = self.fields
    if not f.rope:
      return None
    K = x_BLD.shape[-1] // f.heads
    found = posemb.rotation(grid, K, f.rope, f.rope_side)
    if not f.rope_registers:
      return found
    side = math.isqrt(self.registers)
    first = posemb.rotation((side, side), K, f.rope_registers, side)
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), first, found)


class PatchEmbedding(nn.Module):
  """The product x_p E of equation 1 for every patch.

  It has the parameters of a convolution whose stride is its size, written as
  the product it is; see `tpu_layout`.
  """

  width: int
  patch_size: int
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_BHWC: Array) -> Array:
    """Returns BhwD."""
    P = self.patch_size
    B, H, W, C = x_BHWC.shape
    x_BhPwPC = x_BHWC.reshape(B, H // P, P, W // P, P, C)
    shape = P, P, C, self.width
    E_PPCD = self.param('kernel', nn.initializers.lecun_normal(), shape)
    bias_D = self.param('bias', nn.initializers.zeros, (self.width,))
    y_BhwD = jnp.einsum(
      'BhPwQC,PQCD->BhwD',
      x_BhPwPC.astype(self.dtype),
      E_PPCD.astype(self.dtype),
    )
    return y_BhwD + bias_D.astype(self.dtype)[None, None, None]


class ViT(Model):
  """Images to class logits.

  Attributes:
    num_classes: C; 0 returns the representation y of equation 4 itself.
    patch_size: P, side of a patch in pixels (of the feature map where there is
      a stem).
    width: D.
    depth: number of encoder layers.
    mlp_dim: M.
    heads: N; must divide D.
    pool: 'cls' for the class token, 'gap' for the mean of all tokens, 'map' for
      attention pooling (appendix D.3).
    representation_size: width of the hidden tanh layer of the pre-training
      head; 0 for the single linear layer of fine-tuning.
    posemb: 'learned1d', 'learned2d', 'sincos2d', 'relative' or 'none' (appendix
      D.4).
    posemb_at: where the first three are added: at the 'input', at the
      beginning of 'every_layer' with embeddings of its own, or 'shared' by all
      layers.
    axial: row attention and MLP, then column attention and MLP in every layer
      (appendix D.6); there is no class token then.
    gelu: 'tanh', the approximation of the originals, 'exact', or CLIP's
      'quick', x sigmoid(1.702 x).
    layer_norm_epsilon: added to the variance; another than the originals' is
      for models that were trained with it.
    registers: number of tokens that are learned and not read (2309.16588),
      between the class token and the patches.
    norm: 'layer' or 'rms'.
    pre_norm: one more, before the first layer (CLIP).
    norm_pooled: the final one after the pooling instead of before it.
    layer_scale: initial value of a factor for each channel of what a branch
      adds; 0 for none.
    swiglu: a gated MLP, of three matrices instead of two.
    qkv_bias: whether queries, keys and values have a bias.
    qk_norm: a norm over every head of queries and keys.
    attention_norm: one over all heads, before they are joined (BEiT-3).
    mlp_norm: one inside the MLP, before its last layer (EVA-02).
    rope: theta of rotary embeddings of the patches; 0 for none. They come
      besides `posemb`.
    rope_side: 0, or the side of the grid that they count, -1 for that of the
      image at hand: see `posemb.rotation`.
    rope_registers: theta of those of the registers, a square grid; 0 for none.
    dropout: rate after every dense layer but q, k, v, and after adding the
      position embeddings (appendix B.1).
    stochastic_depth: rate at which the last layer is left out for an example,
      each of its two branches by itself; from 0 in the first layer it grows
      evenly. Not for axial models.
    head_bias: initial bias of the head; -10 for the sigmoid loss, so that
      training does not start with thousands of confident negatives.
    stem_width: 0, or the width of the ResNet before the patches: a hybrid.
    stem_layers: units of each of the stem's stages; its root alone if empty.
    dtype: of the computation; parameters are always float32.
    scan: one compiled layer looped over stacked parameters, which compiles
      several times faster, instead of `depth` unrolled layers.
    remat: what a layer keeps for the backward pass, see `layers.remat`: 'none'
      for everything, 'cheap', or a policy of `jax.checkpoint_policies`.
  """

  kind: ClassVar[str] = 'vit'
  task_params: ClassVar[tuple[str, ...]] = ('pre_logits', 'head')
  choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
    **Model.choices,
    'pool': heads.POOLS,
    'posemb': posemb.KINDS,
    'posemb_at': posemb.PLACES,
    'gelu': layers.GELUS,
    'norm': layers.NORMS,
  }
  loops: ClassVar[tuple[Loop, ...]] = (LAYERS, resnet.UNITS)
  depth_loop: ClassVar[Loop] = LAYERS
  after_layers: ClassVar[str] = (
    '^(Transformer/encoder_norm|pooled_norm|MAPHead_0|pre_logits|prediction|head)'
  )
  cast_params: ClassVar[tuple[str, ...]] = (r'^Transformer/.*/kernel$',)

  num_classes: int
  patch_size: int
  width: int
  depth: int
  mlp_dim: int
  heads: int
  pool: str = 'cls'
  representation_size: int = 0
  posemb: str = 'learned1d'
  posemb_at: str = 'input'
  axial: bool = False
  gelu: str = 'tanh'
  layer_norm_epsilon: float = layers.EPSILON
  registers: int = 0
  norm: str = 'layer'
  pre_norm: bool = False
  norm_pooled: bool = False
  layer_scale: float = 0.0
  swiglu: bool = False
  qkv_bias: bool = True
  qk_norm: bool = False
  attention_norm: bool = False
  mlp_norm: bool = False
  rope: float = 0.0
  rope_side: int = 0
  rope_registers: float = 0.0
  dropout: float = 0.0
  stochastic_depth: float = 0.0
  head_bias: float = 0.0
  stem_width: int = 0
  stem_layers: tuple[int, ...] = ()
  dtype: Any = jnp.float32
  scan: bool = False
  remat: str = 'none'

  @property
  def encoder_fields(self) -> layers.EncoderFields:
    """The fields that the encoder and the pooling head share."""
    names = [field.name for field in dataclasses.fields(layers.EncoderFields)]
    return layers.EncoderFields(**{name: getattr(self, name) for name in names})

  @property
  def attention(self) -> str:
    return 'axial' if self.axial else 'all'

  @property
  def extra_tokens(self) -> tuple[str, ...]:
    # A class derived from this one may have more, after the one that is read.
    read = ('cls',) if self.pool == 'cls' else ()
    return (*read, *self.registers * ('registers',))

  @property
  def class_tokens(self) -> int:
    """How many of the extra tokens are read: all but registers.

    Learned positions have a place for them too.
    """
    return len(self.extra_tokens) - self.registers

  @property
  def num_blocks(self) -> int:
    return self.depth

  def body(self) -> 'ViT':
    own = {field.name: getattr(self, field.name) for field in ViT.own_fields()}
    nothing = {'num_classes': 0, 'representation_size': 0, 'head_bias': 0.0}
    return ViT(**own | nothing, parent=None)

  def describe(self, image_size: tuple[int, int]) -> str:
    (H, W), (h, w) = image_size, self.grid(image_size)
    return (
      f'{"axial " * self.axial}{"hybrid" if self.stem_width else "ViT"}, '
      f'{self.depth} layers of {self.heads} heads, width {self.width}, {h}x{w} '
      f'patches of images of {H}x{W} pixels'
    )

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    stride = self.patch_size
    if self.stem_width:
      stride *= resnet.total_stride(self.stem_layers)
    return posemb.grid_shape(image_size, stride)

  def check(self, image_size: tuple[int, int]) -> None:
    layers.check_sizes(self, 'patch_size', 'width', 'depth', 'mlp_dim', 'heads')
    if not self.layer_norm_epsilon > 0:
      raise ValueError(
        f'model.layer_norm_epsilon is {self.layer_norm_epsilon}: it must be '
        f'above 0, {layers.EPSILON} for the models of the paper.'
      )
    if self.axial and self.pool == 'cls':
      raise ValueError(
        "model.pool is 'cls': axial attention has no row or column for a class "
        "token. Use 'gap' or 'map'."
      )
    if self.axial and self.stochastic_depth:
      raise ValueError(
        f'model.stochastic_depth is {self.stochastic_depth}: axial models have '
        'none, leave it at 0.'
      )
    if self.axial and (self.registers or self.rope):
      raise ValueError(
        f'model.registers is {self.registers} and model.rope {self.rope}: '
        'axial attention has rows and columns of patches alone, leave both at '
        '0.'
      )
    if self.rope and self.width // self.heads % 4:
      raise ValueError(
        f'model.rope is {self.rope} and a head has {self.width // self.heads} '
        'numbers: rotary embeddings turn pairs of them by rows and by columns, '
        'which takes a multiple of 4.'
      )
    if self.rope_registers and not (
      self.rope
      and self.registers
      and math.isqrt(self.registers) ** 2 == self.registers
    ):
      raise ValueError(
        f'model.rope_registers is {self.rope_registers}, model.rope '
        f'{self.rope} and model.registers {self.registers}: it needs '
        'model.rope, and a square number of registers.'
      )
    parts = {'learned2d': 2, 'sincos2d': 4}.get(self.posemb, 1)
    if self.width % parts:
      raise ValueError(
        f'model.width {self.width} is not a multiple of {parts}, which '
        f'model.posemb {self.posemb!r} takes.'
      )
    if self.posemb in ('none', 'relative') and self.posemb_at != 'input':
      raise ValueError(
        f'model.posemb_at is {self.posemb_at!r}, but with model.posemb '
        f"{self.posemb!r} nothing is added to the tokens: leave it at 'input'."
      )
    if self.stem_width:
      resnet.check_stages(
        'stem_layers', self.stem_layers, 'stem_width', self.stem_width
      )
    elif self.stem_layers:
      raise ValueError(
        f'model.stem_layers is {self.stem_layers} and model.stem_width 0: set '
        'the width, 64 for a regular ResNet.'
      )
    self.grid(image_size)

  @nn.compact
  def __call__(
    self,
    images_BHWC: Array,
    *,
    train: bool = False,
    capture: tuple[str, ...] = (),
  ) -> tuple[Array, dict[str, Any]]:
    """Computes equations 1 to 4.

    Args:
      images_BHWC: images in [-1, 1]; H and W are multiples of the patch size.
      train: whether to drop out, which needs the random key 'dropout'.
      capture: more intermediates to return: 'attention' (the softmax weights,
        depth x BNLL, or as `AxialBlock` has them) and 'blocks' (tokens after
        each layer, depth x BLD).

    Returns:
      Logits BC in float32 and a dict with `stem` (patch embeddings BhwD),
      `tokens` (encoded, BLD), `pre_logits` (what the head sees) and the
      captured.
    """
    x_BhwD, x_BLD = self.embed(images_BHWC)  # equation 1
    _, h, w, _ = x_BhwD.shape
    x_BLD, captured = self.encode(  # equations 2 and 3
      x_BLD, (h, w), train=train, capture=capture
    )
    y_BD = self.represent(x_BLD)  # equation 4
    aux = {'stem': x_BhwD, **captured, 'tokens': x_BLD, 'pre_logits': y_BD}
    if not self.num_classes:
      return y_BD, aux
    logits_BC, more = self.classify(x_BLD, y_BD)
    return logits_BC, aux | more

  def embed(self, images_BHWC: Array) -> tuple[Array, Array]:
    """Returns the patches' embeddings, and the tokens that start with them.

    Of equation 1, all but the positions, which `encode` adds. This and the
    methods after it are called inside a compact method, of this class or of one
    derived from it, and make the parameters of this class there.

    Returns:
      The embeddings BhwD of images in [-1, 1], and the tokens BLD:
      `extra_tokens`, then the patches in raster order.
    """
    x_BhwC = images_BHWC.astype(self.dtype)
    if self.stem_width:
      x_BhwC = resnet.feature_maps(
        x_BhwC,
        width=self.stem_width,
        layers=self.stem_layers,
        version=1,
        scan=self.scan,
        remat=self.remat,
      )[-1]
    x_BhwD = PatchEmbedding(
      self.width, self.patch_size, self.dtype, name='embedding'
    )(x_BhwC)
    B, h, w, D = x_BhwD.shape
    x_BLD = x_BhwD.reshape(B, h * w, D)
    extra = []
    for name, n in collections.Counter(self.extra_tokens).items():
      # Several that begin as equals would stay equal.
      init = nn.initializers.zeros if n == 1 else nn.initializers.normal(0.02)
      x_1XD = self.param(name, init, (1, n, D)).astype(self.dtype)
      extra.append(jnp.broadcast_to(x_1XD, (B, n, D)))
    return x_BhwD, jnp.concatenate([*extra, x_BLD], axis=1)

  def encode(
    self,
    x_BLD: Array,
    grid: tuple[int, int],
    *,
    train: bool = False,
    capture: tuple[str, ...] = (),
    mask_BQL: Array | None = None,
  ) -> tuple[Array, dict[str, Any]]:
    """Returns the encoded tokens BLD and the captured: equations 2 and 3.

    `x_BLD` is from `embed`, or what has been made of it; a token may look where
    `mask_BQL` is true, B and Q of which may be 1, or everywhere without it.
    """
    drops = train and (self.dropout or self.stochastic_depth)
    key = self.make_rng('dropout') if drops else None
    encoder = Encoder(
      self.encoder_fields, self.registers, capture, name='Transformer'
    )
    return encoder(x_BLD, grid, key, mask_BQL)

  def represent(self, x_BLD: Array) -> Array:
    """Returns the representation y of equation 4, BD: what the head sees."""
    f = self.encoder_fields
    patches_BLD = x_BLD[:, len(self.extra_tokens) :]
    if self.pool == 'cls':
      y_BD = x_BLD[:, 0]
    elif self.pool == 'map':
      y_BD = heads.MAPHead(f, name='MAPHead_0')(patches_BLD)
    else:
      y_BD = jnp.mean(patches_BLD, axis=1)
    if self.norm_pooled:
      y_BD = layers.norm(y_BD, f, 'pooled_norm')
    if self.representation_size:
      y_BD = nn.Dense(
        self.representation_size, dtype=self.dtype, name='pre_logits'
      )(y_BD)
      y_BD = nn.tanh(y_BD)
    return y_BD

  def classify(self, x_BLD: Array, y_BD: Array) -> tuple[Array, dict[str, Any]]:
    """Returns logits BC of the representation, and what else there is to say.

    `x_BLD` are the encoded tokens.
    """
    del x_BLD
    return heads.classifier(y_BD, self.num_classes, self.head_bias), {}
