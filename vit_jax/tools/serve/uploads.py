"""Image files from strangers as models see them, in a process of its own.

It is started as `python -m vit_jax.serve.uploads`, answers on standard output
what it reads on standard input, may write no file, and can be ended by whoever
has waited enough. Pixels are those of `data/decode.py` and
`data/transforms.py`, with Pillow and NumPy alone: JPEGs decoded at 1/2, 1/4 or
1/8 where that is enough, upright, transparency on white, 16-bit grey scaled,
of an animation the first frame.
"""

import functools
import json
import resource
import struct
import sys
import warnings
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image, JpegImagePlugin

from vit_jax.data import upright
from vit_jax.data.preprocessing import Plan, Preprocessing
from vit_jax.data.upright import Box
from vit_jax.tools.serve.resizing import resize

# Those that people have; each decoder more is one more to attack.
FORMATS = ('JPEG', 'PNG', 'WEBP', 'AVIF', 'GIF', 'BMP', 'TIFF')
MAX_PIXELS = 50_000_000
# Of addresses, libraries included, which are many times what is used.
_MAX_MEMORY_BYTES = 2 << 30

# What the process says first.
READY = b'ready to decode\n'


class UnreadableUpload(ValueError):
  """Says why bytes are no image that is served."""


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
  image = upright.open_image(data, _formats())
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
  turn = upright.turn_of(image)
  H, W = (width, height) if turn.transpose else (height, width)
  given, size = view.preprocessing, view.size
  if view.keeps_shape:
    size = upright.fitted((H, W), size)
    plan = Plan(Box(0, 0, H, W), size, (0, 0))
  else:
    plan = given.plan((H, W), size)
  box, part, (top, left) = plan
  factor = 1
  if reducible and given.reduces:
    factor = upright.scale_factor(box, part)
    image.draft(None, (width // factor, height // factor))
  pixels = upright.upright(upright.rgb(image), turn, box, (H, W), factor)
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


def send(pipe: IO[bytes], message: Any, *data: bytes | bytearray) -> None:
  """Writes JSON of values and dataclasses, and bytes with their lengths."""
  head = json.dumps(
    [message, [len(part) for part in data]], default=vars
  ).encode()
  for part in (struct.pack('>I', len(head)), head, *data):
    pipe.write(part)
  pipe.flush()


def receive(pipe: IO[bytes]) -> tuple[Any, list[bytes]]:
  """Reads what `send` has written.

  Raises:
    EOFError: if the other end is closed.
  """

  def read(count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
      raise EOFError
    return data

  (length,) = struct.unpack('>I', read(4))
  message, lengths = json.loads(read(length))
  return message, [read(count) for count in lengths]


def main() -> None:
  """Answers lists of views and an image until nobody asks any more."""
  warnings.simplefilter('ignore')
  # `see` decides by the number of pixels.
  Image.MAX_IMAGE_PIXELS = None
  for limit, most in (
    (resource.RLIMIT_AS, _MAX_MEMORY_BYTES),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0),
  ):
    _, hard = resource.getrlimit(limit)
    if hard != resource.RLIM_INFINITY:
      most = min(most, hard)
    resource.setrlimit(limit, (most, most))
  sys.stdout.buffer.write(READY)
  sys.stdout.buffer.flush()
  while True:
    try:
      views, (data,) = receive(sys.stdin.buffer)
    except EOFError:
      return
    try:
      seen = [
        see(data, View(tuple(size), Preprocessing.of(given), keeps_shape))
        for size, given, keeps_shape in views
      ]
    except UnreadableUpload as e:
      send(sys.stdout.buffer, {'error': str(e)})
      continue
    found = [[x.pixels_HWC.shape, x.box, x.size] for x in seen]
    pixels = (x.pixels_HWC.tobytes() for x in seen)
    send(sys.stdout.buffer, {'seen': found}, *pixels)


if __name__ == '__main__':
  main()
