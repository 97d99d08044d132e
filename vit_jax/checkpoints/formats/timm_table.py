"""The keys of timm's models and how they lay out our arrays.

Keys are ours spelt differently, but for the queries, keys and values of a
layer, which timm keeps in one array.
"""

import re
from collections.abc import Iterator, Mapping

import numpy as np

from vit_jax.checkpoints.formats import torch_table
from vit_jax.checkpoints.formats.table import Entry, Flat, Layout, Shapes, one

BACKBONE = 'patch_embed.backbone.'

_POSITIONS = 'Transformer/posembed_input/pos_embedding'
_VIT = {
  'cls': 'cls_token',
  _POSITIONS: 'pos_embed',
  'embedding': 'patch_embed.proj',
  'LayerNorm_0': 'norm1',
  'MultiHeadDotProductAttention_1/query': 'attn.qkv',
  'MultiHeadDotProductAttention_1/out': 'attn.proj',
  'LayerNorm_2': 'norm2',
  'MlpBlock_3/Dense_0': 'mlp.fc1',
  'MlpBlock_3/Dense_1': 'mlp.fc2',
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
_RESNET = {
  'conv_root': 'stem.conv',
  'gn_root': 'stem.norm',
  'gn_final': 'norm',
  'head': 'head.fc',
}


class Stored(Mapping[str, np.ndarray]):
  """Our arrays as those of a file, each made when it is asked for.

  Those that timm joins are copies, a quarter of a model if all were there at
  once.
  """

  def __init__(self, arrays: Flat):
    self._arrays = arrays
    table = entries({name: x.shape for name, x in arrays.items()})
    self._entries = {entry.keys[0]: entry for entry in table}

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
  modules, backbone = _RESNET, ''
  if is_vit:
    # A stem without stages is all of the backbone.
    stages = any(name.startswith('block1/') for name in shapes)
    root = BACKBONE + ('stem.' if stages else '')
    modules = _VIT | {'conv_root': f'{root}conv', 'gn_root': f'{root}norm'}
    backbone = BACKBONE
  table = []
  for name, shape in shapes.items():
    names = _together(name)
    if not names:
      continue
    key = torch_table.key_of(
      name, modules, 'blocks.{}.', backbone + 'stages.{}.blocks.{}.'
    )
    layout = torch_table.layout(name, shape)
    if name == _POSITIONS and grid_only:
      layout = lambda x: x[:, 1:], lambda x: np.pad(x, ((0, 0), (1, 0), (0, 0)))
    if name == 'head/kernel' and not is_vit:
      # BiT's head is a convolution of one pixel.
      layout = lambda x: x.T[:, :, None, None], lambda x: x[:, :, 0, 0].T
    table.append(
      _joined(prefix + key, names, layout)
      if len(names) > 1
      else one(prefix + key, name, layout)
    )
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


def _joined(key: str, names: tuple[str, ...], layout: Layout) -> Entry:
  to_file, to_ours = layout
  return Entry(
    (key,),
    names,
    lambda *parts: (np.concatenate([to_file(x) for x in parts]),),
    lambda x: tuple(to_ours(part) for part in np.split(x, len(names))),
  )
