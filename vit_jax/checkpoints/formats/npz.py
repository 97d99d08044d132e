"""The official .npz checkpoints of the paper and its successors.

Flat keys joined by '/', float32. The names inside an encoder layer carry the
numbers of one of two Flax APIs; ours are the older, published ones, so that the
table is the identity but for prefixes and numbers. ResNets are written as BiT
publishes them, by `bit`.
"""

import re
from collections.abc import Iterable
from typing import Any

from vit_jax.checkpoints.formats import archive, bit, table
from vit_jax.models import resnet

PREFIXES = ('opt/target/', 'params/img/', 'params/')
DTYPES: tuple[str, ...] = ('float32',)
POSITIONS = 'Transformer/posembed_input/pos_embedding'
# What the names of encoder layers begin with, before their number.
LAYERS = 'Transformer/encoderblock'

# From our names to those of today's Flax.
LINEN_NUMBERS = {
  'LayerNorm_2': 'LayerNorm_1',
  'MultiHeadDotProductAttention_1': 'MultiHeadDotProductAttention_0',
  'MlpBlock_3': 'MlpBlock_0',
}

_HOLDS = (
  'pool=gap representation_size gelu layer_norm_epsilon stem_width stem_layers'
)

# The next of kin of what a format refuses because of a field, or of its name.
_HELD_BY = {'pool': 'bigvision', 'stem_width': 'npz'}
_KIND_HELD_BY = {'resnet': 'npz', 'deit': 'timm', 'igpt': 'hf'}

_GROUP_NORM = re.compile(r'(^|/)gn\w+/(scale|bias)$')


def matches(arrays: table.Flat) -> bool:
  """Accepts all arrays, as the last format that is asked."""
  del arrays
  return True


def read(path: str, arrays: table.Flat) -> table.File:
  """Reads a file, of which `arrays` are from `archive.load`."""
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
  return table.File(
    path=path,
    arrays=arrays,
    fields=_infer_fields(lookup),
    table=table.renamed(key_of, _layout),
    warnings=zeroed_head(lookup),
  )


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a checkpoint that the original loader and timm read."""
  if weights.fields['name'] == 'resnet':
    return bit.write(weights, target, dtype)
  check_vit(weights, 'An official .npz file', _HOLDS)
  entries = table.renamed(lambda name: name, _layout)
  archive.save(target, table.ours_to_file(weights.arrays, entries), dtype)
  return archive.not_held(weights)


def check_vit(weights: table.Weights, target: str, holds: str) -> None:
  """Refuses what the original code and its successors have no model for.

  Args:
    weights: to be written.
    target: the format, to begin a sentence with.
    holds: as `table.check_writable` takes it.

  Raises:
    ValueError: naming the field and the formats that hold it.
  """
  fields = weights.fields
  held_by = _HELD_BY | {'name': _KIND_HELD_BY.get(fields['name'])}
  ways_out = {
    field: f'use {table.ELSEWHERE.replace("=", f"={kin}, ")}'
    for field, kin in held_by.items()
    if kin
  }
  table.check_writable(
    fields,
    f'{target} cannot hold a model with',
    ('vit',),
    holds,
    ways_out,
  )
  H, W = fields['image_size']
  if H != W:
    raise ValueError(
      f'{target} cannot hold the image_size {H}x{W}: its readers take the '
      f'position embeddings for those of a square. Use {table.ELSEWHERE}'
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


def without_other_trees(arrays: table.Flat) -> tuple[str, table.Flat]:
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
  lookup: archive.Lookup, stacked: bool = False
) -> dict[str, Any]:
  """Infers the fields that every ViT has.

  Args:
    lookup: by our names.
    stacked: whether a first axis goes over the layers.

  Raises:
    ValueError: if they contradict one another.
  """
  layer = LAYERS if stacked else f'{LAYERS}_0'
  patch, _, _, width = lookup.shape('embedding/kernel', 4)
  query = f'{layer}/MultiHeadDotProductAttention_1/query/kernel'
  *_, heads, head_width = lookup.shape(query, 3 + stacked)
  dense = lookup.shape(f'{layer}/MlpBlock_3/Dense_0/kernel', 2 + stacked)
  *depths, _, mlp_dim = dense
  depth = sum(depths or lookup.count(lookup.key_of(LAYERS), '(_[^/]+)/'))
  if heads * head_width != width:
    raise ValueError(
      f'{lookup.path} is no {lookup.what} checkpoint: '
      f'{lookup.key_of(query)!r} has {heads} heads of {head_width} where the '
      f'width is {width}.'
    )
  return {
    'patch_size': patch,
    'width': width,
    'depth': depth,
    'mlp_dim': mlp_dim,
    'heads': heads,
    'pool': 'cls' if lookup.has('cls') else 'gap',
    'representation_size': lookup.size('pre_logits/kernel', 2, 1),
    'num_classes': lookup.size('head/kernel', 2, 1),
  }


def _infer_fields(lookup: archive.Lookup) -> dict[str, Any]:
  fields = encoder_fields(lookup)
  _, tokens, _ = lookup.shape(POSITIONS, 3)
  stem_width, stride = 0, fields['patch_size']
  stem_layers: tuple[int, ...] = ()
  if lookup.has('conv_root/kernel'):
    *_, stem_width = lookup.shape('conv_root/kernel', 4)
    stem_layers = lookup.count(lookup.key_of('block'), bit.UNIT)
    stride *= resnet.total_stride(stem_layers)
  pixels = table.square_side(tokens - lookup.has('cls'), lookup.path) * stride
  return fields | {
    'stem_width': stem_width,
    'stem_layers': stem_layers,
    'image_size': (pixels, pixels),
  }


def _layout(name: str, shape: tuple[int, ...]) -> table.Layout:
  if _GROUP_NORM.search(name):
    return lambda x: x.reshape(1, 1, 1, -1), lambda x: x.reshape(-1)
  return table.SAME
