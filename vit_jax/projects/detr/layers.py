"""DETR's backbone, and the layers of its encoder and decoder (2005.12872).

LayerNorm follows each residual sum (post-norm, appendix A.3).
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax

from vit_jax.models import resnet
from vit_jax.models.layers import (
  GroupNorm,
  MultiHeadAttention,
  constrain,
  dropout,
)
from vit_jax.models.model import Partitions

Array = jax.Array

PARTITIONS: Partitions = (
  (r'linear1/kernel$', ('fsdp', 'tensor')),
  (r'linear1/bias$', ('tensor',)),
  (r'linear2/kernel$', (('tensor', 'fsdp'), None)),
)
BACKBONES = ('resnet', 'plain')
EPSILON = 1e-5  # of LayerNorm


class PostNormLayer(nn.Module):
  """Base of encoder and decoder layers: attention and MLP with post-norm.

  Dropout is applied to attention weights, to the hidden units of the MLP, and
  to the output of every branch. `DETR.__call__` documents `capture`.
  """

  of: Any  # the fields of DETR
  capture: tuple[str, ...] = ()

  def attend(
    self,
    name: str,
    norm: str,
    queries: tuple[Array, Array],
    seen: tuple[Array, Array],
    mask_B1L: Array | None,
    key: Array | None,
  ) -> tuple[Array, Array | None]:
    """Returns the query tokens BQD after attention, and the weights BNQL.

    `queries` and `seen` are pairs of tokens and their positions. Positions are
    added to queries and keys, not to values. `mask_B1L` is true for tokens that
    may be attended to; None for all. The weights may be None unless 'attention'
    is captured.
    """
    (x_BQD, places_BQD), (seen_BLD, seen_places_BLD) = queries, seen
    key_weights, key_branch = _split(key, 2)
    y_BQD, weights_BNQL = MultiHeadAttention(
      self.of.heads,
      dtype=self.of.dtype,
      weights='attention' in self.capture,
      dropout=self.of.dropout,
      name=name,
    )(
      x_BQD + places_BQD,
      seen_BLD + seen_places_BLD,
      seen_BLD,
      mask_B1L,
      key=key_weights,
    )
    y_BQD = x_BQD + dropout(y_BQD, self.of.dropout, key_branch)
    return self.norm(y_BQD, norm), weights_BNQL

  def mlp(self, x_BLD: Array, norm: str, key: Array | None) -> Array:
    """Returns the tokens BLD after the MLP; `norm` names its LayerNorm."""
    key_hidden, key_branch = _split(key, 2)
    init: dict[str, Any] = {
      'kernel_init': nn.initializers.xavier_uniform(),
      'dtype': self.of.dtype,
    }
    y_BLM = nn.relu(nn.Dense(self.of.mlp_dim, name='linear1', **init)(x_BLD))
    y_BLM = dropout(y_BLM, self.of.dropout, key_hidden)
    y_BLD = nn.Dense(x_BLD.shape[-1], name='linear2', **init)(y_BLM)
    y_BLD = dropout(y_BLD, self.of.dropout, key_branch)
    return self.norm(x_BLD + y_BLD, norm)

  def norm(self, x: Array, name: str) -> Array:
    return nn.LayerNorm(EPSILON, dtype=self.of.dtype, name=name)(x)


class EncoderLayer(PostNormLayer):
  """Self-attention over the cells of a feature map, then an MLP."""

  @nn.compact
  def __call__(
    self,
    x_BLD: Array,
    key: Array | None,
    places_BLD: Array,
    mask_B1L: Array | None,
  ) -> tuple[Array, dict[str, Any]]:
    """Returns the tokens BLD after this layer, and the captured values."""
    key_attention, key_mlp = _split(key, 2)
    x = constrain(x_BLD, 'BLD'), places_BLD
    x_BLD, weights_BNLL = self.attend(
      'self_attn', 'norm1', x, x, mask_B1L, key_attention
    )
    x_BLD = self.mlp(x_BLD, 'norm2', key_mlp)
    found = {'attention': weights_BNLL, 'blocks': x_BLD}
    return x_BLD, {name: found[name] for name in self.capture}


class DecoderLayer(PostNormLayer):
  """Self-attention of queries, cross-attention to the image, and an MLP."""

  @nn.compact
  def __call__(
    self,
    x_BQD: Array,
    key: Array | None,
    queries_1QD: Array,
    memory_BLD: Array,
    places_BLD: Array,
    mask_B1L: Array | None,
  ) -> tuple[Array, dict[str, Any]]:
    """Returns the query tokens BQD after this layer, and a dict.

    The dict repeats the tokens under the key 'outputs', so that the loop over
    layers stacks them. `queries_1QD` are the learned positions of the queries.
    `memory_BLD` is the encoder's output, and `places_BLD` are its positions,
    where B may be 1.
    """
    key_self, key_cross, key_mlp = _split(key, 3)
    x = constrain(x_BQD, 'BLD'), queries_1QD
    x_BQD, _ = self.attend('self_attn', 'norm1', x, x, None, key_self)
    x_BQD, _ = self.attend(
      'multihead_attn',
      'norm2',
      (x_BQD, queries_1QD),
      (memory_BLD, places_BLD),
      mask_B1L,
      key_cross,
    )
    x_BQD = self.mlp(x_BQD, 'norm3', key_mlp)
    return x_BQD, {'outputs': x_BQD}


def _split(key: Array | None, n: int) -> Sequence[Array | None]:
  return [None] * n if key is None else list(jax.random.split(key, n))


class PlainBackbone(nn.Module):
  """Stages of 3x3 convolutions; each stage halves the resolution.

  It suits images that are too small for the stem of a ResNet. It has no
  pretrained weights. With `dilation`, the last stage keeps the resolution.
  """

  of: Any  # the fields of DETR

  @nn.compact
  def __call__(self, x_BHWC: Array) -> list[Array]:
    """Returns the outputs of the stages, BhwC, finest first."""
    maps = []
    x = x_BHWC
    for i, units in enumerate(self.of.backbone_layers):
      dilated = self.of.dilation and i == len(self.of.backbone_layers) - 1
      for j in range(units):
        y = nn.Conv(
          self.of.backbone_width * 2**i,
          (3, 3),
          1 if j or dilated else 2,
          kernel_dilation=2 if j and dilated else 1,
          use_bias=False,
          kernel_init=nn.initializers.he_normal(),
          dtype=self.of.dtype,
          name=f'conv{i + 1}_{j + 1}',
        )(x)
        y = GroupNorm(1e-5, name=f'gn{i + 1}_{j + 1}')(y)
        x = nn.relu(x + y if x.shape == y.shape else y)
      maps.append(x)
    return maps


class Backbone(nn.Module):
  """A ResNet without its head, or a plain backbone."""

  of: Any  # the fields of DETR

  @nn.compact
  def __call__(self, images_BHWC: Array) -> list[Array]:
    """Returns the outputs of the stages, BhwC, finest first."""
    images_BHWC = images_BHWC.astype(self.of.dtype)
    f = self.of
    if f.backbone == 'plain':
      return PlainBackbone(f, name='plain')(images_BHWC)
    maps = resnet.feature_maps(
      images_BHWC,
      width=f.backbone_width,
      layers=f.backbone_layers,
      version=f.backbone_version,
      dilated=f.dilation,
      scan=f.scan,
      remat=f.remat,
    )
    return maps[1:]
