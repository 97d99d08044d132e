"""Masks, COCO's segmentations and panoptic quality (1801.00868).

COCO's `segmentation` of an object is a list of polygons (x and y alternate, in
pixels) or RLE: the lengths of runs of zeros and ones, column by column, as
numbers or compressed to text.

Panoptic quality is counted as in COCO's panopticapi, but unannotated pixels are
a background segment, so they count against a detected segment that covers them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import cv2
import numpy as np

Segmentation = Sequence[Sequence[float]] | Mapping[str, Any] | np.ndarray
# Segments of an image as COCO's annotations.
Written = list[dict[str, Any]]
ROWS = ('PQ', 'SQ', 'RQ')
# DETR's code drops segments of at most this probability, or of at most this
# many pixels.
_LIKELY, _SMALL = 0.85, 4


def problem(segmentation: Any, size: tuple[int, int]) -> str:
  """Returns the error in a segmentation or ''; `size` is the image's (H, W)."""
  if isinstance(segmentation, Mapping):
    found, counts = segmentation.get('size'), segmentation.get('counts')
    if found != list(size):
      return f'segmentation is RLE of size {found}; its image has {list(size)}'
    if isinstance(counts, str):  # compressed; not checked
      return ''
    if not isinstance(counts, list) or not all(
      isinstance(x, int) and x >= 0 for x in counts
    ):
      return (
        'segmentation is RLE whose counts are neither text nor integers >= 0'
      )
    if sum(counts) != math.prod(size):
      return (
        f'segmentation is RLE of {sum(counts)} pixels, but the image has '
        f'{math.prod(size)}'
      )
    return ''
  for x in segmentation if isinstance(segmentation, list) else [segmentation]:
    if not are_numbers(x) or len(x) < 6 or len(x) % 2:
      return (
        f'segmentation has {x!r:.50}, which is not x and y of 3 or more points'
      )
  return ''


def are_numbers(x: Any) -> TypeGuard[list[float]]:
  """Whether x is a list of numbers between -1e300 and 1e300, without NaN."""
  return isinstance(x, list) and all(
    isinstance(number, int | float) and abs(number) < 1e300 for number in x
  )


def run_lengths(
  segmentation: Segmentation, size: tuple[int, int]
) -> dict[str, Any]:
  """Returns COCO's `segmentation`, or a mask bool HW, as compressed RLE.

  The RLE has `size`, the image's (height, width), and `counts`, bytes or str.
  """
  from hotcoco import mask as coco_mask

  if isinstance(segmentation, np.ndarray):
    return coco_mask.encode(np.asfortranarray(segmentation, dtype=np.uint8))
  if not isinstance(segmentation, Mapping):
    return coco_mask.merge(coco_mask.frPyObjects(list(segmentation), *size))
  if isinstance(segmentation['counts'], list):
    return coco_mask.frPyObjects(dict(segmentation), *size)
  return dict(segmentation)


def mask(
  segmentation: Segmentation | None, size: tuple[int, int]
) -> np.ndarray:
  """Returns the pixels of a segmentation, bool HW; all false for None.

  Raises ImportError if hotcoco, which decodes COCO's masks, is missing.
  """
  if isinstance(segmentation, np.ndarray):
    return segmentation
  if not segmentation:
    return np.zeros(size, bool)
  from hotcoco import mask as coco_mask

  return coco_mask.decode(run_lengths(segmentation, size)).astype(bool)


def in_pixels(
  logits_hw: np.ndarray,
  canvas: tuple[int, int],
  size: tuple[int, int],
  shown: tuple[int, int],
) -> np.ndarray:
  """Resizes mask logits from the padded canvas to the original image.

  As in DETR's code (2005.12872), the float32 logits are interpolated bilinearly
  to the canvas. The image covers the upper left `size` of the canvas. This part
  is then resized to `shown` by nearest neighbour. Sizes are (height, width).
  """
  fine_HW = cv2.resize(logits_hw, canvas[::-1], interpolation=cv2.INTER_LINEAR)
  rows, columns = map(nearest, size, shown)
  return fine_HW[rows[:, None], columns[None]]


