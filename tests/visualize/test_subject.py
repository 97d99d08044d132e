"""Batches of images, as large as attention weights leave memory for."""

import types

import numpy as np
import pytest

from vit_jax.visualize import photos
from vit_jax.visualize.photos import Subject


@pytest.fixture
def seen(monkeypatch):
  """Collects what models see."""
  batches = []
  monkeypatch.setattr(
    photos,
    'Layers',
    lambda model, params, images_BHWC: batches.append(np.asarray(images_BHWC)),
  )
  return batches


@pytest.mark.parametrize(
  ('count', 'entries', 'sizes'),
  [(5, 2 * 2 * 49, [2, 2, 1]), (3, 5, [1, 1, 1]), (40, 2**26, [32, 8])],
)
def test_as_many_images_at_once_as_leave_weights_small(
  count, entries, sizes, seen, monkeypatch
):
  """The last batch is filled up with images of zeros."""
  monkeypatch.setattr(photos, '_MAX_ENTRIES', entries)
  checkpoint = types.SimpleNamespace(
    model=types.SimpleNamespace(
      attention='all', heads=2, num_tokens=lambda size: 7
    ),
    image_size=(8, 12),
    on_device='params',
    normalize=lambda images_BHWC: images_BHWC - 1.0,
  )
  photographs = [
    types.SimpleNamespace(seen_HWC=np.full((8, 12, 3), 10 + i, np.uint8))
    for i in range(count)
  ]
  subject = Subject(checkpoint, photographs)
  found = [batch for _, batch in subject.at_work('here')]
  assert [len(batch) for batch in found] == sizes
  assert [p for batch in found for p in batch] == photographs
  at = 0
  for images_BHWC, size in zip(seen, sizes, strict=True):
    assert images_BHWC.shape == (sizes[0], 8, 12, 3)
    want_B = np.full(sizes[0], -1.0)
    want_B[:size] = 9 + np.arange(at, at + size)
    np.testing.assert_array_equal(images_BHWC[..., 0].min((1, 2)), want_B)
    np.testing.assert_array_equal(images_BHWC.max((1, 2, 3)), want_B)
    at += size
