"""iGPT, a transformer whose tokens are pixels.

This follows "Generative Pretraining from Pixels" (ICML 2020). The tokens are
the pixels in raster order, quantised to K colours. The model predicts each
pixel's colour: a causal model from the pixels before it, a BERT model from all
pixels that are not masked.

`models.layers` lists the dimension letters. L is the number of pixels, H W.
K is the width of a head after N, as in BLNK, and the number of colours
elsewhere.
"""

from typing import Any

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
from vit_jax.models.model import Loop, Model

Array = jax.Array
# Keys and values of X layers, both XBLNK, and the number of filled positions.
Cache = tuple[Array, Array, Array]

EPSILON = 1e-5
LAYERS = Loop('h', 0, 'h')
# Largest number of pixels of an image. The paper uses up to 64 x 64.
MAX_TOKENS = 2**16
# Causal attention runs on chunks of this many queries. Each chunk uses only the
# keys up to its last query. This saves memory, and skips up to half of the
# L x L weights.
QUERIES = 256


def even_palette(levels: int) -> tuple[float, ...]:
  """Returns a palette of `levels`^3 colours: an even grid over R, G and B."""
  values = np.linspace(-1, 1, levels)
  colours = np.stack(np.meshgrid(values, values, values, indexing='ij'), -1)
  return tuple(colours.ravel().tolist())


def grey_palette(count: int) -> tuple[float, ...]:
  """Returns a palette of `count` greys from black to white."""
  return tuple(np.repeat(np.linspace(-1, 1, count), 3).tolist())


class Block(nn.Module):
  """A pre-norm transformer layer: attention, then an MLP.

  `IGPT.__call__` documents `capture`; 'cache' captures the keys and values.
  """

  of: Any  # the fields of IGPT
  capture: tuple[str, ...] = ()

  @nn.compact
  def __call__(
    self,
    x_BLD: Array,
    kept: tuple[Array, Array] | None = None,
    position: Array | None = None,
  ) -> tuple[Array, dict[str, Any]]:
    """Returns the tokens BLD after this layer, and the captured values.

    `kept` are the cached keys and values BLNK of all L tokens. With `kept`,
    `x_BLD` has only the token at `position`, an int32 scalar.
    """
    x_BLD = constrain(x_BLD, 'BLD')
    y_BLD = rms_norm(self.of.dtype, 'ln_1')(x_BLD)
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
    found: dict[str, Any] = {'blocks': y_BLD, 'cache': (k_BLNK, v_BLNK)}
    L = k_BLNK.shape[1]
    query_Q = np.arange(L) if position is None else position[None]
    if 'attention' in self.capture:
      found['attention'] = attention.softmax(
        attention.logits(q_BQNK, k_BLNK), self._mask(query_Q, L)
      )
    if self.of.causal and position is None:
      z_BQNK = self._causal(q_BQNK, k_BLNK, v_BLNK)
    else:
      mask_1QL = self._mask(query_Q, L)
      z_BQNK = attention.attend(q_BQNK, k_BLNK, v_BLNK, mask_1QL)
    y_BLD = Projection(
      (D,),
      axes=2,
      dtype=self.of.dtype,
      bias=self.of.bias,
      kernel_init=nn.initializers.normal((D * self.of.depth) ** -0.5),
      name='out',
    )(z_BQNK)
    x_BLD = constrain(x_BLD + y_BLD, 'BLD')
    y_BLD = MlpBlock(
      self.of.mlp_dim,
      'quick',
      dtype=self.of.dtype,
      bias=self.of.bias,
      kernel_init=nn.initializers.normal(0.02),
      name='mlp',
    )(rms_norm(self.of.dtype, 'ln_2')(x_BLD))
    return x_BLD + y_BLD, {k: found[k] for k in self.capture if k in found}

  def _causal(self, q_BLNK: Array, k_BLNK: Array, v_BLNK: Array) -> Array:
    parts, L = [], q_BLNK.shape[1]
    for start in range(0, L, QUERIES):
      end = min(start + QUERIES, L)
      parts.append(
        attention.attend(
          q_BLNK[:, start:end],
          k_BLNK[:, :end],
          v_BLNK[:, :end],
          self._mask(np.arange(start, end), end),
        )
      )
    return jnp.concatenate(parts, axis=1)

  def _mask(self, query_Q: np.ndarray | Array, keys: int) -> Array | None:
    """Returns a mask bool 1QL of the keys that queries see; None for BERT."""
    if not self.of.causal:
      return None
    return jnp.asarray((np.arange(keys)[None] <= query_Q[:, None])[None])


