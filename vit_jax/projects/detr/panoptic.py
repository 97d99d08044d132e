"""Panoptic quality of objects that do not overlap (1801.00868).

Every pixel of an image belongs to one object or to none. PQ (equation 1) is SQ,
the mean IoU of matched objects, times RQ, the F1 score of the matches. hotcoco
counts them as COCO's panopticapi does, with one difference: pixels without an
object are background here, and count against a segment that covers them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.projects.detr import segments

# COCO's annotations of an image's segments.
Written = list[dict[str, Any]]
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


def written(x: Segments, *, background: bool = False) -> Written:
  """Returns COCO's annotations of segments; class 0 is the background.

  Crowds of a class become one, since panopticapi knows one an image.
  """
  index_HW, crowd_N = x.index_HW, x.crowd_N
  parts: list[tuple[int, bool, Any]] = [
    (x.labels_N[i] + 1, False, i) for i in np.flatnonzero(~crowd_N)
  ]
  for label in np.unique(x.labels_N[crowd_N]):
    members = np.flatnonzero(crowd_N & (x.labels_N == label))
    parts.append((label + 1, True, members))
  if background:
    parts.append((0, False, -1))
  return [
    {
      'category_id': int(category),
      'iscrowd': int(crowd),
      'segmentation': segments.run_lengths(mask_HW, mask_HW.shape),
    }
    for category, crowd, members in parts
    if (mask_HW := np.isin(index_HW, members)).any()
  ]


def quality(images: Sequence[tuple[Written, Written]]) -> dict[str, float]:
  """Returns PQ, SQ and RQ; nothing if there is no object at all.

  Args:
    images: annotations, with background, and what was found, of each.
  """
  sizes = [want[0]['segmentation']['size'] for want, _ in images]
  labels = {x['category_id'] for pair in images for x in (*pair[0], *pair[1])}

  def document(side: int) -> dict[str, Any]:
    annotations = [
      {'image_id': i} | x for i, pair in enumerate(images) for x in pair[side]
    ]
    return {
      'images': [
        {'id': i, 'height': H, 'width': W} for i, (H, W) in enumerate(sizes)
      ],
      'annotations': [{'id': i} | x for i, x in enumerate(annotations, 1)],
      'categories': [
        {'id': x, 'name': str(x), 'isthing': int(x > 0)} for x in labels
      ],
    }

  from hotcoco import panoptic as hotcoco_panoptic

  if not labels - {0}:
    return {}
  measured = hotcoco_panoptic.PanopticEval(document(0), document(1))
  measured.evaluate()
  things = measured.results()['Things']
  return {row: things[row.lower()] for row in ROWS if things['n']}
