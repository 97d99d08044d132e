"""Which pixels of an image are an object's: masks, and how COCO writes them.

COCO's `segmentation` of an object is a list of polygons, x and y by turns in
pixels, or run lengths of zeros and ones down the columns (RLE), compressed or
not. pycocotools decides which pixels a polygon has.
"""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np

# How far from an image's corner a point may be, in sides of the image.
_MOST_OUTSIDE = 10
Segmentation = Sequence[Sequence[float]] | Mapping[str, Any] | np.ndarray


def require_library(what: str) -> None:
  """Raises ImportError, naming what needs it, if pycocotools is missing."""
  if not importlib.util.find_spec('pycocotools'):
    raise ImportError(
      f'{what} needs pycocotools, which is not installed: pip install -e '
      "'.[detection]'."
    )


def problem(segmentation: Any, size: tuple[int, int]) -> str:
  """Returns what is wrong with COCO's segmentation; empty for nothing.

  `size` is the (height, width) of its image.
  """
  if isinstance(segmentation, Mapping):
    found, counts = segmentation.get('size'), segmentation.get('counts')
    if not isinstance(found, list) or tuple(found) != tuple(size):
      return (
        f'segmentation is RLE of size {found} (height, width) and its image '
        f'of {list(size)}'
      )
    if isinstance(counts, str):
      counts = _runs(counts)
    if not isinstance(counts, list) or not all(
      isinstance(x, int) and x >= 0 for x in counts
    ):
      return 'segmentation is RLE whose counts are no whole numbers or text'
    if sum(counts) != math.prod(size):
      return (
        f'segmentation is RLE of {sum(counts)} pixels and its image has '
        f'{math.prod(size)}'
      )
    return ''
  if not isinstance(segmentation, list):
    return 'segmentation is no list of polygons and no RLE'
  for polygon in segmentation:
    if not isinstance(polygon, list) or not all(
      isinstance(x, int | float) and x == x for x in polygon
    ):
      return 'segmentation has a polygon that is no list of numbers'
    # There pycocotools would crash, or have no end.
    if any(abs(x) > _MOST_OUTSIDE * max(size) for x in polygon):
      return (
        f'segmentation has a polygon far outside its image of {size[1]}x'
        f'{size[0]}'
      )
    if len(polygon) % 2 or len(polygon) < 6:
      return (
        f'segmentation has a polygon of {len(polygon)} numbers: give x and y '
        'of at least 3 points'
      )
  return ''


def _runs(text: str) -> list[int] | None:
  """Returns the run lengths of compressed RLE, None where it is none.

  pycocotools takes what was cut short and leaves the other pixels to chance.
  Each number has five bits a character, the lowest first, and from the fourth
  on is what it is more than the last but one.
  """
  runs: list[int] = []
  value = shift = 0
  for character in text:
    bits = ord(character) - 48
    if not 0 <= bits < 64:
      return None
    value |= (bits & 31) << shift
    shift += 5
    if bits & 32:
      continue
    if bits & 16:
      value -= 1 << shift
    runs.append(value + (runs[-2] if len(runs) > 2 else 0))
    value = shift = 0
  return None if shift else runs


def run_lengths(
  segmentation: Segmentation, size: tuple[int, int]
) -> dict[str, Any]:
  """Returns compressed RLE, `size` and `counts` (bytes), of a segmentation.

  Args:
    segmentation: COCO's, or a mask, bool HW.
    size: the (height, width) of its image.
  """
  from pycocotools import mask as coco_mask

  if isinstance(segmentation, np.ndarray):
    return coco_mask.encode(np.asfortranarray(segmentation, dtype=np.uint8))
  if not isinstance(segmentation, Mapping):
    return coco_mask.merge(coco_mask.frPyObjects(list(segmentation), *size))
  if isinstance(segmentation['counts'], list):
    return coco_mask.frPyObjects(segmentation, *size)
  return dict(segmentation)


def mask(segmentation: Segmentation, size: tuple[int, int]) -> np.ndarray:
  """Returns the pixels of a segmentation, bool HW; see `run_lengths`."""
  if isinstance(segmentation, np.ndarray):
    return segmentation
  if not segmentation:
    return np.zeros(size, bool)
  from pycocotools import mask as coco_mask

  return coco_mask.decode(run_lengths(segmentation, size)).astype(bool)


def in_pixels(
  logits_hw: np.ndarray,
  canvas: tuple[int, int],
  size: tuple[int, int],
  shown: tuple[int, int],
) -> np.ndarray:
  """Returns a model's logits of a mask in pixels of the image it was shown.

  As DETR's code does it (2005.12872): between the logits linearly, then the
  nearest of the pixels that the model saw.

  Args:
    logits_hw: float32, of the canvas.
    canvas: (height, width) of what the model sees, with padding.
    size: (height, width) of the part of it that is the image.
    shown: (height, width) of the image.

  Returns:
    float32 HW of the image, above 0 where the mask is.
  """
  fine_HW = cv2.resize(logits_hw, canvas[::-1], interpolation=cv2.INTER_LINEAR)
  rows, columns = (
    nearest(old, new) for old, new in zip(size, shown, strict=True)
  )
  return fine_HW[rows[:, None], columns[None]]


def nearest(old: int, new: int) -> np.ndarray:
  """Returns of which of `old` pixels each of `new` is, as PyTorch counts."""
  scale = np.float32(old) / np.float32(new)
  at = np.floor(np.arange(new, dtype=np.float32) * scale).astype(np.int64)
  return np.minimum(at, old - 1)
