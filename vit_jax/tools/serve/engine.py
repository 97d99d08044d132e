"""Decodes images and runs models in two threads, with two caches.

Images and answers are cached in memory by the image's digest, and never on
disk. While they are cached, moving a slider of the page does not upload the
image again. It does not run the model again either, unless the map is for a
class.
"""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException

from vit_jax.tools.serve.decoder import Decoder, Seen, View
from vit_jax.tools.serve.served_model import Answer, ServedModel

# The largest number of requests that wait or run. Further requests are refused.
MAX_WAITING = 32
_MAX_BYTES = 16 << 20  # size limit of each cache

# Maps each view to the image, preprocessed for it.
Sights = dict[View, Seen]
# Returns the attention map of a class, [h, w]. Arguments: name of the model,
# preprocessed image, index of the class, fusion of heads, share of weights to
# discard.
Explain = Callable[[str, np.ndarray, int, str, float], np.ndarray]


class LruCache:
  """A thread-safe least-recently-used cache with a limit in bytes.

  The newest value is kept even if it exceeds the limit.
  """

  def __init__(self, max_bytes: int):
    self._max_bytes = max_bytes
    self._found: dict[Any, tuple[Any, int]] = {}  # in order of last use
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
    """Stores a value; drops the least recently used values if full."""
    with self._lock:
      self._nbytes += nbytes - self._found.pop(key, (None, 0))[1]
      self._found[key] = value, nbytes
      while self._nbytes > self._max_bytes and len(self._found) > 1:
        self._nbytes -= self._found.pop(next(iter(self._found)))[1]


def busy(why: str) -> HTTPException:
  """Returns the error that asks a client to try again later."""
  return HTTPException(503, f'{why}. Try again in 5 s.', {'Retry-After': '5'})


class Engine:
  """Runs models on images for concurrent requests."""

  def __init__(
    self, models: Mapping[str, ServedModel], explain: Explain | None
  ):
    """Starts the threads and the decoder; `explain` is None without JAX."""
    self.models = models
    self.explain = explain
    self.waiting = 0  # requests that wait or run
    self._views = list({model.view: None for model in models.values()})
    self._decoder = Decoder(self._views)
    self.images = LruCache(_MAX_BYTES)  # `Sights` by digest
    self._answers = LruCache(_MAX_BYTES)
    # Separate threads, so that decoding does not delay models.
    self._decoding = futures.ThreadPoolExecutor(1)
    self._running = futures.ThreadPoolExecutor(1)

  @contextlib.contextmanager
  def place(self) -> Iterator[None]:
    """Counts a request as waiting in this context, or raises HTTPException.

    Call it only in the thread of the event loop.
    """
    self.refuse_if_full()
    self.waiting += 1
    try:
      yield
    finally:
      self.waiting -= 1

  def refuse_if_full(self) -> None:
    """Raises HTTPException if `MAX_WAITING` requests wait or run."""
    if self.waiting >= MAX_WAITING:
      raise busy(f'{MAX_WAITING} requests are waiting')

  def add(self, data: bytes | bytearray) -> futures.Future[tuple[str, Sights]]:
    """Decodes an image file in another thread.

    The future returns digest and `Sights`, or raises an error of `Decoder.see`.
    """
    return self._decoding.submit(self._add, data)

  def _add(self, data: bytes | bytearray) -> tuple[str, Sights]:
    digest = hashlib.sha256(data).hexdigest()
    found = self.images.get(digest)
    if found is None:
      seen = self._decoder.see(data)
      found = dict(zip(self._views, seen, strict=True))
      nbytes = sum(x.pixels_HWC.nbytes for x in seen)
      self.images.put(digest, found, nbytes)
    return digest, found

  def answer(
    self, digest: str, seen: Seen, model: str
  ) -> futures.Future[Answer]:
    """Runs a model on an image, or takes its output from the cache."""
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
    """Computes the attention map of a class; the future returns it, [h, w]."""
    assert self.explain
    return self._running.submit(
      self.explain, model, seen.pixels_HWC, number, fusion, discard
    )

  def close(self) -> None:
    """Ends the threads and the decoder, and drops waiting requests."""
    for executor in (self._decoding, self._running):
      executor.shutdown(cancel_futures=True)
    self._decoder.close()
