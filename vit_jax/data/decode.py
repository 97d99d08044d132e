"""Decodes image files to RGB pixels.

The content decides the format; the file extension is ignored. libjpeg-turbo
(simplejpeg) decodes JPEGs, at 1/2, 1/4 or 1/8 of the size if that is enough. In
most JPEGs, it stops below the last row that the caller needs. Pillow decodes
all other formats, JPEGs in CMYK, and JPEGs with faults that may be harmless. At
full size and with `exact`, both decode a JPEG to the same pixels.

Every image becomes uint8 RGB of shape [H, W, 3]:
  - the EXIF orientation is applied, or the XMP orientation if EXIF has none;
  - transparency is composited on white, as viewers show it;
  - 16-bit grey is scaled to 8 bits; white is 2^n - 1 if a TIFF declares n bits;
  - CMYK is converted with the inversion that Adobe files need;
  - only the first frame of an animation is read.
"""

import contextlib
import functools
import importlib.util
import io
import logging
import os
import re
import stat
import struct
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image, PngImagePlugin

from vit_jax.data import orientation
from vit_jax.data.orientation import Box, Turn

# Larger images are refused. Pillow warns that they may be decompression bombs.
MAX_PIXELS = 89_478_485

# Increase this number when a change of the decoder may affect which files are
# readable. The image check then ignores its older results.
DECODER_VERSION = 3

# The largest 12-bit value, 4095, becomes 16 when 16 bits are scaled to 8.
_WHITE_OF_12_BITS = 16

HEIC_NEEDS = "HEIC images need pillow-heif: pip install -e '.[heif]'"

# Logs a warning, but each text only once.
warn_once = functools.cache(logging.getLogger(__name__).warning)

# The entry that `warnings.filterwarnings` adds for Pillow's warnings.
_PILLOW_FILTER = ('ignore', None, Warning, re.compile(r'PIL\.'), 0)


class UnreadableImage(ValueError):
  """An image that cannot be decoded: `name` is the file, `reason` says why."""

  def __init__(self, name: str, reason: str):
    # Pickling needs both in `args`.
    super().__init__(name, reason)
    self.name = name
    self.reason = reason

  def __str__(self) -> str:
    return f'cannot read image {self.name}: {self.reason}'

  def __reduce__(self) -> tuple[Any, ...]:
    # Workers send the error. Pickling would lose its cause, by which a command
    # chooses its exit status. Errors of plugins may not be picklable.
    known = isinstance(self.__cause__, OSError | MemoryError)
    cause = self.__cause__ if known else None
    return type(self), (self.name, self.reason), {'__cause__': cause}


def read_file(path: str) -> bytes:
  """Returns the bytes of an image file.

  Raises UnreadableImage if it cannot be read or is not a regular file.
  """
  try:
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
      raise UnreadableImage(path, 'Not a regular file')
    with open(path, 'rb') as file:
      return file.read()
  except OSError as error:
    # If the cause is an OSError of failing storage, a command ends with 71.
    raise UnreadableImage(path, error.strerror or str(error)) from error


def state_of(path: str) -> str:
  """Formats a file's path, size and modification time."""
  try:
    found = os.stat(path)
  except OSError:  # a broken link, for example: the image check reports it
    return f'{path}\0unreadable'
  return f'{path}\0{found.st_size} {found.st_mtime_ns}'


class Picture:
  """An image of known size; `read` returns its pixels or a part of them.

  This class holds decoded pixels; `_JpegPicture` decodes in `read`. `height`
  and `width` describe the upright image.
  """

  def __init__(self, image: np.ndarray):
    self.height, self.width = image.shape[:2]
    self._image = image

  def read(
    self,
    box: Box | None = None,
    size: tuple[int, int] | None = None,
    *,
    exact: bool = True,
  ) -> np.ndarray:
    """Returns a part of the image as uint8 [H, W, 3].

    Args:
      box: The part; None for the whole image.
      size: The (height, width) to which the caller will resize the part. A JPEG
        may then be decoded at 1/2, 1/4 or 1/8 of its size, but not to less than
        `size`. None for full size.
      exact: False allows a faster inverse DCT, which is good enough for
        training: it changes pixels by one grey level on average.

    Raises:
      UnreadableImage: The data is damaged or truncated.
    """
    if box is None:
      return self._image
    top, left, height, width = box
    return self._image[top : top + height, left : left + width]


