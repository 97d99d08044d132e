"""Load photographs as model input, and in more detail for display."""

import collections
import dataclasses
import math
import os
from collections.abc import Sequence

import numpy as np

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.data import decode, transforms
from vit_jax.data.images import Images

# Limits of the longer side of displayed pictures, in pixels: large enough to
# see the patches of a small image, and small enough to fit a page.
SMALLEST, LARGEST = 256, 1024


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


def load(paths: Sequence[str], checkpoint: Checkpoint) -> list[Photograph]:
  """Reads image files and preprocesses them for a checkpoint.

  Raises:
    UnreadableImage: if a file is missing, damaged or not an image.
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
