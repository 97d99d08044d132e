"""A process that decodes images, with limits of time and memory."""

import json
import os
import pathlib
import resource
import subprocess
import sys
import warnings
from multiprocessing import connection

import numpy as np
from PIL import Image

from vit_jax.data.preprocessing import Preprocessing
from vit_jax.tools.serve import options
from vit_jax.tools.serve.uploads import Seen, UnreadableUpload, View, see

SECONDS = 10.0
_START_SECONDS = 60.0
# Address space, libraries included: many times the memory in use.
MAX_MEMORY_BYTES = 2 << 30


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
    others = filter(None, [os.environ.get('PYTHONPATH')])
    # The process reads images of strangers and need not know the secret.
    env = {k: x for k, x in os.environ.items() if k != options.TOKEN}
    env['PYTHONPATH'] = os.pathsep.join([root, *others])
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
  warnings.simplefilter('ignore')
  Image.MAX_IMAGE_PIXELS = None  # `see` has a limit of its own
  for limit, most in (
    (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0),
  ):
    _, hard = resource.getrlimit(limit)
    if hard != resource.RLIM_INFINITY:
      most = min(most, hard)
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
