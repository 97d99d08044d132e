"""How an image becomes the input of a model.

Training, evaluation, prediction, serving and every checkpoint format use this
description.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from PIL import Image

from vit_jax.data.orientation import Box
from vit_jax.models.fields import Valid, check_value

# Limit of an image's longest side, far above the size of any model.
MAX_SIDE = 1 << 16
INTERPOLATIONS = ('bilinear', 'bicubic')
# 'dinov3' is the processor of that name in transformers, which resizes floats.
RESIZE_LIKE = ('vit_jax', 'torchvision', 'transformers', 'dinov3')
# Valid values of fields. Beyond these means and deviations, float32 cannot tell
# pixels apart.
_VALID: dict[str, Valid] = {
  'resize_small': f'[0, {MAX_SIDE}]',
  'mean': '[-1e6, 1e6]',
  'std': '[1e-6, 1e6]',
  'interpolation': INTERPOLATIONS,
  'squash': (False, True),
  'resize_like': RESIZE_LIKE,
}

_Size = tuple[int, int]


class Plan(NamedTuple):
  """How one image is resized and cropped.

  Attributes:
    box: the part of the image to resize.
    part: the (height, width) of that part after resizing.
    cut: the (top, left) of the crop in the resized part.
  """

  box: Box
  part: _Size
  cut: _Size


@dataclasses.dataclass(frozen=True)
class Preprocessing:
  """How images are resized and scaled for a model of any image size.

  Attributes:
    resize_small: 0 to resize the whole image to the model's size. Otherwise the
      shorter side is resized to this many pixels, and the centre is cut out.
    mean: a value for each channel (RGB), subtracted from pixels in [0, 1].
    std: a value for each channel; the difference is divided by it.
    interpolation: 'bilinear' or 'bicubic', antialiased.
    squash: with `resize_small`, whether to resize to the model's aspect ratio
      instead of keeping the image's, as in DeiT's processor.
    resize_like: the library whose rounding of sides and crops is reproduced.
      'vit_jax' is fast: 'bilinear' uses OpenCV and decodes JPEGs at a reduced
      size. timm resizes with torchvision.
  """

  resize_small: int = 0
  mean: tuple[float, ...] = (0.5, 0.5, 0.5)
  std: tuple[float, ...] = (0.5, 0.5, 0.5)
  interpolation: str = 'bilinear'
  squash: bool = False
  resize_like: str = 'vit_jax'

  def __post_init__(self) -> None:
    """Raises ValueError for an invalid field."""
    for name, valid in _VALID.items():
      value = getattr(self, name)
      check_value(name, value, valid)
      if name in ('mean', 'std') and len(value) != 3:
        raise ValueError(
          f'{name} is {value!r:.200}: give a number for red, green and blue '
          'each.'
        )

  @classmethod
  def of(cls, data: Mapping[str, Any]) -> Self:
    """Reads the fields from `config.data` or from JSON; some may be missing."""
    found: dict[str, Any] = {
      field.name: tuple(value) if isinstance(value, list) else value
      for field in dataclasses.fields(cls)
      if (value := data.get(field.name)) is not None
    }
    return cls(**found)

  def describe(self) -> str:
    """Describes in words how images are resized."""
    sides = 'both sides' if self.squash else 'the shorter side'
    part = f'{sides} to {self.resize_small} pixels, then the centre'
    way = part if self.resize_small else 'the whole image'
    return f'{way}, {self.interpolation}'

  def scaled(self, old: _Size, new: _Size) -> Self:
    """Returns a copy for another image size, with `resize_small` scaled."""
    scale = max(n / o for n, o in zip(new, old, strict=True))
    return dataclasses.replace(
      self, resize_small=round(self.resize_small * scale)
    )

  def check(self, size: _Size) -> None:
    """Raises ValueError if a crop of `size` does not fit the resized image."""
    least = min(size) if self.squash else max(size)
    if self.resize_small and self.resize_small < least:
      raise ValueError(
        f'resize_small is {self.resize_small}, less than the crop of '
        f'{size[0]}x{size[1]} pixels: use 0, or at least {least}.'
      )

  def plan(self, shape: _Size, size: _Size) -> Plan:
    """Returns how an image of `shape` (height, width) becomes one of `size`."""
    box, is_ours = Box(0, 0, *shape), self.resize_like == 'vit_jax'
    if not self.resize_small:
      return Plan(box, size, (0, 0))
    if not self.squash:
      # With 2, modes of other libraries would round photographs differently.
      box = _central(*shape, longest=2 if is_ours else 8)
    sides = size if self.squash else box[2:]
    height, width = (
      (round if is_ours else int)(side * self.resize_small / min(sides))
      for side in sides
    )
    halves = (height - size[0]) / 2, (width - size[1]) / 2
    # torchvision rounds a half to the even number; transformers rounds down.
    rounds = round if self.resize_like == 'torchvision' else int
    return Plan(box, (height, width), (rounds(halves[0]), rounds(halves[1])))

  @property
  def reduces(self) -> bool:
    """Whether a JPEG may be decoded at a reduced size, which changes pixels."""
    return (self.resize_like, self.interpolation) == ('vit_jax', 'bilinear')

  def resize(self, image: np.ndarray, plan: Plan, size: _Size) -> np.ndarray:
    """Returns uint8 pixels [*size, 3] of a decoded `plan.box`.

    Args:
      image: uint8 [H, W, 3], decoded at full or reduced size.
      plan: the plan for this image.
      size: (height, width) of the result.
    """
    (top, left), (height, width) = plan.cut, plan.part
    filter_ = Image.Resampling[self.interpolation.upper()]
    if self.reduces:
      image = resize(image, plan.part)
    elif self.resize_like == 'dinov3':
      channels = [
        np.asarray(Image.fromarray(channel).resize((width, height), filter_))
        for channel in np.moveaxis(image.astype(np.float32), 2, 0)
      ]
      image = np.rint(np.stack(channels, -1)).clip(0, 255).astype(np.uint8)
    else:
      pillow = Image.fromarray(image)
      if self.resize_like == 'transformers':
        # PyTorch resizes the width first, and Pillow 13 the height if that is
        # faster. The order matters: both round to 8 bits in between.
        pillow = pillow.resize((width, pillow.height), filter_)
      image = np.asarray(pillow.resize((width, height), filter_))
    if plan.part == size:
      return image
    height, width = size
    # A copy, so that the crop does not keep the whole image alive.
    return image[top : top + height, left : left + width].copy()


def _central(height: int, width: int, longest: int) -> Box:
  """Returns the middle of an image, at most `longest` times as long as wide.

  A central crop needs no more. Without this limit, resizing a strip of
  30,000 x 1 pixels would fill the memory.
  """
  most = longest * min(height, width)
  # Both ends lose the same number of pixels, which keeps the centre.
  top, left = (max(side - most, 0) // 2 for side in (height, width))
  return Box(top, left, height - 2 * top, width - 2 * left)


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """Bilinear resize of uint8 [H, W, 3], antialiased along sides that shrink.

  The result is close to Pillow's BILINEAR and takes a quarter of the time.
  Pillow's triangle filter grows with the scale n/m. Compared with plain
  bilinear sampling, it adds a blur of variance ((n/m)^2 - 1) / 6, which is 1/2
  at a scale of 2. The taps 1/4, 1/2, 1/4 have the same variance. Sides whose
  variance is nearer to 1/2 than to 0 are blurred by these taps and then
  sampled. Sides longer than twice their target are first averaged down to twice
  their target. An image that has the `size` (height, width) is returned as it
  is.
  """
  if image.shape[:2] == tuple(size):
    return image
  cv2 = _opencv()
  twice = tuple(min(n, 2 * m) for n, m in zip(image.shape, size, strict=False))
  if twice != image.shape[:2]:
    image = cv2.resize(image, twice[::-1], interpolation=cv2.INTER_AREA)
  variances = [((n / m) ** 2 - 1) / 6 for n, m in zip(twice, size, strict=True)]
  taps = [3 if variance > 1 / 4 else 1 for variance in variances]
  if max(taps) > 1:
    # sigmaX=0 selects the taps above, for which OpenCV has its fastest code.
    image = cv2.GaussianBlur(
      image, taps[::-1], sigmaX=0, borderType=cv2.BORDER_REPLICATE
    )
  return cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR)


@functools.cache
def _opencv() -> Any:
  """Imports OpenCV on first use; `serve` never uses it in its main process."""
  import cv2

  cv2.setNumThreads(1)  # the loader already uses every core
  return cv2
