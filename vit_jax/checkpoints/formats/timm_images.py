"""How timm says that images are prepared, from our preprocessing and to it."""

import math
from typing import Any

from vit_jax.checkpoints.formats.stated import Stated, given
from vit_jax.checkpoints.formats.table import Preprocessing

# What timm assumes of a pretrained_cfg that does not say.
_DEFAULTS = {
  'crop_pct': 0.875,
  'crop_mode': 'center',
  'interpolation': 'bicubic',
  'mean': [0.485, 0.456, 0.406],
  'std': [0.229, 0.224, 0.225],
}
_INTERPOLATIONS = {'bilinear': 'bilinear', 'bicubic': 'bicubic'}


def read(pretrained: Stated, size: tuple[int, int]) -> Preprocessing:
  """Returns the preprocessing of a directory.

  Args:
    pretrained: its pretrained_cfg; gets a warning of each thing that cannot be
      done alike here.
    size: (H, W) of the model's images in pixels.

  Raises:
    ValueError: if it makes no sense.
  """
  found = pretrained.with_values(_DEFAULTS | given(pretrained))
  mean, std = found.rgb('mean'), found.rgb('std')
  if min(std) <= 0:
    found.refuse('std', ': it divides, so it must be above 0.')
  interpolation = found.interpolation('interpolation', _INTERPOLATIONS)
  return found.preprocessing(
    resize_small=_resize_small(found, size),
    mean=mean,
    std=std,
    interpolation=interpolation,
  )


def config(
  preprocessing: Preprocessing, size: tuple[int, int]
) -> tuple[dict[str, Any], list[str]]:
  """Returns a part of a pretrained_cfg.

  Args:
    preprocessing: of a model.
    size: (H, W) of its images in pixels.

  Returns:
    The part, and a sentence on each thing that timm does otherwise.
  """
  resize_small, lines = preprocessing.resize_small, []
  crop_pct = 1.0
  if resize_small:
    crop_pct = min(size) / resize_small
    # timm rounds the quotient down, which rounding may have put below.
    if math.floor(min(size) / crop_pct) < resize_small:
      crop_pct = math.nextafter(crop_pct, 0)
    if size[0] != size[1]:
      lines.append(
        f'Resizing the shorter side to {resize_small} pixels for images of '
        f'{size[0]}x{size[1]}: timm resizes until both sides are '
        f'{1 / crop_pct:.3g} times those.'
      )
  return {
    'crop_mode': 'center' if resize_small else 'squash',
    'crop_pct': crop_pct,
    'input_size': [3, *size],
    'interpolation': preprocessing.interpolation,
    'mean': list(preprocessing.mean),
    'std': list(preprocessing.std),
  }, lines


def _resize_small(found: Stated, size: tuple[int, int]) -> int:
  share, mode = found['crop_pct'], found['crop_mode']
  # Smaller ones are of more pixels than any image has.
  if type(share) not in (int, float) or not 1e-5 < share <= 2:
    found.refuse(
      'crop_pct', ' and should be a share of the image, as in 0.875.'
    )
  resize_small = math.floor(min(size) / share)
  height, width = size
  if mode == 'squash' and share == 1:
    return 0
  if mode == 'center' and resize_small >= max(size):
    if height == width:
      return resize_small
    how = (
      f'the shorter side is resized to {resize_small} pixels and the '
      'centre taken'
    )
  else:
    resize_small, how = 0, 'the whole image is resized'
  found.warn(
    f'with crop_mode {mode!r}, crop_pct {share} and images of {height}x{width} '
    f'pixels timm prepares images in a way that is not there here: {how}.'
  )
  return resize_small
