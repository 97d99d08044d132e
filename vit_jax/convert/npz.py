"""The official .npz checkpoints of the paper and its successors.

Flat keys joined by '/', float32. The names inside an encoder layer carry the
numbers of one of two Flax APIs; ours are the older, published ones, so that the
table is the identity but for prefixes and numbers.
"""

import re
from collections.abc import Callable
from typing import Any

from vit_jax.convert import archive
from vit_jax.convert.table import (
  Entry,
  File,
  Flat,
  Shapes,
  Weights,
  ours_to_file,
  shapes_of,
  square_side,
)

PREFIXES = ('opt/target/', 'params/img/', 'params/')
DTYPES = ('float32',)

# From our names to those of today's Flax.
LINEN_NUMBERS = {
  'LayerNorm_2': 'LayerNorm_1',
  'MultiHeadDotProductAttention_1': 'MultiHeadDotProductAttention_0',
  'MlpBlock_3': 'MlpBlock_0',
}
_PUBLISHED_NUMBERS = {linen: ours for ours, linen in LINEN_NUMBERS.items()}

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
  linen = any(re.search('encoderblock_.*/MlpBlock_0/', key) for key in arrays)

  def key_of(name: str) -> str:
    return prefix + (renumbered(name, LINEN_NUMBERS) if linen else name)

  for key, x in arrays.items():
    if _GROUP_NORM.search(key) and x.shape[:-1] == (1, 1, 1):
      arrays[key] = x.reshape(-1)
  fields = _infer_fields(arrays, key_of, path)
  head = arrays.get(key_of('head/kernel'))
  zeroed = head is not None and not head.any()
  return File(
    path=path,
    arrays=arrays,
    fields=fields,
    table=lambda shapes: table(shapes, key_of),
    warnings=(f'{path}: {ZEROED_HEAD}',) if zeroed else (),
  )


ZEROED_HEAD = (
  'its head is all zeros, as in the files pre-trained on ImageNet-21k: every '
  'class is equally likely until the model is fine-tuned.'
)


def table(shapes: Shapes, key_of: Callable[[str], str]) -> list[Entry]:
  """Returns the entries of our arrays under the keys that `key_of` gives."""
  return [Entry((key_of(name),), (name,)) for name in shapes]


def write(weights: Weights, target: str, dtype: str) -> list[str]:
  """Writes a checkpoint that the original loader and timm read.

  Args:
    weights: of a ViT or hybrid.
    target: the new file.
    dtype: one of `DTYPES`.

  Returns:
    What the format could not hold, a sentence each.

  Raises:
    ValueError: if the original code has no such model.
    FileExistsError: if something is there already.
  """
  del dtype
  check_writable(weights, 'an official .npz file', pools=('cls', 'gap'))
  entries = table(shapes_of(weights.arrays), lambda name: name)
  archive.save(target, ours_to_file(weights.arrays, entries))
  return not_held(weights)


def check_writable(
  weights: Weights, target: str, *, pools: tuple[str, ...]
) -> None:
  """Refuses what the original code and its successors have no model for.

  Raises:
    ValueError: naming the field and the formats that hold it.
  """
  fields = weights.fields
  wanted = {
    'name': ('vit',),
    'pool': pools,
    'posemb': ('learned1d',),
    'posemb_at': ('input',),
    'axial': (False,),
  }
  for field, values in wanted.items():
    if fields[field] not in values:
      raise ValueError(
        f'{target} cannot hold a model with {field} {fields[field]!r}, only '
        f'{" or ".join(map(repr, values))}: use --to=orbax, onnx or stablehlo.'
      )


