"""Turn a record with boxes into arrays of fixed shapes.

As in DETR's code (2005.12872), an image is cropped at random, resized with its
aspect ratio kept, and flipped at random. It lies in the upper left corner of
the array; the rest of the array is 0.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data import decode, orientation, transforms
from vit_jax.data.orientation import Box
from vit_jax.projects.detr import segments

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class BoxTransform:
  """Turns a record with boxes into an example.

  Attributes:
    image_size: (H, W) of the arrays.
    max_objects: M, the number of rows for objects.
    short_sides: possible lengths of the short side of a resized image. An image
      that would exceed the array becomes smaller. Training draws a length,
      evaluation uses the last one. If empty, images are as large as the array
      allows.
    mask_stride: image pixels per mask pixel along a side; 0 for no masks.
    crop_sides: possible short sides to scale an image to before a random crop.
      Training crops an image with probability 1/2; if empty, never.
    crop: smallest and largest side of the random crop, in pixels of the scaled
      image.
    flip: whether to flip images horizontally with probability 1/2.
    buckets: number of buckets, which are nearly equal groups of `short_sides`.
      A training batch uses one bucket. Its images have `image_size` times
      max(sides of the bucket) / max(short_sides), rounded up to multiples
      of 32, but never larger than `image_size`.
  """

  image_size: tuple[int, int]
  max_objects: int
  short_sides: tuple[int, ...] = ()
  mask_stride: int = 0
  crop_sides: tuple[int, ...] = ()
  crop: tuple[int, int] = (384, 600)
  flip: bool = False
  buckets: int = 1

  def of_batch(self, rng: np.random.Generator) -> 'BoxTransform':
    """Returns the transform of a random bucket.

    Each short side is as likely as without buckets.
    """
    if self.buckets == 1:
      return self
    return self._of_bucket(int(rng.integers(len(self.short_sides))))

  def sizes(self) -> list[tuple[int, int]]:
    """Returns the (H, W) of training batches; each entry is equally likely."""
    if self.buckets == 1:
      return [self.image_size]
    sides = range(len(self.short_sides))
    return [self._of_bucket(i).image_size for i in sides]

  def _of_bucket(self, chosen: int) -> 'BoxTransform':
    groups = np.array_split(np.arange(len(self.short_sides)), self.buckets)
    group = next(g for g in groups if chosen in g)
    sides = tuple(self.short_sides[i] for i in group)
    share = max(sides) / max(self.short_sides)
    H, W = (
      min(side, 32 * math.ceil(side * share / 32)) for side in self.image_size
    )
    return dataclasses.replace(
      self, image_size=(H, W), short_sides=sides, buckets=1
    )

  def __call__(
    self, record: Record, rng: np.random.Generator | None = None
  ) -> dict[str, np.ndarray]:
    """Crops, resizes and pads a record.

    Boxes are clipped to the crop. Crowds, objects outside the crop and boxes
    without area are dropped.

    Args:
      record: has `image`, `name`, and `boxes` and `labels` as
        `BoxedSource.objects` returns them; optionally `crowd`. With
        `mask_stride` also `masks` and `size`.
      rng: generator of this example; None for evaluation.

    Returns:
      `image`: uint8 HWC.
      `size`: int32 [2], the (height, width) of the image without padding.
      `boxes`: float32 M4, (cx, cy, w, h) as shares of `size`.
      `labels`: int32 M; -1 in rows without an object, which come last.
      `masks`: bool Mhw; only with `mask_stride`.

    Raises:
      UnreadableImage: The image cannot be decoded.
      ValueError: The record lacks boxes or, with `mask_stride`, a mask; or more
        than `max_objects` objects are left.
    """
    if 'boxes' not in record:
      raise ValueError(
        f'{record["name"]} has no boxes; objective.name=detection needs them. '
        'Set data.name to a folder with COCO or VOC annotations, or to '
        'digits_canvas.'
      )
    picture = decode.open_image(record['image'], record['name'])
    part, flip = Box(0, 0, picture.height, picture.width), False
    short = self.short_sides[-1] if self.short_sides else 0
    if rng is not None:
      if self.crop_sides and rng.random() < 0.5:
        part = self._part(picture.height, picture.width, rng)
      short = int(rng.choice(self.short_sides)) if self.short_sides else 0
      flip = self.flip and rng.random() < 0.5
    size = orientation.fitted_size(
      (part.height, part.width), self.image_size, short
    )
    image = transforms.resize(picture.read(part, size, exact=rng is None), size)
    corner_4 = np.array([part.left, part.top] * 2)
    boxes_N4 = np.asarray(record['boxes'], np.float64).reshape(-1, 4)
    boxes_N4 = (boxes_N4 - corner_4) / ([part.width, part.height] * 2)
    # Masks are sampled at these rows and columns of the original image, one for
    # each row and column of the resized image.
    rows = part.top + segments.nearest(part.height, size[0])
    columns = part.left + segments.nearest(part.width, size[1])
    if flip:
      image, columns = image[:, ::-1], columns[::-1]
      boxes_N4 = boxes_N4[:, [2, 1, 0, 3]] * [-1, 1, -1, 1] + [1, 0, 1, 0]
    boxes_N4 = np.clip(boxes_N4, 0, 1)
    low_N2, high_N2 = boxes_N4[:, :2], boxes_N4[:, 2:]
    is_kept_N = np.all(high_N2 > low_N2, axis=1)
    # The box of a crowd covers many objects, so it is not a target.
    is_kept_N &= ~np.asarray(record.get('crowd', np.zeros(len(low_N2), bool)))
    count = np.sum(is_kept_N)
    if count > self.max_objects:
      raise ValueError(
        f'{record["name"]} has {count} objects and objective.max_objects is '
        f'{self.max_objects}. Raise it, and model.num_queries to at least the '
        'same number.'
      )
    canvas = np.zeros((*self.image_size, 3), np.uint8)
    canvas[: image.shape[0], : image.shape[1]] = image
    labels_M = np.full(self.max_objects, -1, np.int32)
    labels_M[:count] = np.asarray(record['labels'])[is_kept_N]
    boxes_M4 = np.zeros((self.max_objects, 4), np.float32)
    boxes_M4[:count, :2] = ((low_N2 + high_N2) / 2)[is_kept_N]
    boxes_M4[:count, 2:] = (high_N2 - low_N2)[is_kept_N]
    example: dict[str, np.ndarray] = {
      'image': canvas,
      'size': np.array(image.shape[:2], np.int32),
      'boxes': boxes_M4,
      'labels': labels_M,
    }
    if self.mask_stride:
      kept = np.flatnonzero(is_kept_N)
      example['masks'] = self._masks(record, kept, (rows, columns))
    return example

  def _masks(
    self,
    record: Record,
    kept: np.ndarray,
    pixels: tuple[np.ndarray, np.ndarray],
  ) -> np.ndarray:
    """Returns the masks of the objects with indices `kept`, bool Mhw.

    `pixels` maps rows and columns of the resized image to the original image.
    A mask pixel is the middle of a square of `mask_stride`^2 image pixels.
    """
    masks = masks_of(record)
    middle = self.mask_stride // 2
    rows_h, columns_w = (x[middle :: self.mask_stride] for x in pixels)
    shape = (-(-side // self.mask_stride) for side in self.image_size)
    masks_Mhw = np.zeros((self.max_objects, *shape), bool)
    for mask_hw, i in zip(masks_Mhw, kept, strict=False):
      whole_HW = segments.mask(masks[i], record['size'])
      found_hw = whole_HW[rows_h[:, None], columns_w[None]]
      mask_hw[: len(rows_h), : len(columns_w)] = found_hw
    return masks_Mhw

  def _part(self, height: int, width: int, rng: np.random.Generator) -> Box:
    """Draws a crop, in pixels of the original image.

    DETR's code scales the image to one of `crop_sides`, crops it, and resizes
    the crop. Mapping the crop to the original image saves the first resize.
    """
    scale = int(rng.choice(self.crop_sides)) / min(height, width)
    starts, sides = [], []
    for side in (height, width):
      resized, (least, most) = round(scale * side), self.crop
      cut = int(rng.integers(min(least, resized), min(most, resized) + 1))
      start = int(rng.integers(resized - cut + 1))
      starts.append(min(round(start / scale), side - 1))
      sides.append(max(1, min(round(cut / scale), side - starts[-1])))
    return Box(*starts, *sides)


def masks_of(record: Record) -> Sequence[segments.Segmentation]:
  """Returns the segmentation of each object of a record; crowds may have None.

  Raises ValueError if any other object lacks it.
  """
  masks = record.get('masks', [None] * len(record['labels']))
  crowd = record.get('crowd', [False] * len(masks))
  lacking = sum(x is None and not c for x, c in zip(masks, crowd, strict=True))
  if lacking:
    raise ValueError(
      f'{record["name"]} has {lacking} objects without a mask. Add the COCO '
      'field segmentation to every annotation. For objective.name=detection '
      'without masks, set model.masks=False.'
    )
  return masks
