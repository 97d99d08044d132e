"""The official .npz checkpoints of the paper and its successors.

Flat keys joined by '/', float32. The names inside an encoder layer carry the
numbers of one of two Flax APIs; ours are the older, published ones, so that the
table is the identity but for prefixes and numbers. ResNets are written as BiT
publishes them, by `bit`.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats import archive, bit, npz_peer
from vit_jax.checkpoints.formats.table import (
  Entry,
  File,
  Flat,
  Peer,
  Shapes,
  Weights,
  ours_to_file,
  shapes_of,
  square_side,
)

PREFIXES = ('opt/target/', 'params/img/', 'params/')
DTYPES = ('float32',)
POSITIONS = 'Transformer/posembed_input/pos_embedding'

# From our names to those of today's Flax.
LINEN_NUMBERS = {
  'LayerNorm_2': 'LayerNorm_1',
  'MultiHeadDotProductAttention_1': 'MultiHeadDotProductAttention_0',
  'MlpBlock_3': 'MlpBlock_0',
}

# The next of kin of what a format refuses because of a field.
_HELD_BY = {'name': 'npz', 'pool': 'bigvision', 'stem_width': 'npz'}

_GROUP_NORM = re.compile(r'(^|/)gn\w+/(scale|bias)$')


def read(path: str, arrays: Flat) -> File:
  """Reads off what a checkpoint's shapes say of its model.

  Args:
    path: of the file, for messages.
    arrays: from `archive.load`.

  Raises:
    ValueError: if it is no ViT; names the file and key.
  """
  prefix, arrays = without_other_trees(arrays)
  linen = has_linen_numbers(arrays)

  def key_of(name: str) -> str:
    return prefix + (linen_name(name) if linen else name)

  # Old Flax stored them as (1, 1, 1, C), and newer rewrites of files as C.
  arrays = {
    key: x.reshape(1, 1, 1, -1)
    if _GROUP_NORM.search(key) and x.ndim == 1
    else x
    for key, x in arrays.items()
  }
  lookup = archive.Lookup(path, arrays, key_of, 'ViT')
  return File(
    path=path,
    arrays=arrays,
    fields=_infer_fields(lookup, prefix),
    table=lambda shapes: _table(shapes, key_of),
    warnings=zeroed_head(lookup),
  )


def write(weights: Weights, target: str, dtype: str) -> list[str]:
  """Writes a checkpoint that the original loader and timm read.

  Args:
    weights: of any model that the originals or BiT have.
    target: the new file.
    dtype: one of `DTYPES`.

  Returns:
    What the format could not hold, a sentence each.

  Raises:
    ValueError: if the original code has no such model.
    FileExistsError: if something is there already.
  """
  if weights.fields['name'] == 'resnet':
    return bit.write(weights, target, dtype)
  check_writable(weights, 'An official .npz file', {'pool': ('cls', 'gap')})
  entries = _table(shapes_of(weights.arrays), lambda name: name)
  archive.save(target, ours_to_file(weights.arrays, entries), dtype)
  return archive.not_held(weights)


def open_peer(path: str) -> Peer:
  """Opens a file with timm.

  Raises:
    ImportError: if timm is not installed.
    ValueError: if timm has no such model.
  """
  arrays = archive.load(path)
  if bit.matches(arrays):
    return bit.open_peer(path)
  return npz_peer.open_vit(path, read(path, arrays).fields)


def check_writable(
  weights: Weights, target: str, values: dict[str, tuple[Any, ...]]
) -> None:
  """Refuses what the original code and its successors have no model for.

  Args:
    weights: to be written.
    target: the format, to begin a sentence with.
    values: that the format can hold by field, where it differs from others.

  Raises:
    ValueError: naming the field and the formats that hold it.
  """
  fields = weights.fields
  values = {
    'name': ('vit',),
    'posemb': ('learned1d',),
    'posemb_at': ('input',),
    'axial': (False,),
  } | values
  for field, valid in values.items():
    if fields[field] not in valid:
      near = f'{_HELD_BY[field]}, ' if field in _HELD_BY else ''
      raise ValueError(
        f'{target} cannot hold a model with {field} {fields[field]!r}, only '
        f'{" or ".join(map(repr, valid))}: use --to={near}orbax, onnx or '
        'stablehlo.'
      )
  H, W = fields['image_size']
  if H != W:
    raise ValueError(
      f'{target} cannot hold the image_size {H}x{W}: its readers take the '
      'position embeddings for those of a square. Use --to=orbax, onnx or '
      'stablehlo.'
    )


def zeroed_head(lookup: archive.Lookup) -> tuple[str, ...]:
  """Returns a warning if every class gets the same logit."""
  kernel = lookup.arrays.get(lookup.key_of('head/kernel'))
  if kernel is None or kernel.any():
    return ()
  return (
    f'{lookup.path}: its head is all zeros, as in the files pre-trained on '
    'ImageNet-21k: every class is equally likely until the model is '
    'fine-tuned.',
  )


def without_other_trees(arrays: Flat) -> tuple[str, Flat]:
  """Returns the prefix of a checkpoint's parameters and only those."""
  for prefix in PREFIXES:
    if any(key.startswith(prefix) for key in arrays):
      return prefix, {k: x for k, x in arrays.items() if k.startswith(prefix)}
  return '', dict(arrays)


