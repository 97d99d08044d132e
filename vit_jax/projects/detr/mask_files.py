"""COCO's annotations of images that have their masks as files.

As Penn-Fudan's pedestrians do: `images/` and `masks/` with files of the same
names but for their extensions and `_mask` behind those of masks. A pixel of a
mask is 0 where there is nothing and else the number of its object, and all
objects are of one class. 255 is a border that is left out, as in Pascal VOC,
unless masks have it alone or 254 as well.
"""

import logging
import pathlib
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from vit_jax.data import decode, image_files
from vit_jax.projects.detr import segments

_log = logging.getLogger(__name__)
_BORDER = 255


def instances(root: pathlib.Path, class_name: str) -> dict[str, Any]:
  """Returns COCO's `instances.json` for the images of a folder.

  Boxes end behind an object's outermost pixels; masks are compressed RLE.

  Raises:
    ValueError: an image or a mask is missing, or they differ in size.
    OSError: a file cannot be read.
  """
  segments.require_library('COCO from masks')
  from hotcoco import mask as coco_mask

  paths = _by_stem(root / 'images')
  masks = _by_stem(root / 'masks', '_mask')
  lacking = sorted(paths.keys() - masks.keys()) or ['images'] * (not paths)
  if lacking:
    raise ValueError(
      f'{root} has {len(paths)} images and {len(masks)} masks, and lacks '
      f'{", ".join(lacking[:5])}: give images/ and a mask of each in masks/.'
    )
  images: list[dict[str, Any]] = []
  annotations: list[dict[str, Any]] = []
  bar = tqdm(paths.items(), unit=' images', delay=2, disable=None)
  for i, (stem, path) in enumerate(bar, 1):
    numbers_HW = _numbers(masks[stem])
    height, width = numbers_HW.shape
    # As it will be learned from: turned as its EXIF data say.
    image = decode.open_image(decode.read_file(str(path)), str(path))
    if (image.height, image.width) != (height, width):
      raise ValueError(
        f'{path} has {image.width}x{image.height} pixels and {masks[stem]} '
        f'{width}x{height}: make them the same.'
      )
    images.append(
      {'id': i, 'file_name': path.name, 'height': height, 'width': width}
    )
    for number in _objects(numbers_HW, masks[stem]):
      rle = segments.run_lengths(numbers_HW == number, (height, width))
      annotations.append(
        {
          'id': number,
          'image_id': i,
          'category_id': 0,
          'iscrowd': 0,
          'bbox': coco_mask.to_bbox(rle).astype(int).tolist(),
          'area': int(coco_mask.area(rle)),
          'segmentation': rle | {'counts': rle['counts'].decode()},
        }
      )
  numbers = {x['id'] for x in annotations}
  if _BORDER in numbers and numbers != {_BORDER} and 254 not in numbers:
    objects = [x for x in annotations if x['id'] != _BORDER]
    _log.warning(
      '255 is left out as a border without an object: %d of %d masks have it.',
      len(annotations) - len(objects),
      len(images),
    )
    annotations = objects
  return {
    'images': images,
    'annotations': [x | {'id': i} for i, x in enumerate(annotations, 1)],
    'categories': [{'id': 0, 'name': class_name}],
  }


def _by_stem(place: pathlib.Path, end: str = '') -> dict[str, pathlib.Path]:
  found = image_files.by_stem(place)
  for first, *others in found.values():
    if others:
      raise ValueError(
        f'{place} has {first} and {others[0]}: masks and images have the same '
        'names, so that two of one name cannot be told apart.'
      )
  return {x.removesuffix(end): place / name for x, (name,) in found.items()}


def _numbers(path: pathlib.Path) -> np.ndarray:
  """Returns the number of the object of each pixel, HW."""
  with decode.naming_errors(str(path)), Image.open(path) as image:
    numbers_HW = np.array(image)
  one_number = image.mode in ('1', 'L', 'P', 'I', 'I;16')
  # JPEG changes the numbers that are written to it.
  if image.format in ('JPEG', 'MPO') or not one_number:
    raise ValueError(
      f'{path} is a {image.format} of mode {image.mode}: save masks as PNG '
      'whose pixels are the numbers of their objects, or 0.'
    )
  return numbers_HW.astype(np.int64)


def _objects(numbers_HW: np.ndarray, path: pathlib.Path) -> list[int]:
  """Returns the numbers above 0.

  Raises:
    ValueError: most are of pixels without a neighbour of the same number but
      with one of another, as greys at an edge are.
  """
  padded = np.pad(numbers_HW, 1)
  row, column = padded[:, 1:-1], padded[1:-1]
  around = row[:-2], row[2:], column[:, :-2], column[:, 2:]
  same_HW = np.logical_or.reduce([x == numbers_HW for x in around])
  edge_HW = np.logical_or.reduce([x > 0 for x in around]) & ~same_HW
  found, of_pixel = np.unique(numbers_HW, return_inverse=True)
  areas = np.bincount(of_pixel.ravel())
  at_edges = np.bincount(of_pixel.ravel(), edge_HW.ravel())
  if np.sum(at_edges > areas / 2) > max(3, len(found) / 2):
    raise ValueError(
      f'{path} has {len(found) - 1} numbers, most of them of pixels at edges: '
      'it looks antialiased, or resized with interpolation. Write hard '
      'edges, and resize it by nearest neighbours.'
    )
  return found[found > 0].tolist()
