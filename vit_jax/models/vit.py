"""The Vision Transformer of section 3.1, equations 1 to 4.

The model cuts an image (in hybrids, a ResNet's feature map) into patches, and
embeds every patch as a token. The encoder adds position embeddings and applies
its layers. A head classifies the pooled tokens. `layers` explains the dimension
letters.
"""

import collections
import math
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import fields, heads, layers, resnet
from vit_jax.models.encoder import LAYERS, Encoder
from vit_jax.models.fields import REQUIRED, field
from vit_jax.models.model import Model

Array = jax.Array


class PatchEmbedding(nn.Module):
  """The product x_p E of equation 1 for every patch.

  The parameters are named and shaped as in a convolution; see `tpu_layout`.
  """

  width: int
  patch_size: int
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_BHWC: Array) -> Array:
    """Returns the embeddings BhwD."""
    P = self.patch_size
    B, H, W, C = x_BHWC.shape
    x_BhPwPC = x_BHWC.astype(self.dtype).reshape(B, H // P, P, W // P, P, C)
    shape = P, P, C, self.width
    E_PPCD = self.param('kernel', nn.initializers.lecun_normal(), shape)
    bias_D = self.param('bias', nn.initializers.zeros, (self.width,))
    E_PPCD = E_PPCD.astype(self.dtype)
    y_BhwD = jnp.einsum('BhPwQC,PQCD->BhwD', x_BhPwPC, E_PPCD)
    return y_BhwD + bias_D.astype(self.dtype)[None, None, None]


class ViT(Model):
  """Maps images to class logits."""

  kind = 'vit'
  task_params: ClassVar[tuple[str, ...]] = ('pre_logits', 'head')
  loops = (LAYERS, resnet.UNITS)
  depth_loop = LAYERS
  after_layers = (
    '^(Transformer/encoder_norm|pooled_norm|MAPHead_0|pre_logits|prediction|'
    'head)'
  )
  cast_params = (r'^Transformer/.*/kernel$',)

  patch_size: int = field(
    REQUIRED,
    "P, side of a patch in pixels, or in cells of a stem's feature map.",
    valid='[1, 65536]',
  )
  width: int = field(REQUIRED, 'D, width of a token.', valid='[1, inf)')
  depth: int = field(REQUIRED, 'Number of encoder layers.', valid=layers.DEPTHS)
  mlp_dim: int = field(REQUIRED, 'M, hidden width of MLPs.', valid='[1, inf)')
  heads: int = field(REQUIRED, 'N, heads; must divide D.', valid='[1, inf)')
  pool: str = field(
    'cls',
    "The head reads the class token ('cls'), the mean of the patches ('gap', "
    "appendix D.3), both concatenated ('cls+gap') or attention pooling ('map', "
    '2106.04560).',
    valid=('cls', 'gap', 'map', 'cls+gap'),
  )
  representation_size: int = field(
    0,
    "Width of the pre-training head's hidden tanh layer; 0 for one linear "
    'layer.',
    valid='[0, inf)',
  )
  posemb: str = field(
    'learned1d',
    'Kind of position embeddings (appendix D.4, which lacks sincos2d).',
    valid=('learned1d', 'learned2d', 'sincos2d', 'relative', 'none'),
  )
  posemb_at: str = field(
    'input',
    "Where position embeddings are added: at the 'input', or in every layer, "
    "with separate ('every_layer') or 'shared' embeddings.",
    valid=('input', 'every_layer', 'shared'),
  )
  axial: bool = field(
    False,
    'Every layer is row attention and MLP, then column attention and MLP '
    "(appendix D.6). Needs pool 'gap' or 'map'.",
  )
  gelu: str = field(
    'tanh',
    "GELU: the original code's 'tanh' approximation, 'exact', or CLIP's "
    "'quick': x sigmoid(1.702 x).",
    valid=('tanh', 'exact', 'quick'),
  )
  layer_norm_epsilon: float = field(
    layers.EPSILON,
    "Added to the variance; transformers' ViTs use 1e-12.",
    valid='(0, 1]',
  )
  registers: int = field(
    0,
    'Number of register tokens (2309.16588), between the class token and the '
    'patches.',
    valid='[0, 1024]',
    unless='axial',
  )
  norm: str = field('layer', 'LayerNorm or RMSNorm.', valid=('layer', 'rms'))
  pre_norm: bool = field(False, 'A norm before the first layer (CLIP).')
  final_norm: bool = field(True, 'A norm after the last layer.')
  norm_pooled: bool = field(
    False,
    'The final norm comes after the pooling instead of before it.',
    needs='final_norm',
  )
  layer_scale: float = field(
    0.0,
    'Initial value of LayerScale, a factor per channel of each branch; 0 '
    'disables it.',
    valid='[0, inf)',
  )
  swiglu: bool = field(False, 'SwiGLU, a gated MLP, instead of GELU.')
  qkv_bias: bool = field(True, 'Queries, keys and values have a bias.')
  qk_norm: bool = field(False, 'A norm of queries and keys, per head.')
  attention_norm: bool = field(False, 'A norm of the joined heads (BEiT-3).')
  mlp_norm: bool = field(False, "A norm before the MLP's last layer (EVA-02).")
  rope: float = field(
    0.0,
    'Theta of rotary embeddings of the patches, in addition to `posemb`; 0 '
    'disables them.',
    valid='[0, inf)',
    unless='axial',
  )
  rope_side: int = field(
    0,
    'Side of the patch grid in pre-training; rotary coordinates are scaled to '
    'it. -1: not scaled. 0: scaled to [-2 pi, 2 pi]. See `posemb.rotation`.',
    valid='[-1, 65536]',
  )
  rope_registers: float = field(
    0.0,
    'Theta of rotary embeddings of the registers, placed on a square grid; 0 '
    'disables them.',
    valid='[0, inf)',
    needs='rope',
  )
  dropout: float = field(
    0.0,
    'Dropout rate after every dense layer of the encoder except queries, keys '
    "and values, and on the encoder's input (appendix B.1).",
    valid='[0, 1)',
  )
  stochastic_depth: float = field(
    0.0,
    'Probability that an example skips a branch of the last layer; the rate '
    'increases linearly from 0 in the first layer.',
    valid='[0, 1)',
    unless='axial',
  )
  head_bias: float = field(
    0.0,
    'Initial bias of the head. With the sigmoid loss and many classes use -10, '
    'so that the negatives do not dominate the loss at first.',
    valid='(-inf, inf)',
  )
  stem_width: int = field(
    0,
    'Width of the ResNet stem before the patches (a hybrid); 0 for no stem.',
    valid='[0, inf)',
    multiple=resnet.GROUPS,
  )
  stem_layers: tuple[int, ...] = field(
    (),
    "Number of units in each of the stem's stages; empty for a stem of one "
    'convolution and max-pooling.',
    valid=layers.DEPTHS,
    needs='stem_width',
  )

  @property
  def encoder_fields(self) -> layers.EncoderFields:
    """The fields of this model, for the encoder and the pooling head."""
    return fields.frozen(self)

  @property
  def attention(self) -> str:
    return 'axial' if self.axial else 'all'

  @property
  def extra_tokens(self) -> tuple[str, ...]:
    read = ('cls',) if 'cls' in self.pool else ()
    return (*read, *self.registers * ('registers',))

  @property
  def class_tokens(self) -> int:
    """Number of extra tokens with position embeddings: all except registers."""
    return len(self.extra_tokens) - self.registers

  @property
  def num_blocks(self) -> int:
    return self.depth

  def body(self) -> 'ViT':
    own = {f.name: getattr(self, f.name) for f in ViT.own_fields()}
    nothing = {'num_classes': 0, 'representation_size': 0, 'head_bias': 0.0}
    return ViT(**own | nothing, parent=None)

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    stride = self.patch_size
    if self.stem_width:
      stride *= resnet.total_stride(self.stem_layers)
    H, W = image_size
    if H % stride or W % stride or not H or not W:
      raise ValueError(
        f'Patches of {stride}x{stride} pixels do not tile an image of {H}x{W}: '
        'choose an image size that is a multiple of the patch size.'
      )
    return H // stride, W // stride

  def check(self, image_size: tuple[int, int]) -> None:
    layers.check_heads(self)
    if self.axial:
      fields.check_only(self, 'axial attention', pool=('gap', 'map'))
    if self.rope and self.width // self.heads % 4:
      raise ValueError(
        f'model.rope is {self.rope} and a head has width '
        f'{self.width // self.heads}, but rotary embeddings need a multiple '
        'of 4. Change model.width or model.heads.'
      )
    side = math.isqrt(self.registers)
    if self.rope_registers and side**2 != (self.registers or -1):
      raise ValueError(
        f'model.rope_registers is {self.rope_registers}, so model.registers '
        f'must be a square such as 4, but it is {self.registers}.'
      )
    parts = {'learned2d': 2, 'sincos2d': 4}.get(self.posemb, 1)
    if self.width % parts:
      raise ValueError(
        f'model.width {self.width} is not a multiple of {parts}, which '
        f'model.posemb {self.posemb!r} needs.'
      )
    if self.posemb in ('none', 'relative'):  # they add nothing to the tokens
      user = f'model.posemb {self.posemb!r}'
      fields.check_only(self, user, posemb_at=('input',))
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
      images_BHWC: normalised images, of a size that `grid` accepts.
      train: whether to apply dropout and stochastic depth. They need the random
        key 'dropout'.
      capture: more intermediates to return: 'attention' (softmax weights, depth
        x BNLL; `AxialBlock` documents axial attention) and 'blocks' (tokens
        after each layer, depth x BLD).

    Returns:
      Logits BC in float32, or y of equation 4 if `num_classes` is 0; and a dict
      with `stem` (patch embeddings, BhwD), `tokens` (encoded, BLD),
      `pre_logits` (y, the input of the head's last layer) and the captured
      intermediates.
    """
    x_BhwD, x_BLD = self.embed(images_BHWC)  # equation 1
    aux = self.encode(x_BhwD, x_BLD, train=train, capture=capture)  # 2 to 4
    if not self.num_classes:
      return aux['pre_logits'], aux
    return self.classify(aux)

  # A compact `__call__` calls the methods below and owns their parameters.

  def embed(self, images_BHWC: Array) -> tuple[Array, Array]:
    """Computes equation 1 without position embeddings, which `Encoder` adds.

    Returns:
      The patch embeddings BhwD of normalised images, and the tokens BLD:
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
      # Several registers start at random: equal registers would stay equal.
      init = nn.initializers.zeros if n == 1 else nn.initializers.normal(0.02)
      x_1XD = self.param(name, init, (1, n, D)).astype(self.dtype)
      extra.append(jnp.broadcast_to(x_1XD, (B, n, D)))
    return x_BhwD, jnp.concatenate([*extra, x_BLD], axis=1)

  def encode(
    self,
    x_BhwD: Array,
    x_BLD: Array,
    *,
    train: bool = False,
    capture: tuple[str, ...] = (),
    visible_BK: Array | None = None,
  ) -> dict[str, Any]:
    """Computes equations 2 to 4 for the result of `embed`.

    `Encoder` documents `visible_BK`; `__call__` documents the returned dict.
    """
    drops = train and (self.dropout or self.stochastic_depth)
    key = self.make_rng('dropout') if drops else None
    encoder = Encoder(self.encoder_fields, capture, name='Transformer')
    _, h, w, _ = x_BhwD.shape
    x_BLD, captured = encoder(x_BLD, (h, w), key, visible_BK)  # 2 and 3
    y_BD = self.represent(x_BLD)  # 4
    return {'stem': x_BhwD, **captured, 'tokens': x_BLD, 'pre_logits': y_BD}

  def represent(self, x_BLD: Array) -> Array:
    """Returns y of equation 4, the input of the head's last layer.

    Its shape is (B, D), or (B, 2 D) for the pool 'cls+gap', or
    (B, representation_size) if `representation_size` is set.
    """
    f = self.encoder_fields
    patches_BLD = x_BLD[:, len(self.extra_tokens) :]
    if self.pool == 'cls':
      y_BD = x_BLD[:, 0]
    elif self.pool == 'map':
      y_BD = heads.MAPHead(f, name='MAPHead_0')(patches_BLD)
    else:
      y_BD = jnp.mean(patches_BLD, axis=1)
    if self.pool == 'cls+gap':
      y_BD = jnp.concatenate([x_BLD[:, 0], y_BD], axis=1)
    if self.norm_pooled:
      y_BD = layers.norm(y_BD, f, 'pooled_norm')
    if self.representation_size:
      y_BD = nn.Dense(
        self.representation_size, dtype=self.dtype, name='pre_logits'
      )(y_BD)
      y_BD = nn.tanh(y_BD)
    return y_BD

  def classify(self, aux: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
    """Returns logits BC of the representation, and the dict of `encode`."""
    y_BD = aux['pre_logits']
    return heads.classifier(y_BD, self.num_classes, self.head_bias), aux
