"""ResNets of bottleneck units, in three versions.

Versions 1 and 2 have the weight-standardised convolutions and GroupNorm of BiT
(1912.11370). Version 1, the stem of hybrids, normalises after each convolution.
Version 2, the model of the published BiT weights, normalises and activates
before each convolution of a unit. Version 0, the backbone of DETR, is
torchvision's ResNet with frozen BatchNorm. Parameters have the names of the
published hybrids, with `bn` instead of `gn` in version 0.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import cpu_gradients
from vit_jax.models.axial import AxialConv
from vit_jax.models.fields import REQUIRED, field
from vit_jax.models.heads import classifier
from vit_jax.models.layers import DEPTHS, GroupNorm, remat
from vit_jax.models.model import Loop, Model

Array = jax.Array

# A unit's output has this many times the channels of its 3x3 convolution.
EXPANSION = 4
# GroupNorm's groups; they must divide the channels.
GROUPS = 32


class StdConv(nn.Conv):
  """Convolution with a standardised kernel (Qiao et al., 2019).

  Standardises over height, width and input channels, with the population
  standard deviation. Version 1 adds 1e-5 to the standard deviation, version 2
  adds 1e-10 to the variance.
  """

  version: int = 1

  def param(self, name, *args, **kwargs):
    value = super().param(name, *args, **kwargs)
    if name == 'kernel':
      over: dict[str, Any] = {'axis': (0, 1, 2), 'keepdims': True}
      value = value - jnp.mean(value, **over)
      if self.version == 1:
        value = value / (jnp.std(value, **over) + 1e-5)
      else:
        value = value * jax.lax.rsqrt(jnp.var(value, **over) + 1e-10)
    return value


class FrozenBatchNorm(nn.Module):
  """BatchNorm with fixed statistics and parameters."""

  @nn.compact
  def __call__(self, x_BhwC: Array) -> Array:
    zeros, ones = nn.initializers.zeros, nn.initializers.ones
    parts = {'scale': ones, 'bias': zeros, 'mean': zeros, 'var': ones}
    scale_C, bias_C, mean_C, var_C = (
      jax.lax.stop_gradient(self.param(name, init, x_BhwC.shape[-1:]))
      for name, init in parts.items()
    )
    scale_C = scale_C * jax.lax.rsqrt(var_C + 1e-5)
    bias_C = bias_C - mean_C * scale_C
    scale_C, bias_C = (x.astype(x_BhwC.dtype) for x in (scale_C, bias_C))
    return x_BhwC * scale_C[None, None, None] + bias_C[None, None, None]


def _conv(
  x: Array,
  width: int,
  size: int,
  stride: int,
  version: int,
  name: str,
  dilation: int = 1,
) -> Array:
  kind: Any = StdConv if version else nn.Conv
  if size == 1:
    kind = functools.partial(
      kind, conv_general_dilated=cpu_gradients.convolve_pixels
    )
  return kind(
    width,
    (size, size),
    stride,
    padding='SAME' if version == 1 else dilation * (size // 2),
    kernel_dilation=dilation,
    use_bias=False,
    dtype=x.dtype,
    name=name,
    **({'version': version} if version else {}),
  )(x)


def _norm(
  x: Array, version: int, name: str, scale_init: Any = nn.initializers.ones
) -> Array:
  if version == 0:
    return FrozenBatchNorm(name=name.replace('gn', 'bn'))(x)
  return GroupNorm(1e-6 if version == 1 else 1e-5, scale_init, name=name)(x)


class Unit(nn.Module):
  """A bottleneck residual unit: 1x1, 3x3 and 1x1 convolutions.

  The 3x3 convolution has `width` channels and the stride. If `axial`, row and
  column attention replace it.
  """

  width: int
  stride: int = 1
  version: int = 2
  axial: bool = False
  dilation: int = 1

  @nn.compact
  def __call__(self, x_BhwC: Array) -> Array:
    """Returns BhwC: h and w are divided by the stride, C is 4 * width."""
    version, C = self.version, EXPANSION * self.width
    # Version 2 normalises before each convolution, versions 0 and 1 after.
    names = ('gn2', 'gn3') if version == 2 else ('gn1', 'gn2')
    y = residual = x_BhwC
    if version == 2:
      y = nn.relu(_norm(y, version, 'gn1'))
    if self.stride > 1 or x_BhwC.shape[-1] != C:
      residual = _conv(y, C, 1, self.stride, version, 'conv_proj')
      if version < 2:
        residual = _norm(residual, version, 'gn_proj')
    y = _conv(y, self.width, 1, 1, version, 'conv1')
    y = nn.relu(_norm(y, version, names[0]))
    if self.axial:
      y = AxialConv(self.width, self.stride, y.dtype, name='axial2')(y)
    else:
      dilation = self.dilation
      y = _conv(y, self.width, 3, self.stride, version, 'conv2', dilation)
    y = nn.relu(_norm(y, version, names[1]))
    y = _conv(y, C, 1, 1, version, 'conv3')
    if version == 2:
      return residual + y
    # The zero scale makes each unit of version 1 start as its shortcut.
    return nn.relu(residual + _norm(y, version, 'gn3', nn.initializers.zeros))


# The loop begins at the second unit, because the first has other shapes.
UNITS = Loop('unit', 2, 'units')


class Stage(nn.Module):
  """A sequence of units of one width.

  The stride applies to the first unit, the dilation to the other units. With
  dilation 2 instead of stride 2, their receptive field stays the same.
  """

  units: int
  width: int
  stride: int = 1
  version: int = 2
  axial: bool = False
  dilation: int = 1
  scan: bool = False
  remat: str = 'none'

  @nn.compact
  def __call__(self, x_BhwC: Array) -> Array:
    unit = remat(Unit, self.remat, in_loop=False)
    fields: dict[str, Any] = {
      'width': self.width,
      'version': self.version,
      'axial': self.axial,
    }
    x = unit(stride=self.stride, name='unit1', **fields)(x_BhwC)
    fields['dilation'] = self.dilation
    if not self.scan or self.units == 1:
      for i in range(2, self.units + 1):
        x = unit(name=f'unit{i}', **fields)(x)
      return x
    looped = nn.scan(
      lambda unit, x, _: (unit(x), None),
      variable_axes={'params': 0},
      split_rngs={'params': True},
      length=self.units - 1,
    )
    unit = remat(Unit, self.remat, in_loop=True)
    return looped(unit(name='units', **fields), x, None)[0]


def feature_maps(
  images_BHWC: Array,
  *,
  width: int,
  layers: Sequence[int],
  version: int,
  axial: bool = False,
  dilated: bool = False,
  scan: bool = False,
  remat: str = 'none',
) -> list[Array]:
  """Returns the outputs of the root and of every stage, BhwC.

  The root is a 7x7/2 convolution and 3x3/2 max-pooling. Every stage after the
  first halves the height and width and doubles the channels. If `dilated`, the
  last stage has dilation instead of a stride (DC5); see `Stage`.

  This is a function and not a module, so that its parameters are at the same
  level as the caller's, as in the published files.
  """
  x = _conv(images_BHWC, width, 7, 2, version, 'conv_root')
  if version < 2:
    x = nn.relu(_norm(x, version, 'gn_root'))
  x = cpu_gradients.max_pool(x, version)
  maps = [x]
  for i, units in enumerate(layers):
    stride, dilation = 1 if i == 0 else 2, 1
    if dilated and i == len(layers) - 1:
      stride, dilation = 1, stride
    stage = Stage(
      units,
      width * 2**i,
      stride,
      version,
      axial,
      dilation,
      scan,
      remat,
      name=f'block{i + 1}',
    )
    maps.append(stage(maps[-1]))
  return maps


def total_stride(layers: Sequence[int]) -> int:
  """Returns the stride in pixels of the last feature map."""
  return 4 * 2 ** max(len(layers) - 1, 0)


class ResNet(Model):
  """Maps images to class logits by convolutions."""

  kind = 'resnet'
  loops = (UNITS,)

  layers: tuple[int, ...] = field(
    REQUIRED, 'Number of units in each stage.', valid=DEPTHS
  )
  width: int = field(
    64,
    'Channels of the root, 64 times the width factor.',
    valid='[1, inf)',
    multiple=GROUPS,
  )
  version: int = field(
    2,
    'BiT (2), the stem of hybrids (1), or torchvision with frozen BatchNorm '
    '(0).',
    valid=(0, 1, 2),
  )
  axial: bool = field(
    False,
    'Axial-ResNet: row and column attention replace the 3x3 convolutions '
    '(appendix D.6).',
  )
  head_bias: float = field(
    0.0, 'Initial bias of the head.', valid='(-inf, inf)'
  )

  @property
  def num_blocks(self) -> int:
    return len(self.layers)

  def body(self) -> 'ResNet':
    return self.clone(num_classes=0, head_bias=0.0)

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    stride = total_stride(self.layers)
    H, W = image_size
    return -(-H // stride), -(-W // stride)

  def check(self, image_size: tuple[int, int]) -> None:
    del image_size  # padding makes any size work
    if not self.layers:
      raise ValueError(
        'model.layers is empty: give the number of units of at least one stage.'
      )

  @nn.compact
  def __call__(
    self,
    images_BHWC: Array,
    *,
    train: bool = False,
    capture: tuple[str, ...] = (),
  ) -> tuple[Array, dict[str, Any]]:
    """Computes the logits of normalised images, of any size unless `axial`.

    `train` has no effect. `capture` may contain 'blocks', the list of the
    stages' outputs. Raises ValueError if it contains 'attention'.

    Returns:
      Logits (B, classes) in float32, or `pre_logits` if `num_classes` is 0; and
      a dict with `stem` (the root's output, BhwC), `tokens` (the last feature
      map, BLC, in version 2 after norm and ReLU), `pre_logits` (the mean of the
      tokens, BC) and the captured intermediates.
    """
    if 'attention' in capture:
      raise ValueError(
        "A ResNet does not return attention weights. Remove 'attention' from "
        'capture.'
      )
    stem, *stages = feature_maps(
      images_BHWC.astype(self.dtype),
      width=self.width,
      layers=self.layers,
      version=self.version,
      axial=self.axial,
      scan=self.scan,
      remat=self.remat,
    )
    x_BhwC = stages[-1]
    if self.version == 2:
      x_BhwC = nn.relu(_norm(x_BhwC, 2, 'gn_final'))
    y_BC = jnp.mean(x_BhwC, axis=(1, 2))
    aux: dict[str, Any] = {
      'stem': stem,
      'tokens': x_BhwC.reshape(x_BhwC.shape[0], -1, x_BhwC.shape[-1]),
      'pre_logits': y_BC,
    }
    if 'blocks' in capture:
      aux['blocks'] = stages
    if not self.num_classes:
      return y_BC, aux
    return classifier(y_BC, self.num_classes, self.head_bias), aux
