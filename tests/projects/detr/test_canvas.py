"""Digits on a canvas: always the same, apart, and each in its box."""

import numpy as np

from vit_jax.data import sources
from vit_jax.projects.detr import canvas


def test_canvases_follow_from_split_and_index():
  train, test = (
    sources.open_source('digits_canvas', split) for split in ('train', 'test')
  )
  assert (len(train), len(test)) == (10_000, 500)
  assert isinstance(test, sources.BoxedSource)
  assert test.class_names == tuple('0123456789')
  again = sources.open_source('digits_canvas', 'train')
  for key, x in train[7].items():
    np.testing.assert_array_equal(x, again[7][key])
  assert not np.array_equal(train[0]['image'], test[0]['image'])
  other = sources.open_source('digits_canvas', 'train', split_seed=1)
  assert not np.array_equal(train[7]['image'], other[7]['image'])
  part = sources.open_source('digits_canvas', 'train[10:20]')
  assert len(part) == 10
  np.testing.assert_array_equal(part[0]['image'], train[10]['image'])


def test_boxes_are_around_the_ink():
  source = sources.open_source('digits_canvas', 'test')
  counts = []
  for i in range(60):
    record = source[i]
    assert record['image'].shape == (48, 48, 3)
    counts.append(len(record['labels']))
    rest = record['image'][..., 0].copy()
    for (x0, y0, x1, y1), mask_HW in zip(
      record['boxes'].astype(int), record['masks'], strict=True
    ):
      np.testing.assert_array_equal(
        mask_HW[y0:y1, x0:x1], record['image'][y0:y1, x0:x1, 0] >= 64
      )
      assert mask_HW.sum() == mask_HW[y0:y1, x0:x1].sum()
      inside = rest[y0:y1, x0:x1]
      # Ink at every side.
      assert all(
        side.max() >= 64
        for side in (inside[0], inside[-1], inside[:, 0], inside[:, -1])
      )
      inside[:] = 0
    assert rest.max() < 64
    for key, x in source.objects(i).items():
      np.testing.assert_array_equal(x, record[key])
  assert set(counts) == {1, 2, 3}


def test_held_out_canvases_have_digits_of_their_own():
  digits = sources.open_source('digits', 'train', split_seed=1)
  known = {record['image'].tobytes() for record in digits}
  source = sources.open_source('digits_canvas', 'test', split_seed=1)
  assert not {r['image'].tobytes() for r in source._digits['test']} & known


def test_objects_are_as_large_as_they_are_and_apart():
  """Of squares all ink, whose grey value tells their class."""
  squares = [
    {'image': np.full((8, 8, 3), 70 + 9 * c, np.uint8), 'label': c}
    for c in range(20)
  ]
  source = canvas.DigitsCanvas('digits_canvas', 'train[-150:]+test[:150]', 0)
  source._digits = {'train': squares[:10], 'test': squares[10:]}
  sides, ends, counts = set(), set(), np.zeros(4)
  for i in range(300):
    record = source[i]
    assert record['name'] == f'digits_canvas/{9850 + i}'
    assert record['size'] == (48, 48)
    assert record['boxes'].dtype == np.float32
    assert record['labels'].dtype == np.int32
    assert not record['crowd'].any() and record['crowd'].dtype == bool
    assert ((record['labels'] >= 10) == (i >= 150)).all()
    want_HW = np.zeros((48, 48), int)
    for (x0, y0, x1, y1), label, mask_HW, area in zip(
      record['boxes'].astype(int),
      *(record[key] for key in ('labels', 'masks', 'area')),
      strict=True,
    ):
      assert 0 <= x0 and 0 <= y0 and x1 <= 48 and y1 <= 48
      assert x1 - x0 == y1 - y0 and area == mask_HW.sum() == (x1 - x0) ** 2
      assert mask_HW[y0:y1, x0:x1].all()
      sides.add(x1 - x0)
      ends |= {('x', x0), ('y', y0), ('x', x1), ('y', y1)}
      want_HW[y0:y1, x0:x1] += 70 + 9 * label  # a sum where two overlap
    np.testing.assert_array_equal(record['image'], want_HW[..., None] + [0] * 3)
    counts[len(record['labels'])] += 1
    # The same as ever: checkpoints were trained on these.
    rng = np.random.RandomState([0, 9850 + i])
    assert len(record['labels']) <= rng.choice([1, 2, 3])
    assert record['labels'][0] % 10 == rng.randint(10)
  assert {(x, end) for x in 'xy' for end in (0, 48)} <= ends
  assert sides == set(range(14, 25))
  # A third of 300 each is asked for, 5 deviations of 8; some do not fit.
  assert counts[0] == 0 and abs(counts[1] - 100) < 41
  assert counts[2] > 59 and counts[3] > 30


def test_a_subset_keeps_its_objects():
  source = sources.open_source('digits_canvas', 'test')
  part = sources.subset(source, [3, 1])
  assert part.class_names == source.class_names
  np.testing.assert_array_equal(
    part.objects(0)['boxes'], source.objects(3)['boxes']
  )
