"""timm's models: directories for its `local-dir:`, and files of tensors.

ViT and its successors (DeiT, DeiT III, AugReg, the image towers of CLIP and
SigLIP, DINOv2, DINOv3), hybrids and BiT.
"""

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats import (
  archive,
  table,
  tensors,
  timm_config,
  timm_images,
  timm_table,
)
from vit_jax.checkpoints.formats.stated import Stated
from vit_jax.models import resnet
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
# What models here lack, by patterns of keys.
_LACKING = {
  r'\.mlp\.w12\.': 'a gated MLP as the DINOv2 authors name it',
  r'(^|\.)rope\.|rel_pos|relative_position': 'relative positions',
  r'\.running_mean$': "BatchNorm in another place than torchvision's ResNet",
}
# What a file alone does not show, by arrays that it may have.
_NEEDS_CONFIG = {
  'blocks.0.attn.q_bias': 'BEiT and EVA have, with rotary embeddings or not',
  'blocks.0.attn.q_proj.weight': 'EVA-02 has, with rotary embeddings or not',
  'blocks.0.gamma_1': 'BEiT, EVA and DeiT III have',
}


def matches(arrays: table.Flat) -> bool:
  """Tells whether these are the arrays of a ViT, a hybrid or BiT."""
  return 'patch_embed.proj.weight' in arrays or 'stem.conv.weight' in arrays


