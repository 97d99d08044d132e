"""Reads ResNets with BatchNorm and bottleneck units from torchvision and timm.

They become our ResNets with version=0, whose BatchNorm uses stored statistics.
"""

import os
import re
from collections.abc import Callable
from typing import Any

from vit_jax.checkpoints.formats import archive, table, timm_config, torch_vit
from vit_jax.checkpoints.formats.json_config import JsonConfig

# Preprocessing of torchvision's V1 weights, for files without a config.json.
IMAGES = table.Preprocessing(
  256,
  mean=(0.485, 0.456, 0.406),
  std=(0.229, 0.224, 0.225),
  resize_like='torchvision',
)
_SIZE = (224, 224)
LEAVES = torch_vit.LEAVES | {'mean': '.running_mean', 'var': '.running_var'}
# Replacements that convert our module paths to torchvision's, in this order.
Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]
RULES: Rules = (
  ('^head$', 'fc'),
  (r'(conv|bn)_root', r'\g<1>1'),
  (r'block(\d+)/unit(\d+)/', lambda m: f'layer{m[1]}.{int(m[2]) - 1}.'),
  ('conv_proj', 'downsample.0'),
  ('bn_proj', 'downsample.1'),
)


def matches(arrays: table.Flat) -> bool:
  """Whether the arrays are from a ResNet with bottleneck units and a head."""
  known = ('conv1.weight', 'layer1.0.conv3.weight', 'fc.weight')
  return all(key in arrays for key in known)


def read(
  path: str, arrays: table.Flat, config: dict[str, Any] | None = None
) -> table.File:
  """Reads a file; or a timm directory, if `config` is its config.json."""
  lookup = archive.Lookup(path, arrays, _key_of, 'ResNet')
  full = JsonConfig(config or {}, os.path.join(path, 'config.json'))
  if config is None:
    full.warnings.append(
      f'{path} does not store its configuration. vit_jax assumes bilinear '
      f'resizing to a shorter side of {IMAGES.resize_small} pixels, a crop of '
      f"{_SIZE[0]}x{_SIZE[1]}, ImageNet's mean and standard deviation, and "
      'average pooling. For other settings, give a timm directory with a '
      'config.json.'
    )
  timm_config.check_resnet(full, timm_config.RESNET)
  fields = {
    'name': 'resnet',
    'version': 0,
    'layers': lookup.count('layer', r'(\d{1,6})\.(\d+)\.'),
    'width': lookup.shape('conv_root/kernel', 4)[0],
    'num_classes': lookup.shape('head/kernel', 2)[0],
    'image_size': timm_config.image_size(full) or _SIZE,
  }
  return table.File(
    path=path,
    arrays=arrays,
    fields=fields,
    table=table.renamed(_key_of, torch_vit.layout),
    **timm_config.file_attributes(full, fields, IMAGES),
  )


def _key_of(name: str) -> str:
  """Returns the file's key for one of our names."""
  module, _, leaf = name.rpartition('/')
  for pattern, to in RULES:
    module = re.sub(pattern, to, module)
  return module.replace('/', '.') + LEAVES[leaf]
