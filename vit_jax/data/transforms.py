"""From a record to the pixels that a model sees.

Both transforms turn a record {'image', 'name'} of a source into {'image': uint8
[H, W, 3]}, and its 'label', where it has one, into int32; one uint8 [C] of
several classes stays. Images stay uint8 until they are on the device, where
scaling to [-1, 1] and flips happen.
"""

import dataclasses
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.data import decode
from vit_jax.data.host_augmentation import Augmentation
from vit_jax.data.orientation import Box
from vit_jax.data.preprocessing import Preprocessing
from vit_jax.data.resizing import resize

_ASPECTS = (3 / 4, 4 / 3)  # Width over height.
_CROP_ATTEMPTS = 100


@dataclasses.dataclass(frozen=True)
class TrainTransform:
  """A random part of the image: the "inception crop", or BiT's.

  The inception crop has an aspect ratio uniform in (3/4, 4/3), and a height
  uniform between that of a part of `min_area` and the largest that fits,
  anywhere in the image, and is resized. This is the distribution of
  tf.image.sample_distorted_bounding_box, with which the models of the paper
  were trained; with a uniform area instead, as elsewhere, parts would be larger
  on average.

  BiT's (arXiv 1912.11370) resizes the whole image, whatever its aspect ratio,
  and cuts a part of fixed size out of that, anywhere.

  Attributes:
    image_size: (height, width) of the output.
    min_area: smallest share of the image that the inception crop takes; 1 is
      always the whole image, squashed to size.
    resize: (height, width) to which BiT's crop resizes the image. None, for
      the inception crop.
    augmentation: what is then done to the pixels, if anything.

  Raises:
    ValueError: `min_area` is not in (0, 1], `image_size` is not positive, or
      `resize` is smaller.
  """

  image_size: tuple[int, int]
  min_area: float = 0.05
  resize: tuple[int, int] | None = None
  augmentation: Augmentation | None = None

  def __post_init__(self) -> None:
    _check_size(self.image_size)
    if not 0 < self.min_area <= 1:
      raise ValueError(
        f'min_area={self.min_area} must be in (0, 1]; it is the smallest share '
        'of the image that a training crop covers'
      )
    if self.resize and any(
      a < b for a, b in zip(self.resize, self.image_size, strict=True)
    ):
      raise ValueError(
        f'resize={tuple(self.resize)} is smaller than image_size='
        f'{tuple(self.image_size)}, which is cut out of it; use None or at '
        'least that size'
      )

  def __call__(
    self, record: Mapping[str, Any], rng: np.random.Generator
  ) -> dict[str, np.ndarray | np.int32]:
    """A record and its own generator to {'image'} and maybe 'label'.

    Raises:
      UnreadableImage: The image cannot be decoded.
    """
    picture = decode.open_image(record['image'], record['name'])
    if self.resize:
      image = self._cut(picture, self.resize, rng)
    else:
      box = self._random_box(picture.height, picture.width, rng)
      part = picture.read(box, self.image_size, exact=False)
      image = resize(part, self.image_size)
    if self.augmentation:
      image = self.augmentation(image, rng)
    return {'image': image} | _label(record)

  def _cut(
    self,
    picture: decode.Picture,
    size: tuple[int, int],
    rng: np.random.Generator,
  ) -> np.ndarray:
    image = resize(picture.read(size=size, exact=False), size)
    height, width = self.image_size
    top = int(rng.integers(size[0] - height + 1))
    left = int(rng.integers(size[1] - width + 1))
    # A copy, so that the part does not keep the whole image alive.
    return image[top : top + height, left : left + width].copy()

  def _random_box(
    self, height: int, width: int, rng: np.random.Generator
  ) -> Box:
    if self.min_area == 1:
      return Box(0, 0, height, width)
    for _ in range(_CROP_ATTEMPTS):
      aspect = rng.uniform(*_ASPECTS)
      # The tallest box of this aspect ratio that fits, and the smallest that
      # has the area.
      tallest = min(height, int((width + 0.5) / aspect))
      smallest = math.sqrt(self.min_area * height * width / aspect)
      box_height = int(rng.integers(min(round(smallest), tallest), tallest + 1))
      box_width = round(box_height * aspect)
      if (
        box_width <= width
        and box_height * box_width >= self.min_area * height * width
      ):
        break
    else:
      # Too long an image: the largest part of an allowed aspect ratio.
      aspect = min(max(width / height, _ASPECTS[0]), _ASPECTS[1])
      box_height = min(height, round(width / aspect))
      box_width = min(width, round(height * aspect))
    top = int(rng.integers(height - box_height + 1))
    left = int(rng.integers(width - box_width + 1))
    return Box(top, left, box_height, box_width)


