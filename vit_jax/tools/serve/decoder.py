"""Decodes and preprocesses untrusted image files in a separate process.

The pixels are the same as in `predict`, unless a DETR has a landscape input and
the image is portrait, or vice versa. The process has limits of time and memory.
If it hangs, the server replaces it.
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

# Name of the environment variable with the token. Other users of the machine
# can see flags, but not environment variables.
TOKEN = 'VIT_JAX_TOKEN'
# Only common formats, because every decoder can be attacked.
FORMATS = ('JPEG', 'PNG', 'WEBP', 'AVIF', 'GIF', 'BMP', 'TIFF')
MAX_PIXELS = 50_000_000
SECONDS = 10.0
_START_SECONDS = 60.0
# Limit of the address space. Libraries count too, so it is far larger than the
# memory in use.
MAX_MEMORY_BYTES = 2 << 30


class UnreadableUpload(ValueError):
  """An upload cannot be read; the message says why."""


class View(NamedTuple):
  """The input format of a model."""

  size: tuple[int, int]  # height and width in pixels
  preprocessing: Preprocessing
  # Whether to keep the aspect ratio, and pad right and bottom with black.
  keeps_shape: bool = False


class Seen(NamedTuple):
  """A preprocessed image."""

  pixels_HWC: np.ndarray  # the input of the model, uint8 RGB
  # The part that the model sees: top, left, height and width as shares of the
  # upright image.
  box: tuple[float, ...]
  size: tuple[int, int]  # height and width without padding, in pixels


def see(data: bytes, view: View) -> Seen:
  """Decodes and preprocesses an image file; raises UnreadableImage."""
  picture = decode.open_image(
    data, 'upload', formats=FORMATS, max_pixels=MAX_PIXELS
  )
  H, W = picture.height, picture.width
  given, size = view.preprocessing, view.size
  if view.keeps_shape:
    size = orientation.fitted_size((H, W), size, min(size))
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
    """Starts the process, or raises OSError; `seconds` is a limit per image."""
    self._views = views
    self._seconds = seconds
    self._start()

  def _start(self) -> None:
    root = os.fspath(pathlib.Path(__file__).parents[3])
    # The process reads untrusted images, so it must not know the token.
    env = {k: x for k, x in os.environ.items() if k != TOKEN}
    paths = filter(None, [root, env.get('PYTHONPATH')])
    env['PYTHONPATH'] = os.pathsep.join(paths)
    env['OPENBLAS_NUM_THREADS'] = '1'  # decoding does not use BLAS
    views = json.dumps(self._views, default=vars)
    self._pipe, other = connection.Pipe()
    with other:
      self._process = subprocess.Popen(
        [sys.executable, '-m', __name__, str(other.fileno()), views],
        pass_fds=[other.fileno()],
        process_group=0,  # Ctrl-C reaches only the server, not the new process
        env=env,
      )
    try:
      self._receive(_START_SECONDS)
    except (EOFError, OSError):
      self.close()
      raise OSError(
        'The process that decodes images does not start. The output of the '
        'server has its error.'
      ) from None

  def see(self, data: bytes | bytearray) -> list[Seen]:
    """Decodes and preprocesses an image file for each view.

    Raises:
      UnreadableUpload: if `data` is not an image, is damaged, has too many
        pixels, or takes too much time or memory.
      OSError: if the process cannot be started.
    """
    # The process may have exceeded a limit and ended after the last image.
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
        f'Decoding the image takes more than {self._seconds:g} seconds or too '
        'much memory. Send a smaller image.'
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
    self._process.kill()
    self._process.wait()
    self._pipe.close()


def main() -> None:
  """Runs the separate process."""
  # Otherwise strangers could write to the log through warnings about images.
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
        with decode.naming_errors('upload'):
          seen = [see(data, view) for view in views]
      except decode.UnreadableImage as e:
        error = (
          f'The image cannot be read: {e.reason:.200}. Send one of '
          f'{", ".join(FORMATS)} with at most {MAX_PIXELS:,} pixels.'
        )
      facts = [[x.pixels_HWC.shape, x.box, x.size] for x in seen]
      pipe.send_bytes(json.dumps([facts, error]).encode())
      for x in seen:
        pipe.send_bytes(x.pixels_HWC.tobytes())


if __name__ == '__main__':
  main()
