"""The preprocessor_config.json of transformers' image processors."""

import math
import os
import re
from typing import Any

from vit_jax.checkpoints.formats import tensors
from vit_jax.checkpoints.formats.stated import Rgb, Stated, given
from vit_jax.checkpoints.formats.table import Preprocessing

FILE = 'preprocessor_config.json'
# Where transformers 5 keeps those of images and text together.
BOTH = 'processor_config.json'

# Pillow's numbers.
_RESAMPLE = {'bilinear': 2, 'bicubic': 3}

# What the processors do where their file does not say.
_COMMON = {
  'do_normalize': True,
  'do_rescale': True,
  'do_resize': True,
  'rescale_factor': 1 / 255,
}
_CENTRE = {'crop_size': 224, 'do_center_crop': True, 'resample': 3}
_HALF = {'image_mean': [0.5] * 3, 'image_std': [0.5] * 3}
_OPENAI = _CENTRE | {
  'image_mean': [0.48145466, 0.4578275, 0.40821073],
  'image_std': [0.26862954, 0.26130258, 0.27577711],
  'size': {'shortest_edge': 224},
}
_IMAGENET = {
  'image_mean': [0.485, 0.456, 0.406],
  'image_std': [0.229, 0.224, 0.225],
}
_DEFAULTS: dict[str, dict[str, Any]] = {
  'ViT': _HALF | {'do_center_crop': False, 'resample': 2, 'size': 224},
  'ImageGPT': _HALF | {'do_center_crop': False, 'resample': 2, 'size': 256},
  'DeiT': _HALF | _CENTRE | {'size': 256},
  'Bit': _OPENAI,
  # It resizes to 1 / crop_pct of the size, and cuts the centre out itself.
  'ConvNext': _HALF
  | {
    'crop_pct': 224 / 256,
    'do_center_crop': False,
    'resample': 3,
    'size': {'shortest_edge': 384},
  },
  'CLIP': _OPENAI,
  'Siglip': _HALF | {'do_center_crop': False, 'resample': 3, 'size': 224},
  # Whose images are of no size of their own.
  'Siglip2': _HALF | {'do_center_crop': False, 'resample': 2, 'size': 256},
  'DINOv3ViT': _IMAGENET
  | {'do_center_crop': False, 'resample': 2, 'size': 224},
}
# What the published ones have, by how the type of their model begins; those of
# other types are as in the paper.
_CLIP = {key: _OPENAI[key] for key in ('image_mean', 'image_std', 'resample')}
_PUBLISHED: dict[str, dict[str, Any]] = {
  'clip': _CLIP,
  'deit': _IMAGENET | {'resample': 3},
  'dinov2': _IMAGENET | {'resample': 3},
  'dinov3': _IMAGENET,
  'siglip2': {'resample': 2},
  'siglip': {'resample': 3},
}
_OF_MODELS = {
  'imagegpt': 'ImageGPT',
  'deit': 'DeiT',
  'bit': 'Bit',
  'dinov2': 'Bit',
  'dinov2_with_registers': 'Bit',
  'dinov3_vit': 'DINOv3ViT',
  'clip': 'CLIP',
  'clip_vision_model': 'CLIP',
  'siglip': 'Siglip',
  'siglip_vision_model': 'Siglip',
  'siglip2': 'Siglip2',
  'siglip2_vision_model': 'Siglip2',
}  # of others, ViT


