"""Worker processes of the loader, and their shared memory."""

import contextlib
import fcntl
import functools
import os
import pathlib
import secrets
import signal
import sys
import threading
import weakref
from multiprocessing import (
  current_process,
  parent_process,
  resource_tracker,
  util,
)
from multiprocessing import shared_memory as shared_memory_lib
from typing import Any

import cloudpickle
import grain
from absl import flags

_MEMORY = pathlib.Path('/dev/shm')
_LOCK = '.vj-lock'


def batches_of(
  batches: grain.MapDataset, workers: int
) -> grain.DatasetIterator[Any]:
  """Returns an iterator over batches that worker processes make."""
  if not flags.FLAGS.is_parsed():
    # Grain reads an absl flag, which fails in programs without absl.app.
    flags.FLAGS.mark_as_parsed()
  sent = grain.MapDataset.range(len(batches)).map(_InMemoryFile(batches))
  # Worker k makes the batches k, k + workers, and so on. It has two threads, so
  # that reading and decoding overlap.
  return iter(
    sent.to_iter_dataset(grain.ReadOptions(2, 2)).mp_prefetch(
      grain.MultiprocessingOptions(num_workers=workers),
      worker_init_fn=functools.partial(_set_up, _own_prefix()),
    )
  )


class _InMemoryFile:
  """A dataset that workers read from an in-memory file of their parent.

  By default, Python sends pickled objects through a pipe. If a worker died
  before it had read a large dataset, the parent would wait for ever.
  """

  def __init__(self, dataset: grain.MapDataset):
    self._fd = os.memfd_create('vit_jax')
    weakref.finalize(self, os.close, self._fd)
    with open(self._fd, 'wb', closefd=False) as file:
      cloudpickle.dump(dataset, file)

  def __reduce__(self) -> tuple[Any, ...]:
    return _load, (f'/proc/{os.getpid()}/fd/{self._fd}',)

  def __call__(self, index: int) -> Any:
    raise NotImplementedError  # only the unpickled dataset makes batches


def _load(path: str) -> Any:
  with open(path, 'rb') as file:
    return cloudpickle.load(file).__getitem__


@functools.cache
def _own_prefix() -> str:
  """Returns a prefix for the names of this run's shared memory files.

  Killed processes leave their shared memory behind. Therefore each run holds a
  lock on a file while it lives. The next run removes lock files that are not
  locked, together with the shared memory of the same prefix.
  """
  for path in _MEMORY.glob(f'*{_LOCK}'):
    # An OSError means that the run is alive or belongs to another user.
    with contextlib.suppress(OSError), path.open() as file:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      for left in _MEMORY.glob(f'*{path.name.removesuffix(_LOCK)}*'):
        left.unlink(missing_ok=True)
  prefix = f'vj{secrets.token_hex(4)}'
  # Lock the file before giving it the name that other runs look for.
  new = _MEMORY / f'{prefix}.new'
  lock = new.open('w')
  fcntl.flock(lock, fcntl.LOCK_EX)
  new.rename(_MEMORY / f'{prefix}{_LOCK}')
  # Semaphores are files in the same folder, so they get the prefix too.
  process: Any = current_process()
  process._config['semprefix'] = f'/{prefix}'
  # With a negative priority, `_remove` runs after the workers have stopped.
  util.Finalize(None, _remove, (prefix, lock), exitpriority=-1)
  return prefix


def _remove(prefix: str, lock: Any) -> None:
  """Removes the files of this run's unread batches, and its lock file."""
  for path in _MEMORY.glob(f'{prefix}*'):
    with contextlib.suppress(FileNotFoundError):  # Grain may remove it first
      path.unlink()
      if not path.name.endswith(_LOCK):
        # A killed worker may not have registered its file. The tracker prints a
        # traceback if an unknown name is unregistered.
        resource_tracker.register(f'/{path.name}', 'shared_memory')
        resource_tracker.unregister(f'/{path.name}', 'shared_memory')
  lock.close()


def _set_up(prefix: str, worker_index: int, worker_count: int) -> None:
  """Keeps a worker off the TPU or GPU, and ends it when its parent ends.

  SIGINT and SIGTERM may reach the whole process group. Workers ignore them,
  because the current step or evaluation of the parent still needs batches.
  """
  threading.Thread(target=_end_with_parent, daemon=True).start()
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  if 'jax' in sys.modules:  # JAX reads the environment only at import
    sys.modules['jax'].config.update('jax_platforms', 'cpu')
  # Python chooses the names of Grain's shared memory. It has no public setting
  # for their prefix.
  names: Any = shared_memory_lib
  names._SHM_NAME_PREFIX = f'/{prefix}'
  names._SHM_SAFE_NAME_LENGTH = len(prefix) + 17


def _end_with_parent() -> None:
  parent = parent_process()
  assert parent is not None  # this is a worker
  parent.join()
  os._exit(0)
