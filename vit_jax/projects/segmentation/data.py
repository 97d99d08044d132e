"""Images with a class for every pixel, from PNG files or COCO annotations.

A folder with PNG masks has `images/`, `masks/` with a PNG of the same stem for
each image, and `classes.txt` with the names of classes 1, 2, ..., one per line.
A mask pixel is the number of its class, 0 for background, or 255 to be ignored.
Both `images/` and `masks/` may have a folder for each split, such as `train/`.

A folder that `projects.detr.coco` reads can be used too if each object except
crowds has a mask.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from vit_jax.data import decode, folder, text_files, transforms
from vit_jax.data.orientation import Box
from vit_jax.data.source import Record
from vit_jax.projects.detr import box_transforms, mask_files, segments

BACKGROUND = 'background'
# The class of pixels that are neither learned nor measured.
IGNORED = 255


class MaskFiles(folder.Files):
  """Image files, each with a mask file."""

  def __init__(
    self, root: pathlib.Path, paths: list[str], class_names: tuple[str, ...]
  ):
    """Finds the masks.

    Raises ValueError if an image lacks its mask, or if the masks of the folder
    have ignored pixels but no class.
    """
    super().__init__(paths, class_names=class_names)
    inside = [pathlib.Path(x).relative_to(root / 'images') for x in paths]
    self._masks = [root / 'masks' / x.with_suffix('.png') for x in inside]
    if lacking := [x for x in self._masks if not x.is_file()]:
      raise ValueError(
        f'{len(lacking)} of {len(paths)} images of {root} lack a mask. The '
        f'first missing file is {lacking[0]}. Add masks or remove images.'
      )
    sizes = [x.stat().st_size for x in self._masks]
    self.annotations = repr(sizes).encode()
    numbers: set[int] = set()
    for path in sorted((root / 'masks').rglob('*.png')):
      if numbers - {0, IGNORED}:
        break
      with contextlib.suppress(ValueError):  # the image check names the file
        numbers |= {*np.unique(mask_files.numbers(path)).tolist()}
    if IGNORED in numbers and numbers <= {0, IGNORED}:
      raise ValueError(
        f'The masks of {root} have no classes: all values are 0 (background) '
        f'or {IGNORED} (ignored). Write the numbers of classes as 1, 2, ...'
      )

  def __getitem__(self, index: int) -> Record:
    mask_HW = mask_files.numbers(self._masks[index])
    most = len(self.class_names)
    wrong = mask_HW[(mask_HW > most) & (mask_HW != IGNORED)]
    if wrong.size:
      raise decode.UnreadableImage(
        str(self._masks[index]),
        f'the mask has the class {wrong[0]}, and classes are 0 to {most}. Name '
        f'all classes in classes.txt, or use {IGNORED} for pixels to ignore.',
      )
    extent = {'mask': mask_HW, 'size': mask_HW.shape}
    return super().__getitem__(index) | extent

  def states(self, indices: Sequence[int]) -> Iterable[str]:
    masks = [decode.state_of(str(self._masks[i])) for i in indices]
    found = zip(super().states(indices), masks, strict=True)
    return (f'{a} {b} {len(self.class_names)}' for a, b in found)


def open_masks(name: str, split: str, split_seed: int) -> MaskFiles | None:
  """Opens a split; returns None without `classes.txt` or `masks/`.

  Raises:
    FileNotFoundError: if `images/` is missing.
    ValueError: if `classes.txt` is not UTF-8, or has a name that is empty,
      repeated or 'background'.

  Also raises the errors of `folder.open_folder` and `MaskFiles`.
  """
  root = pathlib.Path(name).expanduser()
  listed = root / 'classes.txt'
  if not listed.is_file() or not (root / 'masks').is_dir():
    return None
  text = text_files.decoded(listed.read_bytes(), listed)
  images = str(root / 'images')
  files = folder.open_folder(images, split, split_seed, has_classes=False)
  class_names = tuple(x.strip() for x in text.rstrip().splitlines())
  if '' in class_names or len({BACKGROUND, *class_names}) <= len(class_names):
    raise ValueError(
      f'{listed} needs a different name in each line: line 1 is the class of '
      f'pixels of value 1. Leave out {BACKGROUND}, which has the value 0.'
    )
  return MaskFiles(root, files.paths, class_names)


@dataclasses.dataclass(frozen=True)
class MaskTransform:
  """Turns a record with masks into an image and the class of each pixel.

  With a generator (training), it takes a random crop, else the whole image.
  """

  train: transforms.TrainTransform
  evaluation: transforms.EvalTransform  # must not crop

  def __call__(
    self, record: Record, rng: np.random.Generator | None = None
  ) -> dict[str, np.ndarray]:
    """Returns `image`, uint8 HWC, and `classes`, uint8 HW.

    Raises:
      UnreadableImage: The image cannot be decoded.
      ValueError: The record lacks masks, or they have another size.
      ImportError: The masks are COCO's, and hotcoco is not installed.
    """
    name = record['name']
    picture = decode.open_image(record['image'], name)
    classes_HW = classes_of(record)
    if classes_HW.shape != (picture.height, picture.width):
      height, width = classes_HW.shape
      raise ValueError(
        f'{name} has {picture.width}x{picture.height} pixels and its mask '
        f'{width}x{height}. Give both the same size.'
      )
    size, box = self.train.image_size, Box(0, 0, *classes_HW.shape)
    if rng is None:
      image = self.evaluation.image(record['image'], name)
    else:
      box = self.train.random_box(picture.height, picture.width, rng)
      part = picture.read(box, size, exact=False)
      image = transforms.resize(part, size)
    # A pixel gets the class of the mask pixel at its centre.
    nearest = Image.fromarray(classes_HW.astype(np.uint8)).resize(
      size[::-1],
      Image.Resampling.NEAREST,
      (box.left, box.top, box.left + box.width, box.top + box.height),
    )
    return {'image': image, 'classes': np.asarray(nearest)}


def classes_of(record: Record) -> np.ndarray:
  """Returns the class of each pixel of a record's image, int64 HW.

  Where objects overlap, the smaller one wins. Pixels of crowds get `IGNORED`.

  Raises:
    ValueError: The record lacks masks.
    ImportError: The masks are COCO's, and hotcoco is not installed.
  """
  if 'mask' in record:
    return record['mask']
  if 'labels' not in record:
    raise ValueError(
      f'{record["name"]} has no mask. Give a folder with images/, masks/ and '
      "classes.txt, or with COCO's instances.json."
    )
  objects: dict[str, Any] = record | {'masks': box_transforms.masks_of(record)}
  found = segments.wanted(objects)
  class_N = np.where(found.crowd_N, IGNORED, found.labels_N + 1)
  # The index -1 of background selects the appended 0.
  return np.append(class_N, 0)[found.index_HW]
