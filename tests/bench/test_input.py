"""The rate of an input pipeline, on a clock of its own."""

import io
import types

import pytest
from PIL import Image

from vit_jax.bench import input as input_bench


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
