"""Segment photographs, and paint the classes of their pixels."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.data import atomic_files, decode
from vit_jax.visualize import draw, photos


def find(
  checkpoint: Checkpoint, paths: Sequence[str], out: str = ''
) -> Iterator[list[tuple[str, float]] | decode.UnreadableImage]:
  """Yields for each file a list of (class name, share of the pixels).

  The largest share comes first; absent classes are left out. For an unreadable
  file, yields the error instead. With the folder `out`, writes per image:

    painted-NAME.png: the image, tinted by class; class 0 is not tinted.
    classes-NAME.png: class numbers, with the classes' colours as palette.

  Raises ValueError if the outputs of the model are not finite.
  """
  transform = checkpoint.transform()
  if out:
    os.makedirs(out, exist_ok=True)
  for path, name in zip(paths, photos.unique_names(paths), strict=True):
    try:
      data = decode.read_file(path)
      shown_HWC = decode.open_image(data, path).read()
      seen_HWC = transform.image(data, path)
    except decode.UnreadableImage as e:
      yield e
      continue
    logits_hwC = np.asarray(checkpoint.logits(seen_HWC[None]))[0]
    checkpoint.check_finite(logits_hwC, path)
    classes_HW = likeliest(logits_hwC, shown_HWC.shape[:2])
    if out:
      place = os.path.join(out, f'painted-{name}.png')
      atomic_files.replace(place, draw.png(painted(shown_HWC, classes_HW)))
      place = os.path.join(out, f'classes-{name}.png')
      atomic_files.replace(place, draw.png(classes_HW, _palette()))
    share_C = np.bincount(classes_HW.ravel()) / classes_HW.size
    yield [
      (checkpoint.class_name(c), float(share_C[c]))
      for c in np.argsort(-share_C, kind='stable')
      if share_C[c]
    ]


def likeliest(logits_hwC: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """Returns the likeliest class of each pixel, uint8 HW.

  Enlarges the patches' logits to `size` (H, W) one class at a time, because all
  classes of a photograph at once would take gigabytes.
  """
  best_HW = np.full(size, -np.inf, np.float32)
  classes_HW = np.zeros(size, np.uint8)
  for c, logits_hw in enumerate(np.moveaxis(logits_hwC, -1, 0)):
    logits_HW = draw.enlarge(logits_hw, size)
    classes_HW[logits_HW > best_HW] = c
    best_HW = np.maximum(best_HW, logits_HW)
  return classes_HW


def painted(shown_HWC: np.ndarray, classes_HW: np.ndarray) -> np.ndarray:
  """Tints the pixels of an image, uint8 HWC, by class, except class 0."""
  mixed_HWC = shown_HWC // 2 + _palette()[classes_HW] // 2
  return np.where(classes_HW[..., None] > 0, mixed_HWC, shown_HWC)


def _palette() -> np.ndarray:
  """Returns the colour of each class, uint8 [256, 3]; class 0 is black."""
  colours: list[Any] = [(0, 0, 0), *map(draw.class_colour, range(255))]
  return np.array(colours, np.uint8)
