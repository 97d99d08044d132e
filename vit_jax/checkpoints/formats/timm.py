"""Reads timm's directories and tensor files, and writes timm directories.

Reads hybrids, BiT, ViT and its successors, such as DeiT, DeiT III, AugReg,
the image towers of CLIP and SigLIP, DINOv2, DINOv3 and EVA.
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
from vit_jax.checkpoints.formats.json_config import JsonConfig
from vit_jax.models.variants import SIZES

DTYPES: tuple[str, ...] = ('float32', 'bfloat16', 'float16')

_CORRECT_IT = (
  'If any of this is wrong, so are the logits. In that case, give the '
  'model as timm://NAME.TAG, or run `python -m vit_jax.convert FILE DIRECTORY '
  '--to=timm`, correct config.json (model_args.global_pool, '
  'model_args.act_layer, pretrained_cfg.mean ...) and give the directory.'
)
# Matches arrays of models that may have rotary embeddings. Only a config.json
# can tell whether they do.
_MAYBE_ROTARY = re.compile(
  r'blocks\.0\.(attn\.q_bias|attn\.q_proj\.weight|gamma_1)$'
)
# Matches arrays that are not parameters of our models.
_UNUSED = re.compile(
  r'(^|\.)(mask_token|local_cls_norm\.\w+|bias_mask|rope_embed\.periods)$'
  '|^decoder_'
)
_PERIODS = 'rope_embed.periods'


def matches(arrays: table.Flat) -> bool:
  """Whether the arrays look like a ViT, a hybrid or BiT."""
  known = 'patch_embed.proj.weight', 'stem.conv.weight', 'conv_proj.weight'
  return any(key in arrays for key in known)


def read(
  path: str, arrays: table.Flat, config: dict[str, Any] | None = None
) -> table.File:
  """Reads a tensor file; or a directory, if `config` is its config.json.

  Also reads torchvision's ViT, and the original files of DINO, DINOv2, DINOv3
  and MAE.
  """
  full = JsonConfig(config or {}, os.path.join(path, 'config.json'))
  if config is None and _PERIODS not in arrays:
    _check_alone(path, arrays)
  is_bit = 'stem.conv.weight' in arrays
  stored = {key: x for key, x in arrays.items() if not _UNUSED.search(key)}
  named = torch_vit.Arrays(path, stored, is_bit)
  preprocessing = table.Preprocessing()
  if 'conv_proj.weight' in arrays:
    preprocessing = torchvision.IMAGES
  if is_bit:
    timm_config.check_resnet(full, timm_config.BIT)
    image_size = timm_config.image_size(full)
    if image_size is None:
      image_size = (224, 224)
      also = ''
      if config is None:
        also = (
          ', bilinear resizing without a crop, values in [-1, 1] and average '
          'pooling'
        )
      full.warnings.append(
        f'{path} does not store its image size. vit_jax assumes 224x224 pixels'
        f'{also}. {_CORRECT_IT}'
      )
    fields = torch_vit.bit_fields(named.lookup('timm'))
    fields |= {'image_size': image_size}
  elif config is None and _PERIODS in arrays:
    fields = _dinov3_fields(named, arrays[_PERIODS], full)
    preprocessing = dataclasses.replace(torchvision.IMAGES, resize_small=0)
    full.warnings.append(
      f'{path} does not store its preprocessing. vit_jax assumes mean '
      f'{preprocessing.mean} and standard deviation {preprocessing.std}. '
      'Both are wrong for models of satellite images (SAT-493M); open those as '
      'timm://NAME.TAG.'
    )
  else:
    fields, preprocessing = _vit_fields(named, full, preprocessing)
  attributes = timm_config.file_attributes(full, fields, preprocessing)
  return named.file(fields, **attributes)


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a directory for `timm.create_model('local-dir:TARGET')`."""
  images, lines = image_configs.to_timm(
    weights.preprocessing, weights.fields['image_size']
  )
  config = timm_config.config(weights, images)
  arrays = torch_vit.to_timm(weights.arrays)
  tensors.write_folder(target, {'config.json': config}, arrays, dtype)
  fields = weights.fields
  if fields['name'] == 'deit' and not fields['num_classes']:
    lines.append(
      'Without a head, the model returns the class token. timm returns the '
      'mean of the class token and the distillation token.'
    )
  if fields['name'] == 'resnet' or fields['stem_width']:
    most = '2e-5' if fields['name'] == 'resnet' else '3e-4'
    lines.append(
      'timm has other epsilons than the original code. This changes logits by '
      f'up to {most} of the largest logit, or more if kernels are small.'
    )
  return lines


