"""Converts images opened by Pillow to upright uint8 RGB pixels."""

from typing import Any, NamedTuple

import numpy as np
from PIL import Image

_ORIENTATION_TAG = 0x0112
# Numbers of the TIFF tags BitsPerSample, MaxSampleValue and
# PhotometricInterpretation, which is 0 if pixels of value 0 are white.
_BITS_TAG, _MOST_TAG, _COLOURS_TAG = 258, 281, 262
# Maps the content of MaxSampleValue to the value of white, for 9 to 15 bits.
_WHITES: dict[Any, int] = {(2**n - 1,): 2**n - 1 for n in range(9, 16)}


class Box(NamedTuple):
  """A part of the full-size image, in pixels: upright, or as in the file."""

  top: int
  left: int
  height: int
  width: int


class Turn(NamedTuple):
  """The operations that make an image upright, in this order."""

  transpose: bool = False
  flip_rows: bool = False
  flip_columns: bool = False


def turn_of(image: Image.Image) -> Turn:
  """Returns the turn that makes an image upright.

  It comes from EXIF, or from XMP if EXIF has no orientation. Damaged EXIF is
  ignored. First load the pixels of a PNG or TIFF: a PNG may have EXIF behind
  its pixels, and Pillow itself turns a TIFF while it loads.
  """
  try:
    tag = image.getexif().get(_ORIENTATION_TAG, 1)
  except Exception:
    tag = 1
  return Turn(tag in (5, 6, 7, 8), tag in (3, 4, 7, 8), tag in (2, 3, 6, 7))


def upright(
  image: np.ndarray,
  turn: Turn,
  box: Box,
  size: tuple[int, int],
  factor: int = 1,
) -> np.ndarray:
  """Cuts a part out of stored pixels [H, W, 3] and turns it upright.

  Args:
    image: stored pixels, decoded at 1/factor of the full size. Rows below the
      part may be missing.
    turn: the operations that make the image upright.
    box: the part of the upright image at full size. It is rounded outwards if
      `factor` does not divide it.
    size: (height, width) of the whole upright image at full size.
  """
  top, left, height, width = stored(box, size, turn)
  image = image[
    top // factor : -(-(top + height) // factor),
    left // factor : -(-(left + width) // factor),
  ]
  if not any(turn):
    return image
  if turn.transpose:
    image = image.transpose(1, 0, 2)
  if turn.flip_rows:
    image = image[::-1]
  if turn.flip_columns:
    image = image[:, ::-1]
  return np.ascontiguousarray(image)


def stored(box: Box, size: tuple[int, int], turn: Turn) -> Box:
  """Converts a box from the upright image to the stored image."""
  top, left, height, width = box
  if turn.flip_rows:
    top = size[0] - top - height
  if turn.flip_columns:
    left = size[1] - left - width
  if turn.transpose:
    return Box(left, top, width, height)
  return Box(top, left, height, width)


def rgb(image: Image.Image) -> np.ndarray:
  """Returns the stored pixels of an opened image, uint8 [H, W, 3].

  Raises:
    ValueError: pixels are floats, or a grey value is not in 0..65535.
    Exception: Pillow's error if the file is damaged: OSError, SyntaxError or
      another.
  """
  image.load()
  if image.mode.startswith('I'):
    image = _grey16_to_grey8(image)
  elif image.mode == 'F':
    raise ValueError(
      'floating point pixels have no defined white; save the image with 8 or '
      '16 bits'
    )
  # Transparency may be an alpha channel, a colour or a palette index.
  if image.has_transparency_data:
    image = image.convert('RGBA')
    white = Image.new('RGBA', image.size, 'white')
    image = Image.alpha_composite(white, image)
  return np.asarray(image.convert('RGB'))


def _grey16_to_grey8(image: Image.Image) -> Image.Image:
  """Scales grey values to 0..255; Pillow's own conversion would clip them."""
  pixels = np.asarray(image).astype(np.int64)
  low, high = int(pixels.min()), int(pixels.max())
  if low < 0 or high > 65535:
    raise ValueError(
      f'grey values {low}..{high} exceed 16 bits; save the image with 8 or 16 '
      'bits'
    )
  tags = getattr(image, 'tag_v2', {})
  declared = (4095,) if tags.get(_BITS_TAG) == (12,) else tags.get(_MOST_TAG)
  white = _WHITES.get(declared, 65535)
  if high > white:
    white = 65535
  if tags.get(_COLOURS_TAG) == 0:  # Pillow inverts only up to 8 bits
    pixels = white - pixels
  grey = ((pixels * 255 + white // 2) // white).astype(np.uint8)
  # One 16-bit value may be transparent; it becomes white.
  grey[pixels == image.info.get('transparency', -1)] = 255
  return Image.fromarray(grey)


def scale_factor(box: Box, size: tuple[int, int]) -> int:
  """Returns the largest factor that shrinks `box` to at least `size`.

  The factor is 1, 2, 4 or 8: libjpeg has no vector code for other scales.
  """
  ratio = min(box.height // size[0], box.width // size[1])
  return next(f for f in (8, 4, 2, 1) if f <= max(ratio, 1))


def fitted_size(
  size: tuple[int, int], most: tuple[int, int], short: int = 0
) -> tuple[int, int]:
  """Returns the (height, width) to which DETR resizes an image of `size`.

  Args:
    most: (height, width) of the array that must hold the resized image.
    short: wanted length of the shorter side in pixels; the result is smaller if
      it would not fit otherwise. 0 for the largest that fits, up to rounding.
  """
  (height, width), (low, high) = size, sorted(size)
  longest = max(most)
  if not short or high / low * short > longest:
    short = max(1, round(longest * low / high))
  if height < width:
    h, w = short, int(short * width / height)
  else:
    h, w = int(short * height / width), short
  scale = min(1.0, most[0] / h, most[1] / w)
  return max(1, int(h * scale)), max(1, int(w * scale))
