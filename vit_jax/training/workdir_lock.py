"""Allows only one run at a time in a workdir.

On disks, including NFS, the kernel holds the lock and releases it when the
process ends in any way. (An NFS server may take a minute or two to notice that
a machine is gone.) On file systems without locks, a run only logs a warning.
Buckets do not support locks either. There, a run logs a warning and continues
if the previous run did not end normally.
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
from etils import epath

from vit_jax.checkpoints.saving import absolute
from vit_jax.data import bad_images
from vit_jax.training import processes

_log = logging.getLogger(__name__)

FILE = 'lock'


def check(workdir: str) -> None:
  """Raises ValueError if a run could not write to a workdir.

  Does not create the workdir, and does not check buckets.
  """
  if '://' in workdir:
    return
  place = pathlib.Path(absolute(workdir))
  there = next(p for p in (place, *place.parents) if os.path.lexists(p))
  if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
    raise ValueError(
      f'--workdir={workdir}: {there} is not a writable folder. Make it '
      'writable, or give another --workdir.'
    )


@contextlib.contextmanager
def held(workdir: str) -> Iterator[None]:
  """Locks a workdir; process 0 holds the lock for all processes.

  Raises ValueError in every process if another run holds the lock, process 0
  cannot write the lock file, or a process cannot see it.
  """
  with contextlib.ExitStack() as stack:
    refusal = ''
    if jax.process_index() == 0:
      take = _noted if '://' in workdir else _locked
      try:
        stack.enter_context(take(absolute(workdir) / FILE))
      except BlockingIOError as e:  # from `_locked`
        refusal = str(e)
      except Exception as e:  # any error must reach all processes
        refusal = (
          f'{workdir} cannot be locked ({type(e).__name__}: {e}). Make it '
          'writable or give another --workdir.'
        )
    # Tells all processes; only process 0 has a refusal.
    if refusal := ''.join(bad_images.gather([refusal])):
      raise ValueError(refusal)
    processes.refuse_unlike(
      lambda: [(absolute(workdir) / FILE).exists()],
      f'Not all processes see the lock file in {workdir}. Put the workdir on '
      'shared storage.',
      processes.SEEN_S,
    )
    yield


def _holder() -> str:
  """Describes this process for the lock file."""
  now = time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())
  return (
    f'process {os.getpid()} on {socket.gethostname()} since {now} '
    f'({os.fsencode(shlex.join(sys.argv)[:300]).decode(errors="replace")})'
  )


@contextlib.contextmanager
def _locked(path: epath.Path) -> Iterator[None]:
  """Holds a kernel lock on a file; raises BlockingIOError if another run does.

  The file stays: if it were removed, a run that had opened it before could lock
  a file that other runs do not see.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, 'a+') as f:
    try:
      # lockf, because children of a killed process would still hold a flock.
      fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both errors
      f.seek(0)
      raise BlockingIOError(
        f'Another run is in the workdir {path.parent}: {f.readline().strip()}. '
        'Wait for its end or stop it, then repeat the command; or give another '
        '--workdir.'
      ) from None
    except OSError as e:
      # Some file systems do not support locks; training works there too.
      _log.warning(
        '%s cannot be locked (%s). Do not start a second run there.', path, e
      )
    f.truncate(0)
    f.write(_holder() + '\n')
    f.flush()
    yield


@contextlib.contextmanager
def _noted(path: epath.Path) -> Iterator[None]:
  """Warns about the lock file of another run, and writes one for this run."""
  if path.exists():
    _log.warning(
      'The last run in %s did not end normally: %s. If it still runs, stop one '
      'of the two runs.',
      *(path.parent, path.read_text().strip()),
    )
  path.write_text(_holder() + '\n')
  try:
    yield
  finally:
    path.unlink(missing_ok=True)
