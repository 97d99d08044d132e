"""Describes resizing and normalisation of input images, and resizes images.

Training, evaluation, prediction, serving and all checkpoint formats use this
module.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from PIL import Image

from vit_jax.data.orientation import Box
from vit_jax.models.fields import Valid, check_value

# Maximum side of an image in pixels, far above the input size of any model.
MAX_SIDE = 1 << 16
INTERPOLATIONS = ('bilinear', 'bicubic')
# 'dinov3' is DINOv3's processor in transformers, which resizes floats.
RESIZE_LIKE = ('vit_jax', 'torchvision', 'transformers', 'dinov3')
# Valid values of fields. With a mean of 1e8, float32 pixels would all be equal.
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
  """The resizing and cropping of one image."""

  box: Box  # the part of the image to resize
  part: _Size  # the (height, width) to which `box` is resized
  cut: _Size  # the (top, left) corner of the crop in the resized part


@dataclasses.dataclass(frozen=True)
class Preprocessing:
  """Resizing and normalisation of images for a model of any image size.

  Attributes:
    resize_small: 0 to resize the whole image to the model's size. Otherwise the
      shorter side is resized to this many pixels, and the centre is kept.
    mean: the mean of each channel (RGB), for pixels in [0, 1].
    std: the standard deviation of each channel, for pixels in [0, 1].
    interpolation: 'bilinear' or 'bicubic', antialiased.
    squash: with `resize_small`, whether to resize to the model's aspect ratio,
      as DeiT's processor does, instead of keeping the image's aspect ratio.
    resize_like: the library whose resizing is reproduced, including how it
      rounds sides and crops. 'vit_jax' is the fastest: its 'bilinear' uses
      OpenCV and decodes JPEGs at a reduced size. For timm, use 'torchvision'.
  """

  resize_small: int = 0
  mean: tuple[float, ...] = (0.5, 0.5, 0.5)
  std: tuple[float, ...] = (0.5, 0.5, 0.5)
  interpolation: str = 'bilinear'
  squash: bool = False
  resize_like: str = 'vit_jax'

  def __post_init__(self) -> None:
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
    """Reads fields from `config.data` or JSON; missing fields get defaults."""
    found: dict[str, Any] = {
      field.name: tuple(value) if isinstance(value, list) else value
      for field in dataclasses.fields(cls)
      if (value := data.get(field.name)) is not None
    }
    return cls(**found)

  def describe(self) -> str:
    """Describes the resizing in words, such as 'the whole image, bilinear'."""
    sides = 'the shorter side (squashed)' if self.squash else 'the shorter side'
    part = f'{sides} to {self.resize_small} pixels, then the centre'
    way = part if self.resize_small else 'the whole image'
    return f'{way}, {self.interpolation}'

  def scaled(self, old: _Size, new: _Size) -> Self:
    """Returns a copy with `resize_small` scaled from image size old to new."""
    side = min if self.squash else max  # as in `check`
    scaled = round(self.resize_small * side(new) / side(old))
    return dataclasses.replace(self, resize_small=scaled)

  def check(self, size: _Size) -> None:
    """Raises ValueError if a crop of `size` may not fit a resized image."""
    least = min(size) if self.squash else max(size)
    if self.resize_small and self.resize_small < least:
      raise ValueError(
        f'resize_small is {self.resize_small}, less than the crop of '
        f'{size[0]}x{size[1]} pixels: use 0, or at least {least}.'
      )

  def plan(self, shape: _Size, size: _Size) -> Plan:
    """Returns the plan to resize and crop `shape` to `size`, both (H, W)."""
    box, is_ours = Box(0, 0, *shape), self.resize_like == 'vit_jax'
    if not self.resize_small:
      return Plan(box, size, (0, 0))
    if not self.squash:
      # Other libraries resize the whole image and round its sides. A cut would
      # change the scale a little, so images of up to 32:1 stay whole.
      box = _central(*shape, longest=2 if is_ours else 32)
    sides = size if self.squash else box[2:]
    height, width = (
      (round if is_ours else int)(side * self.resize_small / min(sides))
      for side in sides
    )
    halves = (height - size[0]) / 2, (width - size[1]) / 2
    # torchvision rounds to the nearest integer (halves to even);
    # transformers rounds down.
    rounds = round if self.resize_like == 'torchvision' else int
    return Plan(box, (height, width), (rounds(halves[0]), rounds(halves[1])))

  @property
  def reduces(self) -> bool:
    """Whether a JPEG may be decoded at a reduced size, which changes pixels."""
    return (self.resize_like, self.interpolation) == ('vit_jax', 'bilinear')

  def resize(self, image: np.ndarray, plan: Plan, size: _Size) -> np.ndarray:
    """Resizes and crops `image`, the pixels of `plan.box`, to uint8 [*size, 3].

    `image` is uint8 [H, W, 3], decoded at full or reduced size.
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
        # PyTorch resizes the width first. Pillow 13 starts with the height if
        # that is faster. The order changes the result, because the first pass
        # rounds to 8 bits.
        pillow = pillow.resize((width, pillow.height), filter_)
      image = np.asarray(pillow.resize((width, height), filter_))
    if plan.part == size:
      return image
    height, width = size
    # A copy, so that the crop does not keep the whole image alive.
    return image[top : top + height, left : left + width].copy()


def _central(height: int, width: int, longest: int) -> Box:
  """Returns a central box, at most about `longest` times as long as wide.

  A central crop uses no pixels outside this box. Without the limit, resizing a
  strip of 30,000 x 1 pixels would fill the memory.
  """
  most = longest * min(height, width)
  # Both ends lose the same number of pixels, which keeps the centre.
  top, left = (max(side - most, 0) // 2 for side in (height, width))
  return Box(top, left, height - 2 * top, width - 2 * left)


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """Resizes uint8 [H, W, 3] bilinearly to uint8 [*size, 3], with antialiasing.

  The result is close to Pillow's BILINEAR. It takes a quarter of the time if no
  side is longer than twice its target. Pillow's triangle filter grows with the
  scale n/m, where n is a side of the image and m its target. Compared with
  plain bilinear sampling, it adds a blur of variance ((n/m)^2 - 1) / 6, which
  is 1/2 at a scale of 2. The taps 1/4, 1/2, 1/4 have that variance too. If a
  side needs a variance nearer to 1/2 than to 0, it is blurred with these taps
  and then sampled. A side longer than twice its target is first averaged down
  to twice its target. An image that already has `size` (height, width) is
  returned unchanged.
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
    # sigmaX=0 selects the taps 1/4, 1/2, 1/4; OpenCV has fast code for them.
    image = cv2.GaussianBlur(
      image, taps[::-1], sigmaX=0, borderType=cv2.BORDER_REPLICATE
    )
  return cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR)


@functools.cache
def _opencv() -> Any:
  """Imports OpenCV on first use: the main process of `serve` never needs it."""
  import cv2

  cv2.setNumThreads(1)  # the loader already uses every core
  return cv2
