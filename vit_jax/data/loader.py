"""Batches of a source, as a pure function of the seed and the step.

The order of the examples and the random numbers of each example follow from the
seed and a running index. So the batch at step n is bit for bit the same whether
the steps before it were read or skipped, for any number of threads, workers and
processes. A checkpoint needs no iterator state, and may be resumed on another
number of hosts.
"""

import functools
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from vit_jax.data import cores
from vit_jax.data import workers as workers_lib
from vit_jax.data.decode import UnreadableImage
from vit_jax.data.sources import Source, labelled
from vit_jax.data.transforms import PerStep

_log = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]
Transform = Callable[[Any, np.random.Generator], Any]

# After this many failures in a row, blame the disk instead of the images.
_MOST_SKIPPED = 10


def train_batches(
  source: Source,
  transform: Transform | PerStep,
  *,
  batch_size: int,
  seed: int,
  start_step: int = 0,
  process_index: int = 0,
  process_count: int = 1,
  workers: int = 0,
  repeats: int = 1,
  balance: float = 0.0,
) -> grain.DatasetIterator[Batch]:
  """Endless training batches, shuffled anew in every epoch.

  Batches run across epochs, so no example is ever dropped, and a batch may be
  larger than the dataset.

  Args:
    source: The examples.
    transform: (record, generator) -> an example, arrays by name, such as
      {'image': uint8 [H, W, 3], 'label': int32}; picklable if there are
      workers. A `PerStep` gives a transform for each step, so that batches may
      differ in shape.
    batch_size: Examples per step over all processes.
    seed: Of the order and of the transform.
    start_step: The step of the first batch.
    process_index: Of this process. The local batches of all processes, in their
      order, make up the global batch.
    process_count: How many processes share each batch.
    workers: Worker processes of this process; 0 uses threads, which is enough
      up to about a dozen cores. A script with workers needs an
      `if __name__ == '__main__'` guard, because they import it anew.
    repeats: How many times each batch has the same example, transformed anew
      each time.
    balance: 0 for every example once an epoch, 1 for every class equally often.
      An example of a class of n comes in proportion to n^-balance.

  Returns:
    An iterator of arrays with a leading axis of b = batch_size // process_count
    examples. Close it to stop its threads and workers.

  Raises:
    ValueError: `batch_size` is not a multiple of `process_count`, the source is
      empty, or has no labels to balance.
    UnreadableImage: While iterating, unless the source skips them.
  """
  local_size = _local_batch_size(source, batch_size, process_count)
  # Grain's own use of a seed s in epoch e equals that of s + 1 in epoch e - 1.
  order_seed, transform_seed, step_seed = (
    int(n) for n in np.random.SeedSequence(seed).generate_state(3)
  )
  order = grain.MapDataset.range(len(source))
  if balance:
    labels_N = labelled(source, 'the source for data.balance').labels()
    drawn = _Balance(labels_N, balance, order_seed)
    order = order.repeat().map_with_index(drawn)
  else:
    order = order.shuffle(order_seed).repeat()
  if repeats > 1:
    repeated = functools.partial(_repeated, order, batch_size, repeats)
    order = grain.MapDataset.range(len(order)).map(repeated)
  order = order.map_with_index(lambda i, index: (index, i // batch_size))
  made = functools.partial(_transformed, source, transform, step_seed)
  examples = order.random_map(made, seed=transform_seed)
  # Grain counts batches with floats, of which the largest is past sys.maxsize.
  batches = examples[: sys.maxsize // 2].batch(local_size)
  return _iterate(batches[process_index::process_count][start_step:], workers)


def _transformed(
  source: Source,
  transform: Transform | PerStep,
  step_seed: int,
  place: tuple[int, int],
  rng: np.random.Generator,
) -> dict[str, Any]:
  """An example by its index and the step of its batch.

  Grain's own sources would log every record that they read.
  """
  index, step = place
  of_step: Transform
  if isinstance(transform, PerStep):
    of_step = transform.of_batch(np.random.default_rng((step_seed, step)))
  else:
    of_step = transform
  return _example(source, index, lambda record: of_step(record, rng))[0]


def _example(
  source: Source, index: int, transform: Callable[[Any], Any]
) -> tuple[dict[str, Any], bool]:
  """Returns a transformed example, and whether it has that index.

  If unreadable images are skipped, the next one takes the place of one that has
  become unreadable.
  """
  for tried in range(min(len(source), _MOST_SKIPPED)):
    try:
      return transform(source[(index + tried) % len(source)]), not tried
    except UnreadableImage as e:
      if not source.skips_unreadable:
        raise
      last = e
      _log.warning('Skipped, the next image takes its place: %s', e)
  raise last


# Not the object's, which travels to worker processes.
_DRAWING = threading.Lock()
_EPOCHS_KEPT = 3  # where one ends, threads are in several at once


class _Balance:
  """Draws the examples of each epoch by class, instead of each once.

  Systematic resampling: the count of an example, and of a class, differs from
  its share of the epoch by less than one.
  """

  def __init__(self, labels_N: np.ndarray, balance: float, seed: int):
    self._labels_N, self._seed = labels_N, seed
    images_C = np.maximum(np.bincount(labels_N), 1)
    self._weights_N = (images_C**-balance)[labels_N]
    self._kept: dict[int, np.ndarray] = {}

  def __call__(self, index: int, _: int) -> int:
    epoch, position = divmod(index, len(self._labels_N))
    with _DRAWING:  # or each thread would draw the epoch
      if epoch not in self._kept:
        if len(self._kept) == _EPOCHS_KEPT:
          del self._kept[next(iter(self._kept))]
        self._kept[epoch] = self._drawn(epoch)
      return int(self._kept[epoch][position])

  def _drawn(self, epoch: int) -> np.ndarray:
    N = len(self._labels_N)
    rng = np.random.default_rng((self._seed, epoch))
    # Others of a class are left out in every epoch.
    rows_N = rng.permutation(N)
    rows_N = rows_N[np.argsort(self._labels_N[rows_N], kind='stable')]
    edges_N = np.cumsum(self._weights_N[rows_N])
    points_N = (rng.random() + np.arange(N)) / N * edges_N[-1]
    return rng.permutation(rows_N[np.searchsorted(edges_N, points_N)])


def _repeated(
  order: grain.MapDataset, batch_size: int, repeats: int, index: int
) -> int:
  """The example at an index, if each batch repeats a smaller one.

  So neighbours, which are mixed, are different examples. The last repeat is cut
  off if need be.
  """
  step, position = divmod(index, batch_size)
  different = -(-batch_size // repeats)
  return order[step * different + position % different]


def eval_batches(
  source: Source,
  transform: Callable[[Any], Any],
  *,
  batch_size: int,
  process_index: int = 0,
  process_count: int = 1,
  workers: int = 0,
) -> grain.DatasetIterator[Batch]:
  """Every example exactly once over all processes, in the source's order.

  All processes yield the same number of full batches, padded with examples of
  mask 0. A skipped image counts as padding. Arguments and errors are those of
  `train_batches`; the transform takes a record alone.

  Returns:
    An iterator of batches as in `train_batches`, with 'mask' float32 [b] of 1
    and 0, and 'index' int32 [b], the position in `source` or -1.
  """
  local_size = _local_batch_size(source, batch_size, process_count)
  padded_size = -(-len(source) // batch_size) * batch_size
  examples = grain.MapDataset.range(padded_size).map(
    functools.partial(_padded, source, transform)
  )
  batches = examples.batch(local_size)
  return _iterate(batches[process_index::process_count], workers)


def _padded(source: Source, transform: Callable, index: int) -> dict[str, Any]:
  """An example; after the last one its copies as padding, of the same shape."""
  position = min(index, len(source) - 1)
  example, is_it = _example(source, position, transform)
  real = is_it and position == index
  return {
    **example,
    'mask': np.float32(real),
    'index': np.int32(index if real else -1),
  }


def _local_batch_size(
  source: Source, batch_size: int, process_count: int
) -> int:
  if not len(source):
    raise ValueError('the source has no examples')
  if batch_size < 1 or batch_size % process_count:
    raise ValueError(
      f'batch_size={batch_size} must be a positive multiple of the '
      f'{process_count} processes'
    )
  return batch_size // process_count


def _iterate(
  batches: grain.MapDataset, workers: int
) -> grain.DatasetIterator[Batch]:
  """Makes batches ahead of time, in threads or in worker processes.

  The unit of work is a batch: less overhead per image, a few batches in memory.
  """
  if not workers:
    threads = min(cores.usable_cores(), 16)
    return iter(batches.to_iter_dataset(grain.ReadOptions(threads, threads)))
  return workers_lib.batches_of(batches, workers)
