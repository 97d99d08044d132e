"""Reads and writes the .npz checkpoints of big_vision.

Keys have the module numbers of Flax Linen. Files have no position embedding for
the class token. Reading sets it to zeros; writing adds it to the token.
"""

import re
from collections.abc import Callable

import numpy as np

from vit_jax.checkpoints.formats import archive, npz, table

DTYPES: tuple[str, ...] = ('float32', 'bfloat16')
PREFIX = 'params/'  # begins the keys of parameters in a training checkpoint

_HOLDS = (
  'pool=gap pool=map representation_size gelu layer_norm_epsilon '
  'posemb=sincos2d'
)
_TOWER = 'params/img/'
_POSITIONS = 'pos_embedding'
_LAYER = re.compile(rf'{npz.LAYERS}_(\d+)(/.*)')


def matches(arrays: table.Flat) -> bool:
  """Whether the arrays are from a big_vision file.

  A file with Linen's module numbers but without position embeddings is from
  big_vision, because official ViT files always store position embeddings.
  """
  prefix, arrays = npz.without_other_trees(arrays)
  return prefix + _POSITIONS in arrays or (
    npz.has_linen_numbers(arrays) and prefix + npz.POSITIONS not in arrays
  )


def read(path: str, arrays: table.Flat) -> table.File:
  """Reads a file; `arrays` are the result of `archive.load`."""
  count = len(arrays)
  prefix, arrays = npz.without_other_trees(arrays)

  def key_of(name: str) -> str:
    return prefix + _key(name)

  lookup = archive.Lookup(path, arrays, key_of, 'big_vision ViT')
  stacked = any(key.startswith(f'{prefix}{npz.LAYERS}/') for key in arrays)
  fields = npz.encoder_fields(lookup, stacked)
  side = _assumed_side(fields['patch_size'])
  posemb = 'sincos2d'
  if lookup.has(npz.POSITIONS):
    posemb = 'learned1d'
    _, tokens, _ = lookup.shape(npz.POSITIONS, 3)
    side = table.square_side(tokens, path) * fields['patch_size']
  fields |= {'posemb': posemb, 'image_size': (side, side)}
  if lookup.has('MAPHead_0/probe'):
    fields['pool'] = 'map'
  warnings = list(npz.zeroed_head(lookup))
  if posemb == 'sincos2d':
    warnings.append(
      f'{path} has no position embeddings. vit_jax assumes fixed '
      f'position embeddings (sincos2d) and images of {side}x{side} pixels.'
    )
  if prefix == _TOWER and len(arrays) < count:
    warnings.append(
      f'{path}: only the image tower is read, {len(arrays)} of {count} arrays.'
    )
  return table.File(
    path=path,
    arrays=arrays,
    fields=fields,
    table=lambda shapes: _table(shapes, key_of, stacked * fields['depth']),
    preprocessing=(
      table.Preprocessing()
      if prefix == _TOWER
      else _preprocessing(fields['image_size'])
    ),
    warnings=tuple(warnings),
  )


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a checkpoint for big_vision and timm, with layers unrolled."""
  npz.check_vit(weights, 'A big_vision .npz file', _HOLDS)
  fields = weights.fields
  arrays = table.ours_to_file(
    weights.arrays,
    lambda shapes: _table(shapes, lambda name: PREFIX + _key(name)),
  )
  archive.save(target, arrays, dtype)
  lines = archive.notes(weights, _preprocessing(fields['image_size']))
  side = _assumed_side(fields['patch_size'])
  if fields['posemb'] == 'sincos2d' and fields['image_size'] != (side, side):
    H, W = fields['image_size']
    lines.append(
      f'The image size is {H}x{W}. The file does not store fixed position '
      f'embeddings, so its readers assume {side}x{side}.'
    )
  return lines


def _key(name: str) -> str:
  return _POSITIONS if name == npz.POSITIONS else npz.linen_name(name)


def _assumed_side(patch: int) -> int:
  """Returns the largest multiple of `patch` up to 224; at least `patch`."""
  return max(224 // patch, 1) * patch


def _preprocessing(image_size: tuple[int, int]) -> table.Preprocessing:
  """Returns the evaluation preprocessing of big_vision's classifiers."""
  return table.Preprocessing(256 if image_size == (224, 224) else 0)


def _table(
  shapes: table.Shapes, key_of: Callable[[str], str], stacked: int = 0
) -> list[table.Entry]:
  """Returns the entries for our arrays of these shapes; see `table.File`.

  `stacked` is the number of layers that the file stacks along a first axis.
  """
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
