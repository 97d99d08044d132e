"""Batches are a function of seed and step alone, and lose no example."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap

import grain
import jax
import numpy as np
import pytest

from vit_jax.data import decode, loader, sources, transforms


class _Numbers(sources.Source):
  """Images whose pixels and labels are their index."""

  class_names: tuple[str, ...] = ('any',)

  def __init__(self, count):
    self._count = count

  def __len__(self):
    return self._count

  def __getitem__(self, index):
    image = np.full((5, 7, 3), index % 251, np.uint8)
    return {'image': image, 'label': index, 'name': f'number {index}'}


def _train(source, steps, **kwargs):
  kwargs = {'batch_size': 32, 'seed': 7} | kwargs
  batches = loader.train_batches(
    source, transforms.TrainTransform((6, 6)), **kwargs
  )
  with contextlib.closing(batches):
    return list(itertools.islice(batches, steps))


def _assert_same(actual, expected):
  assert len(actual) == len(expected)
  for a, b in zip(actual, expected, strict=True):
    assert a.keys() == b.keys()
    for key in a:
      assert a[key].dtype == b[key].dtype
      np.testing.assert_array_equal(a[key], b[key])


@pytest.fixture(scope='module')
def digits():
  return sources.open_source('digits', 'train[:100]')


def test_repeated_examples_are_transformed_anew(digits):
  """A batch is a smaller one three times, whatever process makes it."""
  fewer = _train(digits, 20, batch_size=10)
  batches = _train(digits, 20, batch_size=30, repeats=3)
  for batch, want in zip(batches, fewer, strict=True):
    np.testing.assert_array_equal(batch['label'], np.tile(want['label'], 3))
    copies = batch['image'].reshape(3, 10, -1)
    assert (copies[0] != copies[1]).any()
    assert (copies[1] != copies[2]).any()
  _assert_same(
    _train(digits, 2, batch_size=30, repeats=3, start_step=5), batches[5:7]
  )
  halves = [
    _train(
      digits, 3, batch_size=30, repeats=3, process_index=p, process_count=2
    )
    for p in range(2)
  ]
  joined = [
    {key: np.concatenate([a[key], b[key]]) for key in a}
    for a, b in zip(*halves, strict=True)
  ]
  _assert_same(joined, batches[:3])
  (twice,) = _train(digits, 1, batch_size=20, repeats=2)
  np.testing.assert_array_equal(twice['label'], np.tile(fewer[0]['label'], 2))
  # 3 x 11, of which one is too many.
  (uneven,) = _train(digits, 1, batch_size=32, repeats=3)
  (want,) = _train(digits, 1, batch_size=11)
  np.testing.assert_array_equal(uneven['label'], np.tile(want['label'], 3)[:32])


def test_starting_at_a_step_is_iterating_to_it(digits):
  through = _train(digits, 5)[3:]
  _assert_same(_train(digits, 2, start_step=3), through)


@pytest.mark.slow
def test_workers_change_nothing(digits):
  expected = _train(digits, 7)[3:]
  _assert_same(_train(digits, 4, workers=2, start_step=3), expected)


def test_one_worker_is_a_process_of_its_own(monkeypatch):
  """With two threads; without any there is a thread a core, up to 16."""
  asked = []

  class Options:
    def __init__(self, num_workers):
      asked.append(num_workers)
      raise StopIteration

  read_options = grain.ReadOptions

  def spy(*threads):
    asked.append(threads)
    return read_options(*threads)

  monkeypatch.setattr(loader.grain, 'MultiprocessingOptions', Options)
  monkeypatch.setattr(loader.grain, 'ReadOptions', spy)
  for cores in (3, 40):
    monkeypatch.setattr(loader.cores, 'usable_cores', lambda n=cores: n)
    loader._iterate(grain.MapDataset.range(8), 0)
  with pytest.raises(StopIteration):
    loader._iterate(grain.MapDataset.range(8), 1)
  assert asked == [(3, 3), (16, 16), (2, 2), 1]


def test_processes_share_the_global_batch(digits):
  whole = _train(digits, 4, start_step=2)
  parts = [
    _train(digits, 4, start_step=2, process_index=p, process_count=4)
    for p in range(4)
  ]
  joined = [
    {key: np.concatenate([part[key] for part in step]) for key in step[0]}
    for step in zip(*parts, strict=True)
  ]
  assert parts[0][0]['label'].shape == (8,)
  _assert_same(joined, whole)


@pytest.mark.parametrize('count, batch_size', [(10, 4), (3, 8)])
def test_every_epoch_has_every_example_once(count, batch_size):
  epochs = 4
  steps = -(-count * epochs // batch_size)
  batches = _train(_Numbers(count), steps, batch_size=batch_size)
  labels = np.concatenate([batch['label'] for batch in batches])
  for epoch in range(epochs):
    part = labels[epoch * count : (epoch + 1) * count]
    assert sorted(part) == list(range(count))


def test_epochs_are_shuffled_anew_and_seeds_are_unrelated():
  def epochs(seed):
    labels = np.concatenate(
      [b['label'] for b in _train(_Numbers(96), 9, seed=seed)]
    )
    return [tuple(part) for part in labels.reshape(3, 96)]

  # Epoch 1 of seed 0 must not be epoch 0 of seed 1, either.
  assert len({*epochs(0), *epochs(1), *epochs(2)}) == 9
  assert tuple(range(96)) not in epochs(0)


class _WithATornOne(_Numbers):
  def __getitem__(self, index):
    record = super().__getitem__(index)
    return record | {'image': b'torn'} if index == 5 else record


@pytest.mark.slow
def test_an_unreadable_image_is_named():
  with pytest.raises(decode.UnreadableImage, match='image number 5: not an im'):
    _train(_WithATornOne(8), 3, batch_size=8, workers=1)


def _evaluate(source, **kwargs):
  batches = loader.eval_batches(
    source, transforms.EvalTransform((5, 7)), **kwargs
  )
  with contextlib.closing(batches):
    return list(batches)


@pytest.mark.parametrize('count', [1, 25])
def test_eval_has_every_example_once(count):
  source = _Numbers(count)
  per_process = [
    _evaluate(source, batch_size=8, process_index=p, process_count=4)
    for p in range(4)
  ]
  steps = -(-count // 8)
  assert {len(batches) for batches in per_process} == {steps}
  # In the order of the processes the batches are those of a single process.
  batches = [
    {key: np.concatenate([part[key] for part in step]) for key in step[0]}
    for step in zip(*per_process, strict=True)
  ]
  _assert_same(batches, _evaluate(source, batch_size=8))
  everything = {
    key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]
  }
  assert len(everything['index']) == steps * 8
  assert everything['mask'].dtype == np.float32
  assert everything['index'].dtype == np.int32
  assert everything['index'][:count].tolist() == list(range(count))
  assert (everything['index'][count:] == -1).all()
  assert everything['mask'].tolist() == [1] * count + [0] * (steps * 8 - count)
  assert everything['label'][:count].tolist() == list(range(count))
  assert (everything['image'][:count, 0, 0, 0] == np.arange(count)).all()


@pytest.mark.slow
def test_eval_workers_change_nothing():
  # Three batches for two workers: uneven shares.
  source = _Numbers(17)
  _assert_same(
    _evaluate(source, batch_size=8, workers=2), _evaluate(source, batch_size=8)
  )


_SCRIPT = """
  from absl import app
  from vit_jax.data import loader, sources, transforms

  def main(argv):
    batches = loader.train_batches(
      sources.open_source('digits', 'train'),
      transforms.TrainTransform((8, 8)),
      batch_size=16, seed=0, workers=2,
    )
    print('labels', next(batches)['label'].sum())
    batches.close()

  if __name__ == '__main__':
    app.run(main)
