"""Masks against pycocotools' own reading, and PyTorch's resizes."""

import re

import numpy as np
import pytest

from vit_jax.projects.detr import segments

pytest.importorskip('hotcoco')
coco_mask = pytest.importorskip('pycocotools.mask')
SIZE = (30, 40)
# Two polygons of one object, the second one partly outside.
POLYGONS = [
  [3.2, 4.7, 20.1, 5.5, 14.9, 25.3],
  [30, 10, 45, 12, 38.5, 28, 31, 20],
]


def compressed(polygons):
  (rle,) = coco_mask.frPyObjects(polygons[:1], *SIZE)
  return rle['counts'].decode()


def counted(mask_HW):
  """Returns uncompressed run lengths down the columns, from zeros on."""
  flat = np.concatenate([[0], mask_HW.T.reshape(-1), [0]]).astype(int)
  edges = np.flatnonzero(np.diff(flat))
  ends = np.concatenate([[0], edges, [mask_HW.size]])
  return {'size': [*mask_HW.shape], 'counts': np.diff(ends).tolist()}


def test_polygons_are_those_of_the_original():
  rles = coco_mask.frPyObjects(POLYGONS, *SIZE)
  want_HW = coco_mask.decode(rles).any(axis=2)
  got_HW = segments.mask(POLYGONS, SIZE)
  assert got_HW.dtype == bool and 100 < got_HW.sum() < 500
  np.testing.assert_array_equal(got_HW, want_HW)
  assert not segments.mask([], SIZE).any()


def test_run_lengths_both_ways():
  mask_HW = np.random.default_rng(0).random(SIZE) < 0.3
  compressed = segments.run_lengths(mask_HW, SIZE)
  text = compressed | {'counts': compressed['counts'].decode()}
  for written in (counted(mask_HW), compressed, text, mask_HW):
    np.testing.assert_array_equal(segments.mask(written, SIZE), mask_HW)
    assert segments.run_lengths(written, SIZE)['size'] == list(SIZE)


def test_masks_of_logits_are_those_of_pytorch():
  torch = pytest.importorskip('torch')
  interpolate = torch.nn.functional.interpolate
  rng = np.random.default_rng(0)
  for canvas, size, shown in (
    ((40, 48), (30, 48), (90, 144)),
    ((39, 50), (37, 41), (25, 33)),
  ):
    logits_hw = rng.normal(size=(10, 12)).astype(np.float32)
    found = torch.from_numpy(logits_hw)[None, None]
    found = interpolate(found, canvas, mode='bilinear', align_corners=False)
    found = (found.sigmoid() > 0.5)[:, :, : size[0], : size[1]]
    want = interpolate(found.float(), shown, mode='nearest')[0, 0].numpy() > 0
    got = segments.in_pixels(logits_hw, canvas, size, shown) > 0
    # A sum in another order may have another sign beside 0.
    assert np.mean(got != want) < 1e-3


@pytest.mark.parametrize(
  'segmentation, message',
  [
    (POLYGONS, ''),
    ({'size': [30, 40], 'counts': compressed(POLYGONS)}, ''),
    ({'size': [30, 40], 'counts': [1200]}, ''),
    ([[1, 2, 3, 4, 5, 6], [1, 2]], 'not x and y of 3'),
    ({'size': [30, 40], 'counts': [600.0, 600]}, 'neither text nor'),
    ([[1, 2, 3, 4, 5, 6, 7]], 'not x and y of 3'),
    ('text', 'not x and y of 3'),
    ({'size': [40, 30], 'counts': [1200]}, r'RLE of size \[40, 30\]'),
    (
      {'size': [30, 40], 'counts': [1100]},
      'RLE of 1100 pixels, but the',
    ),
    ({'size': [30, 40], 'counts': [-1, 1201]}, 'neither text nor'),
  ],
)
def test_what_is_wrong_is_said(segmentation, message):
  found = segments.problem(segmentation, SIZE)
  assert re.search(message, found) if message else not found
