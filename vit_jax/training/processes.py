"""Several processes that train together, and what one does without another.

A process that waits for a lost one in a collective operation waits for ever.
JAX notices within HEARTBEAT_S, logs it and aborts the process in C++. `Watch`
is for processes that are all alive and still do not move.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

# sysexits.h calls it EX_UNAVAILABLE. Not 75, "try again", which some launch
# scripts do without asking: it may have been an error that comes again.
EXIT_LOST = 69

# Without a heartbeat for so long, a process is lost. JAX's default is 100 s.
HEARTBEAT_S = 30
# Within this time of a failure the others fail too, if it is for all to see.
MEET_S = 15
# What NFS takes at the most to show a new file to other machines.
SEEN_S = 60


def join() -> None:
  """Joins the other processes.

  Of the environment JAX itself reads only the coordinator's address, and all
  three variables from Slurm and on TPU.

  Raises:
    ValueError: if there is nothing that says where the others are.
  """

  def number(variable: str) -> int | None:
    return int(os.environ[variable]) if variable in os.environ else None

  # JAX's abort gets its exit status. JAX calls no Python before (with a
  # `missed_heartbeat_callback` it throws std::bad_cast), nor does `signal`.
  libc = ctypes.CDLL(None)
  libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
  libc.signal(signal.SIGABRT, ctypes.cast(_lost, ctypes.c_void_p))
  jax.distributed.initialize(
    num_processes=number('JAX_NUM_PROCESSES'),
    process_id=number('JAX_PROCESS_ID'),
    heartbeat_timeout_seconds=HEARTBEAT_S,
  )


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _lost(number: int) -> None:
  del number
  os._exit(EXIT_LOST)


def refuse_unlike(
  see: Callable[[], Sequence[int]], refusal: str, patience_s: int = 0
) -> None:
  """Refuses that processes see different things, which all of them look at.

  What they do next would differ, and they would wait for one another for ever.

  Args:
    see: numbers of 32 bits at the most, as many in each process.
    refusal: what is wrong, and the way out.
    patience_s: for so long all of them look again, as NFS may be late.

  Raises:
    ValueError: in all of them.
  """
  for second in range(patience_s + 1):
    each = multihost_utils.process_allgather(np.array(see(), np.int64))
    each = each.reshape(jax.process_count(), -1)
    if np.array_equal(each, np.broadcast_to(each[:1], each.shape)):
      return
    if second < patience_s:
      time.sleep(1)
  raise ValueError(refusal)


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
  """Ends this process without the others if it alone fails inside.

  Leaving Python would wait for them, while they wait for this one.
  """
  try:
    yield
  except BaseException as e:
    client = distributed.global_state.client
    assert client
    try:
      client.wait_at_barrier('vit_jax failed', 1000 * MEET_S)
    except jax.errors.JaxRuntimeError:
      # If another process is lost, JAX aborts this one meanwhile. An error of a
      # collective operation may come before the loss is noticed.
      of_jax = isinstance(e, jax.errors.JaxRuntimeError)
      time.sleep(HEARTBEAT_S * (2 if of_jax else 1))
      if not isinstance(e, SystemExit):
        traceback.print_exc()
      sys.stdout.flush()
      status = e.code if isinstance(e, SystemExit) else 1
      os._exit(status if isinstance(status, int) else 1)
    raise


class Watch:
  """Ends the process once no step, evaluation or save has finished for long.

  Attributes:
    timeout_s: how long that is.
  """

  timeout_s: ClassVar[float] = 1800.0

  def __init__(self) -> None:
    """Starts watching."""
    self._idle_s = 0.0
    self._stopped = threading.Event()
    threading.Thread(target=self._watch, daemon=True).start()

  def progress(self) -> None:
    """Tells that something has finished."""
    self._idle_s = 0.0

  def stop(self) -> None:
    """Ends watching."""
    self._stopped.set()

  def _watch(self) -> None:
    tick_s = min(1.0, self.timeout_s)
    # Ticks and not a clock: the time in which the process is suspended, as by
    # Ctrl-Z, does not count.
    while not self._stopped.wait(tick_s):
      self._idle_s += tick_s
      if self._idle_s >= self.timeout_s:
        faulthandler.dump_traceback(2)
        number = distributed.global_state.process_id
        text = (
          f'error: Process {number} has finished no step, evaluation or save '
          f'for {self.timeout_s:g} s: a collective operation or the data hangs '
          'at the lines above. If it is only slow, raise --timeout_s. The same '
          'command resumes from the last checkpoint.\n'
        )
        os.write(2, text.encode())
        os._exit(EXIT_LOST)
