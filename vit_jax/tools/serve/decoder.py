"""The other end of `uploads`: a process that decodes, with a time limit."""

import os
import pathlib
import subprocess
import sys
import threading

import numpy as np

from vit_jax.tools.serve import options, uploads

SECONDS = 10.0
START_SECONDS = 60.0


class Decoder:
  """Decodes one image at a time, in a process that is replaced if it hangs."""

  def __init__(self, views: list[uploads.View], seconds: float = SECONDS):
    """Starts it.

    Args:
      views: what each image becomes.
      seconds: after which an image is given up.

    Raises:
      OSError: the process cannot be started.
    """
    self._views = views
    self._seconds = seconds
    self._lock = threading.Lock()
    self._start()

  def _start(self) -> None:
    root = os.fspath(pathlib.Path(__file__).parents[3])
    others = filter(None, [os.environ.get('PYTHONPATH')])
    # What reads images of strangers need not know the secret.
    env = {k: x for k, x in os.environ.items() if k != options.TOKEN}
    self._process = subprocess.Popen(
      [sys.executable, '-m', uploads.__name__],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      # Ctrl-C is not for it: it ends when nobody asks any more.
      process_group=0,
      # Threads of a library that multiplies matrices, which nobody does there.
      env=env
      | {
        'PYTHONPATH': os.pathsep.join([root, *others]),
        'OPENBLAS_NUM_THREADS': '1',
      },
    )
    assert self._process.stdin and self._process.stdout
    self._questions = self._process.stdin
    self._answers = self._process.stdout
    timer = threading.Timer(START_SECONDS, self._process.kill)
    timer.start()
    try:
      # What a module prints as it is imported is no message.
      ready = self._answers.read(len(uploads.READY)) == uploads.READY
    finally:
      timer.cancel()
    if not ready:
      self.close()
      raise OSError(
        'The process that decodes images does not begin, or prints something: '
        'see above.'
      )

  def see(self, data: bytes | bytearray) -> list[uploads.Seen]:
    """Returns an image file as each of the views has it.

    Raises:
      UnreadableUpload: for what is no image, damaged, has too many pixels or
        takes too long.
      OSError: the process cannot be started.
    """
    with self._lock:
      # It was given up, or ended while nobody asked, for want of memory, say.
      if self._process.poll() is not None:
        self.close()
        self._start()
      timer = threading.Timer(self._seconds, self._end)
      timer.start()
      try:
        uploads.send(self._questions, self._views, data)
        answer, pixels = uploads.receive(self._answers)
      except (EOFError, OSError):
        self.close()
        raise uploads.UnreadableUpload(
          f'The image cannot be decoded within {self._seconds:g} seconds and '
          'the memory there is: send a simpler one.'
        ) from None
      finally:
        timer.cancel()
        # Where it was about to end the process, the next image shall know.
        timer.join()
    if 'error' in answer:
      raise uploads.UnreadableUpload(answer['error'])
    return [
      uploads.Seen(
        np.frombuffer(part, np.uint8).reshape(shape), tuple(box), tuple(size)
      )
      for part, (shape, box, size) in zip(pixels, answer['seen'], strict=True)
    ]

  def close(self) -> None:
    """Ends the process."""
    self._end()
    for pipe in (self._questions, self._answers):
      try:
        pipe.close()
      except OSError:  # what was still to be written
        pass

  def _end(self) -> None:
    self._process.kill()
    self._process.wait()