def _check_alone(path: str, arrays: table.Flat) -> None:
  """Raises ValueError if a file cannot be read without a config.json."""
  why = ''
  bias = 'blocks.0.attn.qkv.bias'
  if key := next(filter(_MAYBE_ROTARY.match, arrays), ''):
    why = f'has {key!r}, like DeiT III, EVA, BEiT and RoPE-ViT'
  elif 'attn_pool.latent' in arrays and 'cls_token' in arrays:
    why = "has 'attn_pool.latent' and 'cls_token', like the Perception Encoder"
  elif 'blocks.0.norm1.weight' in arrays and bias not in arrays:
    # A damaged file looks the same as a model without this bias.
    why = f'lacks {bias!r}: the file is damaged, or the model has no such bias'
  if why:
    raise ValueError(
      f'{path} {why}. The arrays alone do not determine the model. Give a '
      "directory with a config.json that names timm's architecture, such as "
      '{"architecture": "deit3_base_patch16_224"}.'
    )


def _vit_fields(
  named: torch_vit.Arrays, config: JsonConfig, images: table.Preprocessing
) -> tuple[dict[str, Any], table.Preprocessing]:
  lookup = named.lookup('timm')
  found, channels, stride = torch_vit.fields(lookup)
  known = timm_config.architecture_facts(config)
  has_cls, is_deit = lookup.has('cls'), lookup.has('dist')
  pool = _pool(lookup, config, known['pool'])
  if is_deit and pool != 'cls':
    raise ValueError(
      f"{lookup.path} has 'dist_token' but pool {pool!r}; a model with this "
      'token must pool the class token.'
    )
  if size := timm_config.image_size(config):
    size = config.whole_patches(size, stride)
  args = {
    'channels': channels,
    'class_token': has_cls,
    'registers': lookup.size('registers', 3, axis=1),
  }
  read = ('cls', 'dist') if pool == 'cls' else ()
  image_size, placed = named.convert_tokens(read, stride, size, config)
  if images.resize_small:
    small = max(images.resize_small, *image_size)
    images = dataclasses.replace(images, resize_small=small)
  args['grid_only'] = grid_only = has_cls and not placed
  found |= {
    'name': 'deit' if is_deit else 'vit',
    'pool': pool,
    'image_size': image_size,
  }
  facts = timm_config.read(config, found | args, known)
  if facts['heads'] is None:
    width = found['width']
    usual = (size.heads for size in SIZES.values() if size.width == width)
    facts['heads'] = next(usual, None)
    if not facts['heads']:
      raise ValueError(
        f'{lookup.path} does not store the number of heads, and its width '
        f'{width} is not the width of a known model. Give a directory with a '
        'config.json such as {"architecture": "vit_base_patch16_224", '
        f'"model_args": {{"embed_dim": {width}, "num_heads": HEADS}}}}. '
        'HEADS is the number of heads.'
      )
  if not config:
    config.warnings.append(
      f'{lookup.path} does not store its configuration. vit_jax assumes '
      f'{facts["heads"]} heads, pool {pool!r}, the exact GELU, a LayerNorm '
      f'epsilon of {facts["layer_norm_epsilon"]:g}, '
      + ('a class token without position embedding, ' if grid_only else '')
      + f'images of {image_size[0]}x{image_size[1]} pixels, resizing '
      f'({images.describe()}), mean {images.mean} and standard deviation '
      f'{images.std}. {_CORRECT_IT}'
    )
  if known['rotation']:
    named.reorder_channels(found['width'] // facts['heads'], *known['rotation'])
  return found | facts, images


def _dinov3_fields(
  named: torch_vit.Arrays, periods: np.ndarray, config: JsonConfig
) -> dict[str, Any]:
  """Returns the fields of a model in DINOv3's original format.

  `periods` are the periods of the rotary embeddings, [P].
  """
  lookup = named.lookup('DINOv3')
  found, _, stride = torch_vit.fields(lookup)
  for name in named:
    if name.endswith('/key/bias'):
      # The original code ignores this bias.
      named[name] = np.zeros_like(named[name])
  P = periods.size
  theta = float(periods[-1]) ** (P / (P - 1)) if P > 1 else 0.0
  if not 1 < theta < 1e9:
    raise ValueError(f'{named.path}: {_PERIODS!r} must increase from 1.')
  side = 224 // stride * stride
  image_size, _ = named.convert_tokens(('cls',), stride, (side, side), config)
  return found | {
    'gelu': 'exact',
    'layer_norm_epsilon': 1e-5,
    'heads': found['width'] // (4 * P),
    # Rounded, because some files store periods with 16 bits.
    'rope': float(round(theta)),
    'image_size': image_size,
  }


def _pool(
  lookup: archive.Lookup, config: JsonConfig, stated: str | None
) -> str:
  """Returns the pooling; `stated` is the pooling that config.json implies."""
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
      f'{config.path}: global_pool or architecture means pool {stated!r}, but '
      f'the arrays need {" or ".join(map(repr, possible))}.'
    )
  return stated or possible[0]
