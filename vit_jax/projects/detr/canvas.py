"""Synthetic detection data: scikit-learn's digits on black canvases."""

from collections.abc import Mapping
from typing import Any

import cv2
import numpy as np

from vit_jax.data import splits
from vit_jax.data.source import Source
from vit_jax.data.sources import Digits

SIDE = 48
# Range of the side that a digit of 8x8 pixels is resized to.
_LEAST, _MOST = 14, 24
_COUNTS = (1, 2, 3)
_CANVASES = {'train': range(10_000), 'test': range(10_000, 10_500)}
# Lowest grey value of the pixels that belong to a digit and its box.
_INK = 64
_ATTEMPTS = 100


class DigitsCanvas(Source):
  """Canvases of 48x48 pixels with one to three digits of random size and place.

  The split `train` has 10,000 canvases and `test` has 500. A canvas depends
  only on its number and `split_seed`. Canvases of a split use the digits of the
  same split of `Digits`. Digits do not overlap.
  """

  class_names = tuple('0123456789')

  def __init__(self, name: str, split: str, split_seed: int):
    self._positions = splits.select(split, _CANVASES, name)
    self._digits = {part: Digits(part, split_seed) for part in _CANVASES}
    self._seed = split_seed

  def __len__(self) -> int:
    return len(self._positions)

  def __getitem__(self, index: int) -> dict[str, Any]:
    position = int(self._positions[index])
    # RandomState draws the same numbers in all versions of NumPy.
    rng = np.random.RandomState([self._seed, position])
    digits = self._digits['train' if position in _CANVASES['train'] else 'test']
    canvas = np.zeros((SIDE, SIDE, 3), np.uint8)
    is_taken_HW = np.zeros((SIDE, SIDE), bool)
    boxes, labels, masks = [], [], []
    for _ in range(rng.choice(_COUNTS)):
      record = digits[rng.randint(len(digits))]
      for _ in range(_ATTEMPTS):
        side = rng.randint(_LEAST, _MOST + 1)
        top, left = rng.randint(SIDE - side + 1, size=2)
        square = slice(top, top + side), slice(left, left + side)
        if not is_taken_HW[square].any():
          break
      else:  # every attempt overlaps a digit
        break
      is_taken_HW[square] = True
      canvas[square] = cv2.resize(record['image'], canvas[square].shape[:2])
      mask_HW = np.zeros((SIDE, SIDE), bool)
      mask_HW[square] = canvas[square][:, :, 0] >= _INK
      masks.append(mask_HW)
      rows, columns = np.nonzero(mask_HW)
      low = columns.min(), rows.min()
      boxes.append((*low, columns.max() + 1, rows.max() + 1))
      labels.append(record['label'])
    boxes_N4 = np.array(boxes, np.float32)
    return {
      'image': canvas,
      'name': f'digits_canvas/{position}',
      'boxes': boxes_N4,
      'labels': np.array(labels, np.int32),
      'crowd': np.zeros(len(labels), bool),
      'area': np.prod(boxes_N4[:, 2:] - boxes_N4[:, :2], axis=1),
      'size': (SIDE, SIDE),
      'masks': masks,
    }

  def objects(self, index: int) -> Mapping[str, Any]:
    return {k: x for k, x in self[index].items() if k != 'image'}
