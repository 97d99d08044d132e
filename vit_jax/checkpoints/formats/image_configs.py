"""Converts image preprocessing from and to the configs of other libraries.

transformers stores it in preprocessor_config.json, timm in its config.json.
"""

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from vit_jax.checkpoints.formats import tensors
from vit_jax.checkpoints.formats.stated import Stated, given
from vit_jax.checkpoints.formats.table import Preprocessing

FILE = 'preprocessor_config.json'
# Where transformers 5 keeps those of images and text together.
BOTH = 'processor_config.json'

_PILLOW = {'bilinear': 2, 'bicubic': 3}
_HALF = {'image_mean': [0.5] * 3, 'image_std': [0.5] * 3}
_IMAGENET = {
  'image_mean': [0.485, 0.456, 0.406],
  'image_std': [0.229, 0.224, 0.225],
}
_OPENAI = {
  'image_mean': [0.48145466, 0.4578275, 0.40821073],
  'image_std': [0.26862954, 0.26130258, 0.27577711],
}
# Values that timm assumes if a pretrained_cfg lacks them.
_TIMM = {
  'crop_pct': 0.875,
  'crop_mode': 'center',
  'interpolation': 'bicubic',
  'mean': _IMAGENET['image_mean'],
  'std': _IMAGENET['image_std'],
}
# Defaults of all processors of transformers.
_COMMON = {
  'do_normalize': True,
  'do_rescale': True,
  'do_resize': True,
  'rescale_factor': 1 / 255,
}


def _kind(
  scaling: dict[str, Any], size: int, resample: int, crop: int = 0
) -> dict[str, Any]:
  has_crop = {'do_center_crop': bool(crop), 'crop_size': crop or None}
  return scaling | {'size': size, 'resample': resample} | has_crop


# What each processor does besides. A number is the shorter side of `_EDGE`.
_KINDS: dict[str, dict[str, Any]] = {
  'ViT': _kind(_HALF, 224, 2),
  'ImageGPT': _kind(_HALF, 256, 2),
  'DeiT': _kind(_HALF, 256, 3, crop=224),
  'Bit': _kind(_OPENAI, 224, 3, crop=224),
  'CLIP': _kind(_OPENAI, 224, 3, crop=224),
  # It resizes to 1 / crop_pct of the size, and cuts the centre out itself.
  'ConvNext': _kind(_HALF, 384, 3) | {'crop_pct': 224 / 256},
  'Siglip': _kind(_HALF, 224, 3),
  # Its images have no fixed size.
  'Siglip2': _kind(_HALF, 256, 2),
  'DINOv3ViT': _kind(_IMAGENET, 224, 2),
}
_EDGE = 'Bit', 'CLIP', 'ConvNext'
# By how a model_type begins: its processor, and what the published models have
# that differs from the paper's, for a directory without a file.
_PUBLISHED: Mapping[str, tuple[str, dict[str, Any]]] = {
  'imagegpt': ('ImageGPT', {}),
  'deit': ('DeiT', _IMAGENET | {'resample': 3}),
  'bit': ('Bit', {}),
  'dinov2': ('Bit', _IMAGENET | {'resample': 3}),
  'dinov3': ('DINOv3ViT', _IMAGENET),
  'clip': ('CLIP', _OPENAI | {'resample': 3}),
  'siglip2': ('Siglip2', {'resample': 2}),
  'siglip': ('Siglip', {'resample': 3}),
  'vit_m': ('ViT', _IMAGENET),  # MAE and MSN
  '': ('ViT', {}),
}


def to_hf(p: Preprocessing, size: tuple[int, int]) -> dict[str, Any]:
  """Returns the file of transformers for images of `size` (H, W)."""
  height_width = dict(zip(('height', 'width'), size, strict=True))
  found = _COMMON | {
    'image_mean': list(p.mean),
    'image_processor_type': 'ViTImageProcessor',
    'image_std': list(p.std),
    'resample': _PILLOW[p.interpolation],
    'size': height_width,
  }
  if p.resize_small:
    # ViT's processor cannot cut out the centre; these are for any model.
    kind, edge = 'Bit', {'shortest_edge': p.resize_small}
    if p.squash:
      kind, edge = 'DeiT', dict.fromkeys(height_width, p.resize_small)
    found |= {
      'crop_size': height_width,
      'do_center_crop': True,
      'do_convert_rgb': True,
      'image_processor_type': f'{kind}ImageProcessor',
      'size': edge,
    }
  return found


def of_hf(
  path: str, model_type: str, takes: tuple[int, int] | None
) -> tuple[Preprocessing, tuple[int, int], tuple[str, ...]]:
  """Reads the file of a directory; without one, images are as published.

  Args:
    path: of the directory.
    model_type: of its config.json; decides where the file does not.
    takes: size (H, W) of the model's images in pixels; None for any.

  Returns:
    The preprocessing, the size (H, W) that images end up with, and a sentence
    on each thing that cannot be done alike here.

  Raises:
    ValueError: for an invalid value; names the file and key.
  """
  places = [os.path.join(path, name) for name in (FILE, BOTH)]
  place = next(filter(os.path.exists, places), '')
  file = Stated({}, place or places[0])
  start = next(x for x in _PUBLISHED if model_type.startswith(x))
  kind, published = _PUBLISHED[start]
  if place:
    of_images = Stated(tensors.read_json(place), place)
    if place == places[1]:
      of_images = of_images.part('image_processor')
    file.update(given(of_images))
    kind = _kind_of(file, kind)
  elif takes:
    kind = 'ViT'
    file.update({'size': list(takes)} | published)
    if published:
      file.warnings.append(
        f'{path} has no {FILE}: images are resized and scaled as those of the '
        'published models are.'
      )
  else:
    kind = 'ViT'
    file.warnings.append(f'{path} has no {FILE}: 224 x 224 pixels are assumed.')
  for key, default in (_COMMON | _KINDS[kind]).items():
    file.setdefault(key, default)
  if kind == 'Siglip2' and takes:
    file['size'] = list(takes)
    file.warn(
      'images keep their aspect ratio, with any number of patches up to '
      f'max_num_patches; here the whole image is resized to {takes}.'
    )
  makes, how = _sizes(file, kind)
  if takes and makes != takes:
    file.warn(
      f'makes images of {makes} pixels where the model takes {takes}; here the '
      'whole image is resized to that.'
    )
    makes, how = takes, {}
  mean, std = _scaling(file)
  preprocessing = file.preprocessing(
    mean=mean,
    std=std,
    interpolation=file.interpolation('resample', _PILLOW),
    resize_like='dinov3' if kind == 'DINOv3ViT' else 'transformers',
    **how,
  )
  return preprocessing, makes, tuple(file.warnings)


