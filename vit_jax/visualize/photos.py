"""Image files as a model sees them, and in their own detail."""

import collections
import dataclasses
import math
import os
from collections.abc import Sequence

import numpy as np

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.data import decode, transforms
from vit_jax.data.images import Images

# The longer side of pictures, in pixels: enough to see the patches of a small
# image, and no more than fits a page.
SMALLEST, LARGEST = 256, 1024


@dataclasses.dataclass(frozen=True)
class Photograph:
  """An image file.

  Attributes:
    path: of the file.
    name: of its own among those loaded together, without folder and extension.
    seen_HWC: the model's input, uint8.
    images: the preprocessing of the input.
  """

  path: str
  name: str
  seen_HWC: np.ndarray
  images: Images = dataclasses.field(repr=False)

  def shown(self) -> np.ndarray:
    """Returns the part that the model sees in the file's own detail, uint8."""
    data = decode.read_file(self.path)
    picture = decode.open_image(data, self.path)
    shape = picture.height, picture.width
    given = self.images.preprocessing
    if small := given.resize_small:
      detail = min(shape) / small
      shape = self.images.size
    else:  # the whole image, which the model sees out of proportion
      detail = 1.0
    longer = max(shape)
    detail = min(max(detail, SMALLEST / longer), LARGEST / longer)
    height, width = (max(1, round(side * detail)) for side in shape)
    # Rounded up, so that the crop fits.
    given = dataclasses.replace(given, resize_small=math.ceil(small * detail))
    shown = transforms.EvalTransform((height, width), given)
    return shown.image(data, self.path)


def load(paths: Sequence[str], checkpoint: Checkpoint) -> list[Photograph]:
  """Reads files of images that a checkpoint's model is to see.

  Raises:
    UnreadableImage: for a file that is no image, or a damaged one.
    ValueError: for one that has fewer pixels than the model has patches.
  """
  images = checkpoint.images
  transform = images.eval_transform()
  found = []
  for path, name in zip(paths, unique_names(paths), strict=True):
    data = decode.read_file(path)
    picture = decode.open_image(data, path)
    if checkpoint.model.attention:
      h, w = checkpoint.model.grid(checkpoint.image_size)
      if picture.height < h or picture.width < w:
        raise ValueError(
          f'{path} has {picture.height}x{picture.width} pixels, fewer than the '
          f"model's {h}x{w} patches: there is nothing to see in it. Give a "
          'larger image.'
        )
    found.append(Photograph(path, name, transform.image(data, path), images))
  return found


def unique_names(paths: Sequence[str]) -> list[str]:
  """Returns a name for what is made of each file: its own, and a number."""
  names: dict[str, None] = {}
  numbers: collections.Counter[str] = collections.Counter()
  for path in paths:
    stem = os.path.splitext(os.path.basename(path))[0]
    # It goes into files, which hold no bytes that are not UTF-8.
    stem = name = os.fsencode(stem).decode(errors='backslashreplace')
    while name in names:
      numbers[stem] += 1
      name = f'{stem}-{1 + numbers[stem]}'
    names[name] = None
  return [*names]
