"""Transforms records into examples: images of the size that a model needs.

A transform turns a record {'image', 'name'} of a source into {'image': uint8
[H, W, 3]}. If the record has a 'label', the example has it too, as int32, or as
uint8 [C] if images have several classes. Normalisation and flips follow later,
on the device. A transform raises UnreadableImage if it cannot decode the image.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vit_jax.data import decode
from vit_jax.data.host_augmentation import Augmentation
from vit_jax.data.orientation import Box
from vit_jax.data.preprocessing import Preprocessing, resize

_ASPECTS = (3 / 4, 4 / 3)  # width over height
_CROP_ATTEMPTS = 100


@dataclasses.dataclass(frozen=True)
class TrainTransform:
  """Cuts a random part out of an image: the inception crop or BiT's crop.

  The inception crop has a uniform aspect ratio (width / height) between 3/4 and
  4/3. Its height is uniform between the heights at which its area is `min_area`
  and `max_area`, limited by the image. The ViT paper's models were trained
  with this distribution, from tf.image.sample_distorted_bounding_box. Other
  libraries draw a uniform area, which gives larger crops on average.

  BiT's crop (arXiv 1912.11370) resizes the whole image to `resize`, ignoring
  its aspect ratio, and cuts `image_size` out of it.

  With a `min_area` of 1, the inception crop always takes the whole image and
  ignores the aspect ratio.
  """

  image_size: tuple[int, int]  # (height, width) of the output
  min_area: float = 0.05  # smallest share of the image, if such a crop fits
  resize: tuple[int, int] | None = None  # (H, W); None for the inception crop
  augmentation: Augmentation | None = None
  max_area: float = 1.0  # largest share of the image in the inception crop

  def __call__(
    self, record: Mapping[str, Any], rng: np.random.Generator
  ) -> dict[str, np.ndarray | np.int32]:
    picture = decode.open_image(record['image'], record['name'])
    if self.resize:
      image = resize(picture.read(size=self.resize, exact=False), self.resize)
      height, width = self.image_size
      top = int(rng.integers(self.resize[0] - height + 1))
      left = int(rng.integers(self.resize[1] - width + 1))
      # Copy, so that the part does not keep the whole image in memory.
      image = image[top : top + height, left : left + width].copy()
    else:
      box = self.random_box(picture.height, picture.width, rng)
      part = picture.read(box, self.image_size, exact=False)
      image = resize(part, self.image_size)
    if self.augmentation:
      image = self.augmentation(image, rng)
    return {'image': image} | _label(record)

  def random_box(
    self, height: int, width: int, rng: np.random.Generator
  ) -> Box:
    """Draws an inception crop for an image of this height and width."""
    if self.min_area == 1:
      return Box(0, 0, height, width)
    for _ in range(_CROP_ATTEMPTS):
      aspect = rng.uniform(*_ASPECTS)
      # `tallest` is the height of the largest box of this aspect ratio that
      # fits and has at most `max_area`. `smallest` is the height of the box
      # whose area is `min_area`.
      tallest = min(height, int((width + 0.5) / aspect))
      if self.max_area < 1:
        largest = math.sqrt(self.max_area * height * width / aspect)
        tallest = min(tallest, max(1, round(largest)))
      smallest = math.sqrt(self.min_area * height * width / aspect)
      box_height = int(rng.integers(min(round(smallest), tallest), tallest + 1))
      box_width = round(box_height * aspect)
      if (
        box_width <= width
        and box_height * box_width >= self.min_area * height * width
      ):
        break
    else:
      # No draw fitted, by chance or because the image is too tall or wide for
      # `min_area`, as 16:9 is for 0.8. Take the largest part that has an
      # allowed aspect ratio.
      aspect = min(max(width / height, _ASPECTS[0]), _ASPECTS[1])
      box_height = min(height, round(width / aspect))
      box_width = min(width, round(height * aspect))
    top = int(rng.integers(height - box_height + 1))
    left = int(rng.integers(width - box_width + 1))
    return Box(top, left, box_height, box_width)


@dataclasses.dataclass(frozen=True)
class EvalTransform:
  """Resizes an image, and crops its centre if `preprocessing` asks for it.

  Raises ValueError if a crop of `image_size` may not fit a resized image.
  """

  image_size: tuple[int, int]  # (height, width) of the output
  preprocessing: Preprocessing = Preprocessing()

  def __post_init__(self) -> None:
    self.preprocessing.check(self.image_size)

  def __call__(
    self, record: Mapping[str, Any]
  ) -> dict[str, np.ndarray | np.int32]:
    image = self.image(record['image'], record['name'])
    return {'image': image} | _label(record)

  def image(self, data: bytes | np.ndarray, name: str) -> np.ndarray:
    """Returns uint8 [*image_size, 3] for the bytes of a file or for pixels.

    Raises UnreadableImage, with `name`, if the image cannot be decoded.
    """
    picture = decode.open_image(data, name)
    how, shape = self.preprocessing, (picture.height, picture.width)
    plan = how.plan(shape, self.image_size)
    pixels = picture.read(plan.box, plan.part if how.reduces else None)
    return how.resize(pixels, plan, self.image_size)


def seed_of(name: str) -> int:
  """Returns a seed from the last two parts of a record's name, a path."""
  last = '/'.join(name.split('/')[-2:])
  return zlib.crc32(last.encode(errors='surrogateescape'))


@dataclasses.dataclass(frozen=True)
class WrongLabels:
  """A transform that gives a fraction of the images a wrong class.

  The record's name seeds the choice, so it is the same in every epoch. All
  wrong classes are equally likely.
  """

  transform: TrainTransform
  share: float  # of wrong labels, from 0 to 1
  classes: int

  def __call__(
    self, record: Mapping[str, Any], rng: np.random.Generator
  ) -> dict[str, Any]:
    if 'label' not in record:
      return self.transform(record, rng)
    own = np.random.RandomState(seed_of(record['name']))
    label = record['label']
    if own.random_sample() < self.share:
      label = (label + 1 + own.randint(self.classes - 1)) % self.classes
    return self.transform({**record, 'label': label}, rng)


def without_label(transform: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a transform that drops labels, for objectives without classes."""
  return lambda record, *rng: transform(
    {k: v for k, v in record.items() if k != 'label'}, *rng
  )


def _label(record: Mapping[str, Any]) -> dict[str, np.ndarray | np.int32]:
  if 'label' not in record:
    return {}
  label = record['label']
  return {'label': label if np.ndim(label) else np.int32(label)}
