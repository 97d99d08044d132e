"""Reads and writes BiT's .npz checkpoints (ResNet v2, arXiv 1912.11370).

Keys are TensorFlow's variable names; arrays are float32. A unit has parts a, b
and c, each with a GroupNorm and a convolution. The head is a 1x1 convolution.
"""

import re
from collections.abc import Iterable

from vit_jax.checkpoints.formats import archive, table, torchvision

DTYPES: tuple[str, ...] = ('float32',)
PREFIX = 'resnet/'
# Image size of pre-training. Files do not store it, and any size works.
IMAGE_SIZE = (224, 224)
# Matches the stage number and the unit name after 'block' in a key.
UNIT = r'(\d)/(unit\d+)/'

_CONV = 'standardized_conv2d'
# Replacements that convert our names to BiT's keys, applied in this order.
_RULES: torchvision.Rules = (
  ('^conv_root', f'root_block/{_CONV}'),
  ('^head', 'head/conv2d'),
  ('conv_proj', f'a/proj/{_CONV}'),
  (r'(?<=unit)(\d)(?=/)', r'0\1'),
  (r'conv(\d)/', lambda m: f'{" abc"[int(m[1])]}/{_CONV}/'),
  (r'gn(\d)', lambda m: f'{" abc"[int(m[1])]}/group_norm'),
  ('gn_final', 'group_norm'),
  ('group_norm/scale', 'group_norm/gamma'),
  ('group_norm/bias', 'group_norm/beta'),
)


def matches(arrays: Iterable[str]) -> bool:
  """Whether the keys are from a BiT file."""
  return any(key.startswith(PREFIX) for key in arrays)


def read(path: str, arrays: table.Flat) -> table.File:
  """Reads a file; `arrays` are the result of `archive.load`."""
  arrays = {k: x for k, x in arrays.items() if k.startswith(PREFIX)}
  # In some files, TensorFlow has appended numbers to the convolutions' names.
  stored = {re.sub(r'(standardized_conv2d)_\d+/', r'\1/', k): k for k in arrays}

  def key_of(name: str) -> str:
    key = _key(name)
    return stored.get(key, key)

  lookup = archive.Lookup(path, arrays, key_of, 'BiT')
  return table.File(
    path=path,
    arrays=arrays,
    fields={
      'name': 'resnet',
      'version': 2,
      'layers': lookup.count(f'{PREFIX}block', UNIT),
      'width': lookup.shape('conv_root/kernel', 4)[3],
      'num_classes': lookup.size('head/kernel', 4, 3),
      'image_size': IMAGE_SIZE,
    },
    table=table.renamed(key_of, _layout),
    warnings=(
      f'{path} does not store the image size. vit_jax assumes '
      f'{IMAGE_SIZE[0]}x{IMAGE_SIZE[1]} pixels.',
    ),
  )


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a checkpoint for timm and BiT's own code."""
  fields = weights.fields
  start = 'A BiT .npz file cannot store a model with'
  table.check_writable(fields, start, ('resnet',), 'width')
  arrays = table.ours_to_file(weights.arrays, table.renamed(_key, _layout))
  archive.save(target, arrays, dtype)
  lines = archive.notes(weights)
  if fields['image_size'] != IMAGE_SIZE:
    H, W = fields['image_size']
    lines.append(
      f'The image size is {H}x{W}. The file does not store it: vit_jax assumes '
      f'{IMAGE_SIZE[0]}x{IMAGE_SIZE[1]}, timm the default size of the model.'
    )
  return lines


def _key(name: str) -> str:
  """Returns BiT's key for one of our names."""
  for pattern, to in _RULES:
    name = re.sub(pattern, to, name)
  return PREFIX + name


def _layout(name: str, shape: tuple[int, ...]) -> table.Layout:
  if name == 'head/kernel':
    return lambda x: x[None, None], lambda x: x[0, 0]
  return table.SAME
