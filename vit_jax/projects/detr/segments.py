"""Which pixels of an image are an object's: masks, and how COCO writes them.

COCO's `segmentation` of an object is a list of polygons, x and y by turns in
pixels, or run lengths of zeros and ones down the columns (RLE), compressed or
not. hotcoco decides which pixels a polygon has, as pycocotools does.
"""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np

Segmentation = Sequence[Sequence[float]] | Mapping[str, Any] | np.ndarray


def require_library(what: str) -> None:
  """Raises ImportError, naming what needs it, if hotcoco is missing."""
  if not importlib.util.find_spec('hotcoco'):
    raise ImportError(
      f'{what} needs hotcoco, which is not installed: pip install -e '
      "'.[detection]'."
    )


def problem(segmentation: Any, size: tuple[int, int]) -> str:
  """Returns what is wrong with COCO's segmentation; empty for nothing.

  `size` is the (height, width) of its image.
  """
  if isinstance(segmentation, Mapping):
    found, counts = segmentation.get('size'), segmentation.get('counts')
    if found != list(size):
      return f'segmentation is RLE of size {found}, its image {list(size)}'
    if isinstance(counts, str):
      return ''
    if not isinstance(counts, list) or not all(
      isinstance(x, int) and x >= 0 for x in counts
    ):
      return 'segmentation is RLE whose counts are neither text nor numbers'
    if sum(counts) != math.prod(size):
      return f'segmentation is RLE of {sum(counts)} of {math.prod(size)} pixels'
    return ''
  for x in segmentation if isinstance(segmentation, list) else [None]:
    if not are_numbers(x) or len(x) < 6 or len(x) % 2:
      return f'segmentation has {x!r:.60}, which is not x and y of 3 points'
  return ''


def are_numbers(x: Any) -> bool:
  """Whether a list has finite numbers alone; JSON's may exceed every float."""
  return isinstance(x, list) and all(
    isinstance(number, int | float) and abs(number) < 1e300 for number in x
  )


def run_lengths(
  segmentation: Segmentation, size: tuple[int, int]
) -> dict[str, Any]:
  """Returns compressed RLE, `size` and `counts` (bytes), of a segmentation.

  Args:
    segmentation: COCO's, or a mask, bool HW.
    size: the (height, width) of its image.
  """
  from hotcoco import mask as coco_mask

  if isinstance(segmentation, np.ndarray):
    return coco_mask.encode(np.asfortranarray(segmentation, dtype=np.uint8))
  if not isinstance(segmentation, Mapping):
    return coco_mask.merge(coco_mask.frPyObjects(list(segmentation), *size))
  if isinstance(segmentation['counts'], list):
    return coco_mask.frPyObjects(dict(segmentation), *size)
  return dict(segmentation)


def mask(segmentation: Segmentation, size: tuple[int, int]) -> np.ndarray:
  """Returns the pixels of a segmentation, bool HW; see `run_lengths`."""
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