def _kind_of(file: Stated, usual: str) -> str:
  name = file.get(
    'image_processor_type', file.get('feature_extractor_type', usual)
  )
  kind = re.sub('(ImageProcessor|FeatureExtractor)(Fast|Pil)?$', '', str(name))
  if kind in _KINDS:
    return kind
  file.warn(
    f'image_processor_type is {name!r}, which is unknown here: it is read as '
    'ViTImageProcessor.'
  )
  return 'ViT'


def _sizes(file: Stated, kind: str) -> tuple[tuple[int, int], dict[str, Any]]:
  """Returns the size of processed images, `resize_small` and `squash`."""
  crop = file.sides('crop_size') if file['do_center_crop'] else None
  size = file['size']
  has_edge = isinstance(size, dict) and size.keys() == {'shortest_edge'}
  if has_edge:
    size = size['shortest_edge']
  has_edge |= kind in _EDGE and isinstance(size, int)
  makes = file.sides('size', size)
  if file['do_resize']:
    edge, is_square = makes[0], makes[0] == makes[1]
    if kind == 'ConvNext' and has_edge and not crop:
      # From 384 pixels on it does not crop.
      small = int(edge / file.above_zero('crop_pct', 1)) if edge < 384 else 0
      return makes, {'resize_small': small}
    if not has_edge and crop in (None, makes):
      return makes, {}
    if crop and is_square and edge >= max(crop):
      if has_edge or crop[0] == crop[1]:
        return crop, {'resize_small': edge, 'squash': not has_edge}
  file.warn(
    f'do_resize is {file["do_resize"]}, size {file["size"]} and the crop '
    f'{crop}; here the whole image is resized.'
  )
  return crop or makes, {}


def _scaling(file: Stated) -> list[tuple[float, ...]]:
  """Returns mean and deviation for values in [0, 1]."""
  rows: list[tuple[float, ...]] = [(0.0,) * 3, (1.0,) * 3]
  if file['do_normalize']:
    rows = [file.rgb('image_mean'), file.rgb('image_std')]
  # What a value of 1 here is there.
  one = 255 * (file.rgb('rescale_factor')[0] if file['do_rescale'] else 1)
  if min(*rows[1], one) <= 0:
    file.refuse(
      'image_std',
      f' and rescale_factor {file["rescale_factor"]}: both must be above 0.',
    )
  if math.isclose(one, 1):
    return rows
  file.warn(
    f'values reach from 0 to {one:g} before mean and deviation, which is done '
    'alike here; it is rarely meant.'
  )
  return [tuple(x / one for x in row) for row in rows]


def of_timm(pretrained: Stated, size: tuple[int, int]) -> Preprocessing:
  """Returns the preprocessing of a directory of timm.

  Args:
    pretrained: its pretrained_cfg; gets a warning of each thing that cannot be
      done alike here.
    size: (H, W) of the model's images in pixels.

  Raises:
    ValueError: for an invalid value; names the file and key.
  """
  found = pretrained.with_values(_TIMM | given(pretrained))
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
  squash = mode == 'squash'
  if squash and share == 1:
    resize_small, squash = 0, False
  elif not squash and height != width:
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
  return found.preprocessing(
    mean=found.rgb('mean'),
    std=found.rgb('std'),
    interpolation=found.interpolation('interpolation', {x: x for x in _PILLOW}),
    resize_like='torchvision',
    resize_small=resize_small,
    squash=squash,
  )


def to_timm(
  p: Preprocessing, size: tuple[int, int]
) -> tuple[dict[str, Any], list[str]]:
  """Returns a part of a pretrained_cfg for images of `size` (H, W).

  Returns:
    The part, and a sentence on each thing that timm does otherwise.
  """
  crop_pct, lines = 1.0, []
  if p.resize_small:
    crop_pct = min(size) / p.resize_small
    # timm rounds the quotient down, which rounding may have put below.
    if math.floor(min(size) / crop_pct) < p.resize_small:
      crop_pct = math.nextafter(crop_pct, 0)
    if size[0] != size[1] and not p.squash:
      lines.append(
        f'Resizing the shorter side to {p.resize_small} pixels for images of '
        f'{size[0]}x{size[1]}: timm resizes until both sides are '
        f'{1 / crop_pct:.3g} times those.'
      )
  return {
    'crop_mode': 'squash' if p.squash or not p.resize_small else 'center',
    'crop_pct': crop_pct,
    'input_size': [3, *size],
    'interpolation': p.interpolation,
    'mean': list(p.mean),
    'std': list(p.std),
  }, lines