class PerStep:
  """A training transform that is another one in each step."""

  def of_batch(self, rng: np.random.Generator) -> Any:
    """Returns the transform of a step, drawn by a generator of the step."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class OneOf(PerStep):
  """Of these, each step has one for all of its examples, drawn evenly."""

  transforms: tuple[Any, ...]

  def of_batch(self, rng: np.random.Generator) -> Any:
    drawn = self.transforms[rng.integers(len(self.transforms))]
    return drawn.of_batch(rng) if isinstance(drawn, PerStep) else drawn


@dataclasses.dataclass(frozen=True)
class EvalTransform:
  """The same pixels every time: a resize, and maybe a central crop.

  Attributes:
    image_size: (height, width) of the output.
    preprocessing: how images are resized to it.

  Raises:
    ValueError: The crop does not fit into the resized image.
  """

  image_size: tuple[int, int]
  preprocessing: Preprocessing = Preprocessing()

  def __post_init__(self) -> None:
    _check_size(self.image_size)
    self.preprocessing.check(self.image_size)

  def __call__(
    self, record: Mapping[str, Any]
  ) -> dict[str, np.ndarray | np.int32]:
    """A record to {'image'} and maybe 'label'.

    Raises:
      UnreadableImage: The image cannot be decoded.
    """
    image = self.image(record['image'], record['name'])
    return {'image': image} | _label(record)

  def image(self, data: bytes | np.ndarray, name: str) -> np.ndarray:
    """An encoded file or uint8 pixels [H, W, 3] to uint8 pixels of image_size.

    Raises:
      UnreadableImage: The image cannot be decoded; the message has `name`.
    """
    picture = decode.open_image(data, name)
    given, shape = self.preprocessing, (picture.height, picture.width)
    plan = given.plan(shape, self.image_size)
    pixels = picture.read(plan.box, plan.part if given.reduces else None)
    return given.resize(pixels, plan, self.image_size)


def seed_of(name: str) -> int:
  """Returns what is the same for a record's name wherever its folder is."""
  last = '/'.join(name.split('/')[-2:])
  return zlib.crc32(last.encode(errors='surrogateescape'))


@dataclasses.dataclass(frozen=True)
class WrongLabels:
  """A transform that gives a share of the images another class.

  Which images and which class follow from their names, so that it is the same
  every time an image is seen; all other classes are as likely.

  Attributes:
    transform: of the images.
    share: from 0 to 1.
    classes: C.
  """

  transform: TrainTransform
  share: float
  classes: int

  def __call__(
    self, record: Mapping[str, Any], rng: np.random.Generator
  ) -> dict[str, Any]:
    """A record and the generator to {'image', 'label'}, as it has a class."""
    if 'label' not in record:
      return self.transform(record, rng)
    own = np.random.RandomState(seed_of(record['name']))
    label = record['label']
    if own.random_sample() < self.share:
      label = (label + 1 + own.randint(self.classes - 1)) % self.classes
    return self.transform({**record, 'label': label}, rng)


@dataclasses.dataclass(frozen=True)
class WithoutLabel:
  """A transform for objectives that learn from images alone."""

  transform: TrainTransform | EvalTransform

  def __call__(self, record: Mapping[str, Any], *rng: Any) -> dict[str, Any]:
    """A record, and the generator of a training transform, to {'image'}."""
    unlabelled = {k: v for k, v in record.items() if k != 'label'}
    return self.transform(unlabelled, *rng)


def _label(record: Mapping[str, Any]) -> dict[str, np.ndarray | np.int32]:
  if 'label' not in record:
    return {}
  label = record['label']
  return {'label': label if np.ndim(label) else np.int32(label)}


def _check_size(image_size: tuple[int, int]) -> None:
  if min(image_size) < 1:
    raise ValueError(
      f'image_size={tuple(image_size)} must be a positive (height, width)'
    )
