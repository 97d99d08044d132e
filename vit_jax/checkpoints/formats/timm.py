"""timm's models: directories for its `local-dir:`, and files of tensors.

ViT and its successors (DeiT, DeiT III, AugReg, the image towers of CLIP and
SigLIP, DINOv2, DINOv3), hybrids and BiT.
"""

import dataclasses
import os
import re
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats import (
  archive,
  image_configs,
  table,
  tensors,
  timm_config,
  torch_vit,
  torchvision,
)
from vit_jax.checkpoints.formats.stated import Stated
from vit_jax.models.variants import SIZES

DTYPES: tuple[str, ...] = ('float32', 'bfloat16', 'float16')

# A file of arrays cannot tell these poolings from max, avgmax or one another.
_POOLINGS = {
  'cls': 'pooling by the class token (not avg, max or avgmax), ',
  'gap': 'pooling by the mean of the patches (not max or avgmax), ',
  'map': '',
}
_TO_STATE = (
  'If any of it is wrong, logits are wrong: write a directory with `python -m '
  'vit_jax.convert FILE DIRECTORY --to=timm`, correct its config.json '
  '(model_args.global_pool, model_args.act_layer, pretrained_cfg.mean ...) and '
  'give that.'
)
# Arrays of models whose files alone do not say whether queries and keys turn.
_TURNING = re.compile(
  r'blocks\.0\.(attn\.q_bias|attn\.q_proj\.weight|gamma_1)$'
)
# What hid patches in training, and what can be computed.
_UNUSED = re.compile(
  r'(^|\.)(mask_token|local_cls_norm\.\w+|bias_mask|rope_embed\.periods)$'
  '|^decoder_'
)
_PERIODS = 'rope_embed.periods'


def matches(arrays: table.Flat) -> bool:
  """Tells whether these are the arrays of a ViT, a hybrid or BiT."""
  known = 'patch_embed.proj.weight', 'stem.conv.weight', 'conv_proj.weight'
  return any(key in arrays for key in known)


