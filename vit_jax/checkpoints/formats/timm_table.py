"""The keys of timm's models and how they lay out our arrays.

Keys are ours spelt differently, but for the queries, keys and values of a
layer, which timm keeps in one array.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.checkpoints.formats import table, torch_table

BACKBONE = 'patch_embed.backbone.'

_POSITIONS = 'Transformer/posembed_input/pos_embedding'
_VIT = {
  'cls': 'cls_token',
  'dist': 'dist_token',
  _POSITIONS: 'pos_embed',
  'embedding': 'patch_embed.proj',
  'registers': 'reg_token',
  'Transformer/pre_norm': 'norm_pre',
  'LayerNorm_0': 'norm1',
  'MultiHeadDotProductAttention_1/query': 'attn.qkv',
  'MultiHeadDotProductAttention_1/query_norm': 'attn.q_norm',
  'MultiHeadDotProductAttention_1/key_norm': 'attn.k_norm',
  'MultiHeadDotProductAttention_1/out_norm': 'attn.norm',
  'MultiHeadDotProductAttention_1/out': 'attn.proj',
  'LayerScale_0': 'ls1',
  'LayerNorm_2': 'norm2',
  'MlpBlock_3/Dense_0': 'mlp.fc1',
  'MlpBlock_3/inner_norm': 'mlp.norm',
  'MlpBlock_3/Dense_1': 'mlp.fc2',
  'LayerScale_1': 'ls2',
  'Transformer/encoder_norm': 'norm',
  'MAPHead_0/probe': 'attn_pool.latent',
  'MAPHead_0/LayerNorm_0': 'attn_pool.norm',
  'MAPHead_0/MlpBlock_0/Dense_0': 'attn_pool.mlp.fc1',
  'MAPHead_0/MlpBlock_0/Dense_1': 'attn_pool.mlp.fc2',
  'MAPHead_0/MultiHeadDotProductAttention_0/query': 'attn_pool.q',
  'MAPHead_0/MultiHeadDotProductAttention_0/key': 'attn_pool.kv',
  'MAPHead_0/MultiHeadDotProductAttention_0/out': 'attn_pool.proj',
  'pooled_norm': 'fc_norm',
  'pre_logits': 'pre_logits.fc',
  'head': 'head',
  'head_dist': 'head_dist',
}
_RESNET = {
  'conv_root': 'stem.conv',
  'gn_root': 'stem.norm',
  'gn_final': 'norm',
  'head': 'head.fc',
}


class Turned(NamedTuple):
  """Which numbers of a head rotary embeddings turn together.

  Attributes:
    neighbours: pairs of neighbours, and not those half a head apart.
    columns_first: the first half of the pairs by columns, and not by rows.
  """

  neighbours: bool
  columns_first: bool


class Stored(Mapping[str, np.ndarray]):
  """Our arrays as those of a file, each made when it is asked for.

  Those that timm joins are copies, a quarter of a model if all were there at
  once.
  """

  def __init__(self, arrays: table.Flat):
    if 'Transformer/pre_norm/scale' in arrays:
      # Before a norm timm's patches have no bias: every position gets it.
      arrays = dict(arrays)
      positions_1LD = np.array(arrays[_POSITIONS])
      positions_1LD[:, int('cls' in arrays) :] += arrays.pop('embedding/bias')
      arrays[_POSITIONS] = positions_1LD
    self._arrays = arrays
    shapes = {name: x.shape for name, x in arrays.items()}
    found = entries(shapes, places_registers='registers' in shapes)
    self._entries = {entry.keys[0]: entry for entry in found}

  def __getitem__(self, key: str) -> np.ndarray:
    entry = self._entries[key]
    return entry.to_file(*(self._arrays[name] for name in entry.ours))[0]

  def __iter__(self) -> Iterator[str]:
    return iter(self._entries)

  def __len__(self) -> int:
    return len(self._entries)


def plain(arrays: table.Flat, *, placed: int, folds_cls: bool) -> table.Flat:
  """Returns the arrays of a ViT of any of timm's classes as a plain one's.

  What it leaves out becomes zeros: the bias of patches, and one of queries,
  keys and values where others are there. The two parts of a gated MLP become
  one array. The positions of registers are added to them, and with `folds_cls`
  a class token that nobody reads is one. `placed` of the tokens before the
  patches have positions.
  """
  found = dict(arrays)
  for key in arrays:
    if match := re.fullmatch(
      r'(blocks\.\d+\.)(attn\.qkv|attn\.q_proj|mlp\.fc1_g)\.weight',
      key,
    ):
      _complete_layer(found, match[1])
    elif key == 'patch_embed.proj.weight':
      width = np.zeros(len(arrays[key]), np.float32)
      found.setdefault(key.replace('weight', 'bias'), width)
    elif re.fullmatch(r'blocks\.\d+\.gamma_[12]', key):
      found[f'{key[:-8]}.ls{key[-1]}.gamma'] = found.pop(key)
  cls, positions, registers = 'cls_token', 'pos_embed', 'reg_token'
  if folds_cls:
    more = [found[registers]] if registers in found else []
    found[registers] = np.concatenate([found.pop(cls), *more], axis=1)
  # Whose positions stay where they are.
  first = (cls in found) + ('dist_token' in found)
  if placed > first:
    rows = found[positions]
    R = placed - first
    found[registers] = np.concatenate(
      [
        found[registers][:, :R] + rows[:, first:placed],
        found[registers][:, R:],
      ],
      axis=1,
    )
    found[positions] = np.concatenate(
      [rows[:, :first], rows[:, placed:]], axis=1
    )
  return found


def _complete_layer(found: table.Flat, layer: str) -> None:
  if f'{layer}attn.q_proj.weight' in found:
    parts = [found.pop(f'{layer}attn.{x}_proj.weight') for x in 'qkv']
    found[f'{layer}attn.qkv.weight'] = np.concatenate(parts)
    for x in 'qkv':
      if (bias := found.pop(f'{layer}attn.{x}_proj.bias', None)) is not None:
        found[f'{layer}attn.{x}_bias'] = bias
  biases = [found.pop(f'{layer}attn.{x}_bias', None) for x in 'qkv']
  there = [x for x in biases if x is not None]
  if there:
    full = [np.zeros_like(there[0]) if x is None else x for x in biases]
    found[f'{layer}attn.qkv.bias'] = np.concatenate(full)
  for leaf in ('weight', 'bias'):
    gate = found.pop(f'{layer}mlp.fc1_g.{leaf}', None)
    if gate is not None:
      parts = [gate, found.pop(f'{layer}mlp.fc1_x.{leaf}')]
      found[f'{layer}mlp.fc1.{leaf}'] = np.concatenate(parts)


def turned_as_here(arrays: table.Flat, K: int, how: Turned) -> table.Flat:
  """Returns the arrays with the numbers of queries and keys in our order.

  Attention does not see the order of the K numbers of a head. That of ours
  turns number j and number j + K/2 together, by rows in the first K/4 pairs.
  """
  pairs = np.arange(K // 2)
  if how.columns_first:
    pairs = np.roll(pairs, K // 4)
  order = np.concatenate([pairs, pairs + K // 2])
  if how.neighbours:
    order = np.concatenate([2 * pairs, 2 * pairs + 1])

  def ordered(key: str, x: np.ndarray) -> np.ndarray:
    if re.fullmatch(r'blocks\.\d+\.attn\.[qk]_norm\.\w+', key):
      return x[order]
    if re.fullmatch(r'blocks\.\d+\.attn\.qkv\.\w+', key):
      qkv = x.reshape(3, -1, K, *x.shape[1:]).copy()
      qkv[:2] = qkv[:2, :, order]
      return qkv.reshape(x.shape)
    return x

  return {key: ordered(key, x) for key, x in arrays.items()}


def entries(
  shapes: table.Shapes,
  grid_only: bool = False,
  places_registers: bool = False,
) -> list[table.Entry]:
  """Returns the table of a file, an entry for each of its arrays.

  Args:
    shapes: of our arrays, by name.
    grid_only: whether the class token has no position embedding, where ours has
      one: it is zero then.
    places_registers: whether registers have position embeddings, zeros, where
      ours have none.
  """
  is_vit = 'embedding/kernel' in shapes
  modules, backbone = _RESNET, ''
  if is_vit:
    # A stem without stages is all of the backbone.
    stages = any(name.startswith('block1/') for name in shapes)
    root = BACKBONE + ('stem.' if stages else '')
    modules = _VIT | {'conv_root': f'{root}conv', 'gn_root': f'{root}norm'}
    backbone = BACKBONE
  found = []
  for name, shape in shapes.items():
    names = _together(name)
    if not names:
      continue
    key = torch_table.key_of(
      name, modules, 'blocks.{}.', backbone + 'stages.{}.blocks.{}.'
    )
    key = re.sub(r'\.(ls[12])\.weight$', r'.\1.gamma', key)
    layout = torch_table.layout(name, shape)
    if name == _POSITIONS and grid_only:
      layout = _of_patches(('cls' in shapes) + ('dist' in shapes))
    if name == _POSITIONS and places_registers:
      layout = _with_registers(int('cls' in shapes), shapes['registers'][1])
    if name == 'head/kernel' and not is_vit:
      # BiT's head is a convolution of one pixel.
      layout = lambda x: x.T[:, :, None, None], lambda x: x[:, :, 0, 0].T
    found.append(
      table.joined(key, names, layout)
      if len(names) > 1
      else table.one(key, name, layout)
    )
  return found


def _of_patches(first: int) -> table.Layout:
  zeros = (0, 0), (first, 0), (0, 0)
  return lambda x: x[:, first:], lambda x: np.pad(x, zeros)


def _with_registers(first: int, R: int) -> table.Layout:
  def to_file(x: np.ndarray) -> np.ndarray:
    zeros = np.zeros((1, R, x.shape[-1]), x.dtype)
    return np.concatenate([x[:, :first], zeros, x[:, first:]], axis=1)

  return to_file, lambda x: np.delete(x, np.s_[first : first + R], axis=1)


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
