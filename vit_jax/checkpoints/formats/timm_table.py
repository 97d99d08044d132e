"""The keys of timm's models and how they lay out our arrays.

Keys are ours spelt differently, but for the queries, keys and values of a
layer, which timm keeps in one array.
"""

import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from vit_jax.checkpoints.formats.table import Entry, Flat, Shapes

BACKBONE = 'patch_embed.backbone.'

_POSITIONS = 'Transformer/posembed_input/pos_embedding'
_VIT_KEYS = {
  'cls': 'cls_token',
  _POSITIONS: 'pos_embed',
  'embedding': 'patch_embed.proj',
  'Transformer/encoder_norm': 'norm',
  'MAPHead_0/probe': 'attn_pool.latent',
  'MAPHead_0/LayerNorm_0': 'attn_pool.norm',
  'MAPHead_0/MlpBlock_0/Dense_0': 'attn_pool.mlp.fc1',
  'MAPHead_0/MlpBlock_0/Dense_1': 'attn_pool.mlp.fc2',
  'MAPHead_0/MultiHeadDotProductAttention_0/query': 'attn_pool.q',
  'MAPHead_0/MultiHeadDotProductAttention_0/key': 'attn_pool.kv',
  'MAPHead_0/MultiHeadDotProductAttention_0/out': 'attn_pool.proj',
  'pre_logits': 'pre_logits.fc',
  'head': 'head',
}
_LAYER_KEYS = {
  'LayerNorm_0': 'norm1',
  'MultiHeadDotProductAttention_1/query': 'attn.qkv',
  'MultiHeadDotProductAttention_1/out': 'attn.proj',
  'LayerNorm_2': 'norm2',
  'MlpBlock_3/Dense_0': 'mlp.fc1',
  'MlpBlock_3/Dense_1': 'mlp.fc2',
}
_RESNET_KEYS = {
  'conv_root': 'stem.conv',
  'gn_root': 'stem.norm',
  'gn_final': 'norm',
  'head': 'head.fc',
}
_LEAVES = {'kernel': '.weight', 'scale': '.weight', 'bias': '.bias'}

_Layout = Callable[[np.ndarray], np.ndarray]


class Stored(Mapping[str, np.ndarray]):
  """Our arrays as those of a file, each made when it is asked for.

  Those that timm joins are copies, a quarter of a model if all were there at
  once.
  """

  def __init__(self, arrays: Flat, entries: list[Entry]):
    self._arrays = arrays
    self._entries = {entry.keys[0]: entry for entry in entries}

  def __getitem__(self, key: str) -> np.ndarray:
    entry = self._entries[key]
    return entry.to_file(*(self._arrays[name] for name in entry.ours))[0]

  def __iter__(self) -> Iterator[str]:
    return iter(self._entries)

  def __len__(self) -> int:
    return len(self._entries)


def entries(
  shapes: Shapes, prefix: str = '', grid_only: bool = False
) -> list[Entry]:
  """Returns the table of a file, an entry for each of its arrays.

  Args:
    shapes: of our arrays, by name.
    prefix: of every key.
    grid_only: whether the class token has no position embedding, where ours has
      one: it is zero then.
  """
  is_vit = 'embedding/kernel' in shapes
  stages = any(name.startswith('block1/') for name in shapes)
  table = []
  for name, shape in shapes.items():
    names = _together(name)
    if names:
      key = _vit_key(name, stages) if is_vit else _resnet_key(name)
      layout = _layout(name, shape)
      if name == _POSITIONS and grid_only:
        layout = _without_first, _with_first
      if name == 'head/kernel' and not is_vit:
        layout = _to_pixel, _from_pixel
      table.append(_entry(prefix + key, names, *layout))
  return table


def _together(name: str) -> tuple[str, ...]:
  """Returns which of ours are one array of timm's, under the first's name."""
  match = re.fullmatch(
    r'(.*MultiHeadDotProductAttention_([01]))/(query|key|value)/(\w+)', name
  )
  # The queries of the pooling come from its probe, and stand alone.
  if not match or (match[2], match[3]) == ('0', 'query'):
    return (name,)
  parts = ('query', 'key', 'value') if match[2] == '1' else ('key', 'value')
  if match[3] != parts[0]:
    return ()
  return tuple(f'{match[1]}/{part}/{match[4]}' for part in parts)


def _entry(
  key: str, names: tuple[str, ...], to_file: _Layout, to_ours: _Layout
) -> Entry:
  if len(names) == 1:
    return Entry(
      (key,), names, lambda x: (to_file(x),), lambda x: (to_ours(x),)
    )
  return Entry(
    (key,),
    names,
    lambda *parts: (np.concatenate([to_file(x) for x in parts]),),
    lambda x: tuple(to_ours(part) for part in np.split(x, len(names))),
  )


def _layout(name: str, shape: tuple[int, ...]) -> tuple[_Layout, _Layout]:
  """Returns how PyTorch lays out an array of ours, and the inverse: views."""
  leaf = name.rpartition('/')[2]
  if leaf == 'kernel' and len(shape) == 4:
    return lambda x: x.transpose(3, 2, 0, 1), lambda x: x.transpose(2, 3, 1, 0)
  if leaf == 'kernel':
    # The heads are the first two of an output projection's dimensions.
    rows = shape[0] * shape[1] if name.endswith('out/kernel') else shape[0]
    return lambda x: x.reshape(rows, -1).T, lambda x: x.T.reshape(shape)
  if leaf == 'bias':
    return lambda x: x.reshape(-1), lambda x: x.reshape(shape)
  return lambda x: x, lambda x: x


def _without_first(x_1LD: np.ndarray) -> np.ndarray:
  return x_1LD[:, 1:]


def _with_first(x_1LD: np.ndarray) -> np.ndarray:
  return np.pad(x_1LD, ((0, 0), (1, 0), (0, 0)))


def _to_pixel(x_DC: np.ndarray) -> np.ndarray:
  """BiT's head is a convolution of one pixel."""
  return x_DC.T[:, :, None, None]


def _from_pixel(x_CD11: np.ndarray) -> np.ndarray:
  return x_CD11[:, :, 0, 0].T


def _vit_key(name: str, stages: bool) -> str:
  module, _, leaf = name.rpartition('/')
  if leaf not in _LEAVES:
    return _VIT_KEYS[name]
  match = re.fullmatch(r'Transformer/encoderblock_(\d+)/(.+)', module)
  if match:
    return f'blocks.{match[1]}.{_LAYER_KEYS[match[2]]}{_LEAVES[leaf]}'
  if module in _VIT_KEYS:
    return _VIT_KEYS[module] + _LEAVES[leaf]
  key = _resnet_key(name)
  # A stem without stages is the whole backbone.
  return BACKBONE + (key if stages else key.removeprefix('stem.'))


def _resnet_key(name: str) -> str:
  module, _, leaf = name.rpartition('/')
  match = re.fullmatch(r'block(\d+)/unit(\d+)/(.+)', module)
  if match:
    stage, unit = int(match[1]) - 1, int(match[2]) - 1
    part = match[3]
    if part.endswith('_proj'):
      part = f'downsample.{part}'.removesuffix('_proj')
    part = part.replace('gn', 'norm')
    module = f'stages.{stage}.blocks.{unit}.{part}'
  else:
    module = _RESNET_KEYS[module]
  return module + _LEAVES[leaf]
