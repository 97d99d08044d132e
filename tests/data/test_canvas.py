"""Digits on a canvas: always the same, apart, and each in its box."""

import numpy as np

from vit_jax.data import sources


def test_canvases_follow_from_split_and_index():
  train, test = (
    sources.open_source('digits_canvas', split) for split in ('train', 'test')
  )
  assert (len(train), len(test)) == (10_000, 500)
  assert isinstance(test, sources.BoxedSource)
  assert sources.class_names(test) == tuple('0123456789')
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
  digits = sources.open_source('digits', 'train')
  known = {record['image'].tobytes() for record in digits}
  source = sources.open_source('digits_canvas', 'test')
  assert not {r['image'].tobytes() for r in source._digits['test']} & known


def test_a_subset_keeps_its_objects():
  source = sources.open_source('digits_canvas', 'test')
  part = sources.subset(source, [3, 1])
  assert sources.class_names(part) == source.class_names
  np.testing.assert_array_equal(
    part.objects(0)['boxes'], source.objects(3)['boxes']
  )