def rms_norm(dtype: Any, name: str) -> nn.RMSNorm:
  return nn.RMSNorm(epsilon=EPSILON, dtype=dtype, name=name)


class IGPT(Model):
  """Maps images to class logits and to colour logits of every pixel."""

  kind = 'igpt'
  attention = 'pixels'
  loops = (LAYERS,)
  flop_capture = ('pixels',)
  depth_loop = LAYERS
  after_layers = '^(ln_f|prediction|head)'
  cast_params = (r'^h\d*/.*/kernel$',)

  width: int = field(REQUIRED, 'D, width of a token.', valid='[1, inf)')
  depth: int = field(REQUIRED, 'Number of layers.', valid=DEPTHS)
  mlp_dim: int = field(
    REQUIRED, 'M, hidden width of the MLP; 4 D in the paper.', valid='[1, inf)'
  )
  heads: int = field(
    REQUIRED, 'N, number of heads; must divide D.', valid='[1, inf)'
  )
  causal: bool = field(True, 'Attend only to earlier pixels; False: BERT.')
  bias: bool = field(False, 'Layers have biases; the original lacks them.')
  palette: tuple[float, ...] = field(
    even_palette(8),
    'R, G and B of K colours, in [-1, 1].',
    valid='[-1.001, 1.001]',
  )

  @property
  def task(self) -> str:
    return 'classes' if self.num_classes else 'pixels'

  @property
  def num_blocks(self) -> int:
    return self.depth

  @property
  def colours_KC(self) -> np.ndarray:
    """The palette as an array: float32, RGB in [-1, 1]."""
    return np.array(self.palette, np.float32).reshape(-1, 3)

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    return image_size

  def check(self, image_size: tuple[int, int]) -> None:
    check_heads(self)
    if len(self.palette) % 3 or len(self.palette) < 6:
      raise ValueError(
        f'model.palette has {len(self.palette)} numbers. Give three numbers '
        'per colour (red, green, blue), and at least two colours.'
      )
    H, W = image_size
    if H * W > MAX_TOKENS:
      raise ValueError(
        f'Images of {H}x{W} have {H * W:,} pixels. Each pixel is a token, and '
        f'iGPT supports at most {MAX_TOKENS:,}. Lower data.image_size; the '
        'paper uses 32, 48 and 64.'
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
      images_BHWC: images in [-1, 1], or palette indices BL.
      capture: names of more values to return:
        pixels: returns `pixels`, colour logits BLK in float32, and `colours`,
          the palette indices int32 BL.
        attention: the softmax weights, XBNLL of X layers.
        blocks: the output of each layer's first norm, XBLD, which the paper
          probes.
        cache: a `Cache` of the given pixels.
      hidden_BL: true for masked pixels, whose embedding becomes zero; for BERT
        models.
      cache: the `Cache` of the earlier pixels, to sample one pixel from a
        causal model. The input is then the palette index B1 of the previous
        pixel, which is ignored if the cache is empty. The outputs have length 1
        and belong to the pixel to sample.

    Returns:
      Logits BC in float32, or `pre_logits` if `num_classes` is 0; and a dict
      with the captured values and
        stem: BHWD, the colour embeddings; only if the input is BHWC.
        tokens: BLD, after the last norm.
        pre_logits: BD, the mean token, which the head reads.
        cache: the updated `Cache`; only with the argument `cache`.
    """
    del train  # iGPT has no dropout
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
      of=self,
      depth=self.depth,
      is_initializing=self.is_initializing(),
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
    """Returns the index of the nearest palette colour of every pixel, int32 BL.

    Images are in [-1, 1]. Ties go to the first colour of the palette.
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
    """Converts palette indices of any shape X to RGB pixels, uint8 X3."""
    return np.rint(127.5 * (self.colours_KC[colours] + 1)).astype(np.uint8)
