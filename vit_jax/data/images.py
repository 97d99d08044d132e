"""Preprocessing and augmentation of images, as set in `config.data`."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Self

import jax
import numpy as np

from vit_jax.data import device_augmentation, host_augmentation, transforms
from vit_jax.data.preprocessing import Preprocessing


@dataclasses.dataclass(frozen=True)
class Images:
  """Preprocessing and augmentation for training and evaluation.

  Training uses only the mean and std of `preprocessing`. It uses the inception
  crop if `crop_resize` is 0. Otherwise it uses BiT's crop, which first resizes
  images to `crop_resize` times the training size.
  """

  size: tuple[int, int]  # (H, W) of evaluation images in pixels
  preprocessing: Preprocessing = Preprocessing()
  crop_min_area: float = 0.05  # see `TrainTransform.min_area`
  crop_resize: float = 0.0
  flip: bool = False
  augment: str = ''  # see `host_augmentation.parse`
  erasing: float = 0.0  # probability that a rectangle becomes noise
  train_size: tuple[int, int] | None = None  # None if it equals `size`

  @classmethod
  def from_config(cls, data: Mapping[str, Any], size: tuple[int, int]) -> Self:
    """Returns the settings in `config.data`, for images of a size (H, W).

    Raises ValueError if a field is invalid, except for the ranges that
    `config.check_fields` checks.
    """
    text = data['train_size']
    train_size = size_of(text, 'data.train_size') if text else size
    if 0 < data['crop_resize'] < 1:
      raise ValueError(
        f'data.crop_resize is {data["crop_resize"]}: use 0, or 1 or more.'
      )
    names = {f.name for f in dataclasses.fields(cls)} & {*data} - {'train_size'}
    try:
      images = cls(
        size,
        Preprocessing.of(data),
        train_size=None if train_size == size else train_size,
        **{name: data[name] for name in names},
      )
      images.eval_transform()
    except ValueError as e:
      raise ValueError(f'data.{e}') from e
    images.train_transform()
    return images

  def train_transform(self) -> transforms.TrainTransform:
    size = self.train_size or self.size
    height, width = (round(self.crop_resize * side) for side in size)
    return transforms.TrainTransform(
      size,
      self.crop_min_area,
      (height, width) if self.crop_resize else None,
      host_augmentation.parse(self.augment),
    )

  def eval_transform(self) -> transforms.EvalTransform:
    return transforms.EvalTransform(self.size, self.preprocessing)

  def batch_shape(self, size: int) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a batch of training images, uint8 BHWC.

    `size` is the number of images.
    """
    shape = (size, *(self.train_size or self.size), 3)
    return jax.ShapeDtypeStruct(shape, np.uint8)

  def normalize(self, images_BHWC: jax.Array) -> jax.Array:
    """Normalises images with values from 0 to 255; returns float32."""
    mean, std = self.preprocessing.mean, self.preprocessing.std
    return device_augmentation.normalize(images_BHWC, mean, std)

  def flipped(self, images_BHWC: jax.Array, key: jax.Array) -> jax.Array:
    """Mirrors training images at random if `flip` is set."""
    if not self.flip:
      return images_BHWC
    return device_augmentation.random_flip(key, images_BHWC)

  def augmented(self, images_BHWC: jax.Array, key: jax.Array) -> jax.Array:
    """Applies `flip` and `erasing` to normalised training images."""
    images_BHWC = self.flipped(images_BHWC, key)
    if self.erasing:
      key = jax.random.fold_in(key, 1)
      images_BHWC = device_augmentation.random_erasing(
        key, images_BHWC, self.erasing
      )
    return images_BHWC


def size_of(text: str, what: str = 'data.image_size') -> tuple[int, int]:
  """Parses an image size such as '224' or '384x512' to (height, width).

  Raises ValueError if the text has another form; the message names `what`.
  """
  match = re.fullmatch(r'([1-9][0-9]*)(?:x([1-9][0-9]*))?', str(text))
  if not match:
    raise ValueError(
      f'{what} is {text!r}: give the side in pixels, as in 224, or height x '
      'width, as in 384x512.'
    )
  return int(match[1]), int(match[2] or match[1])