def has_linen_numbers(keys: Iterable[str]) -> bool:
  """Tells by the MLP's whether the layers have the numbers of today's Flax."""
  return any(re.search('/encoderblock(_.*)?/MlpBlock_0/', key) for key in keys)


def linen_name(name: str) -> str:
  """Returns one of our names with the numbers of today's Flax."""
  return '/'.join(LINEN_NUMBERS.get(part, part) for part in name.split('/'))


def encoder_fields(
  lookup: archive.Lookup, layer: str, stacked: bool = False
) -> dict[str, Any]:
  """Infers the fields that every ViT has.

  Args:
    lookup: by our names.
    layer: name of the first layer, or of all.
    stacked: whether a first axis goes over the layers.

  Raises:
    ValueError: if they contradict one another.
  """
  patch, _, _, width = lookup.shape('embedding/kernel', 4)
  query = f'{layer}/MultiHeadDotProductAttention_1/query/kernel'
  *_, heads, head_width = lookup.shape(query, 3 + stacked)
  *_, mlp_dim = lookup.shape(f'{layer}/MlpBlock_3/Dense_0/kernel', 2 + stacked)
  if heads * head_width != width:
    raise ValueError(
      f'{lookup.path} is no {lookup.what} checkpoint: '
      f'{lookup.key_of(query)!r} has {heads} heads of {head_width} where the '
      f'width is {width}.'
    )
  return {
    'patch_size': patch,
    'width': width,
    'mlp_dim': mlp_dim,
    'heads': heads,
    'representation_size': (
      lookup.shape('pre_logits/kernel', 2)[1]
      if lookup.has('pre_logits/kernel')
      else 0
    ),
    'num_classes': (
      lookup.shape('head/kernel', 2)[1] if lookup.has('head/kernel') else 0
    ),
  }


def count_layers(lookup: archive.Lookup, prefix: str) -> int:
  """Returns how many layers have arrays of their own.

  Raises:
    ValueError: if no model has that many.
  """
  pattern = re.compile(f'{re.escape(prefix)}Transformer/encoderblock_[^/]+/')
  names = {match[0] for key in lookup.arrays if (match := pattern.match(key))}
  lookup.check_layers(len(names))
  return len(names)


def _infer_fields(lookup: archive.Lookup, prefix: str) -> dict[str, Any]:
  fields = encoder_fields(lookup, 'Transformer/encoderblock_0')
  pool = 'cls' if lookup.has('cls') else 'gap'
  _, tokens, _ = lookup.shape(POSITIONS, 3)
  stem_width, stride = 0, fields['patch_size']
  stem_layers: tuple[int, ...] = ()
  if lookup.has('conv_root/kernel'):
    *_, stem_width = lookup.shape('conv_root/kernel', 4)
    stem_layers = bit.count_units(lookup.arrays, prefix)
    lookup.check_layers(sum(stem_layers))
    stride *= 4 * 2 ** max(len(stem_layers) - 1, 0)
  pixels = square_side(tokens - (pool == 'cls'), lookup.path) * stride
  return fields | {
    'depth': count_layers(lookup, prefix),
    'pool': pool,
    'stem_width': stem_width,
    'stem_layers': stem_layers,
    'image_size': (pixels, pixels),
  }


def _table(shapes: Shapes, key_of: Callable[[str], str]) -> list[Entry]:
  """Returns the entries of our arrays under the keys that `key_of` gives."""
  return [
    Entry((key_of(name),), (name,), _four_axes, _one_axis)
    if _GROUP_NORM.search(name)
    else Entry((key_of(name),), (name,))
    for name in shapes
  ]


def _four_axes(x: np.ndarray) -> tuple[np.ndarray]:
  return (x.reshape(1, 1, 1, -1),)


def _one_axis(x: np.ndarray) -> tuple[np.ndarray]:
  return (x.reshape(-1),)