def open_image(
  data: bytes | np.ndarray,
  name: str,
  *,
  formats: Sequence[str] = (),
  max_pixels: int = 0,
) -> Picture:
  """Opens an encoded image or pixels; most JPEGs are decoded later, in `read`.

  Args:
    data: the bytes of a file, or pixels uint8 [H, W, 3].
    formats: Pillow's names of the accepted formats, which must include JPEG;
      empty accepts all formats.
    max_pixels: the largest accepted number of pixels; 0 for `MAX_PIXELS`.

  Raises:
    UnreadableImage: The data is damaged, its format, dtype or shape is not
      accepted, or the image has too many pixels.
  """
  if isinstance(data, np.ndarray):
    if data.dtype != np.uint8 or data.ndim != 3 or data.shape[2] != 3:
      raise UnreadableImage(
        name,
        f'pixels must be uint8 [H, W, 3], not {data.dtype} {data.shape}',
      )
    return Picture(data)
  header = read_header(data)
  if header is None:
    return Picture(_decode_with_pillow(data, name, formats, max_pixels))
  _refuse_bomb(header.width, header.height, name, max_pixels)
  return _JpegPicture(data, name, header)


def decode(data: bytes | np.ndarray, name: str) -> np.ndarray:
  """Decodes a whole image at full size; see `open_image`."""
  return open_image(data, name).read()


def _refuse_bomb(width: int, height: int, name: str, most: int) -> None:
  most = most or MAX_PIXELS
  if width * height > most:
    raise UnreadableImage(
      name,
      f'{width}x{height} pixels exceed the limit of {most} '
      '(a decompression bomb?); scale the file down',
    )


class JpegHeader(NamedTuple):
  """Facts from the header of a JPEG; height and width are before rotation.

  A crop needs no row below its bottom. The decoder stops there if a smaller
  height is written into the header. This saves 15 % of the time for a training
  crop of a 500 x 375 image.

  Attributes:
    height_at: position of the height in the file, in bytes; 0 if the decoder
      cannot stop early. Only sequential JPEGs of one scan without restart
      markers allow it: libjpeg would report missing markers as damage.
    lookahead: number of following rows that may affect a decoded row; 0 unless
      chroma is interpolated between rows.
    has_metadata: whether the file has EXIF or XMP, which may rotate the image.
  """

  height: int
  width: int
  height_at: int
  lookahead: int
  has_metadata: bool


def read_header(data: bytes) -> JpegHeader | None:
  """Reads the header of a JPEG, up to its first scan.

  Returns None for a damaged header, another format, or a JPEG in CMYK.
  """
  if data[:3] != b'\xff\xd8\xff':
    return None
  at, frame_at, has_metadata, restarts = 2, 0, False, False
  while at + 4 <= len(data) and data[at] == 0xFF:
    marker = data[at + 1]
    length = data[at + 2] << 8 | data[at + 3]
    if marker == 0xDA:  # start of scan
      break
    # C0 to CF start a frame, except C4, C8 and CC.
    if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
      frame_at = at
    elif marker == 0xE1:
      has_metadata = True
    elif marker == 0xDD:
      restarts = True
    at += 2 + length
  else:
    return None
  if not frame_at or frame_at + 10 > len(data) or at + 5 > len(data):
    return None
  height, width, components = struct.unpack_from('>HHB', data, frame_at + 5)
  if not height or not width or components not in (1, 3):
    return None
  # Each component has three bytes; the second has the sampling factors.
  sampling = data[frame_at + 11 : frame_at + 10 + 3 * components : 3]
  tallest = max((factors & 15 for factors in sampling), default=1)
  sequential = data[frame_at + 1] in (0xC0, 0xC1)
  one_scan = data[at + 4] == components
  return JpegHeader(
    height=height,
    width=width,
    height_at=frame_at + 5 if sequential and one_scan and not restarts else 0,
    lookahead=0 if tallest == 1 else 2 * tallest,
    has_metadata=has_metadata,
  )


