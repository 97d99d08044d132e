"""The rate of an input pipeline, on a clock of its own."""

import io
import os
import re

from PIL import Image

from vit_jax.data import benchmarks
from vit_jax.tools.bench import input as input_bench


def test_as_many_images_are_transformed_as_are_counted(monkeypatch):
  """The two photographs in turns, cut to one size by one generator."""
  augment = 'randaugment(2, 9)'
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


def test_ours_is_measured(run, monkeypatch):
  monkeypatch.setattr(input_bench, '_BATCHES', 1)
  monkeypatch.setattr(input_bench, '_BATCH_SIZE', 2)
  cores = os.sched_getaffinity(0)
  try:
    status, out, _ = run('input', small=False)
    assert len(os.sched_getaffinity(0)) == 1
  finally:
    os.sched_setaffinity(0, cores)
  assert status == 0
  for name in ('ours, transform alone', 'the same and RandAugment'):
    assert re.search(rf'^ours, batches / {name}: [\d.]+$', out, re.M)