def not_held(weights: Weights) -> list[str]:
  """Says what a file of parameters alone leaves out."""
  fields, preprocessing = weights.fields, weights.preprocessing
  lines = []
  if weights.class_names:
    lines.append('The class names: the format has no place for them.')
  if preprocessing.resize_small:
    lines.append(
      'The preprocessing (shorter side to '
      f'{preprocessing.resize_small} pixels, centre crop).'
    )
  if preprocessing.mean != (0.5,) * 3 or preprocessing.std != (0.5,) * 3:
    lines.append(
      f'The mean {preprocessing.mean} and deviation {preprocessing.std} of '
      'images: its readers assume 0.5 for both.'
    )
  if fields.get('gelu', 'tanh') != 'tanh':
    lines.append(
      'The exact GELU: its readers compute the tanh approximation, which moves '
      'logits by about 1e-3.'
    )
  if fields.get('layer_norm_epsilon', 1e-6) != 1e-6:
    lines.append(
      f'The LayerNorm epsilon {fields["layer_norm_epsilon"]}: its readers use '
      '1e-6.'
    )
  return lines


def without_other_trees(arrays: Flat) -> tuple[str, Flat]:
  """Returns the prefix of a checkpoint's parameters and only those."""
  for prefix in PREFIXES:
    if any(key.startswith(prefix) for key in arrays):
      return prefix, {k: x for k, x in arrays.items() if k.startswith(prefix)}
  return '', arrays


def renumbered(name: str, numbers: dict[str, str]) -> str:
  """Replaces parts of a '/'-joined name."""
  return '/'.join(numbers.get(part, part) for part in name.split('/'))


def shape_of(
  arrays: Flat, key: str, ndim: int, path: str, what: str = 'ViT'
) -> tuple[int, ...]:
  """Returns the shape of an array that decides a field.

  Raises:
    ValueError: if it is absent, or has another number of dimensions.
  """
  if key not in arrays or arrays[key].ndim != ndim:
    found = arrays[key].shape if key in arrays else 'absent'
    raise ValueError(
      f'{path} is no {what} checkpoint: {key!r} should have {ndim} dimensions '
      f'and is {found}.'
    )
  return arrays[key].shape


def _infer_fields(
  arrays: Flat, key_of: Callable[[str], str], path: str
) -> dict[str, Any]:
  def shape(name: str, ndim: int) -> tuple[int, ...]:
    return shape_of(arrays, key_of(name), ndim, path)

  def has(name: str) -> bool:
    return key_of(name) in arrays

  patch, _, _, width = shape('embedding/kernel', 4)
  layer = 'Transformer/encoderblock_0'
  _, heads, _ = shape(f'{layer}/MultiHeadDotProductAttention_1/query/kernel', 3)
  _, mlp_dim = shape(f'{layer}/MlpBlock_3/Dense_0/kernel', 2)
  _, tokens, _ = shape('Transformer/posembed_input/pos_embedding', 3)
  prefix = re.escape(key_of(''))
  layers = {
    match[0]
    for key in arrays
    if (match := re.match(rf'{prefix}Transformer/encoderblock_\d+(?=/)', key))
  }
  pool = 'cls' if has('cls') else 'gap'
  side = square_side(tokens - (pool == 'cls'), path)
  stem_width = shape('conv_root/kernel', 4)[3] if has('conv_root/kernel') else 0
  stem_layers = _stem_layers(arrays, prefix)
  stride = 4 * 2 ** max(len(stem_layers) - 1, 0) if stem_width else 1
  pixels = side * patch * stride
  return {
    'patch_size': patch,
    'width': width,
    'depth': len(layers),
    'mlp_dim': mlp_dim,
    'heads': heads,
    'pool': pool,
    'stem_width': stem_width,
    'stem_layers': stem_layers,
    'representation_size': (
      shape('pre_logits/kernel', 2)[1] if has('pre_logits/kernel') else 0
    ),
    'num_classes': shape('head/kernel', 2)[1] if has('head/kernel') else 0,
    'image_size': (pixels, pixels),
  }


def _stem_layers(arrays: Flat, prefix: str) -> tuple[int, ...]:
  """Returns the units of each stage of a hybrid's stem."""
  units = {
    (int(match[1]), match[2])
    for key in arrays
    if (match := re.match(rf'{prefix}block(\d+)/unit(\d+)/', key))
  }
  stages = sorted({stage for stage, _ in units})
  return tuple(sum(s == stage for s, _ in units) for stage in stages)
