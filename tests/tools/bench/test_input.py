"""The rate of an input pipeline, on a clock of its own."""

import csv
import io
import types

import pytest
from PIL import Image

from vit_jax.data import benchmarks
from vit_jax.tools.bench import input as input_bench
from vit_jax.tools.bench import race


def test_images_a_second_by_hand(monkeypatch):
  ticks, batches = iter([10.0, 14.0]), iter('abcdef')
  clock = types.SimpleNamespace(perf_counter=lambda: next(ticks))
  monkeypatch.setattr(input_bench, 'time', clock)
  monkeypatch.setattr(input_bench, '_BATCHES', 3)
  monkeypatch.setattr(input_bench, '_BATCH_SIZE', 8)
  assert input_bench._rate(batches) == 6
  assert next(batches) == 'd'


@pytest.mark.parametrize('augment', ['', 'randaugment(2, 9)'])
def test_as_many_images_are_transformed_as_are_counted(monkeypatch, augment):
  """The two photographs in turns, cut to one size by one generator."""
  seen = []

  class Transform:
    def __init__(self, size, augmentation=None):
      assert size == (224, 224) and bool(augmentation) == bool(augment)

    def __call__(self, record, rng):
      seen.append((record['label'], record['name'], rng))

  monkeypatch.setattr(input_bench.transforms, 'TrainTransform', Transform)
  monkeypatch.setattr(input_bench, '_BATCHES', 2)
  monkeypatch.setattr(input_bench, '_BATCH_SIZE', 3)
  turn = input_bench._our_transform(input_bench._Photos(), augment)
  assert turn() > 0
  assert [x[:2] for x in seen] == 3 * [(0, 'china'), (1, 'flower')]
  assert len({id(rng) for *_, rng in seen}) == 1


def test_batches_are_as_large_as_is_counted(monkeypatch):
  """From a shuffle of its own each turn, which nothing has read before."""
  turns = []

  def rate(batches):
    turns.append(next(batches))
    return 7.0

  monkeypatch.setattr(input_bench, '_rate', rate)
  monkeypatch.setattr(input_bench, '_BATCH_SIZE', 5)
  monkeypatch.setattr(input_bench, '_BATCHES', 3)
  turn = input_bench._our_batches(input_bench._Photos())
  assert [turn(), turn()] == [7, 7]
  assert [x['image'].shape for x in turns] == 2 * [(5, 224, 224, 3)]
  assert (turns[0]['image'] != turns[1]['image']).any()


def test_the_photographs_are_as_large_as_is_said():
  photos = input_bench._Photos()
  for i in (0, 1, 1_000_001):
    with Image.open(io.BytesIO(photos[i]['image'])) as image:
      assert image.size == (640, 427)
  assert photos[0]['image'] != photos[1]['image'] == photos[1_000_001]['image']
  # As many as ImageNet has, of which the loader draws.
  assert len(photos) == benchmarks.BENCHMARKS['imagenet2012'].examples[0]


@pytest.mark.parametrize('vs', [None, 'tf.data'])
def test_all_run_in_turns_on_one_core(monkeypatch, capsys, tmp_path, vs):
  """Each at a rate that is known, TensorFlow called as one of its builds."""
  pinned = []
  monkeypatch.setattr(race, 'ROUNDS', 2)
  monkeypatch.setattr(input_bench.os, 'sched_getaffinity', lambda _: {3, 1, 2})
  monkeypatch.setattr(
    input_bench.os, 'sched_setaffinity', lambda *args: pinned.append(args)
  )
  monkeypatch.setattr(input_bench, '_our_batches', lambda _: lambda: 12.0)
  monkeypatch.setattr(
    input_bench,
    '_our_transform',
    lambda _, augment='': lambda: 6.0 if augment else 8.0,
  )
  monkeypatch.setattr(
    input_bench,
    '_tf_data',
    lambda _, antialias: lambda: 2.0 if antialias else 4.0,
  )
  monkeypatch.setattr(
    input_bench.importlib.metadata,
    'packages_distributions',
    lambda: {'tensorflow': ['flax', 'tensorflow-none']},
  )
  asked = []
  monkeypatch.setattr(race, 'machine', lambda x: asked.extend(x) or 'a machine')
  file = tmp_path / 'a.csv'
  input_bench.bench(types.SimpleNamespace(vs=vs, csv=str(file)))
  assert pinned == [(0, {3})]
  assert asked[-1] == ('flax' if vs else 'grain')
  with open(file, newline='') as f:
    rows = list(csv.DictReader(f))
  found = [(x['contender'], x['images_per_s'], x['ratio']) for x in rows]
  theirs = [
    ('tf.data, antialias=False', '4.0', '3.0'),
    ('tf.data, antialias=True', '2.0', '6.0'),
  ]
  assert found == [
    ('ours, batches', '12.0', ''),
    ('ours, transform alone', '8.0', '1.5'),
    ('the same and RandAugment', '6.0', '2.0'),
    *(theirs if vs else []),
  ]
  said = capsys.readouterr().out
  assert said.startswith('a machine\none core, photographs of 640x427 pixels')
  assert 'ours, batches / ours, transform alone: 1.50\n' in said
