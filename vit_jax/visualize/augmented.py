"""What the operations of RandAugment do to images, at both ends."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from vit_jax.data import decode, host_augmentation
from vit_jax.data.transforms import EvalTransform
from vit_jax.visualize import draw
from vit_jax.visualize.sections import SHEET, Figure, Section

_HERE = 'Identity'  # what the others do at magnitude 0, where they have one


def section(paths: Sequence[str], size: tuple[int, int]) -> Section:
  """Every operation at magnitude 10, in both directions where it has two.

  The arrays are `images` (uint8 [operation, image, H, W, 3]), `operations` and
  `files`.

  Args:
    paths: of image files, resized to `size` (height, width).
    size: in pixels.

  Raises:
    UnreadableImage: for a file that is no image, or a damaged one.
  """
  transform = EvalTransform(size)
  seen = [transform.image(decode.read_file(path), path) for path in paths]
  made = {
    name: np.stack([np.array(apply(Image.fromarray(x), value)) for x in seen])
    for name, (apply, value) in _ends().items()
  }

  def picture() -> bytes:
    shown = [images[:SHEET] for images in made.values()]
    rows = [{str(i): x for i, x in enumerate(row, 1)} for row in shown]
    return draw.sheet(rows, list(made))

  return Section(
    'Augmentations',
    'Every operation of RandAugment at the ends of its magnitudes, its value '
    f'in brackets; {_HERE} is magnitude 0.',
    {
      'images': np.stack(list(made.values())),
      'operations': np.array(list(made)),
      'files': np.array(paths),
    },
    [Figure('augmentations', 'operations down, images across', picture)],
  )


def _ends() -> dict[str, tuple]:
  """Returns by label what each operation applies, and its value."""
  found: dict[str, tuple] = {}
  for name in host_augmentation.RANDAUGMENT:
    operation = host_augmentation.OPERATIONS[name]
    if not operation.end:
      found[name] = operation.apply, 0.0
      continue
    for sign in (-1, 1) if operation.signed else (1,):
      value = sign * operation.end
      found[f'{name} ({value:.3g})'] = operation.apply, value
  return found