class _JpegPicture(Picture):
  """A JPEG of one or three components."""

  def __init__(self, data: bytes, name: str, header: JpegHeader):
    self._data = data
    self._name = name
    self._header = header
    self._turn = Turn()
    if header.has_metadata:
      # Pillow may find a fault that `read_header` does not see.
      with naming_errors(name):
        self._turn = orientation.turn_of(_pillow_open(data, ('JPEG',)))
    self.height, self.width = header.height, header.width
    if self._turn.transpose:
      self.height, self.width = self.width, self.height

  def read(
    self,
    box: Box | None = None,
    size: tuple[int, int] | None = None,
    *,
    exact: bool = True,
  ) -> np.ndarray:
    box = box or Box(0, 0, self.height, self.width)
    whole = self.height, self.width
    factor = orientation.scale_factor(box, size) if size else 1
    top, _, height, _ = orientation.stored(box, whole, self._turn)
    image = self._decode(factor, top + height, exact)
    if image is None:
      factor = 1
      with naming_errors(self._name):
        image = orientation.rgb(_pillow_open(self._data, ('JPEG',)))
    return orientation.upright(image, self._turn, box, whole, factor)

  def _decode(self, factor: int, bottom: int, exact: bool) -> np.ndarray | None:
    """Decodes rows from the top to at least `bottom`, at 1/factor of the size.

    Returns None if libjpeg reports a fault that may be harmless.
    """
    data: bytes | bytearray = self._data
    rows = self._header.height
    if self._header.height_at:
      rows = min(rows, bottom + self._header.lookahead * factor)
      data = bytearray(data)
      struct.pack_into('>H', data, self._header.height_at, rows)
    columns = self._header.width
    image = np.empty((-(-rows // factor), -(-columns // factor), 3), np.uint8)
    try:
      simplejpeg.decode_jpeg(
        data,
        min_height=image.shape[0],
        min_width=image.shape[1],
        min_factor=factor,
        fastdct=not exact,
        buffer=image,
      )
      return image
    except ValueError as error:
      reason = str(error)
    if rows < self._header.height and 'extraneous bytes before' in reason:
      return image  # the extraneous bytes are the rows left out on purpose
    if 'remature end' in reason:
      # libjpeg fills the missing rows with grey.
      raise UnreadableImage(self._name, f'truncated: {reason}')
    return None


@contextlib.contextmanager
def naming_errors(name: str):
  """Turns any error into UnreadableImage for the file `name`."""
  # Pillow's warnings are ignored in the whole process, because `catch_warnings`
  # is not thread-safe. This module itself handles what Pillow warns of:
  # decompression bombs and damaged metadata.
  if _PILLOW_FILTER not in warnings.filters:
    warnings.filterwarnings('ignore', module=r'PIL\.')
  try:
    yield
  except UnreadableImage:
    raise
  except MemoryError as error:
    raise UnreadableImage(name, 'not enough memory') from error
  # Pillow's plugins raise OSError, SyntaxError, struct.error, IndexError,
  # EOFError, ValueError and more if a file is damaged.
  except Exception as error:
    if isinstance(error, Image.UnidentifiedImageError):
      reason = 'not an image of a known format'
    elif isinstance(error, Image.DecompressionBombError):
      # The limit in Pillow's message is twice MAX_PIXELS.
      size, _, _ = str(error).partition(' exceeds')
      reason = f'{size} is too large; scale the file down'
    else:
      reason = str(error) or type(error).__name__
    raise UnreadableImage(name, reason) from error


@functools.cache
def pillow_formats() -> tuple[str, ...]:
  """Returns the formats that Pillow reads; with pillow-heif, HEIC too.

  Formats without a decoder are left out. EPS is left out too, because Pillow
  would start Ghostscript.
  """
  Image.init()
  # By default, a PNG with a text of more than 1 MB is refused.
  PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
  if importlib.util.find_spec('pillow_heif'):
    importlib.import_module('pillow_heif').register_heif_opener()
  left_out = ('EPS', 'BUFR', 'GRIB', 'HDF5', 'MPEG', 'WMF')
  return tuple(name for name in Image.OPEN if name not in left_out)


def _pillow_open(data: bytes, formats: Sequence[str]) -> Image.Image:
  """Opens a file in one of the formats, or in any if the list is empty."""
  known = [x for x in pillow_formats() if not formats or x in formats]
  try:
    return Image.open(io.BytesIO(data), formats=known)
  except Image.UnidentifiedImageError:
    # Pillow hides the fault of a damaged PNG, unless its reader is called.
    if 'PNG' in known and data.startswith(b'\x89PNG'):
      return PngImagePlugin.PngImageFile(io.BytesIO(data))
    raise


def _decode_with_pillow(
  data: bytes, name: str, formats: Sequence[str], max_pixels: int
) -> np.ndarray:
  """Decodes an image with Pillow at full size and turns it upright."""
  if not data:
    raise UnreadableImage(name, 'the file is empty')
  is_heic = data[4:10] == b'ftyphe'
  if is_heic and not formats and 'HEIF' not in pillow_formats():
    raise UnreadableImage(name, HEIC_NEEDS)
  with naming_errors(name):
    image = _pillow_open(data, formats)
    _refuse_bomb(image.width, image.height, name, max_pixels)
    pixels = from_pillow(image)
  if image.mode.startswith('I') and 0 < pixels.max() <= _WHITE_OF_12_BITS:
    warn_once(
      f'A 16-bit image in {os.path.dirname(name)} is nearly black. If its '
      'values have 12 bits, write such images with 8 bits, or as TIFF with '
      'BitsPerSample=12 or MaxSampleValue=4095.'
    )
  return pixels


def from_pillow(image: Image.Image) -> np.ndarray:
  """Returns the upright pixels of an opened image, uint8 [H, W, 3].

  Raises the errors of `orientation.rgb`.
  """
  pixels = orientation.rgb(image)
  turn = orientation.turn_of(image)
  height, width = pixels.shape[:2]
  size = (width, height) if turn.transpose else (height, width)
  return orientation.upright(pixels, turn, Box(0, 0, *size), size)
