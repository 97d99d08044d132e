"""Convert mask files to COCO annotations.

The mask of `images/a.jpg` is `masks/a.png` or `masks/a_mask.png`. A mask pixel
is 0 for background, or the number of its object. As in Pascal VOC, 255 marks a
border, which is left out. But if any mask has an object 254, or if the masks
have only 0 and 255, 255 is an object.
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
  """Returns the content of COCO's `instances.json` for a folder of images.

  Boxes include an object's outermost pixels; masks are compressed RLE.

  Raises:
    ImportError: hotcoco is not installed.
    UnreadableImage: an image cannot be opened, or a mask cannot be decoded.
    ValueError: images or masks are missing, a mask is invalid or not of its
      image's size, or two files have the same stem.
  """
  from hotcoco import mask as coco_mask

  paths = _by_stem(root / 'images')
  masks = _by_stem(root / 'masks', '_mask')
  lacking = [f'mask of {stem}' for stem in sorted(paths.keys() - masks.keys())]
  lacking = lacking or ['images'] * (not paths)
  if lacking:
    raise ValueError(
      f'{root} has {len(paths)} images and {len(masks)} masks; missing: '
      f'{", ".join(lacking[:5])}. Put images into images/ and a mask for each '
      'into masks/.'
    )
  images: list[dict[str, Any]] = []
  annotations: list[dict[str, Any]] = []
  bar = tqdm(paths.items(), unit=' images', delay=2, disable=None)
  for i, (stem, path) in enumerate(bar, 1):
    numbers_HW = numbers(masks[stem])
    height, width = numbers_HW.shape
    # This is the size after EXIF orientation, which training applies too.
    image = decode.open_image(decode.read_file(str(path)), str(path))
    if (image.height, image.width) != (height, width):
      raise ValueError(
        f'{path} has {image.width}x{image.height} pixels and {masks[stem]} '
        f'{width}x{height}. An image and its mask need the same size.'
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
  found = {x['id'] for x in annotations}
  if _BORDER in found and found != {_BORDER} and 254 not in found:
    objects = [x for x in annotations if x['id'] != _BORDER]
    _log.warning(
      'Pixels with the value 255 in %d of %d masks are left out as borders.',
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
  """Returns the image files of a folder by stem without the suffix `end`."""
  found: dict[str, list[str]] = {}
  for stem, names in image_files.by_stem(place).items():
    found.setdefault(stem.removesuffix(end), []).extend(names)
  for first, *others in found.values():
    if others:
      raise ValueError(
        f'{place} has both {first} and {others[0]}. Masks and images are '
        'matched by stem, so each stem must be unique. Rename or remove one.'
      )
  return {stem: place / name for stem, (name,) in found.items()}


def numbers(path: pathlib.Path) -> np.ndarray:
  """Returns the object number of each pixel of a mask file, int64 HW.

  Raises UnreadableImage if the file cannot be decoded, and ValueError if it is
  a JPEG or does not have one channel of integers.
  """
  with decode.naming_errors(str(path)), Image.open(path) as image:
    numbers_HW = np.array(image)
  one_number = image.mode in ('1', 'L', 'P', 'I', 'I;16')
  # JPEG compression would change the numbers.
  if image.format in ('JPEG', 'MPO') or not one_number:
    raise ValueError(
      f'{path} is a {image.format} of mode {image.mode}. Save masks as PNG '
      'with one channel of numbers, 0 for background.'
    )
  return numbers_HW.astype(np.int64)


def _objects(numbers_HW: np.ndarray, path: pathlib.Path) -> list[int]:
  """Returns the object numbers of a mask; refuses antialiased masks.

  In an antialiased mask, most numbers, and at least four, occur mainly in edge
  pixels. An edge pixel touches another object, but no pixel of its own number.
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
      f'{path} has {np.sum(found > 0)} object numbers, and most occur mainly '
      'at edges: it looks antialiased, or resized with interpolation. Write it '
      'with hard edges, and resize it by nearest neighbours.'
    )
  return found[found > 0].tolist()
