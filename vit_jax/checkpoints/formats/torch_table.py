"""Our arrays as modules of PyTorch name them and lay them out."""

import re
from collections.abc import Mapping

from vit_jax.checkpoints.formats.table import SAME, Layout

LEAVES = {'kernel': '.weight', 'scale': '.weight', 'bias': '.bias'}


def key_of(name: str, modules: Mapping[str, str], layer: str, unit: str) -> str:
  """Returns the key of an array of ours.

  Args:
    name: of ours.
    modules: theirs by ours, in an encoder layer by the names that they have
      there; single arrays by their own names.
    layer: theirs before what is in an encoder layer, with {} for its number.
    unit: theirs before what is in a ResNet's unit, with {} for the numbers of
      stage and unit, from 0.
  """
  module, _, leaf = name.rpartition('/')
  if leaf not in LEAVES:
    return modules[name]
  if match := re.fullmatch(r'Transformer/encoderblock_(\d+)/(.+)', module):
    module = layer.format(match[1]) + modules[match[2]]
  elif match := re.fullmatch(r'block(\d+)/unit(\d+)/(.+)', module):
    part = re.sub('(.+)_proj', r'downsample.\1', match[3]).replace('gn', 'norm')
    module = unit.format(int(match[1]) - 1, int(match[2]) - 1) + part
  else:
    module = modules[module]
  return module + LEAVES[leaf]


def layout(name: str, shape: tuple[int, ...]) -> Layout:
  """Returns how PyTorch lays out an array of ours."""
  leaf = name.rpartition('/')[2]
  if leaf == 'kernel' and len(shape) == 4:
    return lambda x: x.transpose(3, 2, 0, 1), lambda x: x.transpose(2, 3, 1, 0)
  if leaf == 'kernel':
    # The heads are the first two of an output projection's dimensions.
    rows = shape[0] * shape[1] if name.endswith('out/kernel') else shape[0]
    return lambda x: x.reshape(rows, -1).T, lambda x: x.T.reshape(shape)
  if leaf == 'bias':
    return lambda x: x.reshape(-1), lambda x: x.reshape(shape)
  return SAME
