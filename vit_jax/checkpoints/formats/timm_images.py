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
  return found.preprocessing(
    mean=found.rgb('mean'),
    std=found.rgb('std'),
    interpolation=found.interpolation('interpolation', _INTERPOLATIONS),
    resize_like='torchvision',
    **_resize(found, size),
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
    if size[0] != size[1] and not preprocessing.squash:
      lines.append(
        f'Resizing the shorter side to {resize_small} pixels for images of '
        f'{size[0]}x{size[1]}: timm resizes until both sides are '
        f'{1 / crop_pct:.3g} times those.'
      )
  squash = preprocessing.squash or not resize_small
  return {
    'crop_mode': 'squash' if squash else 'center',
    'crop_pct': crop_pct,
    'input_size': [3, *size],
    'interpolation': preprocessing.interpolation,
    'mean': list(preprocessing.mean),
    'std': list(preprocessing.std),
  }, lines


def _resize(found: Stated, size: tuple[int, int]) -> dict[str, Any]:
  """Returns `resize_small` and `squash`."""
  share, mode = found['crop_pct'], found['crop_mode']
  # Smaller ones are of more pixels than any image has.
  if type(share) not in (int, float) or not 1e-5 < share <= 1:
    found.refuse(
      'crop_pct', ' and should be a share of the image, as in 0.875.'
    )
  if mode not in ('center', 'squash'):
    found.refuse(
      'crop_mode',
      ', and images are not padded here: it should be center or squash.',
    )
  height, width = size
  resize_small = math.floor(min(size) / share)
  if mode == 'squash':
    return {'resize_small': resize_small, 'squash': True} if share < 1 else {}
  if height != width:
    if resize_small < max(size):
      resize_small = 0
    how = (
      f'the shorter side is resized to {resize_small} pixels and the '
      'centre taken'
      if resize_small
      else 'the whole image is resized'
    )
    found.warn(
      f'with crop_mode {mode!r}, crop_pct {share} and images of '
      f'{height}x{width} pixels timm prepares images in a way that is not '
      f'there here: {how}.'
    )
  return {'resize_small': resize_small}
