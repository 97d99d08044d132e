"""The .npz checkpoints of big_vision.

Flat keys joined by '/', with the numbers of today's Flax. The class token joins
the others after the position embeddings were added and has none; ours has one,
which is zero in what is read and added to the token in what is written.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats import archive, npz, table

DTYPES: tuple[str, ...] = ('float32', 'bfloat16')
# What its training code saves parameters under.
PREFIX = 'params/'

_HOLDS = 'pool representation_size gelu layer_norm_epsilon posemb=sincos2d'
_TOWER = 'params/img/'
_POSITIONS = 'pos_embedding'
_LAYER = re.compile(rf'{npz.LAYERS}_(\d+)(/.*)')


def matches(arrays: table.Flat) -> bool:
  """Tells whether the arrays are those of a big_vision file.

  One with fixed position embeddings has no sign of its own but that an official
  file would have learned ones.
  """
  prefix, arrays = npz.without_other_trees(arrays)
  return prefix + _POSITIONS in arrays or (
    npz.has_linen_numbers(arrays) and prefix + npz.POSITIONS not in arrays
  )


def read(path: str, arrays: table.Flat) -> table.File:
  """Reads a file, of which `arrays` are from `archive.load`."""
  count = len(arrays)
  prefix, arrays = npz.without_other_trees(arrays)

  def key_of(name: str) -> str:
    return prefix + _key(name)

  lookup = archive.Lookup(path, arrays, key_of, 'big_vision ViT')
  stacked = any(key.startswith(f'{prefix}{npz.LAYERS}/') for key in arrays)
  fields = _infer_fields(lookup, stacked)
  warnings = list(npz.zeroed_head(lookup))
  if fields['posemb'] == 'sincos2d':
    H, W = fields['image_size']
    warnings.append(
      f'{path} has no position embeddings: fixed ones (sincos2d) and images of '
      f'{H}x{W} pixels are assumed.'
    )
  if prefix == _TOWER and len(arrays) < count:
    warnings.append(
      f'{path}: only its image tower is read ({len(arrays)} of {count} arrays).'
    )
  return table.File(
    path=path,
    arrays=arrays,
    fields=fields,
    table=lambda shapes: _table(
      shapes, key_of, fields['depth'] if stacked else 0
    ),
    preprocessing=(
      table.Preprocessing()
      if prefix == _TOWER
      else _preprocessing(fields['image_size'])
    ),
    warnings=tuple(warnings),
  )


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a checkpoint that big_vision and timm read, layers unrolled."""
  npz.check_vit(weights, 'A big_vision .npz file', _HOLDS)
  fields = weights.fields
  arrays = table.ours_to_file(
    weights.arrays,
    lambda shapes: _table(shapes, lambda name: PREFIX + _key(name)),
  )
  archive.save(target, arrays, dtype)
  lines = archive.not_held(weights, _preprocessing(fields['image_size']))
  side = _assumed_side(fields['patch_size'])
  if fields['posemb'] == 'sincos2d' and fields['image_size'] != (side, side):
    H, W = fields['image_size']
    lines.append(
      f'The image size {H}x{W}: fixed position embeddings are not stored, and '
      f'{side}x{side} is assumed.'
    )
  return lines


def _key(name: str) -> str:
  return _POSITIONS if name == npz.POSITIONS else npz.linen_name(name)


def _infer_fields(lookup: archive.Lookup, stacked: bool) -> dict[str, Any]:
  fields = npz.encoder_fields(lookup, stacked)
  patch = fields['patch_size']
  learned = lookup.has(npz.POSITIONS)
  if learned:
    side = (
      table.square_side(lookup.shape(npz.POSITIONS, 3)[1], lookup.path) * patch
    )
  else:
    side = _assumed_side(patch)
  return fields | {
    'pool': 'map' if lookup.has('MAPHead_0/probe') else fields['pool'],
    'posemb': 'learned1d' if learned else 'sincos2d',
    'image_size': (side, side),
  }


def _assumed_side(patch: int) -> int:
  """Returns the side of images where nothing tells it: 224 or just below."""
  return max(224 // patch, 1) * patch


def _preprocessing(image_size: tuple[int, int]) -> table.Preprocessing:
  """Returns what its classifiers are evaluated with: 256 pixels for 224."""
  return table.Preprocessing(
    resize_small=256 if image_size == (224, 224) else 0
  )


def _table(
  shapes: table.Shapes, key_of: Callable[[str], str], stacked: int = 0
) -> list[table.Entry]:
  """Returns the table; `stacked` layers, if any, are along a first axis."""
  entries = []
  for name in shapes:
    layer = _LAYER.fullmatch(name) if stacked else None
    if layer and layer[1] == '0':
      entries.append(
        table.Entry(
          (key_of(npz.LAYERS + layer[2]),),
          tuple(f'{npz.LAYERS}_{i}{layer[2]}' for i in range(stacked)),
          to_file=lambda *layers: (np.stack(layers),),
          to_ours=lambda stack: tuple(stack),
        )
      )
    elif name == 'cls' and npz.POSITIONS in shapes:
      entries.append(
        table.Entry(
          (key_of('cls'), key_of(npz.POSITIONS)),
          ('cls', npz.POSITIONS),
          to_file=lambda cls, table: (cls + table[:, :1], table[:, 1:]),
          to_ours=lambda cls, grid: (
            cls,
            np.concatenate([np.zeros_like(cls), grid], axis=1),
          ),
        )
      )
    elif not layer and not (name == npz.POSITIONS and 'cls' in shapes):
      entries.append(table.one(key_of(name), name))
  return entries
