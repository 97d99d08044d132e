"""DETR: detect the objects of an image as a set, with learned queries.

As in the original code (2005.12872), a transformer encodes the last feature map
of a backbone, and learned queries attend to the encoded map. Each query
predicts one object: its class or "no object", its box and, with `masks`, its
mask.

Q is the number of queries. `models.layers` lists the other dimension letters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import fields, posemb, resnet
from vit_jax.models.fields import field
from vit_jax.models.layers import DEPTHS, check_heads, repeated
from vit_jax.models.model import Loop, Model, padding
from vit_jax.projects.detr import mask_head
from vit_jax.projects.detr.layers import (
  BACKBONES,
  EPSILON,
  PARTITIONS,
  Backbone,
  DecoderLayer,
  EncoderLayer,
)

Array = jax.Array

ENCODER = Loop('encoder_layer', 0, 'encoder_layers')
DECODER = Loop('decoder_layer', 0, 'decoder_layers')
_SIZES = '[1, 1048576]'
# U(-1 / sqrt(inputs), 1 / sqrt(inputs)), PyTorch's default.
_uniform = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')


class BoxHead(nn.Module):
  """Three dense layers and a sigmoid, in float32."""

  @nn.compact
  def __call__(self, x_XBQD: Array) -> Array:
    """Returns boxes (cx, cy, w, h) in [0, 1], float32 XBQ4."""
    D = x_XBQD.shape[-1]
    x = x_XBQD.astype(jnp.float32)
    for i, features in enumerate((D, D, 4)):
      x = linear(x, features, f'layers_{i}')
      x = nn.relu(x) if i < 2 else nn.sigmoid(x)
    return x


def linear(x: Array, features: int, name: str) -> Array:
  """Applies a dense layer with PyTorch's default initialisation."""
  bound = x.shape[-1] ** -0.5

  def bias_init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.random.uniform(key, shape, dtype, -bound, bound)

  return nn.Dense(
    features, kernel_init=_uniform, bias_init=bias_init, name=name
  )(x)


