"""Makes batches of a source, as a pure function of the seed and the step.

The seed and a running index determine the order of the examples and the random
numbers of each example. So the batch at step n is always the same, bit for bit.
It does not depend on whether earlier steps were read or skipped, nor on the
number of threads, workers and processes. A checkpoint needs no iterator state,
and a run may resume on another number of hosts.
"""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from vit_jax.data import cores
from vit_jax.data import workers as workers_lib
from vit_jax.data.decode import UnreadableImage
from vit_jax.data.sources import Source, labelled

_log = logging.getLogger(__name__)

Batch = dict[str, np.ndarray]
Transform = Callable[[Any, np.random.Generator], Any]

# After this many failures in a row, blame the disk instead of the images.
_MOST_SKIPPED = 10


def train_batches(
  source: Source,
  transform: Transform,
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
  """Returns endless training batches, shuffled anew in every epoch.

  A batch may contain examples of two or more epochs, so no example is dropped,
  and a batch may be larger than the dataset. Its arrays have a leading axis of
  b = batch_size // process_count. The global batch is the concatenation of the
  processes' batches, in their order.

  Close the iterator to stop its threads and workers.

  Args:
    source: The examples.
    transform: A function of a record and a NumPy generator. It returns an
      example: arrays by name, such as {'image': uint8 [H, W, 3], 'label':
      int32}. It must be picklable if there are workers. If it has a method
      `of_batch`, this method draws the transform of each step from a NumPy
      generator, so that batches may differ in shape.
    batch_size: Number of examples per step over all processes; must be a
      multiple of `process_count`.
    seed: Determines the order and the random numbers of the transform.
    start_step: The step of the first batch.
    process_index: The index of this process among `process_count`.
    workers: Number of worker processes. 0 uses threads, which are fast enough
      on up to about a dozen cores. A script with workers needs an
      `if __name__ == '__main__'` guard, because workers import the script.
    repeats: How often each example occurs in a batch. If it does not divide
      `batch_size`, some occur less often. Each occurrence is transformed anew.
    balance: 0 draws every example once per epoch; 1 draws all classes equally
      often. An example whose class has n examples is drawn with a frequency
      proportional to n^-balance.

  Raises:
    ValueError: `balance` is set and the source does not have one class per
      image.
    UnreadableImage: While iterating, an image is unreadable. If the source
      skips unreadable images, only after ten in a row.
  """
  # In Grain, epoch e of seed s has the same order as epoch e - 1 of seed s + 1.
  # Derived seeds avoid that.
  order_seed, transform_seed, step_seed = (
    int(n) for n in np.random.SeedSequence(seed).generate_state(3)
  )
  order = grain.MapDataset.range(len(source))
  if balance:
    labels_N = labelled(source, 'the source for data.balance').labels()
    balanced = _BalancedOrder(labels_N, balance, order_seed)
    order = order.repeat().map_with_index(balanced)
  else:
    order = order.shuffle(order_seed).repeat()
  if repeats > 1:
    repeated = functools.partial(_repeated, order, batch_size, repeats)
    order = grain.MapDataset.range(len(order)).map(repeated)
  order = order.map_with_index(lambda i, index: (index, i // batch_size))
  make = functools.partial(_transformed, source, transform, step_seed)
  examples = order.random_map(make, seed=transform_seed)
  # Grain computes the number of batches in floating point. Half of sys.maxsize
  # keeps `len()` valid after rounding.
  batches = examples[: sys.maxsize // 2].batch(batch_size // process_count)
  return _iterate(batches[process_index::process_count][start_step:], workers)


def _transformed(
  source: Source,
  transform: Transform,
  step_seed: int,
  place: tuple[int, int],
  rng: np.random.Generator,
) -> dict[str, Any]:
  """Returns the example of `place`, which is (index, step of the batch)."""
  index, step = place
  if of_batch := getattr(transform, 'of_batch', None):
    transform = of_batch(np.random.default_rng((step_seed, step)))
  return _example(source, index, lambda record: transform(record, rng))[0]


def _example(
  source: Source, index: int, transform: Callable[[Any], Any]
) -> tuple[dict[str, Any], bool]:
  """Returns an example, and whether it is made from the record at `index`.

  If the source skips unreadable images, the next readable record replaces an
  unreadable record.
  """
  for tried in range(min(len(source), _MOST_SKIPPED)):
    try:
      return transform(source[(index + tried) % len(source)]), not tried
    except UnreadableImage as e:
      if not source.skips_unreadable:
        raise
      last = e
      _log.warning('The next image replaces an unreadable image: %s', e)
  raise last


class _BalancedOrder:
  """Draws the examples of each epoch with weights that depend on their class.

  Uses systematic resampling: the count of each example and of each class
  differs from its expectation by less than one.
  """

  def __init__(self, labels_N: np.ndarray, balance: float, seed: int):
    self.labels_N, self.seed = labels_N, seed
    images_C = np.maximum(np.bincount(labels_N), 1)
    self.weights_N = (images_C**-balance)[labels_N]

  def __call__(self, index: int, _: int) -> int:
    epoch, position = divmod(index, len(self.labels_N))
    return int(_drawn(self, epoch)[position])


@functools.lru_cache(maxsize=3)  # threads may be in different epochs
def _drawn(order: _BalancedOrder, epoch: int) -> np.ndarray:
  N = len(order.labels_N)
  rng = np.random.default_rng((order.seed, epoch))
  # Shuffle, so that epochs leave out different examples of a large class.
  rows_N = rng.permutation(N)
  rows_N = rows_N[np.argsort(order.labels_N[rows_N], kind='stable')]
  edges_N = np.cumsum(order.weights_N[rows_N])
  points_N = (rng.random() + np.arange(N)) / N * edges_N[-1]
  return rng.permutation(rows_N[np.searchsorted(edges_N, points_N)])


def _repeated(
  order: grain.MapDataset, batch_size: int, repeats: int, index: int
) -> int:
  """Maps a position to an example, with examples repeated within each batch.

  Repeats of an example are ceil(batch_size / repeats) positions apart, because
  mixup and CutMix combine neighbours. The last repeat is shorter if `repeats`
  does not divide the batch size.
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
  """Yields every example exactly once over all processes, in order.

  All processes yield the same number of full batches, padded with examples of
  mask 0. A skipped image counts as padding. Raises UnreadableImage as
  `train_batches` does. The transform takes only a record. Batches also have
  'mask', float32 [b] of 1 and 0; and 'index', int32 [b], the position in
  `source`, or -1 for padding.
  """
  padded_size = -(-len(source) // batch_size) * batch_size
  examples = grain.MapDataset.range(padded_size).map(
    functools.partial(_padded, source, transform)
  )
  batches = examples.batch(batch_size // process_count)
  return _iterate(batches[process_index::process_count], workers)


def _padded(source: Source, transform: Callable, index: int) -> dict[str, Any]:
  """Returns the example at `index`; beyond the end, copies the last example."""
  position = min(index, len(source) - 1)
  example, is_own = _example(source, position, transform)
  real = is_own and position == index
  return {
    **example,
    'mask': np.float32(real),
    'index': np.int32(index if real else -1),
  }


def _iterate(
  batches: grain.MapDataset, workers: int
) -> grain.DatasetIterator[Batch]:
  """Makes batches ahead of time, in threads or in worker processes.

  Each thread or worker makes whole batches, which has less overhead than
  sharing the images of a batch.
  """
  if not workers:
    threads = min(cores.usable_cores(), 16)
    return iter(batches.to_iter_dataset(grain.ReadOptions(threads, threads)))
  return workers_lib.batches_of(batches, workers)