def config(p: Preprocessing, size: tuple[int, int]) -> dict[str, Any]:
  """Returns the file for images of `size` (H, W)."""
  height_width = dict(zip(('height', 'width'), size, strict=True))
  found = _COMMON | {
    'image_mean': list(p.mean),
    'image_processor_type': 'ViTImageProcessor',
    'image_std': list(p.std),
    'resample': _RESAMPLE[p.interpolation],
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


def read(
  path: str, model_type: str, takes: tuple[int, int] | None
) -> tuple[Preprocessing, tuple[int, int], tuple[str, ...]]:
  """Reads a directory's file; without one, images are as published.

  Args:
    path: of the directory.
    model_type: of its config.json; decides where the file does not.
    takes: size (H, W) of the model's images in pixels; None for any.

  Returns:
    The preprocessing, the size (H, W) that images end up with, and a sentence
    on each thing that cannot be done alike here.

  Raises:
    ValueError: if it makes no sense; names the file and key.
  """
  place = os.path.join(path, FILE)
  file = Stated({}, place)
  kind, is_there = 'ViT', os.path.exists(place)
  if is_there:
    file.update(given(tensors.read_json(place)))
  elif os.path.exists(both := os.path.join(path, BOTH)):
    file.place = both
    file.update(Stated(tensors.read_json(both), both).part('image_processor'))
    is_there = True
  if is_there:
    kind = _kind(file, model_type)
  elif takes:
    file['size'] = list(takes)
    fitting = (x for x in _PUBLISHED if model_type.startswith(x))
    if start := next(fitting, ''):
      file.update(_PUBLISHED[start])
      file.warnings.append(
        f'{path} has no {FILE}: images are resized and scaled as those of the '
        'published models are.'
      )
  else:
    file.warnings.append(f'{path} has no {FILE}: 224 x 224 pixels are assumed.')
  for key, default in (_COMMON | _DEFAULTS[kind]).items():
    file.setdefault(key, default)
  if kind == 'Siglip2' and takes:
    file['size'] = list(takes)
    file.warn(
      'images keep their aspect ratio, with any number of patches up to '
      f'max_num_patches; here the whole image is resized to {takes}.'
    )
  makes, resize_small, squash = _sizes(file, kind)
  if takes and makes != takes:
    file.warn(
      f'makes images of {makes} pixels where the model takes {takes}; here the '
      'whole image is resized to that.'
    )
    makes, resize_small, squash = takes, 0, False
  mean, std = _scaling(file)
  interpolation = file.interpolation('resample', _RESAMPLE)
  preprocessing = file.preprocessing(
    resize_small=resize_small,
    mean=mean,
    std=std,
    interpolation=interpolation,
    squash=squash,
    resize_like='dinov3' if kind == 'DINOv3ViT' else 'transformers',
  )
  return preprocessing, makes, tuple(file.warnings)


def _kind(file: Stated, model_type: str) -> str:
  name = file.get('image_processor_type') or file.get(
    'feature_extractor_type', _OF_MODELS.get(model_type, 'ViT')
  )
  kind = re.sub('(ImageProcessor|FeatureExtractor)(Fast|Pil)?$', '', str(name))
  if kind in _DEFAULTS:
    return kind
  file.warn(
    f'image_processor_type is {name!r}, which is unknown here: it is read as '
    'ViTImageProcessor.'
  )
  return 'ViT'


def _sizes(file: Stated, kind: str) -> tuple[tuple[int, int], int, bool]:
  """Returns the size of processed images, `resize_small` and `squash`."""
  crop = file.sides('crop_size') if file['do_center_crop'] else None
  size = file['size']
  if kind in ('Bit', 'CLIP', 'ConvNext') and isinstance(size, int):
    size = {'shortest_edge': size}
  has_edge = isinstance(size, dict) and size.keys() == {'shortest_edge'}
  if has_edge:
    size = size['shortest_edge']
  makes = file.sides('size', size)
  if file['do_resize']:
    edge, is_square = makes[0], makes[0] == makes[1]
    if kind == 'ConvNext' and has_edge and not crop:
      # From 384 pixels on it does not crop.
      small = int(edge / file.above_zero('crop_pct', 1)) if edge < 384 else 0
      return makes, small, False
    if not has_edge and crop in (None, makes):
      return makes, 0, False
    if crop and is_square and edge >= max(crop):
      if has_edge or crop[0] == crop[1]:
        return crop, edge, not has_edge
  file.warn(
    f'do_resize is {file["do_resize"]}, size {file["size"]} and the crop '
    f'{crop}; here the whole image is resized.'
  )
  return crop or makes, 0, False


def _scaling(file: Stated) -> tuple[Rgb, Rgb]:
  """Returns mean and deviation for values in [0, 1]."""
  mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
  if file['do_normalize']:
    mean, std = file.rgb('image_mean'), file.rgb('image_std')
  # What a value of 1 here is there.
  one = 255.0
  if file['do_rescale']:
    one *= file.rgb('rescale_factor')[0]
  if min(*std, one) <= 0:
    file.refuse(
      'image_std',
      f' and rescale_factor {file["rescale_factor"]}: both must be above 0.',
    )
  if math.isclose(one, 1):
    return mean, std
  file.warn(
    f'values reach from 0 to {one:g} before mean and deviation, which is done '
    'alike here; it is rarely meant.'
  )
  return _divided(mean, one), _divided(std, one)


def _divided(rgb: Rgb, by: float) -> Rgb:
  return rgb[0] / by, rgb[1] / by, rgb[2] / by
