"""The .npz files of all three kinds as timm, which has loaders for them, runs
them."""

import functools
from typing import Any

from vit_jax.checkpoints.formats import (
  archive,
  bigvision,
  recognise,
  timm_config,
)
from vit_jax.checkpoints.formats import timm as timm_format
from vit_jax.checkpoints.formats.table import Peer
from vit_jax.models import variants

# What timm's loaders have no place for.
_ONLY = {'representation_size': 0, 'posemb': 'learned1d'}


def open_peer(path: str) -> Peer:
  """Opens an official, big_vision or BiT file with timm, in float32.

  Raises:
    ImportError: if timm is not installed.
    ValueError: if timm has no such model, or cannot read the file.
  """
  arrays = archive.load(path)
  module = recognise.format_of(arrays, recognise.ARCHIVES)
  fields = module.read(path, arrays).fields
  fields |= variants.fields_of(variants.build(**fields))
  timm = timm_format.library()
  import torch

  if fields['name'] == 'resnet':
    model = timm.models.resnetv2.ResNetV2(
      **_stages(fields['layers'], fields['width']),
      num_classes=fields['num_classes'],
      stem_type='fixed',
      conv_layer=functools.partial(timm.layers.StdConv2d, eps=1e-8),
    )
    load = model.load_pretrained
  else:
    for field, value in _ONLY.items():
      if fields[field] != value:
        raise ValueError(
          f'{path}: timm has no ViT with {field} {fields[field]!r} that reads '
          '.npz files: check another format of the model.'
        )
    transformer = timm.models.vision_transformer
    model = transformer.VisionTransformer(
      **timm_config.vit_args(fields),
      num_classes=fields['num_classes'],
      no_embed_class=module is bigvision,
      **_stem(timm, fields),
    )
    load = functools.partial(
      # The method has no argument for bfloat16.
      transformer._load_weights,
      model,
      load_bfloat16=any(x.dtype.name == 'bfloat16' for x in arrays.values()),
    )
  try:
    with torch.no_grad():
      load(path)
  except (KeyError, RuntimeError, ValueError) as e:
    raise ValueError(f'{path}: timm cannot read it: {e}') from e
  # timm's mean and deviation for these files, IMAGENET_INCEPTION_MEAN.
  half = (0.5, 0.5, 0.5)
  return timm_format.peer(model, fields['image_size'], half, half)


def _stem(timm: Any, fields: dict[str, Any]) -> dict[str, Any]:
  """Returns the arguments of a hybrid that differ."""
  if not fields['stem_width']:
    return {}
  how = {
    'preact': False,
    'stem_type': 'same',
    'conv_layer': functools.partial(timm.layers.StdConv2dSame, eps=1e-8),
  }
  resnetv2 = timm.models.resnetv2
  if fields['stem_layers']:
    stages = _stages(fields['stem_layers'], fields['stem_width'])
    backbone = resnetv2.ResNetV2(**stages, num_classes=0, global_pool='', **how)
  else:
    backbone = resnetv2.create_resnetv2_stem(3, fields['stem_width'], **how)
  return {'embed_layer': functools.partial(timm.layers.HybridEmbed, backbone)}


def _stages(layers: tuple[int, ...], width: int) -> dict[str, Any]:
  return {
    'layers': layers,
    'channels': tuple(4 * width * 2**i for i in range(len(layers))),
    'stem_chs': width,
  }
