"""Image files from strangers as models see them, decoded in another process.

The pixels are those of `predict`, made by the same functions. The process has
limits of time and memory and is replaced if it hangs.
"""

import json
import logging
import os
import pathlib
import resource
import subprocess
import sys
import warnings
from multiprocessing import connection
from typing import NamedTuple

import numpy as np

from vit_jax.data import decode, orientation
from vit_jax.data.orientation import Box
from vit_jax.data.preprocessing import Plan, Preprocessing

# The environment variable of the token, which is hidden from other users.
TOKEN = 'VIT_JAX_TOKEN'
# The formats that people have; every further decoder could be attacked.
FORMATS = ('JPEG', 'PNG', 'WEBP', 'AVIF', 'GIF', 'BMP', 'TIFF')
MAX_PIXELS = 50_000_000
SECONDS = 10.0
_START_SECONDS = 60.0
# Address space, libraries included: many times the memory in use.
MAX_MEMORY_BYTES = 2 << 30


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
    box: the visible part of the upright image: top, left, height, width as
      shares.
    size: (height, width) of the pixels that are not padding.
  """

  pixels_HWC: np.ndarray
  box: tuple[float, ...]
  size: tuple[int, int]


def see(data: bytes, view: View) -> Seen:
  """Returns an image file as a model sees it.

  Raises:
    UnreadableUpload: if it is not an image, is damaged or has too many pixels.
  """
  try:
    with decode.naming_errors('upload'):
      return _see(data, view)
  except decode.UnreadableImage as e:
    raise UnreadableUpload(
      f'The image cannot be read: {e.reason:.200}. Send one of '
      f'{", ".join(FORMATS)} with at most {MAX_PIXELS:,} pixels.'
    ) from e


def _see(data: bytes, view: View) -> Seen:
  picture = decode.open_image(
    data, 'upload', formats=FORMATS, max_pixels=MAX_PIXELS
  )
  H, W = picture.height, picture.width
  given, size = view.preprocessing, view.size
  if view.keeps_shape:
    size = orientation.fitted((H, W), size)
    plan = Plan(Box(0, 0, H, W), size, (0, 0))
  else:
    plan = given.plan((H, W), size)
  pixels = picture.read(plan.box, plan.part if given.reduces else None)
  pixels = given.resize(pixels, plan, size)
  if view.keeps_shape:
    canvas = np.zeros((*view.size, 3), np.uint8)
    canvas[: size[0], : size[1]] = pixels
    return Seen(canvas, (0.0, 0.0, 1.0, 1.0), size)
  box, part, (top, left) = plan
  h, w = size
  shares = (
    (box.top + top / part[0] * box.height) / H,
    (box.left + left / part[1] * box.width) / W,
    h / part[0] * box.height / H,
    w / part[1] * box.width / W,
  )
  return Seen(pixels, shares, size)


class Decoder:
  """Decodes one image at a time, in a process that is replaced if it hangs."""

  def __init__(self, views: list[View], seconds: float = SECONDS):
    """Starts the process.

    Args:
      views: what each image becomes.
      seconds: time limit of an image.

    Raises:
      OSError: if the process cannot be started.
    """
    self._views = views
    self._seconds = seconds
    self._start()

  def _start(self) -> None:
    root = os.fspath(pathlib.Path(__file__).parents[3])
    # The process reads images of strangers and need not know the secret.
    env = {k: x for k, x in os.environ.items() if k != TOKEN}
    paths = filter(None, [root, env.get('PYTHONPATH')])
    env['PYTHONPATH'] = os.pathsep.join(paths)
    env['OPENBLAS_NUM_THREADS'] = '1'  # nothing multiplies matrices there
    views = json.dumps(self._views, default=vars)
    self._pipe, other = connection.Pipe()
    with other:
      self._process = subprocess.Popen(
        [sys.executable, '-m', __name__, str(other.fileno()), views],
        pass_fds=[other.fileno()],
        process_group=0,  # Ctrl-C is for the server, which ends the process
        env=env,
      )
    try:
      self._receive(_START_SECONDS)
    except (EOFError, OSError):
      self.close()
      raise OSError(
        'The process that decodes images does not start: see above.'
      ) from None

  def see(self, data: bytes | bytearray) -> list[Seen]:
    """Returns an image file as each view has it.

    Raises:
      UnreadableUpload: if it is not an image, is damaged, has too many pixels
        or takes too long.
      OSError: if the process cannot be started.
    """
    # A limit may have ended it since the last image.
    if self._process.poll() is not None:
      self.close()
      self._start()
    try:
      self._pipe.send_bytes(data)
      facts, error = json.loads(self._receive(self._seconds))
      parts = [self._receive(self._seconds) for _ in facts]
    except (EOFError, OSError):
      self.close()
      raise UnreadableUpload(
        f'The image cannot be decoded within {self._seconds:g} seconds and '
        'the available memory: send a simpler one.'
      ) from None
    if error:
      raise UnreadableUpload(error)
    return [
      Seen(
        np.frombuffer(part, np.uint8).reshape(shape), tuple(box), tuple(size)
      )
      for part, (shape, box, size) in zip(parts, facts, strict=True)
    ]

  def _receive(self, seconds: float) -> bytes:
    if not self._pipe.poll(seconds):
      raise TimeoutError
    return self._pipe.recv_bytes()

  def close(self) -> None:
    """Ends the process."""
    self._process.kill()
    self._process.wait()
    self._pipe.close()


def main() -> None:
  """Decodes images for the server; runs in the process."""
  # Warnings would be lines of the log that strangers write.
  warnings.simplefilter('ignore')
  logging.disable()
  for limit, most in (
    (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0),
  ):
    resource.setrlimit(limit, (most, most))
  views = [
    View(tuple(size), Preprocessing.of(given), keeps_shape)
    for size, given, keeps_shape in json.loads(sys.argv[2])
  ]
  with connection.Connection(int(sys.argv[1])) as pipe:
    pipe.send_bytes(b'ready')
    while True:
      try:
        data = pipe.recv_bytes()
      except EOFError:
        return
      seen, error = [], ''
      try:
        seen = [see(data, view) for view in views]
      except UnreadableUpload as e:
        error = str(e)
      facts = [[x.pixels_HWC.shape, x.box, x.size] for x in seen]
      pipe.send_bytes(json.dumps([facts, error]).encode())
      for x in seen:
        pipe.send_bytes(x.pixels_HWC.tobytes())


if __name__ == '__main__':
  main()