class DETR(Model):
  """Maps images to a class, a box and optionally a mask for every query."""

  kind = 'detr'
  task = 'objects'
  vectors = ()
  attention = 'objects'
  # The box head is not listed, because it does not depend on the classes.
  task_params = ('class_embed',)
  optional_params = {'masks': ('bbox_attention', 'mask_head')}
  loops = (ENCODER, DECODER, resnet.UNITS)
  any_size = True
  partitions = PARTITIONS
  cast_params = (r'coder_layers?\d*/.*/kernel$',)

  num_queries: int = field(100, 'Number of queries Q.', valid=_SIZES)
  width: int = field(256, 'D, width of a token.', valid=_SIZES, multiple=4)
  heads: int = field(8, 'N, number of heads; must divide D.', valid=_SIZES)
  mlp_dim: int = field(2048, 'M, hidden width of the MLP.', valid=_SIZES)
  encoder_layers: int = field(6, 'Number of encoder layers.', valid=DEPTHS)
  decoder_layers: int = field(6, 'Number of decoder layers.', valid=DEPTHS)
  dropout: float = field(
    0.1, 'Dropout rate of encoder and decoder.', valid='[0, 1)'
  )
  masks: bool = field(False, 'Predict masks too; needs 4+ stages.')
  backbone: str = field('resnet', "'plain' suits tiny images.", valid=BACKBONES)
  backbone_layers: tuple[int, ...] = field(
    (3, 4, 6, 3), 'Residual units (plain: layers) per stage.', valid=DEPTHS
  )
  backbone_width: int = field(
    64,
    'Channels of the root (plain: stage 1).',
    valid='[1, inf)',
    multiple=resnet.GROUPS,
  )
  backbone_version: int = field(
    0, 'ResNet norm; 0: frozen BatchNorm, 1: GroupNorm.', valid=(0, 1)
  )
  dilation: bool = field(False, 'Last stage dilated, not strided (DC5).')

  def outputs(self, outputs: Array, aux: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the last layer's logits, boxes and, with masks, mask logits.

    If `num_classes` is 0, returns `pre_logits` instead of logits.
    """
    found = super().outputs(outputs, aux) | {'boxes': aux['boxes'][-1]}
    if self.masks:
      found['mask_logits'] = aux['mask_logits']
    return found

  @property
  def num_blocks(self) -> int:
    return self.encoder_layers

  def parts(self) -> Mapping[str, Model]:
    if self.backbone != 'resnet':
      return {}
    own = self.backbone_layers, self.backbone_width, self.backbone_version
    model = resnet.ResNet(*own, num_classes=0, scan=self.scan, parent=None)
    return {'backbone': model}

  @property
  def stride(self) -> int:
    """Image pixels per cell of the last feature map, along a side."""
    stages = len(self.backbone_layers)
    first = 1 if self.backbone == 'plain' else 2
    dilated = self.dilation and (stages > 1 or first == 1)
    return 2 ** (first + stages - 1 - dilated)

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    H, W = image_size
    return -(-H // self.stride), -(-W // self.stride)

  def check(self, image_size: tuple[int, int]) -> None:
    del image_size  # any size works
    check_heads(self)
    stages = len(self.backbone_layers)
    if not stages or (self.masks and stages <= mask_head.FINER):
      raise ValueError(
        f'model.backbone_layers has {stages} stages. Use at least 1, and at '
        f'least {mask_head.FINER + 1} with model.masks.'
      )
    made = (self.width + self.heads, *mask_head.channels(self.width))
    if self.masks and any(C % min(8, C) if C else True for C in made):
      raise ValueError(
        f'With model.width {self.width} and model.heads {self.heads}, the '
        f'layers of the mask head have {made} channels, and GroupNorm cannot '
        'divide all of them into 8 groups. Use a width that is a multiple of '
        '128, and 8 heads.'
      )

  @nn.compact
  def __call__(
    self,
    images_BHWC: Array | Sequence[Array],
    padding_BHW: Array | None = None,
    *,
    train: bool = False,
    capture: tuple[str, ...] = (),
  ) -> tuple[Array, dict[str, Any]]:
    """Predicts the objects of images.

    Args:
      images_BHWC: normalised images, 0 in their padding; or the feature maps
        BhwC of a backbone, finest first.
      padding_BHW: true in the padding of images, at any resolution; None if
        images are not padded. The outputs of an image that is all padding are
        finite.
      train: whether to apply dropout, which needs the random key 'dropout'.
      capture: values to return, stacked over the encoder layers: 'blocks' (the
        layer's tokens, XBLD) and 'attention' (the softmax weights, XBNLL).

    Returns:
      The last layer's logits BQ(C + 1), whose last class means "no object", or
      `pre_logits` if `num_classes` is 0; and a dict with captured values and
        boxes: XBQ4 of the X decoder layers, (cx, cy, w, h) as shares of the
          image without padding.
        logits: XBQ(C + 1) of the decoder layers, unless `num_classes` is 0.
        mask_logits: BQhw of the last layer, only with `masks`; at 1/4
          resolution with a ResNet of four stages.
        positions: BhwD, the position embeddings.
        tokens: BLD, the encoder's output.
        pre_logits: BQD, the last layer's query tokens after `decoder_norm`.
      Tokens have `dtype`; logits, boxes, mask logits and positions are float32.
    """
    if isinstance(images_BHWC, Sequence):
      maps = images_BHWC
    else:
      maps = Backbone(fields.frozen(self), name='backbone')(images_BHWC)
    x_BhwD = nn.Conv(
      self.width,
      (1, 1),
      kernel_init=_uniform,
      dtype=self.dtype,
      name='input_proj',
    )(maps[-1])
    B, h, w, D = x_BhwD.shape
    mask_B1L, inside_Bhw = None, jnp.ones((1, h, w), bool)
    if padding_BHW is not None:
      inside_Bhw = ~mask_head.nearest(padding_BHW, (h, w))
      mask_B1L = inside_Bhw.reshape(B, 1, h * w)
    places_BhwD = posemb.detr_sincos2d(inside_Bhw, D)
    places_BLD = places_BhwD.reshape(-1, h * w, D).astype(self.dtype)
    key = self.make_rng('dropout') if train and self.dropout else None
    memory_BLD, outputs_XBQD, captured = self._transform(
      x_BhwD.reshape(B, h * w, D), places_BLD, mask_B1L, capture, key
    )
    norm = nn.LayerNorm(EPSILON, dtype=self.dtype, name='decoder_norm')
    outputs_XBQD = norm(outputs_XBQD)
    y_BQD = outputs_XBQD[-1]
    aux = captured | {
      'boxes': BoxHead(name='bbox_embed')(outputs_XBQD),
      'positions': jnp.broadcast_to(places_BhwD, x_BhwD.shape),
      'tokens': memory_BLD,
      'pre_logits': y_BQD,
    }
    if self.masks:
      seen_BQLN = mask_head.AttentionMap(
        self.heads, self.dtype, name='bbox_attention'
      )(y_BQD, memory_BLD, mask_B1L)
      aux['mask_logits'] = mask_head.MaskHead(self.dtype, name='mask_head')(
        x_BhwD,
        seen_BQLN.reshape(B, self.num_queries, h, w, self.heads),
        maps[-2 : -2 - mask_head.FINER : -1],
      )
    if not self.num_classes:
      return y_BQD, aux
    aux['logits'] = linear(
      outputs_XBQD.astype(jnp.float32), self.num_classes + 1, 'class_embed'
    )
    return aux['logits'][-1], aux

  def _transform(
    self,
    x_BLD: Array,
    places_BLD: Array,
    mask_B1L: Array | None,
    capture: tuple[str, ...],
    key: Array | None,
  ) -> tuple[Array, Array, dict[str, Any]]:
    """Returns tokens BLD, query tokens XBQD by layer, and captured values."""
    B, _, D = x_BLD.shape
    loop: dict[str, Any] = {
      'of': self,
      'is_initializing': self.is_initializing(),
      'fields': {'of': fields.frozen(self), 'capture': capture},
    }
    keys: list[Array | None] = [None, None]
    if key is not None:
      depths = (self.encoder_layers, self.decoder_layers)
      keys = [
        jax.random.split(jax.random.fold_in(key, i), n)
        for i, n in enumerate(depths)
      ]
    memory_BLD, encoded = repeated(
      EncoderLayer,
      ENCODER,
      x_BLD,
      (keys[0],),
      (places_BLD, mask_B1L),
      depth=self.encoder_layers,
      **loop,
    )
    queries_QD = self.param(
      'query_embed', nn.initializers.normal(1.0), (self.num_queries, D)
    )
    shape = (B, self.num_queries, D)
    queries_1QD = queries_QD.astype(self.dtype)[None]
    _, decoded = repeated(
      DecoderLayer,
      DECODER,
      jnp.zeros(shape, self.dtype),
      (keys[1],),
      (queries_1QD, memory_BLD, places_BLD, mask_B1L),
      depth=self.decoder_layers,
      **loop,
    )
    outputs_XBQD = decoded.pop('outputs')
    return memory_BLD, outputs_XBQD, encoded | decoded


def predicted(
  model: Any,
  params: Any,
  normalize: Callable[[Array], Array],
  images_BHWC: Array,
  size_B2: Array,
  **more: Any,
) -> tuple[Array, dict[str, Any]]:
  """Applies a `DETR` to padded uint8 images; returns its outputs.

  `size_B2` is the (height, width) of each image without padding. Padding is 0
  after normalisation, as in the original code.
  """
  is_padding_BHW = padding(size_B2, images_BHWC.shape[1:3])
  images_BHWC = jnp.where(
    is_padding_BHW[..., None], 0.0, normalize(images_BHWC)
  )
  return model.apply({'params': params}, images_BHWC, is_padding_BHW, **more)
