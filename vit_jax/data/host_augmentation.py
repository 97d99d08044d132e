"""Augments single training images on the CPU, with Pillow.

`OPERATIONS` has RandAugment's operations (1909.13719) with AutoAugment's ranges
(1805.09501, table 6). Magnitudes go from 0 to 10 (end of the range), as in
DeiT; in torchvision they go to 30. `BIG_VISION` has the operations of
big_vision, the code of ViT's authors. There, a higher magnitude weakens
Posterize and Solarize, but Solarize inverts all pixels at magnitude 10.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vit_jax.models.fields import check_value

_MOST = 10
_GREY = (128, 128, 128)  # fills areas without pixels

# Maps uint8 pixels [H, W, 3] to uint8 pixels of the same shape. The generator
# draws the random numbers of the example.
Augmentation = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def _moved(image: Image.Image, *matrix: float) -> Image.Image:
  return image.transform(
    image.size,
    Image.Transform.AFFINE,
    matrix,
    Image.Resampling.BILINEAR,
    fillcolor=_GREY,
  )


def _rotated(image: Image.Image, degrees: float) -> Image.Image:
  return image.rotate(degrees, Image.Resampling.BILINEAR, fillcolor=_GREY)


@dataclasses.dataclass(frozen=True)
class Operation:
  apply: Callable[[Image.Image, float], Image.Image]
  end: float = 0.0  # the value at magnitude 10; 0 if the value is ignored
  signed: bool = True  # whether the value is negative in half of the cases

  def __call__(
    self, image: Image.Image, magnitude: float, rng: np.random.Generator
  ) -> Image.Image:
    """Applies the operation at a magnitude, with a random sign if `signed`."""
    value = self.end * min(max(magnitude, 0.0), _MOST) / _MOST
    if self.signed and rng.random() < 0.5:
      value = -value
    return self.apply(image, value)


def _enhances(kind: Callable[[Image.Image], Any]) -> Operation:
  return Operation(lambda image, v: kind(image).enhance(1 + v), 0.9)


OPERATIONS = {
  'Identity': Operation(lambda image, _: image, signed=False),
  'ShearX': Operation(lambda image, v: _moved(image, 1, v, 0, 0, 1, 0), 0.3),
  'ShearY': Operation(lambda image, v: _moved(image, 1, 0, 0, v, 1, 0), 0.3),
  # The value is a fraction of the side. AutoAugment uses 150 of 331 pixels.
  'TranslateX': Operation(
    lambda image, v: _moved(image, 1, 0, -int(v * image.width), 0, 1, 0),
    150 / 331,
  ),
  'TranslateY': Operation(
    lambda image, v: _moved(image, 1, 0, 0, 0, 1, -int(v * image.height)),
    150 / 331,
  ),
  'Rotate': Operation(_rotated, 30.0),
  'Brightness': _enhances(ImageEnhance.Brightness),
  'Color': _enhances(ImageEnhance.Color),
  'Contrast': _enhances(ImageEnhance.Contrast),
  'Sharpness': _enhances(ImageEnhance.Sharpness),
  'Posterize': Operation(  # keeps 8 bits at magnitude 0, 4 at 10
    lambda image, v: ImageOps.posterize(image, 8 - round(v)), 4, signed=False
  ),
  'Solarize': Operation(  # inverts all pixels at magnitude 10
    lambda image, v: ImageOps.solarize(image, 256 - round(v)), 256, signed=False
  ),
  'AutoContrast': Operation(
    lambda image, _: ImageOps.autocontrast(image), signed=False
  ),
  'Equalize': Operation(
    lambda image, _: ImageOps.equalize(image), signed=False
  ),
}


def _shifted(image: Image.Image, *matrix: float) -> Image.Image:
  """Transforms by a matrix that maps pixel indices instead of pixel centres."""
  a, b, c, d, e, f = matrix
  centred = a, b, c + (1 - a - b) / 2, d, e, f + (1 - d - e) / 2
  return image.transform(
    image.size, Image.Transform.AFFINE, centred, fillcolor=_GREY
  )


def _blends(start: Callable[[Image.Image], Image.Image]) -> Operation:
  """Blends with `start(image)`; the weight of the image is 0.1 to 1.9."""
  return Operation(
    lambda image, v: Image.blend(start(image), image, 0.1 + v),
    1.8,
    signed=False,
  )


def _flat(image: Image.Image) -> Image.Image:
  """Returns the grey image that big_vision's Contrast blends with.

  The grey is the number of pixels divided by 256, instead of the mean grey: 196
  for every image of 224 x 224 pixels.
  """
  grey = min(image.width * image.height // 256, 255)
  return Image.new('RGB', image.size, (grey,) * 3)


def _solarize_add(image: Image.Image, value: float) -> Image.Image:
  pixels = np.array(image)
  brighter = np.minimum(pixels.astype(int) + int(value), 255)
  return Image.fromarray(
    np.where(pixels < 128, brighter, pixels).astype(np.uint8)
  )


def _cut_out(
  image: Image.Image, magnitude: float, rng: np.random.Generator
) -> Image.Image:
  """Greys a square of up to 80 x 80 pixels around a random pixel."""
  half = int(40 * min(max(magnitude, 0), _MOST) / _MOST)
  x, y = int(rng.integers(image.width)), int(rng.integers(image.height))
  image = image.copy()
  image.paste(_GREY, (x - half, y - half, x + half, y + half))
  return image


# The operations of big_vision's `randaug`, which is made for 224 x 224 images.
# Differences from `OPERATIONS`: Identity is missing; Invert, Cutout and
# SolarizeAdd are added. Color, Contrast, Brightness and Sharpness get no random
# sign. Shears, translations and Rotate use nearest-neighbour sampling.
# Translations are in pixels. `_flat` describes Contrast; the docstring of this
# module describes Posterize and Solarize.
BIG_VISION: dict[str, Callable[..., Image.Image]] = {
  'AutoContrast': OPERATIONS['AutoContrast'],
  'Equalize': OPERATIONS['Equalize'],
  'Invert': Operation(lambda image, _: ImageOps.invert(image), signed=False),
  'Rotate': Operation(
    lambda image, v: image.rotate(v, fillcolor=_GREY), OPERATIONS['Rotate'].end
  ),
  'Posterize': Operation(  # the value is the number of bits to keep
    lambda image, v: ImageOps.posterize(image, int(v)), 4, signed=False
  ),
  'Solarize': Operation(  # the threshold wraps: 256 is 0 and inverts all pixels
    lambda image, v: ImageOps.solarize(image, int(v) % 256), 256, signed=False
  ),
  'Color': _blends(lambda image: image.convert('L').convert('RGB')),
  'Contrast': _blends(_flat),
  'Brightness': _blends(lambda image: Image.new('RGB', image.size)),
  'Sharpness': _blends(lambda image: image.filter(ImageFilter.SMOOTH)),
  'ShearX': Operation(lambda image, v: _shifted(image, 1, v, 0, 0, 1, 0), 0.3),
  'ShearY': Operation(lambda image, v: _shifted(image, 1, 0, 0, v, 1, 0), 0.3),
  'TranslateX': Operation(
    lambda image, v: _shifted(image, 1, 0, v, 0, 1, 0), 100
  ),
  'TranslateY': Operation(
    lambda image, v: _shifted(image, 1, 0, 0, 0, 1, v), 100
  ),
  'Cutout': _cut_out,
  'SolarizeAdd': Operation(_solarize_add, 110, signed=False),
}


@dataclasses.dataclass(frozen=True)
class RandAugment:
  """Applies several randomly drawn operations in a row (1909.13719).

  The magnitude is drawn for each operation.
  """

  count: int = 2  # number of operations, N of the paper
  magnitude: float = 9.0  # M of the paper, from 0 to 10
  deviation: float = 0.0  # standard deviation of the magnitude; 0.5 in DeiT
  operations: str = 'torchvision'  # or 'big_vision', for `BIG_VISION`

  def __post_init__(self) -> None:
    check_value('count', self.count, '[1, inf)')
    check_value('magnitude', self.magnitude, f'[0, {_MOST}]')
    check_value('deviation', self.deviation, '[0, inf)')
    check_value('operations', self.operations, ('torchvision', 'big_vision'))

  def __call__(
    self, pixels_HWC: np.ndarray, rng: np.random.Generator
  ) -> np.ndarray:
    image = Image.fromarray(pixels_HWC)
    by_name = BIG_VISION if self.operations == 'big_vision' else OPERATIONS
    for name in rng.choice([*by_name], self.count):
      magnitude = rng.normal(self.magnitude, self.deviation)
      image = by_name[name](image, magnitude, rng)
    return np.array(image)


@dataclasses.dataclass(frozen=True)
class ThreeAugment:
  """Greys, solarizes or blurs an image, then jitters its colours.

  The three are equally likely, as in DeiT III (2204.07118, section 3.2).
  Brightness, contrast and saturation, in random order, are each multiplied by a
  random number between 1 - jitter and 1 + jitter.
  """

  jitter: float = 0.3

  def __post_init__(self) -> None:
    check_value('jitter', self.jitter, '[0, 1]')

  def __call__(
    self, pixels_HWC: np.ndarray, rng: np.random.Generator
  ) -> np.ndarray:
    image = Image.fromarray(pixels_HWC)
    which = rng.integers(3)
    if which == 0:
      image = image.convert('L').convert('RGB')
    elif which == 1:
      image = ImageOps.solarize(image)
    else:
      image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0)))
    for name in rng.permutation(['Brightness', 'Contrast', 'Color']):
      value = rng.uniform(-self.jitter, self.jitter)
      image = OPERATIONS[name].apply(image, value)
    return np.array(image)


def parse(text: str) -> Augmentation | None:
  """Returns the augmentation that `config.data.augment` names; None for ''.

  Raises ValueError if the text is invalid.
  """
  if not text:
    return None
  kinds: dict[str, Callable[..., Augmentation]] = {
    'randaugment': lambda n=2, m=9, deviation=0, *, operations='torchvision': (
      RandAugment(int(n), float(m), float(deviation), operations)
    ),
    '3augment': lambda *jitter: ThreeAugment(*map(float, jitter)),
  }
  match = re.fullmatch(
    r'(\w+)(?:\((.*?)(?:\bas\s*=\s*(\w+)\s*)?\))?', text.strip()
  )
  try:
    name, numbers, operations = match.groups('')  # type: ignore[union-attr]
    parts = [part.strip() for part in numbers.split(',')]
    named = {'operations': operations} if operations else {}
    return kinds[name](*filter(None, parts), **named)
  except (AttributeError, KeyError, TypeError, ValueError):
    raise ValueError(
      f'data.augment is {text!r}: use randaugment(N, M), with N of 1 or more '
      f'and M from 0 to {_MOST}; randaugment(N, M, DEVIATION, as=big_vision); '
      "3augment(J), with J from 0 to 1; or ''."
    ) from None
