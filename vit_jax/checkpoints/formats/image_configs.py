"""Reads and writes the image preprocessing of other libraries.

transformers stores it in preprocessor_config.json, timm in config.json.
"""

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from vit_jax.checkpoints.formats import tensors
from vit_jax.checkpoints.formats.json_config import (
  JsonConfig,
  only,
  without_nulls,
)
from vit_jax.checkpoints.formats.table import Preprocessing

FILE = 'preprocessor_config.json'
# In transformers 5, this file has the preprocessing of images and text.
WITH_TEXT = 'processor_config.json'

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
# timm's defaults for a pretrained_cfg.
_TIMM = {
  'crop_pct': 0.875,
  'crop_mode': 'center',
  'interpolation': 'bicubic',
  'mean': _IMAGENET['image_mean'],
  'std': _IMAGENET['image_std'],
}
# Defaults that the image processors below share.
_RESCALES = {'do_rescale': True, 'rescale_factor': 1 / 255}
_COMMON = _RESCALES | {'do_normalize': True, 'do_resize': True}


def _kind(
  scaling: dict[str, Any], size: int, resample: int, crop: int = 0
) -> dict[str, Any]:
  has_crop = {'do_center_crop': bool(crop), 'crop_size': crop or None}
  return scaling | {'size': size, 'resample': resample} | has_crop


# Defaults of each image processor.
_KINDS: dict[str, dict[str, Any]] = {
  'ViT': _kind(_HALF, 224, 2),
  'ImageGPT': _kind(_HALF, 256, 2),
  'DeiT': _kind(_HALF, 256, 3, crop=224),
  'Bit': _kind(_OPENAI, 224, 3, crop=224),
  'CLIP': _kind(_OPENAI, 224, 3, crop=224),
  # Below 384 pixels, resizes to 1 / crop_pct of the size, then crops.
  'ConvNext': _kind(_HALF, 384, 3) | {'crop_pct': 224 / 256},
  'Siglip': _kind(_HALF, 224, 3),
  # Siglip2 has no default size. `of_hf` sets the model's size.
  'Siglip2': _kind(_HALF, 256, 2),
  'DINOv3ViT': _kind(_IMAGENET, 224, 2),
}
# Image processors whose integer `size` is the shorter side.
_EDGE = 'Bit', 'CLIP', 'ConvNext'
# Maps prefixes of model_type to the default image processor, and to the values
# of the published models, which replace ViT's if the file is missing.
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
  """Returns preprocessor_config.json's content for images of size (H, W)."""
  height_width = dict(zip(('height', 'width'), size, strict=True))
  found = _COMMON | {
    'image_mean': list(p.mean),
    'image_processor_type': 'ViTImageProcessor',
    'image_std': list(p.std),
    'resample': _PILLOW[p.interpolation],
    'size': height_width,
  }
  if p.resize_small:
    # ViT's processor crops only in some versions of transformers. The
    # processors of BiT and DeiT always do, and they work with any model.
    kind, edge = 'Bit', {'shortest_edge': p.resize_small}
    if p.squash:
      scale = p.resize_small / min(size)
      kind = 'DeiT'
      edge = {key: int(side * scale) for key, side in height_width.items()}
    found |= {
      'crop_size': height_width,
      'do_center_crop': True,
      'do_convert_rgb': True,
      'image_processor_type': f'{kind}ImageProcessor',
      'size': edge,
    }
  return found


def of_hf(
  path: str, model_type: str, model_size: tuple[int, int] | None
) -> tuple[Preprocessing, tuple[int, int], tuple[str, ...]]:
  """Reads the preprocessor file in a directory of transformers.

  `model_size` is (H, W) in pixels, or None if any size works. If the file is
  missing, assumes no crop and the published models' mean, std and
  interpolation. If `model_size` is None too, assumes ViT's values for 224 x 224
  pixels.

  Returns the preprocessing, the size (H, W) of its images, and warnings about
  assumptions and unsupported values. Raises ValueError if a value is invalid.
  """
  paths = [os.path.join(path, name) for name in (FILE, WITH_TEXT)]
  found = next(filter(os.path.exists, paths), '')
  file = JsonConfig({}, found or paths[0])
  start = next(x for x in _PUBLISHED if model_type.startswith(x))
  kind, published = _PUBLISHED[start]
  if found:
    values = JsonConfig(tensors.read_json(found), found)
    if found == paths[1]:
      values = values.part('image_processor')
    file.update(without_nulls(values))
    name = file.get(
      'image_processor_type', file.get('feature_extractor_type', kind)
    )
    suffix = '(ImageProcessor|FeatureExtractor)(Fast|Pil)?$'
    kind = re.sub(suffix, '', str(name))
    if kind not in _KINDS:
      kind = 'ViT'
      file.warn(
        f'image_processor_type {name!r} is unknown; vit_jax uses the rules of '
        'ViTImageProcessor.'
      )
  else:
    kind, assumed = 'ViT', '224x224 pixels'
    if model_size:
      file.update({'size': list(model_size)} | published)
      assumed = 'no crop, and the published mean, std and interpolation'
    if published or not model_size:
      file.warnings.append(f'{path} has no {FILE}. vit_jax assumes {assumed}.')
  for key, default in (_COMMON | _KINDS[kind]).items():
    file.setdefault(key, default)
  file.fields(only(_RESCALES), {}, model_type)
  if kind == 'Siglip2' and model_size:
    file['size'] = list(model_size)
    file.warn(
      'transformers keeps the aspect ratio, with any number of patches up to '
      f'max_num_patches; vit_jax resizes the whole image to {model_size}.'
    )
  size, resizing = _sizes(file, kind)
  if model_size and size != model_size:
    file.warn(
      f'images have {size} pixels, but the model takes {model_size}; vit_jax '
      'resizes the whole image to the model size.'
    )
    size, resizing = model_size, {}
  if file.get('do_pad') and file.get('pad_size'):
    file.warn('do_pad is True; vit_jax does not pad images.')
  if not file['do_normalize']:
    file.update(image_mean=0, image_std=1)
  preprocessing = file.preprocessing(
    mean=file.rgb('image_mean'),
    std=file.rgb('image_std'),
    interpolation=file.interpolation('resample', _PILLOW),
    resize_like='dinov3' if kind == 'DINOv3ViT' else 'transformers',
    **resizing,
  )
  return preprocessing, size, tuple(file.warnings)


