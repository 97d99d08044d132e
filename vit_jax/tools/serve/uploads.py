"""Image files from strangers as models see them.

The pixels are those of `data/decode.py` and `data/transforms.py`, made with
Pillow and NumPy alone: JPEGs are decoded at 1/2, 1/4 or 1/8 of their size if
that is large enough, images are turned upright, transparency is put on white,
16-bit grey is scaled, and an animation is its first frame.
"""

import functools
from typing import NamedTuple

import numpy as np
from PIL import Image, JpegImagePlugin

from vit_jax.data import orientation
from vit_jax.data.orientation import Box
from vit_jax.data.preprocessing import Plan, Preprocessing
from vit_jax.tools.serve.resizing import resize

# The formats that people have; every further decoder could be attacked.
FORMATS = ('JPEG', 'PNG', 'WEBP', 'AVIF', 'GIF', 'BMP', 'TIFF')
MAX_PIXELS = 50_000_000


class UnreadableUpload(ValueError):
  """Says why an image cannot be read."""


class View(NamedTuple):
  """How a model sees images.

  Attributes:
    size: (height, width) in pixels.
    preprocessing: how an image is resized to that.
    keeps_shape: whether the whole image is as large as fits into the upper left
      corner, its aspect ratio kept, and the rest is black.
  """

  size: tuple[int, int]
  preprocessing: Preprocessing
  keeps_shape: bool = False


class Seen(NamedTuple):
  """An image as a model sees it.

  Attributes:
    pixels_HWC: uint8 RGB.
    box: the part of the upright image: top, left, height, width as shares.
    size: (height, width) of the pixels that are of the image.
  """

  pixels_HWC: np.ndarray
  box: tuple[float, ...]
  size: tuple[int, int]


def see(data: bytes, view: View) -> Seen:
  """Returns an image file as a model has it.

  Raises:
    UnreadableUpload: for what is no image, damaged, or has too many pixels.
  """
  if not data:
    raise UnreadableUpload('There is no image: the request is empty.')
  try:
    return _see(data, view)
  except UnreadableUpload:
    raise
  except Image.UnidentifiedImageError:
    raise UnreadableUpload(
      f'This is no image of a format known here: {", ".join(FORMATS)}.'
    ) from None
  except MemoryError:
    raise UnreadableUpload(
      'The image takes too much memory: send a smaller one.'
    ) from None
  # Pillow's plugins let through whatever a damaged file makes them raise.
  except Exception as e:
    raise UnreadableUpload(
      f'The image is damaged: {str(e) or type(e).__name__:.200}'
    ) from e


def _see(data: bytes, view: View) -> Seen:
  image = orientation.open_image(data, _formats())
  width, height = image.size
  if width * height > MAX_PIXELS:
    raise UnreadableUpload(
      f'The image has {width} x {height} pixels, more than {MAX_PIXELS:,}: '
      'send a smaller one.'
    )
  reducible = image.mode in ('L', 'RGB') and isinstance(
    image, JpegImagePlugin.JpegImageFile
  )
  if not reducible:
    image.load()  # because TIFF is turned by that, and must not be twice
  turn = orientation.turn_of(image)
  H, W = (width, height) if turn.transpose else (height, width)
  given, size = view.preprocessing, view.size
  if view.keeps_shape:
    size = orientation.fitted((H, W), size)
    plan = Plan(Box(0, 0, H, W), size, (0, 0))
  else:
    plan = given.plan((H, W), size)
  box, part, (top, left) = plan
  factor = 1
  if reducible and given.reduces:
    factor = orientation.scale_factor(box, part)
    image.draft(None, (width // factor, height // factor))
  pixels = orientation.upright(
    orientation.rgb(image), turn, box, (H, W), factor
  )
  pixels = given.resize(pixels, plan, size, resize)
  if view.keeps_shape:
    canvas = np.zeros((*view.size, 3), np.uint8)
    canvas[: size[0], : size[1]] = pixels
    return Seen(canvas, (0.0, 0.0, 1.0, 1.0), size)
  h, w = size
  shares = (
    (box[0] + top / part[0] * box[2]) / H,
    (box[1] + left / part[1] * box[3]) / W,
    h / part[0] * box[2] / H,
    w / part[1] * box[3] / W,
  )
  return Seen(pixels, shares, size)


@functools.cache
def _formats() -> tuple[str, ...]:
  """Returns those that this Pillow has."""
  Image.init()
  return tuple(name for name in FORMATS if name in Image.OPEN)
