"""Worker processes of the loader."""

import os
import signal
import sys
import threading
import weakref
from multiprocessing import parent_process
from typing import Any

import cloudpickle
import grain
from absl import flags


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
      worker_init_fn=_set_up,
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


def _set_up(worker_index: int, worker_count: int) -> None:
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


def _end_with_parent() -> None:
  parent = parent_process()
  assert parent is not None  # this is a worker
  parent.join()
  os._exit(0)