"""


@pytest.mark.slow
def test_workers_in_a_program_of_absl(tmp_path):
  (tmp_path / 'script.py').write_text(textwrap.dedent(_SCRIPT))
  result = subprocess.run(
    [sys.executable, '-W', 'error', '-m', 'script'],
    cwd=tmp_path,
    env={'PYTHONPATH': ':'.join(sys.path), 'PATH': '', 'HOME': str(tmp_path)},
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.startswith('labels ')


class Uneven(sources.Source):
  """Five classes of 1, 2, 5, 12 and 30 examples, each its number."""

  labels_N = np.repeat(np.arange(5), (1, 2, 5, 12, 30))
  class_names = tuple('abcde')

  def __len__(self):
    return len(self.labels_N)

  def __getitem__(self, index):
    return index

  def labels(self):
    return self.labels_N


def index_alone(record, rng):
  del rng
  return {'index': np.int32(record), 'is_worker': np.bool_(looks_like_worker())}


def looks_like_worker():
  """Whether what ends training does not end this process, which has no TPU."""
  ignored = {signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}
  on_cpu = os.environ['JAX_PLATFORMS'] == 'cpu' == jax.config.jax_platforms
  return ignored == {signal.SIG_IGN} and on_cpu


def uneven(steps, **kwargs):
  kwargs = {'batch_size': 10, 'seed': 3} | kwargs
  with contextlib.closing(
    loader.train_batches(Uneven(), index_alone, **kwargs)
  ) as batches:
    found = [next(batches) for _ in range(steps)]
  for batch in found:
    assert (batch['is_worker'] == (kwargs.get('workers', 0) > 0)).all()
  return np.concatenate([batch['index'] for batch in found])


def test_classes_come_as_often_as_is_asked_for():
  balance = 0.5
  labels_N = Uneven.labels_N
  got = uneven(5 * 20, balance=balance).reshape(20, 50)
  n_C = np.bincount(labels_N)
  share_C = n_C ** (1 - balance)
  want_C = 50 * share_C / share_C.sum()
  times_N, largest = np.zeros(50), set()
  for epoch in got:
    counts = np.bincount(labels_N[epoch], minlength=5)
    assert (np.abs(counts - want_C) < 1).all()
    times = np.bincount(epoch, minlength=50)
    assert (np.abs(times - want_C[labels_N] / n_C[labels_N]) < 1).all()
    times_N += times
    largest.add(frozenset(epoch[labels_N[epoch] == 4]))
    assert (np.diff(labels_N[epoch]) < 0).any()  # shuffled
  # Each epoch leaves out other images of a class: there are 30 million ways to
  # choose 20 of 30.
  assert times_N.min() > 0
  assert len(largest) == 20


@pytest.mark.slow
def test_balanced_batches_are_a_function_of_the_step(monkeypatch):
  """Also in workers, wherever the model runs."""
  monkeypatch.setenv('JAX_PLATFORMS', 'tpu')
  whole = uneven(12, balance=1.0)
  np.testing.assert_array_equal(
    uneven(4, balance=1.0, start_step=8), whole[80:]
  )
  halves = [
    uneven(12, balance=1.0, process_index=p, process_count=2).reshape(12, 5)
    for p in range(2)
  ]
  np.testing.assert_array_equal(np.concatenate(halves, 1).reshape(-1), whole)
  with_workers = uneven(4, balance=1.0, workers=1)
  np.testing.assert_array_equal(with_workers, whole[:40])
  assert (uneven(12, balance=1.0, seed=4) != whole).any()


def test_a_class_without_examples_is_not_drawn():
  labels_N = np.array([0, 0, 3, 3, 3, 3])
  balance = loader._BalancedOrder(labels_N, 1.0, 0)
  drawn = labels_N[[balance(i, 0) for i in range(60)]]
  assert np.bincount(drawn).tolist() == [30, 0, 0, 30]


@pytest.mark.parametrize(('count', 'tries'), [(30, 10), (4, 4)])
def test_a_few_images_are_skipped_and_then_the_disk_is_to_blame(
  caplog, count, tries
):
  class Gone(_Numbers):
    skips_unreadable = True

    def __getitem__(self, index):
      raise decode.UnreadableImage(f'number {index}', 'gone')

  with pytest.raises(decode.UnreadableImage) as e:
    loader._example(Gone(count), count - 1, lambda record: record)
  want = [f'number {(count - 1 + i) % count}' for i in range(tries)]
  assert e.value.name == want[-1]
  said = [message.split('image ')[-1] for message in caplog.messages]
  assert said == [f'{name}: gone' for name in want]


def test_what_has_no_labels_cannot_be_balanced():
  class Unlabelled(sources.Source):
    def __len__(self):
      return 9

  with pytest.raises(ValueError, match='data.balance'):
    loader.train_batches(
      Unlabelled(), index_alone, batch_size=3, seed=0, balance=1.0
    )
