"""Ends a run after SIGTERM or Ctrl-C, once its state is saved.

The same command then resumes the run.
"""

import contextlib
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

_log = logging.getLogger(__name__)

# Counts the calls to JAX's sync point, where processes agree on the step to
# stop at. JAX needs numbers that only grow; a run's steps begin again at 1.
_SYNC_POINTS = itertools.count(1)
# The function that the open `preemption_notice` yielded, or None.
_open: Callable[[], bool] | None = None
# Whether a run is training, so that it has a state to save.
_in_run = False


class Preempted(BaseException):
  """SIGTERM or Ctrl-C was received; the same command resumes.

  Like KeyboardInterrupt, it passes through `except Exception`.
  """


def end_evaluation() -> None:
  """Raises Preempted after SIGTERM or Ctrl-C inside a `preemption_notice`.

  All processes must call it.
  """
  if _open and _open():
    raise Preempted('Preempted in an evaluation; resuming repeats it.')


@contextlib.contextmanager
def preemption_notice(
  between_runs: bool = False,
) -> Iterator[Callable[[], bool]]:
  """Yields a function that tells whether SIGTERM or Ctrl-C was received.

  Call the yielded function after every step. All processes get the same answer
  at the same step. A second Ctrl-C raises KeyboardInterrupt. Nested notices, as
  of a sweep and its runs, yield the same function. Open the notice in the main
  thread; elsewhere it installs no signal handlers.

  Args:
    between_runs: whether the code inside is a sweep, whose runs have their own
      notices. In a single process, signals between these runs then end the
      sweep at once: SIGTERM raises Preempted, Ctrl-C raises KeyboardInterrupt.
  """
  global _open, _in_run
  before, _in_run = _in_run, not between_runs
  if _open:
    try:
      yield _open
    finally:
      _in_run = before
    return
  received = threading.Event()
  several = jax.process_count() > 1

  def note(number: int, frame: Any) -> None:
    if not (_in_run or several):
      if number == signal.SIGINT:
        raise KeyboardInterrupt
      raise Preempted('Preempted outside of training: nothing is lost.')
    if number == signal.SIGINT:
      signal.signal(signal.SIGINT, signal.default_int_handler)
      _log.info('Ctrl-C: saving, then ending. Press it again to end at once.')
    if several:
      os.kill(os.getpid(), signal.SIGTERM)  # JAX tells the other processes
    else:
      received.set()

  def preempted() -> bool:
    if several and multihost_utils.reached_preemption_sync_point(
      next(_SYNC_POINTS)
    ):
      received.set()
    return received.is_set()

  previous: dict[signal.Signals, Any] = {}
  if threading.current_thread() is threading.main_thread():
    numbers = [signal.SIGINT] if several else [signal.SIGINT, signal.SIGTERM]
    for number in numbers:
      # Shells make background jobs ignore SIGINT; leave that as it is.
      if signal.getsignal(number) != signal.SIG_IGN:
        previous[number] = signal.signal(number, note)
  _open = preempted
  try:
    yield preempted
  finally:
    _open, _in_run = None, before
    for number, handler in previous.items():
      signal.signal(number, handler)
