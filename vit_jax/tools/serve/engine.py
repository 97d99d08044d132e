"""From bytes to answers: a decoder, a thread that runs models, and memories.

Images and answers are kept for a while in memory, never on disk, by the digest
of the image. A slider that moves sends nothing and runs no model again.
"""

import contextlib
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException

from vit_jax.tools.serve.decoder import Decoder, Seen, View
from vit_jax.tools.serve.served_model import Answer, ServedModel

# Requests that wait or run; one more is refused.
MAX_WAITING = 32
_MAX_BYTES = 16 << 20  # of remembered images, and of remembered answers

# The image as each view has it.
Sights = dict[View, Seen]
# Returns a map hw. Arguments: the model's name, the image as the model sees it,
# the number of a class, a fusion of heads and the share to discard.
Explain = Callable[[str, np.ndarray, int, str, float], np.ndarray]


class Remembered:
  """A thread-safe cache of the values used last, up to a number of bytes.

  A value that is larger than that is remembered alone.
  """

  def __init__(self, max_bytes: int):
    """Remembers nothing yet."""
    self._max_bytes = max_bytes
    self._found: dict[Any, tuple[Any, int]] = {}  # the last used is last
    self._lock = threading.Lock()
    self._nbytes = 0

  def get(self, key: Any) -> Any:
    """Returns a value, or None."""
    with self._lock:
      value, nbytes = self._found.pop(key, (None, 0))
      if value is not None:
        self._found[key] = value, nbytes
      return value

  def put(self, key: Any, value: Any, nbytes: int) -> None:
    """Remembers a value, and forgets what was not used for longest."""
    with self._lock:
      self._nbytes += nbytes - self._found.pop(key, (None, 0))[1]
      self._found[key] = value, nbytes
      while self._nbytes > self._max_bytes and len(self._found) > 1:
        self._nbytes -= self._found.pop(next(iter(self._found)))[1]


class Engine:
  """Answers about images, for many who ask at once.

  Attributes:
    models: by name.
    explain: computes the map of a class; None where there is no JAX.
    waiting: number of requests that have a place.
  """

  def __init__(
    self, models: Mapping[str, ServedModel], explain: Explain | None
  ):
    """Starts the threads and the decoder."""
    self.models = models
    self.explain = explain
    self.waiting = 0
    self._views = list({model.view: None for model in models.values()})
    self._decoder = Decoder(self._views)
    self._images = Remembered(_MAX_BYTES)
    self._answers = Remembered(_MAX_BYTES)
    self._seconds = 0.1  # recent duration of a request
    # A thread each, so that images to decode hold up no model.
    self._decoding, self._running = (
      futures.ThreadPoolExecutor(1) for _ in range(2)
    )

  @contextlib.contextmanager
  def place(self) -> Iterator[None]:
    """Takes a place for a request; for the thread of the event loop only.

    Raises:
      HTTPException: if all places are taken.
    """
    self.refuse_if_full()
    self.waiting += 1
    start = time.perf_counter()
    try:
      yield
      took = (time.perf_counter() - start) / self.waiting
      self._seconds += 0.1 * (took - self._seconds)
    finally:
      self.waiting -= 1

  def refuse_if_full(self) -> None:
    """Raises HTTPException if all places are taken."""
    if self.waiting >= MAX_WAITING:
      seconds = max(1, math.ceil(self.waiting * self._seconds))
      raise HTTPException(
        503,
        f'All {MAX_WAITING} places are taken: ask again in {seconds} s.',
        {'Retry-After': str(seconds)},
      )

  def add(self, data: bytes | bytearray) -> futures.Future[tuple[str, Sights]]:
    """Returns the digest of an image and the image as each view has it.

    The result raises `UnreadableUpload` if the image cannot be read.
    """
    return self._decoding.submit(self._add, data)

  def _add(self, data: bytes | bytearray) -> tuple[str, Sights]:
    digest = hashlib.sha256(data).hexdigest()
    found = self.known(digest)
    if found is None:
      seen = self._decoder.see(data)
      found = dict(zip(self._views, seen, strict=True))
      nbytes = sum(x.pixels_HWC.nbytes for x in seen)
      self._images.put(digest, found, nbytes)
    return digest, found

  def known(self, digest: str) -> Sights | None:
    """Returns an image as each view has it, or None if it is forgotten."""
    return self._images.get(digest)

  def answer(
    self, digest: str, seen: Seen, model: str
  ) -> futures.Future[Answer]:
    """Returns the answer of a model about an image."""
    if (known := self._answers.get((digest, model))) is not None:
      future: futures.Future[Answer] = futures.Future()
      future.set_result(known)
      return future
    return self._running.submit(self._answer, digest, seen, model)

  def _answer(self, digest: str, seen: Seen, model: str) -> Answer:
    answer = self.models[model].run(seen)
    self._answers.put((digest, model), answer, answer.nbytes)
    return answer

  def explained(
    self, seen: Seen, model: str, number: int, fusion: str, discard: float
  ) -> futures.Future[np.ndarray]:
    """Returns the map hw of what speaks for a class."""
    assert self.explain
    return self._running.submit(
      self.explain, model, seen.pixels_HWC, number, fusion, discard
    )

  def close(self) -> None:
    """Ends the threads and the decoder; what still waits is dropped."""
    for executor in (self._decoding, self._running):
      executor.shutdown(cancel_futures=True)
    self._decoder.close()
