"""Panoptic quality of objects that do not overlap (1801.00868).

Every pixel of an image is one object's or none's. Of a class, with TP, FP and
FN matched, wrong and missed objects, PQ is the sum of the matched ones' IoU
over TP + FP / 2 + FN / 2 (equation 1): SQ, their mean IoU, times RQ, the F1
score of the matches. Those of the whole are means over the classes.
"""

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.projects.detr import segments

# By class: the sum of the matched objects' IoU, TP, and 2 TP + FP + FN.
Tally = dict[int, np.ndarray]
ROWS = ('PQ', 'SQ', 'RQ')
# Of DETR's code: the least probability of an object, and pixels of a smaller
# one that are left out.
_LIKELY, _SMALL = 0.85, 4


class Segments(NamedTuple):
  """Objects of an image that do not overlap.

  Attributes:
    index_HW: of the object of each pixel, from 0 on; -1 for none.
    labels_N: their classes.
    crowd_N: whether they are many that are not told apart.
  """

  index_HW: np.ndarray
  labels_N: np.ndarray
  crowd_N: np.ndarray


def wanted(objects: Mapping[str, Any]) -> Segments:
  """Returns annotated objects: where they overlap, the smaller one is in front.

  Args:
    objects: as `BoxedSource.objects` has them, with masks; a crowd without one
      has none here either.
  """
  masks = [
    segments.mask([] if x is None else x, objects['size'])
    for x in objects['masks']
  ]
  index_HW = np.full(objects['size'], -1)
  for i in sorted(range(len(masks)), key=lambda i: -np.sum(masks[i])):
    index_HW[masks[i]] = i
  return Segments(index_HW, objects['labels'], objects['crowd'])


def found(
  logits_of: Callable[[int], np.ndarray],
  scores_N: np.ndarray,
  labels_N: np.ndarray,
  size: tuple[int, int],
) -> Segments:
  """Returns what queries found: a pixel is that of the highest positive logit.

  As in DETR's code, those that are unlikely or have few pixels are left out;
  there every pixel is some query's, as there are classes of background too.

  Args:
    logits_of: gives those HW of a query, asked for one after the other: all of
      them would take gigabytes of a photograph.
    scores_N: probabilities of the queries' objects.
    labels_N: their classes.
    size: (H, W).
  """
  index_HW, best_HW = np.full(size, -1), np.zeros(size, np.float32)
  for i in np.flatnonzero(scores_N > _LIKELY):
    logits_HW = logits_of(int(i))
    index_HW[logits_HW > best_HW] = i
    best_HW = np.maximum(best_HW, logits_HW)
  counts_N = np.bincount(index_HW[index_HW >= 0])
  index_HW[np.isin(index_HW, np.flatnonzero(counts_N <= _SMALL))] = -1
  return Segments(index_HW, labels_N, np.zeros(len(labels_N), bool))


def tally(want: Segments, got: Segments) -> Tally:
  """Compares what is wanted in an image with what was found.

  Neither a crowd counts nor what lies by more than a half in one of its class.
  """
  counted: Tally = collections.defaultdict(lambda: np.zeros(3))
  both_NM = _common_pixels(want, got)
  want_N, got_M = both_NM[:-1].sum(axis=1), both_NM[:, :-1].sum(axis=0)
  both_NM = both_NM[:-1, :-1]
  is_same_NM = want.labels_N[:, None] == got.labels_N[None]
  iou_NM = both_NM / np.maximum(want_N[:, None] + got_M[None] - both_NM, 1)
  # At most one of each: no two have more than half of a third.
  is_match_NM = (iou_NM > 0.5) & is_same_NM & ~want.crowd_N[:, None]
  in_crowd_M = np.sum(both_NM * (is_same_NM & want.crowd_N[:, None]), axis=0)
  is_hit_M = is_match_NM.any(axis=0)
  counts_N = ~want.crowd_N & (want_N > 0)
  counts_M = (got_M > 0) & (is_hit_M | (in_crowd_M <= got_M / 2))
  for i, j in np.argwhere(is_match_NM):
    counted[int(got.labels_N[j])] += iou_NM[i, j], 1, 0
  for label in (*want.labels_N[counts_N], *got.labels_N[counts_M]):
    counted[int(label)] += 0, 0, 1
  return dict(counted)


def quality(images: Iterable[Tally]) -> dict[str, float]:
  """Returns PQ, SQ and RQ of images; nothing if there is no object at all."""
  total: Tally = collections.defaultdict(lambda: np.zeros(3))
  for image in images:
    for label, counts_3 in image.items():
      total[label] += counts_3
  if not total:
    return {}
  rows_C3 = np.array(
    [
      (2 * iou / n, iou / max(hits, 1), 2 * hits / n)
      for iou, hits, n in total.values()
    ]
  )
  return dict(zip(ROWS, rows_C3.mean(axis=0).tolist(), strict=True))


def _common_pixels(want: Segments, got: Segments) -> np.ndarray:
  """Returns how many pixels each two have in common; the last are of none."""
  N, M = len(want.labels_N) + 1, len(got.labels_N) + 1
  pairs = (want.index_HW % N) * M + got.index_HW % M
  return np.bincount(pairs.reshape(-1), minlength=N * M).reshape(N, M)
