"""The rate of an input pipeline, on a clock of its own."""

import io
import os
import re

import pytest
from PIL import Image

from vit_jax.data import benchmarks
from vit_jax.tools.bench import input as input_bench


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


@pytest.mark.parametrize(
  ('flags', 'names'),
  [((), ('ours',)), (('--data', 'digits', './photos'), ('digits', './photos'))],
)
def test_what_is_named_is_measured(run, monkeypatch, tmp_path, flags, names):
  monkeypatch.setattr(input_bench, '_BATCHES', 1)
  monkeypatch.setattr(input_bench, '_BATCH_SIZE', 2)
  monkeypatch.chdir(tmp_path)
  for i in range(3):
    path = tmp_path / 'photos' / 'train' / 'cat' / f'{i}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', (20, 10)).save(path)
  cores = os.sched_getaffinity(0)
  try:
    status, out, _ = run('input', *flags, small=False)
    assert len(os.sched_getaffinity(0)) == 1
  finally:
    os.sched_setaffinity(0, cores)
  assert status == 0
  assert ('photographs of 640x427' in out) == (names == ('ours',))
  for name in names:
    assert re.search(rf'^  {name} +[\d.]+  ', out, re.M)
