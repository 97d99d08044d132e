"""Panoptic quality against its definition, pixel by pixel."""

import itertools

import numpy as np
import pytest

from vit_jax.projects.detr import segments as panoptic

pytest.importorskip('hotcoco')


def segments_of(rng):
  """Returns rectangles over each other, with classes of three."""
  index_HW = np.full((12, 14), -1)
  n = rng.integers(0, 6)
  for i in range(n):
    top, left = rng.integers(0, 9, 2)
    index_HW[top : top + rng.integers(1, 8), left : left + 6] = i
  return panoptic.Segments(index_HW, rng.integers(0, 3, n), rng.random(n) < 0.3)


def moved(rng, want):
  """Returns the same objects, some of them elsewhere or of another class.

  They come in another order, and there is one more.
  """
  n = len(want.labels_N)
  *numbers, new = rng.permutation(n + 1)
  index_HW = np.append(numbers, -1).astype(int)[want.index_HW]
  index_HW = np.roll(index_HW, rng.integers(0, 3), axis=rng.integers(0, 2))
  index_HW[-2:, : rng.integers(1, 7)] = new
  labels_M = np.zeros(n + 1, int)
  labels_M[numbers] = np.where(rng.random(n) < 0.2, 0, want.labels_N)
  return panoptic.Segments(index_HW, labels_M, np.zeros(n + 1, bool))


def by_definition(images):
  """Returns the rows of equation 1 of 1801.00868, by sets of pixels."""
  rows = []
  for c in range(3):
    iou, tp, fp, fn = [], 0, 0, 0
    for want, got in images:
      pixels = [
        {
          i: {tuple(p) for p in np.argwhere(x.index_HW == i)}
          for i in range(len(x.labels_N))
          if x.labels_N[i] == c
        }
        for x in (want, got)
      ]
      wanted, found = ({i: p for i, p in x.items() if p} for x in pixels)
      crowd = {i: p for i, p in wanted.items() if want.crowd_N[i]}
      wanted = {i: p for i, p in wanted.items() if i not in crowd}
      matched = [
        (i, j, len(a & b) / len(a | b))
        for (i, a), (j, b) in itertools.product(wanted.items(), found.items())
        if len(a & b) / len(a | b) > 0.5
      ]
      iou += [x for *_, x in matched]
      tp += len(matched)
      fn += len(wanted) - len(matched)
      in_crowd = set().union(*crowd.values())
      hit = {j for _, j, _ in matched}
      fp += sum(
        j not in hit and len(b & in_crowd) <= len(b) / 2
        for j, b in found.items()
      )
    if tp + fp + fn:
      quality = sum(iou) / (tp + fp / 2 + fn / 2)
      rows.append((quality, sum(iou) / max(tp, 1), tp / (tp + fp / 2 + fn / 2)))
  return np.mean(rows, axis=0) if rows else ()


def quality(images):
  return panoptic.quality(
    [
      (panoptic.written(want, background=True), panoptic.written(got))
      for want, got in images
    ]
  )


def test_rows_are_those_of_the_definition():
  values = []
  for seed in range(40):
    rng = np.random.default_rng(seed)
    wanted = [segments_of(rng) for _ in range(3)]
    images = [(want, moved(rng, want)) for want in wanted]
    rows = quality(images)
    want = by_definition(images)
    assert list(rows) == list(panoptic.ROWS[: len(want)])
    np.testing.assert_allclose(list(rows.values()), want, rtol=1e-12)
    values += list(rows.values())[:1]
  assert 0.1 < np.mean(values) < 0.9


def test_the_smaller_object_is_in_front():
  masks = np.zeros((2, 6, 6), bool)
  masks[0, 2:4, 2:4] = True
  masks[1, :, :] = True
  objects = {
    'masks': [*masks, None],
    'size': (6, 6),
    'labels': np.array([4, 5, 4]),
    'crowd': np.array([False, False, True]),
  }
  want = panoptic.wanted(objects)
  np.testing.assert_array_equal(want.index_HW == 0, masks[0])
  np.testing.assert_array_equal(want.index_HW == 1, ~masks[0])
  assert want.labels_N.tolist() == [4, 5, 4]


def test_a_pixel_is_the_likeliest_querys():
  logits = np.full((4, 6, 6), -1.0, np.float32)
  logits[0, :4] = 1.0
  logits[1, 2:] = [[2.0]]
  logits[2] = 9.0  # too unlikely an object
  logits[3, 0, :4] = 5.0  # of too few pixels
  logits[3, 4] = 1.5  # not the highest, though none is later
  scores = np.array([0.9, 0.9, 0.8, 0.9])
  got = panoptic.found(logits.__getitem__, scores, np.arange(4), (6, 6))
  want_HW = np.full((6, 6), 1)
  want_HW[:2] = 0
  want_HW[0, :4] = -1
  np.testing.assert_array_equal(got.index_HW, want_HW)


def test_what_is_just_likely_and_large_enough_is_found():
  logits = np.full((4, 5, 6), -1.0, np.float32)
  logits[0, 0, :5] = 0.1
  logits[1, 1, :4] = 0.1  # of four pixels
  logits[2, 2] = 0.0  # not above 0
  logits[3, 3] = 5.0  # as likely as is not enough
  asked = []

  def logits_of(query):
    asked.append(query)
    return logits[query]

  scores = np.array([0.851, 0.99, 0.99, 0.85])
  got = panoptic.found(logits_of, scores, np.array([7, 8, 9, 7]), (5, 6))
  want_HW = np.full((5, 6), -1)
  want_HW[0, :5] = 0
  np.testing.assert_array_equal(got.index_HW, want_HW)
  assert asked == [0, 1, 2]
  assert got.labels_N.tolist() == [7, 8, 9, 7]
  assert got.crowd_N.tolist() == [False] * 4


def test_an_object_may_have_all_of_an_image():
  all_of_it = panoptic.Segments(
    np.zeros((2, 3), int), np.array([4]), np.array([False])
  )
  assert quality([(all_of_it, all_of_it)]) == {'PQ': 1, 'SQ': 1, 'RQ': 1}


def test_images_without_objects_have_no_rows():
  empty = panoptic.Segments(
    np.full((2, 3), -1), np.zeros(0, int), np.zeros(0, bool)
  )
  assert quality([(empty, empty)]) == {}
