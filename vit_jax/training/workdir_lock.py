"""One run at a time in a workdir.

On a disk the kernel holds the lock, on NFS too, and lets go of it when the
process ends, however it ends. (An NFS server may take a minute or two to notice
that a whole machine is gone.)

A bucket has no locks. There the run writes who it is to WORKDIR/lock, and a new
time every RENEW_S. A run that finds such a file watches it: if it changes,
somebody is there; if it has not after STALE_S, nobody is. What this cannot do:
of two runs that start within the same second, both may begin; the one that
wrote first finds that out within RENEW_S and ends, as does one that was
suspended for STALE_S and finds another in its place.
"""

import contextlib
import fcntl
import logging
import os
import pathlib
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.checkpoints.saving import absolute
from vit_jax.training import processes

_log = logging.getLogger(__name__)

FILE = 'lock'
RENEW_S = 30.0
STALE_S = 180.0


def check(workdir: str) -> None:
  """Refuses a workdir that no run could write to, and makes none.

  Raises:
    ValueError: saying what is in the way.
  """
  if '://' in workdir:
    return
  if os.fsencode(workdir).decode(errors='replace') != workdir:
    raise ValueError(
      f'--workdir={workdir!a}: no checkpoint can be saved in a folder whose '
      'name is no UTF-8. Give another --workdir.'
    )
  place = pathlib.Path(absolute(workdir))
  there = next(p for p in (place, *place.parents) if os.path.lexists(p))
  if not there.is_dir():
    raise ValueError(f'--workdir={workdir}: {there} is no folder.')
  if not os.access(there, os.W_OK | os.X_OK):
    raise ValueError(
      f'--workdir={workdir}: {there} is not writable. Make it so, or give '
      'another --workdir.'
    )


@contextlib.contextmanager
def held(workdir: str) -> Iterator[None]:
  """Keeps other runs out of a workdir; process 0 does so for all processes.

  Raises:
    ValueError: in every process, if another run is there or the file for the
      lock cannot be written.
  """
  with contextlib.ExitStack() as stack:
    refusal = ''
    if jax.process_index() == 0:
      take = _leased if '://' in workdir else _locked
      try:
        stack.enter_context(take(absolute(workdir) / FILE))
      except Exception as e:  # a bucket has its own; the others wait to hear
        refusal = str(e)
        if not isinstance(e, _Held):
          refusal = (
            f'{workdir} cannot be locked ({type(e).__name__}: {e}). Make it '
            'writable or give another --workdir.'
          )
    refusal = _of_process_0(refusal)
    if refusal:
      raise ValueError(refusal)
    processes.refuse_unlike(
      lambda: [(absolute(workdir) / FILE).exists()],
      f'{workdir} of the first process is not that of all: put it on storage '
      'that they share.',
      processes.SEEN_S,
    )
    yield


class _Held(Exception):
  """Another run is there."""

  def __init__(self, path: epath.Path, content: str):
    holder = content.partition('\n')[0]
    super().__init__(
      f'Another run is in the workdir {path.parent}: {holder}. Wait for its '
      'end or stop it, and the same command goes on; or give another --workdir.'
    )


def _of_process_0(text: str) -> str:
  data = np.frombuffer(os.fsencode(text)[:1000].ljust(1000, b'\0'), np.uint8)
  data = np.asarray(multihost_utils.broadcast_one_to_all(data))
  return data.tobytes().rstrip(b'\0').decode(errors='ignore')


def _holder() -> str:
  now = time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())
  return (
    f'process {os.getpid()} on {socket.gethostname()} since {now} '
    f'({os.fsencode(shlex.join(sys.argv)[:300]).decode(errors="replace")})'
  )


@contextlib.contextmanager
def _locked(path: epath.Path) -> Iterator[None]:
  """Holds a lock of the kernel's.

  The file stays, with who was there last: a run that opened it before it was
  removed would lock what nobody else sees.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, 'a+') as f:
    try:
      # Not flock, which a child of a killed process would go on holding.
      fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either
      f.seek(0)
      raise _Held(path, f.read()) from None
    except OSError as e:
      # Some file systems cannot lock; training worked there before.
      _log.warning('%s cannot be locked (%s): start no second run.', path, e)
    f.truncate(0)
    f.write(_holder() + '\n')
    f.flush()
    yield


@contextlib.contextmanager
def _leased(path: epath.Path) -> Iterator[None]:
  """Holds a lease, which a thread renews."""
  _wait_until_stale(path)
  holder = _holder()
  _write(path, holder)
  ended = threading.Event()
  thread = threading.Thread(
    target=_renew, args=(path, holder, ended), daemon=True
  )
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()
    # What fails here only makes the next run wait.
    with contextlib.suppress(Exception):
      if _read(path).startswith(holder):
        path.unlink()


def _wait_until_stale(path: epath.Path) -> None:
  found = _read(path)
  until_s = time.monotonic() + STALE_S
  if found:
    _log.info(
      'Another run was in %s: %s. Seeing for up to %g s whether it still is.',
      path.parent,
      found.partition('\n')[0],
      STALE_S,
    )
  while found and time.monotonic() < until_s:
    time.sleep(RENEW_S / 10)
    now = _read(path)
    if now and now != found:
      raise _Held(path, now)
    found = now


def _renew(path: epath.Path, holder: str, ended: threading.Event) -> None:
  while not ended.wait(RENEW_S):
    try:
      found = _read(path)
      if found and not found.startswith(holder):
        text = f'error: {_Held(path, found)}\n'
        os.write(sys.stderr.fileno(), os.fsencode(text))
        os._exit(2)  # before it writes anything more
      _write(path, holder)
    except Exception as e:  # of many kinds, and the next time it may work
      _log.warning('%s could not be renewed: %s', path, e)


def _read(path: epath.Path) -> str:
  try:
    return path.read_text()
  except FileNotFoundError:
    return ''


def _write(path: epath.Path, holder: str) -> None:
  path.write_text(f'{holder}\nhere at {time.time():.3f} s since 1970\n')
