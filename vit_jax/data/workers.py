"""Worker processes of the loader, and the memory that they share with it."""

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
  """Returns an iterator whose batches are made by worker processes."""
  if not flags.FLAGS.is_parsed():
    # Grain reads a flag of its own here, which fails in programs that do not
    # run under absl.app.
    flags.FLAGS.mark_as_parsed()
  sent = grain.MapDataset.range(len(batches)).map(_Sent(batches))
  # Worker k makes the batches k, k + workers, ...; its two threads overlap
  # reading and decoding.
  return iter(
    sent.to_iter_dataset(grain.ReadOptions(2, 2)).mp_prefetch(
      grain.MultiprocessingOptions(num_workers=workers),
      worker_init_fn=functools.partial(_set_up, _own_prefix()),
    )
  )


class _Sent:
  """A dataset that workers read from memory of the process that made it.

  Python would write it into a pipe, and wait for ever if the worker died before
  it had read more than a pipe holds.
  """

  def __init__(self, dataset: grain.MapDataset):
    self._fd = os.memfd_create('vit_jax')
    weakref.finalize(self, os.close, self._fd)
    with open(self._fd, 'wb', closefd=False) as file:
      cloudpickle.dump(dataset, file)

  def __reduce__(self) -> tuple[Any, ...]:
    return _received, (f'/proc/{os.getpid()}/fd/{self._fd}',)

  def __call__(self, index: int) -> Any:
    raise NotImplementedError  # workers alone make batches


def _received(path: str) -> Any:
  with open(path, 'rb') as file:
    return cloudpickle.load(file).__getitem__


@functools.cache
def _own_prefix() -> str:
  """Returns how the names of this run's shared memory begin.

  Processes that are killed leave their shared memory behind. A run locks a
  file for as long as it lives; whoever finds such a file without a lock removes
  it, and the memory of the same prefix.
  """
  for path in _MEMORY.glob(f'*{_LOCK}'):
    # Of a living run, or of another user.
    with contextlib.suppress(OSError), path.open() as file:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      for left in _MEMORY.glob(f'*{path.name.removesuffix(_LOCK)}*'):
        left.unlink(missing_ok=True)
  prefix = f'vj{secrets.token_hex(4)}'
  # Locked before it has the name by which others find it.
  new = _MEMORY / f'{prefix}.new'
  lock = new.open('w')
  fcntl.flock(lock, fcntl.LOCK_EX)
  new.rename(_MEMORY / f'{prefix}{_LOCK}')
  # Of semaphores, which are files there too.
  process: Any = current_process()
  process._config['semprefix'] = f'/{prefix}'
  # After the workers have ended, which comes at 0.
  util.Finalize(None, _remove, (prefix, lock), exitpriority=-1)
  return prefix


def _remove(prefix: str, lock: Any) -> None:
  """Removes the memory of batches that nobody took."""
  for path in _MEMORY.glob(f'{prefix}*'):
    with contextlib.suppress(FileNotFoundError):  # a thread of Grain was faster
      path.unlink()
      if not path.name.endswith(_LOCK):
        resource_tracker.unregister(f'/{path.name}', 'shared_memory')
  lock.close()


def _set_up(prefix: str, worker_index: int, worker_count: int) -> None:
  """Keeps a worker off the TPU or GPU, and alive as long as its parent.

  Signals that end training reach the whole group of processes, but the current
  step or evaluation still needs its batches.
  """
  del worker_index, worker_count
  threading.Thread(target=_end_with_parent, daemon=True).start()
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  if 'jax' in sys.modules:  # The environment is only read at import.
    sys.modules['jax'].config.update('jax_platforms', 'cpu')
  # Python has no other way to name the memory that Grain asks for.
  names: Any = shared_memory_lib
  names._SHM_NAME_PREFIX = f'/{prefix}'
  names._SHM_SAFE_NAME_LENGTH = len(prefix) + 17


def _end_with_parent() -> None:
  parent = parent_process()
  assert parent is not None  # this is a worker
  parent.join()
  os._exit(0)
