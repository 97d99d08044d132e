"""One run at a time in a workdir.

On a disk the kernel holds the lock, on NFS too, and lets go of it when the
process ends, however it ends. (An NFS server may take a minute or two to notice
that a whole machine is gone.) A bucket has no locks: there a run only says who
wrote to it last and has not ended by itself.
"""

import contextlib
import fcntl
import logging
import os
import pathlib
import shlex
import socket
import sys
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


def check(workdir: str) -> None:
  """Refuses a workdir that no run could write to, and makes none.

  Raises:
    ValueError: saying what is in the way.
  """
  if '://' in workdir:
    return
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
      take = _noted if '://' in workdir else _locked
      try:
        stack.enter_context(take(absolute(workdir) / FILE))
      except _Held as e:
        refusal = str(e)
      except Exception as e:  # a bucket has its own; the others wait to hear
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
      raise _Held(
        f'Another run is in the workdir {path.parent}: {f.readline().strip()}. '
        'Wait for its end or stop it, and the same command goes on; or give '
        'another --workdir.'
      ) from None
    except OSError as e:
      # Some file systems cannot lock; training worked there before.
      _log.warning('%s cannot be locked (%s): start no second run.', path, e)
    f.truncate(0)
    f.write(_holder() + '\n')
    f.flush()
    yield


@contextlib.contextmanager
def _noted(path: epath.Path) -> Iterator[None]:
  """Says who may still write to a bucket, and writes who does now."""
  if path.exists():
    _log.warning(
      'The last run in %s did not end by itself: %s. If it still writes there, '
      'stop one of the two.',
      *(path.parent, path.read_text().strip()),
    )
  path.write_text(_holder() + '\n')
  try:
    yield
  finally:
    path.unlink(missing_ok=True)
