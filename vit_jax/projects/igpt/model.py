"""iGPT, a transformer whose words are pixels.

After "Generative Pretraining from Pixels" (ICML 2020) and openai/image-gpt.
Every pixel of an image is one of K colours, and a token, in raster order. Each
token is asked for the colour of its pixel: causally, seeing the pixels before,
or seeing all of them but some that are hidden (BERT). The dimension letters are
those of `layers`; L is H W.
"""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models import attention, fields, heads
from vit_jax.models.fields import REQUIRED, field
from vit_jax.models.layers import (
  DEPTHS,
  MlpBlock,
  Projection,
  check_heads,
  constrain,
  repeated,
)
from vit_jax.models.model import REMAT, Loop, Model

Array = jax.Array
# Keys and values of all layers, both XBLNK, and how many positions are filled.
Cache = tuple[Array, Array, Array]

EPSILON = 1e-5
LAYERS = Loop('h', 0, 'h')
# A model of 64 x 64 pixels has 4,096 tokens already.
MAX_TOKENS = 2**16
# So many queries at a time look at the keys before them: no more of an image's
# L x L weights is held at once, and nearly half of them are never computed.
QUERIES = 256


def even_palette(levels: int) -> tuple[float, ...]:
  """Returns `levels`^3 colours, as many values of each of R, G and B."""
  values = np.linspace(-1, 1, levels)
  colours = np.stack(np.meshgrid(values, values, values, indexing='ij'), -1)
  return tuple(colours.ravel().tolist())


def grey_palette(count: int) -> tuple[float, ...]:
  """Returns `count` greys from black to white."""
  return tuple(np.repeat(np.linspace(-1, 1, count), 3).tolist())


