"""From images to feature maps of several strides, for what finds objects."""

from typing import Any

import flax.linen as nn
import jax

from vit_jax.models import resnet
from vit_jax.models.layers import group_norm

Array = jax.Array

KINDS = ('resnet', 'plain')


class PlainBackbone(nn.Module):
  """Stages of 3x3 convolutions, each after the root at half the side.

  For images too small for a ResNet's root, to be trained from nothing.
  """

  width: int
  layers: tuple[int, ...]
  dilated: bool
  dtype: Any

  @nn.compact
  def __call__(self, x_BHWC: Array) -> list[Array]:
    """Returns what every stage puts out, BhwC, from 1/2 of the sides on."""
    maps = []
    x = x_BHWC
    for i, units in enumerate(self.layers):
      keeps = self.dilated and i == len(self.layers) - 1
      for j in range(units):
        y = nn.Conv(
          self.width * 2**i,
          (3, 3),
          1 if j or keeps else 2,
          kernel_dilation=2 if j and keeps else 1,
          use_bias=False,
          kernel_init=nn.initializers.he_normal(),
          dtype=self.dtype,
          name=f'conv{i + 1}_{j + 1}',
        )(x)
        y = group_norm(y, 1e-5, f'gn{i + 1}_{j + 1}')
        x = nn.relu(x + y if x.shape == y.shape else y)
      maps.append(x)
    return maps


class Backbone(nn.Module):
  """A ResNet's root and stages, or plain ones."""

  kind: str
  width: int
  layers: tuple[int, ...]
  version: int
  dilated: bool
  dtype: Any
  scan: bool
  remat: str

  @nn.compact
  def __call__(self, images_BHWC: Array) -> list[Array]:
    """Returns what the stages put out, BhwC, finest first."""
    images_BHWC = images_BHWC.astype(self.dtype)
    if self.kind == 'plain':
      return PlainBackbone(
        self.width, self.layers, self.dilated, self.dtype, name='plain'
      )(images_BHWC)
    maps = resnet.feature_maps(
      images_BHWC,
      width=self.width,
      layers=self.layers,
      version=self.version,
      dilated=self.dilated,
      scan=self.scan,
      remat=self.remat,
    )
    return maps[1:]
