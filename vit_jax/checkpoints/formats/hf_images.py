"""The preprocessor_config.json of transformers' image processors."""

import math
import os
import re
from typing import Any

from vit_jax.checkpoints.formats import stated, tensors
from vit_jax.checkpoints.formats.stated import Rgb
from vit_jax.checkpoints.formats.table import Preprocessing

FILE = 'preprocessor_config.json'

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
_DEFAULTS: dict[str, dict[str, Any]] = {
  'ViT': _HALF | {'do_center_crop': False, 'resample': 2, 'size': 224},
  'DeiT': _HALF | _CENTRE | {'size': 256},
  'Bit': _CENTRE
  | {
    'image_mean': [0.48145466, 0.4578275, 0.40821073],
    'image_std': [0.26862954, 0.26130258, 0.27577711],
    'size': {'shortest_edge': 224},
  },
}
_OF_MODELS = {'deit': 'DeiT', 'bit': 'Bit'}  # of others, ViT


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
    # The processor of ViT does not cut out the centre; any model may have this.
    found |= {
      'crop_size': height_width,
      'do_center_crop': True,
      'do_convert_rgb': True,
      'image_processor_type': 'BitImageProcessor',
      'size': {'shortest_edge': p.resize_small},
    }
  return found


def read(
  path: str,
  model_type: str,
  takes: tuple[int, int] | None,
  warnings: list[str],
) -> tuple[Preprocessing, tuple[int, int]]:
  """Reads a directory's file; without one, images are those of the paper.

  Args:
    path: of the directory.
    model_type: of its config.json; decides where the file does not.
    takes: size (H, W) of the model's images in pixels; None for any.
    warnings: gets a sentence on each thing that cannot be done alike here.

  Returns:
    The preprocessing, and the size (H, W) that images end up with.

  Raises:
    ValueError: if it makes no sense; names the file and key.
  """
  place = os.path.join(path, FILE)
  given: dict[str, Any] = {}
  kind = 'ViT'
  if os.path.exists(place):
    # Null stands for the default.
    found = tensors.read_json(place).items()
    given = {key: x for key, x in found if x is not None}
    kind = _kind(given, model_type, place, warnings)
  elif takes:
    given['size'] = list(takes)
  else:
    warnings.append(f'{path} has no {FILE}: 224 x 224 pixels are assumed.')
  found = _COMMON | _DEFAULTS[kind] | given
  makes, resize_small = _sizes(found, kind, place, warnings)
  if takes and makes != takes:
    warnings.append(
      f'{place}: makes images of {makes} pixels where the model takes {takes}; '
      'here the whole image is resized to that.'
    )
    makes, resize_small = takes, 0
  mean, std = _scaling(found, place, warnings)
  interpolation = stated.interpolation(
    found['resample'], 'resample', place, _RESAMPLE, warnings
  )
  return Preprocessing(resize_small, mean, std, interpolation), makes


def _kind(
  given: dict[str, Any], model_type: str, place: str, warnings: list[str]
) -> str:
  name = given.get('image_processor_type') or given.get(
    'feature_extractor_type', _OF_MODELS.get(model_type, 'ViT')
  )
  kind = re.sub('(ImageProcessor|FeatureExtractor)(Fast|Pil)?$', '', str(name))
  if kind in _DEFAULTS:
    return kind
  warnings.append(
    f'{place}: image_processor_type is {name!r}, which is unknown here: it is '
    'read as ViTImageProcessor.'
  )
  return 'ViT'


def _sizes(
  found: dict[str, Any], kind: str, place: str, warnings: list[str]
) -> tuple[tuple[int, int], int]:
  """Returns the size of the processed images, and `resize_small`."""
  crop = None
  if found['do_center_crop']:
    crop = stated.sides(found.get('crop_size'), 'crop_size', place)
  size = found['size']
  if kind == 'Bit' and isinstance(size, int):
    size = {'shortest_edge': size}
  if isinstance(size, dict) and size.keys() == {'shortest_edge'}:
    edge = size['shortest_edge']
    square = stated.sides([edge, edge], 'size', place)
    makes = crop or square
    if crop and edge >= max(crop) and found['do_resize']:
      return crop, edge
  else:
    makes = stated.sides(size, 'size', place)
    if crop in (None, makes) and found['do_resize']:
      return makes, 0
  warnings.append(
    f'{place}: do_resize is {found["do_resize"]}, size {found["size"]} and '
    f'the crop {crop}; here the whole image is resized.'
  )
  return crop or makes, 0


def _scaling(
  found: dict[str, Any], place: str, warnings: list[str]
) -> tuple[Rgb, Rgb]:
  """Returns mean and deviation for values in [0, 1]."""
  mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
  if found['do_normalize']:
    mean, std = (
      stated.rgb(found[key], key, place) for key in ('image_mean', 'image_std')
    )
  # What a value of 1 here is there.
  factor, one = found['rescale_factor'], 255.0
  if found['do_rescale']:
    one *= stated.rgb(factor, 'rescale_factor', place)[0]
  if min(*std, one) <= 0:
    raise ValueError(
      f'{place}: image_std is {std} and rescale_factor {factor}: both must be '
      'above 0.'
    )
  if math.isclose(one, 1):
    return mean, std
  warnings.append(
    f'{place}: values reach from 0 to {one:g} before mean and deviation, which '
    'is done alike here; it is rarely meant.'
  )
  return _divided(mean, one), _divided(std, one)


def _divided(rgb: Rgb, by: float) -> Rgb:
  return rgb[0] / by, rgb[1] / by, rgb[2] / by
