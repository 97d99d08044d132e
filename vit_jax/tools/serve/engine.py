"""From bytes to answers: one decoder, one queue, and what is remembered.

A thread runs the models, one batch after the other, of what waits for the same
model. Images and answers are kept for a while in memory and never on disk, by
the digest of their bytes, so that moving a slider sends nothing and runs
nothing again.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

import numpy as np

from vit_jax.tools.serve.decoder import Decoder
from vit_jax.tools.serve.served_model import Answer, ServedModel
from vit_jax.tools.serve.uploads import Seen, View

# Requests that wait or run; one more is refused.
MAX_WAITING = 32
MAX_BATCH = 4
_MAX_BYTES = 16 << 20  # that are remembered of images, and of answers

# From a view to an image as it has it.
Sights = dict[View, Seen]
# From a model's name, the image as it sees it, the number of a class, a fusion
# and the share discarded, to a map hw.
Explain = Callable[[str, np.ndarray, int, str, float], np.ndarray]


class Busy(Exception):
  """There is no place in the queue for `seconds`."""

  def __init__(self, seconds: int):
    super().__init__(seconds)
    self.seconds = seconds


class Remembered:
  """What was used last, up to a number of bytes; safe between threads.

  One thing may be larger, and is remembered alone.
  """

  def __init__(self, max_bytes: int):
    """Remembers nothing yet."""
    self._max_bytes = max_bytes
    self._found: collections.OrderedDict[Any, tuple[Any, int]] = (
      collections.OrderedDict()
    )
    self._lock = threading.Lock()
    self.nbytes = 0

  def get(self, key: Any) -> Any:
    """Returns what was put there, or None."""
    with self._lock:
      if key not in self._found:
        return None
      self._found.move_to_end(key)
      return self._found[key][0]

  def put(self, key: Any, value: Any, nbytes: int) -> None:
    """Remembers, and forgets what was not used for longest."""
    with self._lock:
      self.nbytes += nbytes - self._found.pop(key, (None, 0))[1]
      self._found[key] = value, nbytes
      while self.nbytes > self._max_bytes and len(self._found) > 1:
        self.nbytes -= self._found.popitem(last=False)[1][1]


@dataclasses.dataclass(frozen=True, eq=False)
class _Job:
  model: str
  seen: Seen
  future: futures.Future
  # Instead of the model, where a class is explained.
  function: Callable[[], Any] | None = None


class Engine:
  """Answers about images, for many who ask at once.

  Attributes:
    models: by name.
    explain: gives the rollout for a class; None where that is not possible.
    waiting: how many requests have a place.
    counts: of images by model, and of their seconds.
  """

  def __init__(
    self, models: Mapping[str, ServedModel], explain: Explain | None
  ):
    """Starts a thread and a decoder."""
    self.models = models
    self.explain = explain
    self.waiting = 0
    self.counts: dict[tuple[str, str], float] = collections.defaultdict(float)
    self._views = list({model.view: None for model in models.values()})
    self._decoder = Decoder(self._views)
    self._images = Remembered(_MAX_BYTES)
    self._answers = Remembered(_MAX_BYTES)
    self._jobs: collections.deque[_Job | None] = collections.deque()
    self._changed = threading.Condition()
    self._seconds = 0.1  # that a request takes, as of late
    self._thread = threading.Thread(target=self._work, daemon=True)
    self._thread.start()

  @property
  def remembered_bytes(self) -> int:
    return self._images.nbytes + self._answers.nbytes

  @contextlib.contextmanager
  def place(self) -> Iterator[None]:
    """Takes a place for a request; for the thread of the event loop only.

    Raises:
      Busy: if there is none.
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
    """Raises `Busy` if there is no place."""
    if self.waiting >= MAX_WAITING:
      raise Busy(max(1, math.ceil(self.waiting * self._seconds)))

  def add(self, data: bytes | bytearray) -> tuple[str, Sights]:
    """Returns the digest of an image, by which it is known for a while.

    And how it is seen, as `known` gives it.

    Raises:
      UnreadableUpload: saying why it is none.
    """
    digest = hashlib.sha256(data).hexdigest()
    found = self.known(digest)
    if found is None:
      seen = self._decoder.see(data)
      found = dict(zip(self._views, seen, strict=True))
      nbytes = sum(x.pixels_HWC.nbytes for x in seen)
      self._images.put(digest, found, nbytes)
    return digest, found

  def known(self, digest: str) -> Sights | None:
    """Returns an image as all views have it, or None if it is forgotten."""
    return self._images.get(digest)

  def answer(self, digest: str, seen: Seen, model: str) -> futures.Future:
    """Returns the `Answer` of a model about an image, to wait for."""
    future: futures.Future[Answer] = futures.Future()
    known = self._answers.get((digest, model))
    if known is not None:
      future.set_result(known)
      return future

    def remember(done: futures.Future) -> None:
      if not done.cancelled() and not done.exception():
        answer = done.result()
        self._answers.put((digest, model), answer, answer.nbytes)

    future.add_done_callback(remember)
    self._put(_Job(model, seen, future))
    return future

  def explained(
    self, seen: Seen, model: str, number: int, fusion: str, discard: float
  ) -> futures.Future:
    """Returns the map hw of what speaks for a class, to wait for."""
    assert self.explain
    future: futures.Future[np.ndarray] = futures.Future()
    asked = model, seen.pixels_HWC, number, fusion, discard
    function = functools.partial(self.explain, *asked)
    self._put(_Job(model, seen, future, function))
    return future

  def close(self) -> None:
    """Ends the thread after what waits, and the decoder."""
    self._put(None)
    self._thread.join()
    self._decoder.close()

  def _put(self, job: _Job | None) -> None:
    with self._changed:
      self._jobs.append(job)
      self._changed.notify()

  def _work(self) -> None:
    while (jobs := self._next()) is not None:
      # Whoever asked may be gone.
      jobs = [x for x in jobs if x.future.set_running_or_notify_cancel()]
      if not jobs:
        continue
      try:
        found = self._run(jobs)
      except Exception as e:  # whoever asked has to know
        for job in jobs:
          job.future.set_exception(e)
        continue
      for job, result in zip(jobs, found, strict=True):
        job.future.set_result(result)

  def _next(self) -> list[_Job] | None:
    """Returns the next job and those that run with it; None at the end."""
    with self._changed:
      self._changed.wait_for(lambda: self._jobs)
      first = self._jobs.popleft()
      if first is None:
        return None
      jobs = [first]
      if first.function or not self.models[first.model].batches:
        return jobs
      for job in list(self._jobs)[:MAX_WAITING]:
        if len(jobs) < MAX_BATCH and job and not job.function:
          if job.model == first.model:
            jobs.append(job)
            self._jobs.remove(job)
      return jobs

  def _run(self, jobs: list[_Job]) -> list[Any]:
    if jobs[0].function:
      return [jobs[0].function()]
    name = jobs[0].model
    answers = self.models[name].run([job.seen for job in jobs])
    self.counts['images', name] += len(jobs)
    self.counts['batches', name] += 1
    self.counts['seconds', name] += sum(x.seconds for x in answers)
    return answers
