"""Several processes that train together, and how they end if one is lost.

If a process is lost, the other processes wait for it in a collective operation.
JAX notices this within HEARTBEAT_S, logs it and aborts the processes in C++.
`Watch` ends a process if training makes no progress although all processes are
alive.
"""

import contextlib
import ctypes
import faulthandler
import math
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

# EX_UNAVAILABLE of sysexits.h. slurm.sbatch and tpu.sh in launch/ restart a run
# after status 75, but not after this status, because the error may recur.
# (tpu.sh restarts it if the TPU was preempted.)
EXIT_LOST = 69

# Seconds without a heartbeat after which a process counts as lost. JAX's
# default is 100.
HEARTBEAT_S = 30
# Seconds within which all processes fail, if all fail for the same reason.
MEET_S = 15
# Maximum seconds until NFS shows a new file to other machines.
SEEN_S = 60


def join() -> None:
  """Connects this process with the other processes.

  On TPU and under cluster managers such as Slurm, JAX finds the processes
  itself. Elsewhere it reads the coordinator's address from
  JAX_COORDINATOR_ADDRESS, and raises ValueError if it is missing. This function
  reads JAX_NUM_PROCESSES and JAX_PROCESS_ID.
  """

  def number(variable: str) -> int | None:
    return int(os.environ[variable]) if variable in os.environ else None

  # JAX aborts when it loses a process. Only a C signal handler can change the
  # exit status: Python's handlers do not run then, and JAX's own
  # `missed_heartbeat_callback` throws std::bad_cast.
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
  os._exit(EXIT_LOST)


def refuse_unlike(
  see: Callable[[], Sequence[int]], refusal: str, patience_s: int = 0
) -> None:
  """Raises ValueError(refusal) in all processes if their `see` results differ.

  Otherwise the processes would take different steps next, and all would wait
  for each other without end.

  Args:
    see: returns numbers of at most 32 bits, equally many in each process.
    patience_s: seconds to repeat `see` until all results agree, because NFS may
      show files late.
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
  """Kills this process if it fails and the other processes do not.

  A normal exit would wait for the other processes, which wait for this process.
  """
  try:
    yield
  except BaseException as e:
    client = distributed.global_state.client
    assert client
    try:
      client.wait_at_barrier('vit_jax failed', 1000 * MEET_S)
    except jax.errors.JaxRuntimeError:
      # If another process is lost, JAX aborts this process while it sleeps. The
      # sleep is longer after a JAX error, because a collective operation may
      # fail before JAX notices the loss.
      is_jax = isinstance(e, jax.errors.JaxRuntimeError)
      time.sleep(HEARTBEAT_S * (2 if is_jax else 1))
      if not isinstance(e, SystemExit):
        traceback.print_exc()
      sys.stdout.flush()
      status = e.code if isinstance(e, SystemExit) else 1
      os._exit(status if isinstance(status, int) else 1)
    raise


class Watch:
  """Ends the process after `timeout_s` without a step, evaluation or save."""

  timeout_s: ClassVar[float] = math.inf  # `main` sets it

  def __init__(self) -> None:
    """Starts watching."""
    self._idle_s = 0.0
    self._stopped = threading.Event()
    threading.Thread(target=self._watch, daemon=True).start()

  def progress(self) -> None:
    """Restarts the clock after a step, evaluation or save."""
    self._idle_s = 0.0

  def stop(self) -> None:
    """Ends watching."""
    self._stopped.set()

  def _watch(self) -> None:
    tick_s = min(1.0, self.timeout_s)
    # Counts ticks instead of reading a clock, so that time during which the
    # process is suspended (Ctrl-Z) does not count.
    while not self._stopped.wait(tick_s):
      self._idle_s += tick_s
      if self._idle_s >= self.timeout_s:
        faulthandler.dump_traceback(2)
        number = distributed.global_state.process_id
        text = (
          f'error: Process {number} has finished no step, evaluation or save '
          f'for {self.timeout_s:g} s: a collective operation or the data '
          'hangs. The traceback above shows where. If training is only slow, '
          'raise --timeout_s. The same command resumes from the last '
          'checkpoint.\n'
        )
        os.write(2, text.encode())
        os._exit(EXIT_LOST)