class Block(nn.Module):
  """One layer: attention, then an MLP, each after a norm.

  Attributes:
    of: the fields of IGPT.
    capture: as the model's `__call__` has it, and 'cache' for keys and values.
  """

  of: Any
  capture: tuple[str, ...] = ()

  @nn.compact
  def __call__(
    self,
    x_BLD: Array,
    kept: tuple[Array, Array] | None = None,
    position: Array | None = None,
  ) -> tuple[Array, dict[str, Any]]:
    """Returns the tokens after this layer, and what `capture` names of it.

    Where keys and values BLNK are `kept`, the tokens are the one at a position.
    """
    x_BLD = constrain(x_BLD, 'BLD')
    y_BLD = rms_norm(self.of.dtype, 'ln_1')(x_BLD)
    captured: dict[str, Any] = {}
    if 'blocks' in self.capture:
      captured['blocks'] = y_BLD
    x_BLD = constrain(
      x_BLD + self._attend(y_BLD, kept, position, captured), 'BLD'
    )
    y_BLD = MlpBlock(
      self.of.mlp_dim,
      'quick',
      dtype=self.of.dtype,
      bias=self.of.bias,
      kernel_init=nn.initializers.normal(0.02),
      name='mlp',
    )(rms_norm(self.of.dtype, 'ln_2')(x_BLD))
    return x_BLD + y_BLD, captured

  def _attend(
    self,
    y_BLD: Array,
    kept: tuple[Array, Array] | None,
    position: Array | None,
    captured: dict[str, Any],
  ) -> Array:
    D = y_BLD.shape[-1]

    def project(name: str) -> Array:
      return Projection(
        (self.of.heads, D // self.of.heads),
        dtype=self.of.dtype,
        bias=self.of.bias,
        kernel_init=nn.initializers.normal(D**-0.5),
        name=name,
      )(y_BLD)

    q_BQNK, k_BLNK, v_BLNK = map(project, ('query', 'key', 'value'))
    if kept is not None and position is not None:
      k_BLNK, v_BLNK = (
        jax.lax.dynamic_update_slice_in_dim(old, new, position, axis=1)
        for old, new in zip(kept, (k_BLNK, v_BLNK), strict=True)
      )
    if 'cache' in self.capture:
      captured['cache'] = (k_BLNK, v_BLNK)
    if 'attention' in self.capture:
      weights_BNQL = attention.softmax(
        attention.logits(q_BQNK, k_BLNK),
        self._mask(0, q_BQNK.shape[1], k_BLNK.shape[1]),
      )
      captured['attention'] = weights_BNQL
    if position is not None:
      mask_BQL = (jnp.arange(k_BLNK.shape[1]) <= position)[None, None]
      z_BQNK = attention.attend(q_BQNK, k_BLNK, v_BLNK, mask_BQL)
    elif self.of.causal:
      z_BQNK = self._causal(q_BQNK, k_BLNK, v_BLNK)
    else:
      z_BQNK = attention.attend(q_BQNK, k_BLNK, v_BLNK)
    return Projection(
      (D,),
      axes=2,
      dtype=self.of.dtype,
      bias=self.of.bias,
      kernel_init=nn.initializers.normal((D * self.of.depth) ** -0.5),
      name='out',
    )(z_BQNK)

  def _causal(self, q_BLNK: Array, k_BLNK: Array, v_BLNK: Array) -> Array:
    parts, L = [], q_BLNK.shape[1]
    for start in range(0, L, QUERIES):
      end = min(start + QUERIES, L)
      parts.append(
        attention.attend(
          q_BLNK[:, start:end],
          k_BLNK[:, :end],
          v_BLNK[:, :end],
          self._mask(start, end, end),
        )
      )
    return jnp.concatenate(parts, axis=1)

  def _mask(self, start: int, end: int, keys: int) -> Array | None:
    """Returns where the queries from `start` to `end` may look, BQL."""
    if not self.of.causal:
      return None
    return jnp.asarray(
      (np.arange(keys)[None] <= np.arange(start, end)[:, None])[None]
    )


def rms_norm(dtype: Any, name: str) -> nn.RMSNorm:
  """Returns iGPT's norm, which subtracts no mean and adds no bias."""
  return nn.RMSNorm(epsilon=EPSILON, dtype=dtype, name=name)


class IGPT(Model):
  """Images to class logits, and to logits of the colour of every pixel."""

  kind: ClassVar[str] = 'igpt'
  compute_fields: ClassVar[tuple[str, ...]] = ('dtype', 'scan', 'remat')
  loops: ClassVar[tuple[Loop, ...]] = (LAYERS,)
  counted: ClassVar[tuple[str, ...]] = ('pixels',)
  depth_loop: ClassVar[Loop] = LAYERS
  after_layers: ClassVar[str] = '^(ln_f|prediction|head)'
  cast_params: ClassVar[tuple[str, ...]] = (r'^h\d*/.*/kernel$',)

  num_classes: int = field(REQUIRED, 'C; 0 for the mean.', valid='[0, inf)')
  width: int = field(REQUIRED, 'D.', valid='[1, inf)')
  depth: int = field(REQUIRED, 'Number of layers.', valid=DEPTHS)
  mlp_dim: int = field(REQUIRED, 'M; 4 D as published.', valid='[1, inf)')
  heads: int = field(REQUIRED, 'N; must divide D.', valid='[1, inf)')
  causal: bool = field(True, 'From pixels before, not from all (BERT).')
  bias: bool = field(False, 'Layers have one; the original has none.')
  palette: tuple[float, ...] = field(
    even_palette(8), 'R, G and B of K colours.', valid='[-1.001, 1.001]'
  )
  dtype: Any = field(jnp.float32, 'Of the computation.')
  scan: bool = field(False, 'As `ViT` has it.')
  remat: str = field('none', 'As `ViT` has it.', valid=REMAT)

  @property
  def task(self) -> str:
    return 'classes' if self.num_classes else 'pixels'

  @property
  def attention(self) -> str:
    return 'pixels'

  @property
  def num_blocks(self) -> int:
    return self.depth

  @property
  def colours_KC(self) -> np.ndarray:
    """The palette as an array: float32, RGB in [-1, 1]."""
    return np.array(self.palette, np.float32).reshape(-1, 3)

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    return image_size

  def describe(self, image_size: tuple[int, int]) -> str:
    (H, W), way = image_size, 'causal' if self.causal else 'BERT'
    return (
      f'iGPT ({way}), {self.depth} layers of {self.heads} heads, width '
      f'{self.width}, {H}x{W} pixels of {len(self.palette) // 3} colours'
    )

  def check(self, image_size: tuple[int, int]) -> None:
    check_heads(self)
    if len(self.palette) % 3 or len(self.palette) < 6:
      raise ValueError(
        f'model.palette has {len(self.palette)} numbers: give red, green and '
        'blue of at least two colours.'
      )
    H, W = image_size
    if H * W > MAX_TOKENS:
      raise ValueError(
        f'Images of {H}x{W} pixels would be {H * W:,} tokens of iGPT, which '
        f'has one for every pixel: at most {MAX_TOKENS:,}. The paper has '
        'data.image_size 32, 48 or 64.'
      )

  @nn.compact
  def __call__(
    self,
    images_BHWC: Array,
    *,
    train: bool = False,
    capture: tuple[str, ...] = (),
    hidden_BL: Array | None = None,
    cache: Cache | None = None,
  ) -> tuple[Array, dict[str, Any]]:
    """Encodes every pixel.

    Args:
      images_BHWC: images in [-1, 1], or the colours BL of their pixels by
        number.
      train: makes no difference here.
      capture: more to return: 'pixels' (`pixels`, logits BLK in float32 of the
        colour of every pixel, and `colours` that they have, BL), 'attention'
        (the softmax weights, depth x BNLL), 'blocks' (what the first norm of
        each layer gives, which the paper probes, depth x BLD) and 'cache' (a
        `Cache` of the pixels given).
      hidden_BL: true where a pixel's embedding is multiplied by zero; not
        causal.
      cache: of pixels before, for a causal model: the one of colours B1 is then
        the last of them, whatever it is for the first pixel, and the next is
        asked for. L is the cache's.

    Returns:
      Logits BC in float32, or the representation BD, and a dict with `stem`
      (the embeddings BHWD of colours), `tokens` (encoded, BLD), `pre_logits`
      (what the head sees) and the captured.
    """
    del train
    D, K = self.width, len(self.palette) // 3
    colours_BL = (
      images_BHWC if images_BHWC.ndim == 2 else self.quantised(images_BHWC)
    )
    B, L = colours_BL.shape
    normal = nn.initializers.normal
    wte_KD = self.param('pixel_embedding', normal(0.02), (K, D))
    length = L if cache is None else cache[0].shape[2]
    wpe_1LD = self.param('pos_embedding', normal(0.01), (1, length, D))
    x_BLD = (
      jnp.asarray(wte_KD, self.dtype)
      .at[colours_BL]
      .get(mode='promise_in_bounds', wrap_negative_indices=False)
    )
    aux: dict[str, Any] = {}
    if images_BHWC.ndim == 4:
      aux['stem'] = x_BLD.reshape(*images_BHWC.shape[:3], D)
    if hidden_BL is not None:
      x_BLD = jnp.where(hidden_BL[..., None], 0, x_BLD)
    kept, position = (None, None) if cache is None else (cache[:2], cache[2])
    if self.causal:
      sos_D = self.param('start_embedding', normal(0.02), (D,))
      sos_BLD = jnp.broadcast_to(sos_D.astype(self.dtype), (B, 1, D))
      if position is None:
        x_BLD = jnp.concatenate([sos_BLD, x_BLD[:, :-1]], axis=1)
      else:
        x_BLD = jnp.where(position == 0, sos_BLD, x_BLD)
    if position is not None:
      wpe_1LD = jax.lax.dynamic_slice_in_dim(wpe_1LD, position, 1, axis=1)
      capture = (*capture, 'cache')
    x_BLD, captured = repeated(
      Block,
      LAYERS,
      x_BLD + wpe_1LD.astype(self.dtype),
      (kept,),
      (position,),
      scan=self.scan,
      policy=self.remat,
      is_initializing=self.is_initializing(),
      heads=self.heads,
      depth=self.depth,
      fields={'of': fields.frozen(self), 'capture': capture},
    )
    if 'cache' in captured:
      filled = jnp.int32(L) if position is None else position + 1
      captured['cache'] = (*captured['cache'], filled)
    x_BLD = rms_norm(self.dtype, 'ln_f')(x_BLD)
    y_BD = jnp.mean(x_BLD, axis=1)
    aux |= {**captured, 'tokens': x_BLD, 'pre_logits': y_BD}
    if 'pixels' in capture or self.is_initializing():
      aux['colours'] = colours_BL
      aux['pixels'] = nn.Dense(
        K,
        use_bias=False,
        kernel_init=nn.initializers.zeros,
        name='prediction',
      )(x_BLD.astype(jnp.float32))
    if not self.num_classes:
      return y_BD, aux
    return heads.classifier(y_BD, self.num_classes, 0.0), aux

  def quantised(self, images_BHWC: Array) -> Array:
    """Returns the nearest colour of every pixel by its number, int32 BL.

    Of images in [-1, 1]; nearest by squares, the first of equals.
    """
    palette_11KC = jnp.asarray(self.colours_KC)[None, None]
    pixels_BLC = images_BHWC.reshape(images_BHWC.shape[0], -1, 3)
    distances_BLKC = jnp.square(
      pixels_BLC[:, :, None].astype(jnp.float32) - palette_11KC
    )
    return jnp.argmin(jnp.sum(distances_BLKC, axis=-1), axis=-1).astype(
      jnp.int32
    )

  def painted(self, colours: np.ndarray) -> np.ndarray:
    """Returns colours by number as pixels, uint8 with an axis RGB more."""
    return np.rint(127.5 * (self.colours_KC[colours] + 1)).astype(np.uint8)