def read(
  path: str, arrays: table.Flat, config: dict[str, Any] | None = None
) -> table.File:
  """Reads a file of tensors, or a directory with its config.json."""
  # As the originals of DINOv2 have them; the one hid patches in training.
  arrays = {
    key.replace('register_tokens', 'reg_token'): x
    for key, x in arrays.items()
    if key != 'mask_token'
  }
  lookup = archive.Lookup(path, arrays, lambda key: key, 'timm')
  _refuse_lacking(lookup, alone=config is None)
  fields_of = _resnet_fields if lookup.has('stem.conv.weight') else _vit_fields
  stated = Stated(config or {}, os.path.join(path, 'config.json'))
  fields, arrays, grid_only = fields_of(lookup, stated)
  preprocessing = table.Preprocessing()
  if config is not None:
    preprocessing = timm_images.read(
      timm_config.pretrained_cfg(stated), fields['image_size']
    )
  return table.File(
    path=path,
    arrays=arrays,
    fields=fields,
    table=lambda shapes: timm_table.entries(shapes, grid_only),
    preprocessing=preprocessing,
    class_names=timm_config.class_names(stated, fields['num_classes']),
    warnings=tuple(stated.warnings),
  )


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a directory for `timm.create_model('local-dir:TARGET')`."""
  images, lines = timm_images.config(
    weights.preprocessing, weights.fields['image_size']
  )
  config = timm_config.config(weights, images)
  arrays = timm_table.Stored(weights.arrays)
  tensors.write_folder(target, {'config.json': config}, arrays, dtype)
  return lines + _not_held(weights)


def open_peer(path: str) -> table.Peer:
  """Opens a directory with timm itself, in float32.

  Raises:
    ImportError: if timm is not installed.
    ValueError: if timm cannot open it.
  """
  timm = library()
  try:
    model = timm.create_model(f'local-dir:{path}', pretrained=True)
  except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as e:
    # torch lists keys over many lines.
    reason = ' '.join(str(e).split())
    raise ValueError(f'{path}: timm cannot open it: {reason}') from e
  found = timm.data.resolve_data_config(model=model)
  _, height, width = found['input_size']
  return peer(model, (height, width), found['mean'], found['std'])


def library() -> Any:
  """Returns the package timm.

  Raises:
    ImportError: if it is not installed.
  """
  try:
    import timm
  except (ImportError, RuntimeError) as e:
    # The second is what a torchvision gives that was built for another torch.
    raise ImportError(
      f'timm cannot run: pip install timm, torch and torchvision. ({e})'
    ) from e
  return timm


def peer(
  model: Any,
  image_size: tuple[int, int],
  mean: Sequence[float],
  std: Sequence[float],
) -> table.Peer:
  """Returns a model as it runs, with the scaling of values in [0, 1]."""
  import torch

  model.eval()
  mean_C11, std_C11 = (
    torch.tensor(x, dtype=torch.float32)[:, None, None] for x in (mean, std)
  )

  def run(images_BHWC: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
      images = torch.from_numpy(images_BHWC).permute(0, 3, 1, 2)
      return model((images / 255 - mean_C11) / std_C11).numpy()

  return table.Peer(f'timm {library().__version__}', image_size, run)


def _refuse_lacking(lookup: archive.Lookup, alone: bool) -> None:
  """Refuses arrays that no model here has, or that a file `alone` leaves open.

  Raises:
    ValueError: naming the array, and the models that have it.
  """
  for key in lookup.arrays:
    for pattern, what in _LACKING.items():
      if re.search(pattern, key):
        raise ValueError(
          f'{lookup.path} has the array {key!r}: {what}, which no model here '
          'has.'
        )
  if not alone:
    return
  needs = {key: what for key, what in _NEEDS_CONFIG.items() if lookup.has(key)}
  if lookup.has('attn_pool.latent') and lookup.has('cls_token'):
    needs['attn_pool.latent'] = 'the Perception Encoder has beside a cls_token'
  for key, what in needs.items():
    raise ValueError(
      f'{lookup.path} has the array {key!r}, as {what}: give a '
      'directory with the config.json, which says the rest.'
    )
  if lookup.has('blocks.0.norm1.weight') and not lookup.has(
    'blocks.0.attn.qkv.bias'
  ):
    # One lost array looks the same: no one would notice.
    raise ValueError(
      f"{lookup.path} has no array 'blocks.0.attn.qkv.bias': give a directory "
      'whose config.json says that its model has none.'
    )


def _vit_fields(
  lookup: archive.Lookup, config: Stated
) -> tuple[dict[str, Any], table.Flat, bool]:
  """Returns the fields, the arrays, and if only patches have positions."""
  width, channels, patch, _ = lookup.shape('patch_embed.proj.weight', 4)
  stem_width = 0
  stem_layers: tuple[int, ...] = ()
  if root := _root(lookup):
    stem_width, channels, *_ = lookup.shape(root, 4)
    stem_layers = _stages(lookup, timm_table.BACKBONE)
  known = timm_config.known_facts(config)
  has_cls = lookup.has('cls_token')
  pool = _pool(lookup, config, timm_config.stated_pool(config, known))
  stride = patch
  if stem_width:
    stride *= resnet.total_stride(stem_layers)
  stated = timm_config.image_size(config)
  if stated:
    stated = config.tiled(stated, stride)
  image_size, placed = _positions(lookup, stride, stated, has_cls)
  grid_only = has_cls and not placed
  # A class token that is not read is a register.
  folds_cls = has_cls and pool != 'cls'
  if lookup.has('dist_token') and pool != 'cls':
    raise ValueError(
      f"{lookup.path} has the array 'dist_token' and no class token that is "
      'read: no model here is like that.'
    )
  turned = known.pop('turned')
  arrays = timm_table.plain(lookup.arrays, placed=placed, folds_cls=folds_cls)
  lookup = dataclasses.replace(lookup, arrays=arrays)
  _, mlp_dim = lookup.shape('blocks.0.mlp.fc2.weight', 2)
  hidden, _ = lookup.shape('blocks.0.mlp.fc1.weight', 2)
  fields = {
    'name': 'deit' if lookup.has('dist_token') else 'vit',
    'patch_size': patch,
    'width': width,
    'depth': sum(lookup.count('blocks.', r'(\d{1,6})\.')),
    'mlp_dim': mlp_dim,
    'swiglu': hidden == 2 * mlp_dim,
    'norm': 'layer' if lookup.has('blocks.0.norm1.bias') else 'rms',
    'pre_norm': lookup.has('norm_pre.weight'),
    'norm_pooled': lookup.has('fc_norm.weight'),
    # What it began with is of no use any more.
    'layer_scale': 1e-4 * lookup.has('blocks.0.ls1.gamma'),
    'qkv_bias': lookup.has('blocks.0.attn.qkv.bias'),
    'qk_norm': lookup.has('blocks.0.attn.q_norm.weight'),
    'attention_norm': lookup.has('blocks.0.attn.norm.weight'),
    'mlp_norm': lookup.has('blocks.0.mlp.norm.weight'),
    'registers': lookup.size('reg_token', 3, axis=1),
    'pool': pool,
    'stem_width': stem_width,
    'stem_layers': stem_layers,
    'image_size': image_size,
    'posemb': 'learned1d' if lookup.has('pos_embed') else 'none',
    'representation_size': lookup.size('pre_logits.fc.weight', 2),
    'num_classes': lookup.size('head.weight', 2),
  }
  found = fields | {'channels': channels}
  facts = timm_config.vit_facts(
    config, known, found, grid_only, has_cls=has_cls
  )
  if facts['heads'] is None:
    facts['heads'] = _usual_heads(lookup.path, width)
  if not config:
    config.warnings.append(
      f'{lookup.path} does not say all of its model. Assumed are '
      f'{_POOLINGS[pool]}{facts["heads"]} heads, '
      f"timm's exact GELU and epsilon of {facts['layer_norm_epsilon']:g}, "
      + ('a class token without a position, ' if grid_only else '')
      + f'square images of {image_size[0]} pixels, resized as a whole and '
      f'bilinearly, and values in [-1, 1]. {_TO_STATE}'
    )
  if turned:
    arrays = timm_table.turned_as_here(arrays, width // facts['heads'], turned)
  return fields | facts, arrays, grid_only


def _pool(lookup: archive.Lookup, config: Stated, stated: str | None) -> str:
  """Returns the pooling that the arrays are for."""
  if lookup.has('attn_pool.latent'):
    possible = ['map']
  elif not lookup.has('cls_token'):
    possible = ['gap']
  elif lookup.has('fc_norm.weight'):
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


def _root(lookup: archive.Lookup) -> str | None:
  """Returns the first convolution of a hybrid."""
  for stem in ('stem.', ''):
    name = f'{timm_table.BACKBONE}{stem}conv.weight'
    if lookup.has(name):
      return name
  return None


def _stages(lookup: archive.Lookup, prefix: str) -> tuple[int, ...]:
  """Returns the units of each stage of a ResNet."""
  return lookup.count(f'{prefix}stages.', r'(\d{1,6})\.blocks\.(\d{1,6})\.')


def _positions(
  lookup: archive.Lookup,
  stride: int,
  stated: tuple[int, int] | None,
  has_cls: bool,
) -> tuple[tuple[int, int], int]:
  """Returns the image size, and how many tokens before it have embeddings.

  Raises:
    ValueError: if the embeddings are for another size than the stated.
  """
  if not lookup.has('pos_embed'):
    if stated:
      return stated, 0
    raise ValueError(
      f"{lookup.path} has no 'pos_embed' and does not say "
      'how large its images are: give a directory with a config.json.'
    )
  _, tokens, _ = lookup.shape('pos_embed', 3)
  first = has_cls + lookup.has('dist_token')
  before = 0, first, first + lookup.size('reg_token', 3, axis=1)
  if not stated:
    squares = (
      n for n in before if math.isqrt(max(tokens - n, 0)) ** 2 == tokens - n
    )
    placed = next(squares, before[1])
    side = table.square_side(tokens - placed, lookup.path)
    return (side * stride, side * stride), placed
  patches = (stated[0] // stride) * (stated[1] // stride)
  if tokens - patches not in before:
    raise ValueError(
      f'{lookup.path}/config.json: images are of {stated[0]}x{stated[1]} '
      f'pixels, {patches} patches of {stride}, and '
      f"'pos_embed' has {tokens} tokens."
    )
  return stated, tokens - patches


def _resnet_fields(
  lookup: archive.Lookup, config: Stated
) -> tuple[dict[str, Any], table.Flat, bool]:
  """Returns the fields, the arrays, and False: a ResNet has no positions."""
  timm_config.check_resnet(config, timm_config.BIT)
  width, *_ = lookup.shape('stem.conv.weight', 4)
  image_size = timm_config.image_size(config)
  if image_size is None:
    image_size = (224, 224)
    config.warnings.append(
      f'{lookup.path} does not say how large its images are: 224x224 pixels, '
      'resized as a whole and bilinearly, values in [-1, 1], and pooling by '
      f'the mean (not max or avgmax) are assumed. {_TO_STATE}'
    )
  return (
    {
      'name': 'resnet',
      'version': 2,
      'layers': _stages(lookup, ''),
      'width': width,
      'num_classes': lookup.size('head.fc.weight', 4),
      'image_size': image_size,
    },
    lookup.arrays,
    False,
  )


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