def _sizes(
  file: JsonConfig, kind: str
) -> tuple[tuple[int, int], dict[str, Any]]:
  """Returns (H, W) of processed images, and fields of `Preprocessing`."""
  crop = file.sides('crop_size') if file['do_center_crop'] else None
  size = file['size']
  has_edge = isinstance(size, dict) and size.keys() == {'shortest_edge'}
  if has_edge:
    size = size['shortest_edge']
  has_edge |= kind in _EDGE and isinstance(size, int)
  resized = file.sides('size', size)
  if file['do_resize']:
    edge, is_square = resized[0], resized[0] == resized[1]
    if kind == 'ConvNext' and has_edge and not crop:
      # ConvNext's processor crops only below 384 pixels.
      small = int(edge / file.above_zero('crop_pct', 1)) if edge < 384 else 0
      return resized, {'resize_small': small}
    if not has_edge and crop in (None, resized):
      return resized, {}
    if crop and is_square and edge >= max(crop):
      if has_edge or crop[0] == crop[1]:
        return crop, {'resize_small': edge, 'squash': not has_edge}
  file.warn(
    f'do_resize is {file["do_resize"]}, size is {file["size"]} and the crop is '
    f'{crop}, which vit_jax does not support; it resizes the whole image.'
  )
  return crop or resized, {}


def of_timm(pretrained: JsonConfig, size: tuple[int, int]) -> Preprocessing:
  """Returns the preprocessing of a timm directory for images of `size`.

  `size` is (H, W) in pixels. Adds warnings about differences from timm to
  `pretrained`, the directory's pretrained_cfg. Raises ValueError if a value is
  invalid.
  """
  found = pretrained.replace(_TIMM | without_nulls(pretrained))
  share, mode = found.above_zero('crop_pct', 1), found['crop_mode']
  if mode not in ('center', 'squash'):
    found.refuse(
      'crop_mode', '; it must be center or squash: vit_jax does not pad images.'
    )
  height, width = size
  # Keeps the result finite; `Preprocessing` refuses a side that is too large.
  resize_small = math.floor(min(min(size) / share, 1e9))
  squash = mode == 'squash'
  if squash and share == 1:
    resize_small, squash = 0, False
  elif not squash and height != width:
    if resize_small < max(size):
      resize_small = 0
    how = 'as a whole'
    if resize_small:
      how = f'to a shorter side of {resize_small} pixels and crops them'
    found.warn(
      f'with crop_mode {mode!r}, timm resizes both sides to at least '
      f'{1 / share:.3g} times {height}x{width} pixels; vit_jax resizes images '
      f'{how}.'
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
  """Converts the preprocessing of images of `size` (H, W) for timm.

  Returns the keys of pretrained_cfg that describe images, and sentences about
  differences from timm.
  """
  crop_pct, lines = 1.0, []
  if p.resize_small:
    crop_pct = min(size) / p.resize_small
    # timm rounds min(size) / crop_pct down. Float rounding may make the result
    # too small.
    if math.floor(min(size) / crop_pct) < p.resize_small:
      crop_pct = math.nextafter(crop_pct, 0)
    if size[0] != size[1] and not p.squash:
      lines.append(
        f'Images are resized to a shorter side of {p.resize_small} pixels, '
        f'then cropped to {size[0]}x{size[1]}. timm resizes both sides to at '
        f'least {1 / crop_pct:.3g} times the crop.'
      )
  return {
    'crop_mode': 'squash' if p.squash or not p.resize_small else 'center',
    'crop_pct': crop_pct,
    'input_size': [3, *size],
    'interpolation': p.interpolation,
    'mean': list(p.mean),
    'std': list(p.std),
  }, lines