def nearest(old: int, new: int) -> np.ndarray:
  """Returns the source index, int64, of each index of a resized axis.

  The axis had the length `old` and gets the length `new`. Rounds as PyTorch's
  'nearest' does.
  """
  scale = np.float32(old) / np.float32(new)
  at = np.floor(np.arange(new, dtype=np.float32) * scale).astype(np.int64)
  return np.minimum(at, old - 1)


class Segments(NamedTuple):
  """Non-overlapping objects of an image.

  `index_HW` is the index of each pixel's object, from 0; -1 for background.
  """

  index_HW: np.ndarray
  labels_N: np.ndarray
  crowd_N: np.ndarray


def wanted(objects: Mapping[str, Any]) -> Segments:
  """Returns the annotated segments; where they overlap, the smaller one wins.

  `objects` are from `BoxedSource.objects`. An object without a mask gets no
  pixels.
  """
  size = objects['size']
  masks = [mask(x, size) for x in objects['masks']]
  index_HW = np.full(size, -1)
  for i in sorted(range(len(masks)), key=lambda i: -np.sum(masks[i])):
    index_HW[masks[i]] = i
  return Segments(index_HW, objects['labels'], objects['crowd'])


def found(
  logits_of: Callable[[int], np.ndarray],
  scores_N: np.ndarray,
  labels_N: np.ndarray,
  size: tuple[int, int],
) -> Segments:
  """Assigns each pixel to the query with the highest positive logit.

  Unlikely objects and tiny segments are dropped, as in DETR's code. Unlike in
  that code, pixels of tiny segments and pixels without a positive logit become
  background. `logits_of` returns the logits HW of one query. For a photograph,
  the logits of all queries would take gigabytes.
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
  """Returns segments as COCO's annotations.

  The category of class c is c + 1. Crowds of a class are merged, because
  panopticapi expects at most one crowd per class and image. With `background`,
  the background becomes a segment of category 0. Segments without pixels are
  left out.
  """
  alone, crowds = np.flatnonzero(~x.crowd_N), np.flatnonzero(x.crowd_N)
  parts: list[tuple[Any, int, Any]] = [(x.labels_N[i] + 1, 0, i) for i in alone]
  for label in np.unique(x.labels_N[crowds]):
    parts.append((label + 1, 1, crowds[x.labels_N[crowds] == label]))
  parts += [(0, 0, -1)] * background
  return [
    {
      'category_id': int(category),
      'iscrowd': crowd,
      'segmentation': run_lengths(mask_HW, mask_HW.shape),
    }
    for category, crowd, members in parts
    if (mask_HW := np.isin(x.index_HW, members)).any()
  ]


def quality(images: Sequence[tuple[Written, Written]]) -> dict[str, float]:
  """Returns PQ, SQ and RQ, from 0 to 1; {} if no object is annotated or found.

  For each image, `images` has the annotated segments, with background, and the
  detected segments.
  """
  from hotcoco import panoptic as hotcoco_panoptic

  sides: list[Written] = [[], []]
  for i, pair in enumerate(images):
    for side, annotations in zip(sides, pair, strict=True):
      side += [
        {'id': len(side) + j, 'image_id': i} | x
        for j, x in enumerate(annotations, 1)
      ]
  labels = {x['category_id'] for side in sides for x in side}
  sizes = [want[0]['segmentation']['size'] for want, _ in images]
  about = {
    'images': [
      {'id': i, 'height': H, 'width': W} for i, (H, W) in enumerate(sizes)
    ],
    'categories': [
      {'id': x, 'name': str(x), 'isthing': int(x > 0)} for x in labels
    ],
  }
  measured = hotcoco_panoptic.PanopticEval(
    *(about | {'annotations': side} for side in sides)
  )
  measured.evaluate()
  things = measured.results()['Things']
  return {row: things[row.lower()] for row in ROWS if things['n']}
