"""Several processes that train together, and what one does without another.

A process that waits for a lost one in a collective operation waits for ever.
JAX notices: each process sends heartbeats to process 0, and the others are told
when one's stop. Then, or when process 0 is gone, a C++ thread of JAX aborts the
process, as gloo's does where a connection breaks; nothing of Python is asked
before. So `join` handles SIGABRT, to say what happened and what to do.

`Watch` is for what heartbeats do not show: processes that are all alive and
still do not move, be it for a collective operation or for the data.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NoReturn

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

import vit_jax
from vit_jax.checkpoints import saving

# sysexits.h calls it EX_UNAVAILABLE. Not 75, "try again", which some launch
# scripts do without asking: it may have been an error that comes again.
EXIT_LOST = 69

# Without a heartbeat for so long, a process is lost. JAX sends two in this time
# and would wait for 100 s.
HEARTBEAT_S = 30
# Within this time of a failure the others fail too, if it is for all to see.
MEET_S = 15
# What NFS takes at the most to show a new file to other machines.
SEEN_S = 60
# That writing a message may take once the process has been aborted.
ABORT_S = 20

_workdir = ''  # of the run under way
_joined = False
_said = threading.Lock()


def join() -> None:
  """Joins the other processes, and has their loss explained.

  Of the environment JAX itself reads only the coordinator's address, and all
  three variables from Slurm and on TPU.

  Raises:
    ValueError: if there is nothing that says where the others are.
  """

  def number(variable: str) -> int | None:
    return int(os.environ[variable]) if variable in os.environ else None

  global _joined
  if _joined:
    return
  _handle_abort()
  jax.distributed.initialize(
    num_processes=number('JAX_NUM_PROCESSES'),
    process_id=number('JAX_PROCESS_ID'),
    heartbeat_timeout_seconds=HEARTBEAT_S,
  )
  _joined = True


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
    # Losing another process may show here before JAX hears of it and aborts.
    late_s = HEARTBEAT_S if isinstance(e, jax.errors.JaxRuntimeError) else 0
    until_s = time.monotonic() + late_s + MEET_S
    if not _meet('failed', late_s + MEET_S):
      time.sleep(max(0.0, until_s - time.monotonic()))
      status: int | str | None = 1
      if isinstance(e, SystemExit):
        status = e.code
        if isinstance(status, str):
          print(status, file=sys.stderr)
      else:
        traceback.print_exc()
      sys.stdout.flush()
      os._exit(status if isinstance(status, int) else 1)
    raise


class Watch:
  """Ends the process once no step, evaluation or save has finished for long.

  Attributes:
    timeout_s: how long that is.
  """

  timeout_s: ClassVar[float] = 1800.0

  def __init__(self, workdir: str):
    """Starts watching a run, whose checkpoints are in `workdir`."""
    global _workdir
    _workdir = workdir
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
        # Where that hangs too, as on a file system that does not answer.
        last = threading.Timer(ABORT_S + MEET_S, os._exit, (EXIT_LOST,))
        last.daemon = True
        last.start()
        _say(
          f'{_name()} has finished no step, evaluation or save for '
          f'{self.timeout_s:g} s, waiting in {_main_thread_at()}: a collective '
          'operation or the data hangs. If it is only slow, raise --timeout_s.'
        )
        # Where all hang, each shall say so before the first one is missed.
        _meet('hung', MEET_S)
        _exit()


def _say(what: str) -> None:
  """Says what happened and how to go on, once."""
  if not _said.acquire(blocking=False):
    return
  text = (
    f'error: {what}{_last_checkpoint()} The same command goes on, with another '
    'number of processes too.\n'
  )
  os.write(sys.stderr.fileno(), os.fsencode(text))


def _exit() -> NoReturn:
  """Ends this process, whose main thread may never come back to do so."""
  if distributed.global_state.process_id == 0:
    time.sleep(1)  # or else the others would miss this one
  os._exit(EXIT_LOST)


def _name() -> str:
  state = distributed.global_state
  return f'Process {state.process_id} of {state.num_processes}'


def _last_checkpoint() -> str:
  if not _workdir:
    return ''  # before training
  try:
    steps = saving.steps_in(_workdir)
  except Exception:  # of as many kinds as there are file systems
    return ''
  if not steps:
    return ' No checkpoint had been saved yet.'
  folder = saving.absolute(_workdir) / saving.FOLDER
  return f' The last good checkpoint is {folder / str(steps[-1])}.'


def _main_thread_at() -> str:
  """Returns the line of this package that the main thread is in."""
  frame = sys._current_frames()[threading.main_thread().ident or 0]
  package = os.path.dirname(vit_jax.__file__)
  ours = [
    f'{os.path.relpath(line.filename, package)}:{line.lineno} ({line.name})'
    for line in traceback.extract_stack(frame)
    if line.filename.startswith(package)
  ]
  return ours[-1] if ours else 'a library'


def _meet(where: str, timeout_s: float) -> bool:
  """Returns whether all processes come here within this time."""
  client = distributed.global_state.client
  if client is None:
    return True  # alone
  try:
    client.wait_at_barrier(f'vit_jax {where}', round(1000 * timeout_s))
  except jax.errors.JaxRuntimeError:
    return False
  return True


def _handle_abort() -> None:
  """Has SIGABRT explained.

  By ctypes, since `signal.signal` calls no Python before the main thread is
  back from C++, and the process is gone by then.
  """
  libc = ctypes.CDLL(None)
  libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
  libc.signal(signal.SIGABRT, ctypes.cast(_on_abort, ctypes.c_void_p))


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(number: int) -> None:
  del number
  signal.alarm(ABORT_S)  # ends the process if what follows cannot
  if not _joined:
    what = 'could not join the others: the lines above say why'
  elif not _coordinator_answers():
    what = 'lost process 0, which coordinates them: it does not answer'
  else:
    what = 'lost another process, or failed in C++: the lines above say which'
  _say(f'{_name()} {what}.')
  _exit()


def _coordinator_answers() -> bool:
  host, port = str(distributed.global_state.coordinator_address).rsplit(':', 1)
  try:
    socket.create_connection((host.strip('[]'), int(port)), timeout=5).close()
  except OSError:
    return False
  return True
