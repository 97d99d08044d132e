"""Image files, as a model sees them and as people do."""

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.data import decode, transforms
from vit_jax.visualize.attention_maps import Layers

# The longer side of pictures, in pixels: enough to see the patches of a small
# image, and no more than fits a page.
SMALLEST, LARGEST = 256, 1024

# Of one layer's weights, and of as many images at once as are drawn in a line.
_MAX_ENTRIES = 2**26
_MAX_BATCH = 32


@dataclasses.dataclass(frozen=True)
class Photograph:
  """An image file.

  Attributes:
    path: of the file.
    name: of its own among those loaded together, without folder and extension.
    seen_HWC: what the model sees, uint8.
  """

  path: str
  name: str
  seen_HWC: np.ndarray
  checkpoint: Checkpoint = dataclasses.field(repr=False)

  def shown(self) -> np.ndarray:
    """Returns the part that the model sees in the file's own detail, uint8."""
    picture = _open(self.path)
    preprocessing = self.checkpoint.preprocessing
    if small := preprocessing.resize_small:
      detail = min(picture.height, picture.width) / small
      shape = self.checkpoint.image_size
    else:  # the whole image, which the model sees out of proportion
      detail, shape = 1.0, (picture.height, picture.width)
    longer = max(shape)
    detail = min(max(detail, SMALLEST / longer), LARGEST / longer)
    transform = transforms.EvalTransform(
      _scaled(shape, detail),
      math.ceil(small * detail),  # so that the crop fits
      preprocessing.interpolation,
    )
    return transform.image(decode.read_file(self.path), self.path)


def _scaled(shape: tuple[int, int], factor: float) -> tuple[int, int]:
  height, width = shape
  return max(1, round(height * factor)), max(1, round(width * factor))


def _open(path: str) -> decode.Picture:
  return decode.open_image(decode.read_file(path), path)


def load(paths: Sequence[str], checkpoint: Checkpoint) -> list[Photograph]:
  """Reads files.

  Args:
    paths: of images.
    checkpoint: whose model is to see them.

  Raises:
    UnreadableImage: for a file that is no image, or a damaged one.
    ValueError: for one that has fewer pixels than the model has patches.
  """
  transform = checkpoint.transform()
  names: set[str] = set()
  found = []
  for path in paths:
    picture = _open(path)
    _check_detail(picture, path, checkpoint)
    seen_HWC = transform.image(decode.read_file(path), path)
    stem = os.path.splitext(os.path.basename(path))[0]
    # It goes into files, which hold no bytes that are not UTF-8.
    stem = name = os.fsencode(stem).decode(errors='backslashreplace')
    for number in itertools.count(2):
      if name not in names:
        break
      name = f'{stem}-{number}'
    names.add(name)
    found.append(Photograph(path, name, seen_HWC, checkpoint))
  return found


def _check_detail(
  picture: decode.Picture, path: str, checkpoint: Checkpoint
) -> None:
  if not checkpoint.model.attention:
    return
  h, w = checkpoint.model.grid(checkpoint.image_size)
  if picture.height < h or picture.width < w:
    raise ValueError(
      f'{path} has {picture.height}x{picture.width} pixels, fewer than the '
      f"model's {h}x{w} patches: there is nothing to see in it. Give a larger "
      'image.'
    )


def at_work(
  checkpoint: Checkpoint, params: Any, photographs: Sequence[Photograph]
) -> Iterator[tuple[Layers, Sequence[Photograph]]]:
  """Yields the model's layers on some images at a time.

  As many as leave the weights of one layer small; the last batch is filled up
  with images of zeros, which whoever reads it leaves out.

  Args:
    checkpoint: the model.
    params: its parameters, on the device.
    photographs: all images.
  """
  model = checkpoint.model
  size = 1
  if model.attention:
    L = model.num_tokens(checkpoint.image_size)
    size = min(_MAX_BATCH, max(1, _MAX_ENTRIES // (model.heads * L * L)))
  size = min(size, len(photographs))
  for start in range(0, len(photographs), size):
    batch = photographs[start : start + size]
    images_BHWC = np.zeros((size, *checkpoint.image_size, 3), np.uint8)
    images_BHWC[: len(batch)] = [p.seen_HWC for p in batch]
    normalized_BHWC = checkpoint.normalize(jax.numpy.asarray(images_BHWC))
    yield Layers(model, params, normalized_BHWC), batch
