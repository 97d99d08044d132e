"""Views of an image for DINO: large and small crops with colour jitter."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from vit_jax.data import decode
from vit_jax.data.host_augmentation import OPERATIONS
from vit_jax.data.transforms import TrainTransform

# Largest change of each colour operation in BYOL (2006.07733) and in DINO's
# original code.
_JITTER = {'Brightness': 0.4, 'Contrast': 0.4, 'Color': 0.2, 'Hue': 0.1}
# Probabilities of colour jitter and of conversion to greyscale.
_CHANGED, _GREY = 0.8, 0.2


@dataclasses.dataclass(frozen=True)
class Distortion:
  """Random colour jitter, greyscale, blur and solarization."""

  blurred: float  # probability
  solarized: float  # probability
  radius: float  # largest radius of the blur in pixels

  def __call__(
    self, pixels_HWC: np.ndarray, rng: np.random.Generator
  ) -> np.ndarray:
    """Returns a changed copy of an image, uint8 HWC."""
    image = Image.fromarray(pixels_HWC)
    if rng.random() < _CHANGED:
      for name in rng.permutation(list(_JITTER)):
        value = rng.uniform(-_JITTER[name], _JITTER[name])
        if name == 'Hue':
          hsv = np.array(image.convert('HSV'))
          hsv[..., 0] += np.uint8(round(256 * value) % 256)  # wraps around
          image = Image.fromarray(hsv, 'HSV').convert('RGB')
        else:
          image = OPERATIONS[name].apply(image, value)
    if rng.random() < _GREY:
      image = image.convert('L').convert('RGB')
    if rng.random() < self.blurred:
      radius = self.radius * rng.uniform(0.05, 1)
      image = image.filter(ImageFilter.GaussianBlur(radius))
    if rng.random() < self.solarized:
      image = ImageOps.solarize(image)
    return np.array(image)


@dataclasses.dataclass(frozen=True)
class Views:
  """Turns a record into two large views and `count` small views."""

  large: tuple[TrainTransform, TrainTransform]
  small: TrainTransform
  count: int

  def __call__(
    self, record: Mapping[str, Any], rng: np.random.Generator
  ) -> dict[str, np.ndarray]:
    """Returns 'image' uint8 [2, H, W, 3], and 'small' uint8 [count, h, w, 3].

    If `count` is 0, 'small' is missing.

    Raises UnreadableImage if the image cannot be decoded.
    """
    pixels = decode.decode(record['image'], record['name'])
    decoded = {'image': pixels, 'name': record['name']}
    views = {'image': [view(decoded, rng)['image'] for view in self.large]}
    if self.count:
      views['small'] = [
        self.small(decoded, rng)['image'] for _ in range(self.count)
      ]
    return {name: np.stack(images) for name, images in views.items()}
