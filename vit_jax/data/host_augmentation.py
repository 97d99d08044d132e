"""Random changes of training images, one by one, on the CPU.

Pillow applies the operations and ranges of AutoAugment (1805.09501, table 6).
Magnitudes count from 0, no change, to 10, the end of the range, as in
torchvision and DeiT; the papers' code counts some the other way round.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

_MOST = 10
_GREY = (128, 128, 128)  # fills the empty area

# Changes uint8 pixels HWC with random numbers of the example's own.
Augmentation = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def _moved(image: Image.Image, *matrix: float) -> Image.Image:
  """Transforms an image by an affine matrix."""
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
  """An operation on an image.

  Attributes:
    apply: takes an image and a value; 0 changes nothing.
    end: the value of magnitude 10; 0 if the operation has no magnitude.
    signed: whether the value may be negative, as likely as not.
  """

  apply: Callable[[Image.Image, float], Image.Image]
  end: float = 0.0
  signed: bool = True

  def __call__(
    self, image: Image.Image, magnitude: float, rng: np.random.Generator
  ) -> Image.Image:
    """Applies it at a magnitude, in a random direction if it has two."""
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
  # A share of the side; the paper says 150 pixels of 331.
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
  'Posterize': Operation(  # to as few as 4 bits
    lambda image, v: ImageOps.posterize(image, 8 - round(v)), 4, signed=False
  ),
  'Solarize': Operation(  # all but black
    lambda image, v: ImageOps.solarize(image, 256 - round(v)), 256, signed=False
  ),
  'AutoContrast': Operation(
    lambda image, _: ImageOps.autocontrast(image), signed=False
  ),
  'Equalize': Operation(
    lambda image, _: ImageOps.equalize(image), signed=False
  ),
}


@dataclasses.dataclass(frozen=True)
class RandAugment:
  """Several operations in a row, drawn from all (1909.13719).

  Attributes:
    count: number of operations, N of the paper.
    magnitude: M of the paper, from 0 to 10.
    deviation: standard deviation of each operation's magnitude; 0.5 in DeiT.
  """

  count: int = 2
  magnitude: float = 9.0
  deviation: float = 0.0

  def __post_init__(self) -> None:
    if self.count < 1 or not 0 <= self.magnitude <= _MOST or self.deviation < 0:
      raise ValueError(f'{self} is out of range')

  def __call__(
    self, pixels_HWC: np.ndarray, rng: np.random.Generator
  ) -> np.ndarray:
    image = Image.fromarray(pixels_HWC)
    for name in rng.choice([*OPERATIONS], self.count):
      magnitude = rng.normal(self.magnitude, self.deviation)
      image = OPERATIONS[name](image, magnitude, rng)
    return np.array(image)


@dataclasses.dataclass(frozen=True)
class ThreeAugment:
  """Grey, solarized or blurred, each as likely; then colours are jittered.

  DeiT III (2204.07118, section 3.2).

  Attributes:
    jitter: brightness, contrast and saturation are each multiplied by a number
      from 1 - jitter to 1 + jitter, in random order.
  """

  jitter: float = 0.3

  def __post_init__(self) -> None:
    if not 0 <= self.jitter <= 1:
      raise ValueError(f'{self} is out of range')

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
  """Returns the augmentation that `config.data.augment` names, if any.

  Raises:
    ValueError: for an unknown name or numbers out of range.
  """
  if not text:
    return None
  kinds: dict[str, Callable[..., Augmentation]] = {
    'randaugment': lambda n=2, *m: RandAugment(int(n), *map(float, m)),
    '3augment': lambda *jitter: ThreeAugment(*map(float, jitter)),
  }
  match = re.fullmatch(r'(\w+)(?:\((.*)\))?', text.strip())
  try:
    name, numbers = match.groups('')  # type: ignore[union-attr]
    parts = [part.strip() for part in numbers.split(',')]
    return kinds[name](*filter(None, parts))
  except (AttributeError, KeyError, TypeError, ValueError):
    raise ValueError(
      f'data.augment is {text!r}: write randaugment(n, m), with n of 1 or more '
      f'and m from 0 to {_MOST}, maybe with a deviation of 0 or more behind '
      'them; 3augment(j), with j from 0 to 1; or nothing.'
    ) from None
