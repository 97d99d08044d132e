"""SIGTERM and Ctrl-C: save, and end so that the same command goes on."""

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

# JAX has several processes agree on the number after the highest that any of
# them asked by. Steps would not do: the next run of a sweep begins below it.
_ASKED = itertools.count(1)
# The answer of the notice that is open.
_open: Callable[[], bool] | None = None
# Whether a run is in its loop. Elsewhere there is no state to save.
_in_run = False


class Preempted(Exception):
  """SIGTERM or Ctrl-C came; the state is saved and the same command goes on."""


def end_evaluation() -> None:
  """Ends an evaluation if SIGTERM or Ctrl-C came; all processes call it.

  Raises:
    Preempted: in a run that listens to them.
  """
  if _open and _open():
    raise Preempted('Preempted in an evaluation, which is done again.')


@contextlib.contextmanager
def preemption_notice(
  between_runs: bool = False,
) -> Iterator[Callable[[], bool]]:
  """Gives a function that says, after a step, whether SIGTERM or Ctrl-C came.

  Evaluations end between two batches.

  Args:
    between_runs: whether the code inside trains by runs with notices of their
      own. Outside of those one process alone ends at once: SIGTERM raises
      Preempted, and Ctrl-C KeyboardInterrupt.

  Several processes get the same answer at the same step. A second Ctrl-C raises
  KeyboardInterrupt. A notice inside another one, as of a run in a sweep, is the
  same notice.
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
    del frame
    if not (_in_run or several):
      if number == signal.SIGINT:
        raise KeyboardInterrupt
      raise Preempted('Preempted outside of training: nothing is lost.')
    if number == signal.SIGINT:
      signal.signal(signal.SIGINT, signal.default_int_handler)
      _log.info('Ctrl-C: saving and ending; again to end at once.')
    if several:
      os.kill(os.getpid(), signal.SIGTERM)  # JAX tells the others
    else:
      received.set()

  def preempted() -> bool:
    if several and multihost_utils.reached_preemption_sync_point(next(_ASKED)):
      received.set()
    return received.is_set()

  previous: dict[signal.Signals, Any] = {}
  if threading.current_thread() is threading.main_thread():
    for number in (
      (signal.SIGINT,) if several else (signal.SIGINT, signal.SIGTERM)
    ):
      # Ignored in what a shell runs in the background, and so it stays.
      if signal.getsignal(number) != signal.SIG_IGN:
        previous[number] = signal.signal(number, note)
  _open = preempted
  try:
    yield preempted
  finally:
    _open, _in_run = None, before
    for number, handler in previous.items():
      signal.signal(number, handler)