def read(
  path: str, arrays: table.Flat, config: dict[str, Any] | None = None
) -> table.File:
  """Reads a file of tensors, or a directory with its config.json.

  Files of torchvision's ViT, DINOv2's and DINOv3's originals and the MAE
  authors are read as timm's, too.
  """
  stated = Stated(config or {}, os.path.join(path, 'config.json'))
  if config is None and _PERIODS not in arrays:
    _check_alone(path, arrays)
  is_bit = 'stem.conv.weight' in arrays
  stored = {key: x for key, x in arrays.items() if not _UNUSED.search(key)}
  named = torch_vit.Arrays(path, stored, 'timm', is_bit)
  preprocessing = table.Preprocessing()
  if 'conv_proj.weight' in arrays:
    preprocessing = torchvision.IMAGES
  if is_bit:
    fields = _resnet_fields(named, stated)
  elif config is None and _PERIODS in arrays:
    fields = _dinov3_fields(named, arrays[_PERIODS], stated)
    preprocessing = dataclasses.replace(torchvision.IMAGES, resize_small=0)
  else:
    fields = _vit_fields(named, stated, preprocessing)
  return named.file(fields, **timm_config.rest(stated, fields, preprocessing))


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a directory for `timm.create_model('local-dir:TARGET')`."""
  images, lines = image_configs.to_timm(
    weights.preprocessing, weights.fields['image_size']
  )
  config = timm_config.config(weights, images)
  arrays = torch_vit.to_timm(weights.arrays)
  tensors.write_folder(target, {'config.json': config}, arrays, dtype)
  return lines + _not_held(weights)


def _check_alone(path: str, arrays: table.Flat) -> None:
  """Refuses a file that leaves open what only a config.json says."""
  why = ''
  pooling = 'attn_pool.latent'
  bias = 'blocks.0.attn.qkv.bias'
  if key := next(filter(_TURNING.match, arrays), ''):
    why = f'has {key!r}, as DeiT III, EVA, BEiT and RoPE-ViT have'
  elif pooling in arrays and 'cls_token' in arrays:
    why = f"has {pooling!r} beside 'cls_token', as the Perception Encoder has"
  elif 'blocks.0.norm1.weight' in arrays and bias not in arrays:
    # One lost array looks the same: no one would notice.
    why = f'lacks {bias!r}, which is lost, or which its model does not have'
  if why:
    raise ValueError(
      f"{path} {why}: give a directory whose config.json says which of timm's "
      'architectures it is, {"architecture": "deit3_base_patch16_224"}.'
    )


def _vit_fields(
  named: torch_vit.Arrays, config: Stated, images: table.Preprocessing
) -> dict[str, Any]:
  lookup = named.lookup('timm')
  found, channels, stride = torch_vit.fields(lookup)
  known = timm_config.known_facts(config)
  has_cls, is_deit = lookup.has('cls'), lookup.has('dist')
  pool = _pool(lookup, config, known['pool'])
  if is_deit and pool != 'cls':
    raise ValueError(
      f"{lookup.path} has the array 'dist_token' and no class token that is "
      'read: no model here is like that.'
    )
  stated = timm_config.image_size(config)
  if stated:
    stated = config.tiled(stated, stride)
  registers = lookup.size('registers', 3, axis=1)
  read = ('cls', 'dist') if pool == 'cls' else ()
  image_size, placed = named.settle(read, stride, stated, config)
  grid_only = has_cls and not placed
  turned = known['turned']
  found |= {
    'name': 'deit' if is_deit else 'vit',
    'pool': pool,
    'image_size': image_size,
  }
  of_args = {
    'channels': channels,
    'class_token': has_cls,
    'grid_only': grid_only,
    'registers': registers,
  }
  facts = timm_config.read(config, found | of_args, known)
  found['registers'] = lookup.size('registers', 3, axis=1)
  if facts['heads'] is None:
    facts['heads'] = _usual_heads(lookup.path, found['width'])
  if not config:
    config.warnings.append(
      f'{lookup.path} does not say all of its model. Assumed are '
      f'{_POOLINGS[pool]}{facts["heads"]} heads, '
      f"timm's exact GELU and epsilon of {facts['layer_norm_epsilon']:g}, "
      + ('a class token without a position, ' if grid_only else '')
      + f'square images of {image_size[0]} pixels, resized so: '
      f'{images.describe()}, values of mean {images.mean} and deviation '
      f'{images.std}. {_TO_STATE}'
    )
  if turned:
    named.turn(found['width'] // facts['heads'], *turned)
  return found | facts


def _dinov3_fields(
  named: torch_vit.Arrays, periods: np.ndarray, config: Stated
) -> dict[str, Any]:
  """Returns the fields of an original of DINOv3, which all have these.

  Raises:
    ValueError: if the periods of its rotary embeddings are impossible.
  """
  lookup = named.lookup('DINOv3')
  found, _, stride = torch_vit.fields(lookup)
  for name in named:
    if name.endswith('/key/bias'):
      named[name] = np.zeros_like(named[name])  # which it masks
  P = periods.size
  theta = float(periods[-1]) ** (P / (P - 1)) if P > 1 else 0.0
  if not 1 < theta < 1e9:
    raise ValueError(
      f'{named.path}: {_PERIODS!r} should be periods that grow from 1.'
    )
  side = 224 // stride * stride
  image_size, _ = named.settle(('cls',), stride, (side, side), config)
  return found | {
    'gelu': 'exact',
    'layer_norm_epsilon': 1e-5,
    'heads': found['width'] // (4 * P),
    # Stored in 16 bits, some of them.
    'rope': float(round(theta)),
    'registers': lookup.size('registers', 3, axis=1),
    'image_size': image_size,
  }


def _pool(lookup: archive.Lookup, config: Stated, stated: str | None) -> str:
  """Returns the pooling that the arrays are for."""
  if lookup.has('MAPHead_0/probe'):
    possible = ['map']
  elif not lookup.has('cls'):
    possible = ['gap']
  elif lookup.has('pooled_norm/scale'):
    possible = ['gap', 'cls']
  else:
    possible = ['cls', 'gap']
  if stated not in (None, *possible):
    raise ValueError(
      f'{config.place}: global_pool is that of pool {stated!r}, and the '
      f'arrays are those of {" or ".join(map(repr, possible))}.'
    )
  return stated or possible[0]


def _usual_heads(path: str, width: int) -> int:
  for size in SIZES.values():
    if size.width == width:
      return size.heads
  raise ValueError(
    f'{path} does not say how many heads its attention has, and a width of '
    f'{width} is not usual: give a directory with a config.json.'
  )


def _resnet_fields(named: torch_vit.Arrays, config: Stated) -> dict[str, Any]:
  lookup = named.lookup('timm')
  timm_config.check_resnet(config, timm_config.BIT)
  image_size = timm_config.image_size(config)
  if image_size is None:
    image_size = (224, 224)
    config.warnings.append(
      f'{lookup.path} does not say how large its images are: 224x224 pixels, '
      'resized as a whole and bilinearly, values in [-1, 1], and pooling by '
      f'the mean (not max or avgmax) are assumed. {_TO_STATE}'
    )
  return torch_vit.bit_fields(lookup) | {'image_size': image_size}


def _not_held(weights: table.Weights) -> list[str]:
  fields = weights.fields
  lines = []
  if fields['name'] == 'deit' and not fields['num_classes']:
    lines.append(
      'That what a classifier would see is the class token: timm gives the '
      'mean of it and the distillation token.'
    )
  if fields['name'] == 'resnet':
    lines.append(
      'The 1e-10 that BiT adds to the variance of kernels: timm adds 1e-8. '
      'With random weights logits move by up to 2e-5 of the largest, less than '
      'by rounding; by more where kernels are small.'
    )
  elif fields['stem_width']:
    lines.append(
      'The 1e-5 that hybrids add to the deviation of kernels, and the 1e-6 '
      "that their GroupNorm adds: timm adds 1e-8 to the kernels' variance, and "
      '1e-5. With random weights logits move by up to 3e-4 of the largest, and '
      'by more where kernels are small.'
    )
  return lines
