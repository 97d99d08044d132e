"""Load photographs as model input, and in more detail for display.

A `Subject` is a checkpoint and its photographs.
"""

import collections
import dataclasses
import math
import os
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from tqdm import tqdm

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.data import decode, transforms
from vit_jax.data.images import Images
from vit_jax.visualize.attention_maps import Layers

# Limits of the longer side of displayed pictures, in pixels: large enough to
# see the patches of a small image, and small enough to fit a page.
SMALLEST, LARGEST = 256, 1024
# Maximum number of attention weights per layer in a batch of several images.
_MAX_ENTRIES = 2**26
# Maximum number of images per batch.
_MAX_BATCH = 32


@dataclasses.dataclass(frozen=True)
class Photograph:
  """An image file, with a unique name and the model's input, uint8."""

  path: str
  name: str
  seen_HWC: np.ndarray
  images: Images = dataclasses.field(repr=False)

  def shown(self) -> np.ndarray:
    """Returns the part of the file that the model sees, uint8 HWC.

    A crop has the aspect ratio of the model's input. A whole image keeps the
    file's aspect ratio. The shorter side has the file's resolution, unless the
    longer side would be outside of `SMALLEST` to `LARGEST`.
    """
    data = decode.read_file(self.path)
    picture = decode.open_image(data, self.path)
    shape = picture.height, picture.width
    given = self.images.preprocessing
    if small := given.resize_small:
      detail = min(shape) / small
      shape = self.images.size
    else:  # the model sees the whole image, with a changed aspect ratio
      detail = 1.0
    longer = max(shape)
    detail = min(max(detail, SMALLEST / longer), LARGEST / longer)
    height, width = (max(1, round(side * detail)) for side in shape)
    # Rounded up, so that the crop fits.
    given = dataclasses.replace(given, resize_small=math.ceil(small * detail))
    shown = transforms.EvalTransform((height, width), given)
    return shown.image(data, self.path)


@dataclasses.dataclass(frozen=True)
class Subject:
  """A checkpoint and images that are preprocessed for it."""

  checkpoint: Checkpoint
  photographs: Sequence[Photograph]

  @property
  def files(self) -> np.ndarray:
    return np.array([photograph.path for photograph in self.photographs])

  def at_work(
    self, description: str
  ) -> Iterator[tuple[Layers, Sequence[Photograph]]]:
    """Yields the attention of each batch of images, with its photographs.

    Batches are as large as `_MAX_ENTRIES` and `_MAX_BATCH` allow. The last
    batch is padded with black images, whose results callers drop. The progress
    bar shows the description.

    Raises ValueError if the model lacks attention between all tokens.
    """
    model, image_size = self.checkpoint.model, self.checkpoint.image_size
    size = min(_MAX_BATCH, len(self.photographs))
    if model.attention:
      L = model.num_tokens(image_size)
      size = min(size, max(1, _MAX_ENTRIES // (model.heads * L * L)))
    starts = range(0, len(self.photographs), size)
    for start in tqdm(
      starts, description, unit=' batches', delay=2, disable=None
    ):
      batch = self.photographs[start : start + size]
      images_BHWC = np.zeros((size, *image_size, 3), np.uint8)
      images_BHWC[: len(batch)] = [p.seen_HWC for p in batch]
      x_BHWC = self.checkpoint.normalize(jax.numpy.asarray(images_BHWC))
      yield Layers(model, self.checkpoint.on_device, x_BHWC), batch


def load(paths: Sequence[str], checkpoint: Checkpoint) -> list[Photograph]:
  """Reads image files and preprocesses them for a checkpoint.

  Raises UnreadableImage if a file is missing, damaged or not an image.
  """
  images = checkpoint.images
  transform = images.eval_transform()
  seen = [transform.image(decode.read_file(path), path) for path in paths]
  names = unique_names(paths)
  rows = zip(paths, names, seen, strict=True)
  return [Photograph(*row, images) for row in rows]


def unique_names(paths: Sequence[str]) -> list[str]:
  """Returns a unique name for each file: its stem, with a number if needed."""
  names: dict[str, None] = {}
  numbers: collections.Counter[str] = collections.Counter()
  for path in paths:
    stem = os.path.splitext(os.path.basename(path))[0]
    # Names are written to UTF-8 files, so bytes that are not UTF-8 are escaped.
    stem = name = os.fsencode(stem).decode(errors='backslashreplace')
    while name in names:
      numbers[stem] += 1
      name = f'{stem}-{1 + numbers[stem]}'
    names[name] = None
  return [*names]
