"""Reads and writes the .npz checkpoints of google-research/vision_transformer.

Keys join module names by '/'; arrays are float32. Flax Linen and its
predecessor number the modules of an encoder layer differently. The published
files and our names follow the predecessor. Apart from these numbers, files
differ from our parameters only in prefixes and in the shape of GroupNorm's
parameters.
"""

import re
from collections.abc import Iterable
from typing import Any

from vit_jax.checkpoints.formats import archive, bit, table
from vit_jax.models import resnet

DTYPES: tuple[str, ...] = ('float32',)
POSITIONS = 'Transformer/posembed_input/pos_embedding'
# The name of an encoder layer, without its number.
LAYERS = 'Transformer/encoderblock'

# Maps our names of modules to Flax Linen's.
_LINEN_NUMBERS = {
  'LayerNorm_2': 'LayerNorm_1',
  'MultiHeadDotProductAttention_1': 'MultiHeadDotProductAttention_0',
  'MlpBlock_3': 'MlpBlock_0',
}

_HOLDS = (
  'pool=gap representation_size gelu layer_norm_epsilon stem_width stem_layers'
)

_GROUP_NORM = re.compile(r'(^|/)gn\w+/(scale|bias)$')


def read(path: str, arrays: table.Flat) -> table.File:
  """Reads a file; `arrays` are the result of `archive.load`."""
  prefix, arrays = without_other_trees(arrays)
  linen = has_linen_numbers(arrays)

  def key_of(name: str) -> str:
    return prefix + (linen_name(name) if linen else name)

  for key, x in arrays.items():
    # Linen's predecessor stores GroupNorm parameters as (1, 1, 1, C).
    if _GROUP_NORM.search(key) and x.ndim == 1:
      arrays[key] = x.reshape(1, 1, 1, -1)
  lookup = archive.Lookup(path, arrays, key_of, 'ViT')
  fields = encoder_fields(lookup)
  _, tokens, _ = lookup.shape(POSITIONS, 3)
  stride = fields['patch_size']
  if lookup.has('conv_root/kernel'):
    *_, fields['stem_width'] = lookup.shape('conv_root/kernel', 4)
    fields['stem_layers'] = lookup.count(lookup.key_of('block'), bit.UNIT)
    stride *= resnet.total_stride(fields['stem_layers'])
  pixels = table.square_side(tokens - lookup.has('cls'), path) * stride
  return table.File(
    path=path,
    arrays=arrays,
    fields=fields | {'image_size': (pixels, pixels)},
    table=table.renamed(key_of, _layout),
    warnings=zeroed_head(lookup),
  )


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a ViT for the paper's code and timm; a ResNet as in `bit.write`."""
  if weights.fields['name'] == 'resnet':
    return bit.write(weights, target, dtype)
  check_vit(weights, 'An official .npz file', _HOLDS)
  entries = table.renamed(lambda name: name, _layout)
  archive.save(target, table.ours_to_file(weights.arrays, entries), dtype)
  return archive.notes(weights)


def check_vit(weights: table.Weights, format_name: str, holds: str) -> None:
  """Raises ValueError if a file cannot store a ViT; see `check_writable`."""
  start = f'{format_name} cannot store a model with'
  table.check_writable(weights.fields, start, ('vit',), holds)
  H, W = weights.fields['image_size']
  if H != W:
    raise ValueError(
      f'{format_name} cannot store image_size {H}x{W}: its readers expect '
      f'position embeddings of a square grid. {table.ELSEWHERE}'
    )


def zeroed_head(lookup: archive.Lookup) -> tuple[str, ...]:
  """Returns a warning if the kernel of the head is all zeros."""
  kernel = lookup.arrays.get(lookup.key_of('head/kernel'))
  if kernel is None or kernel.any():
    return ()
  return (
    f'{lookup.path}: the kernel of the head is all zeros, as in some files '
    'pre-trained on ImageNet-21k. Every image gets the same probabilities '
    'until the model is fine-tuned.',
  )


def without_other_trees(arrays: table.Flat) -> tuple[str, table.Flat]:
  """Returns the key prefix of the parameters, and the arrays that have it."""
  for prefix in ('opt/target/', 'params/img/', 'params/', ''):
    inside = {k: x for k, x in arrays.items() if k.startswith(prefix)}
    if inside:
      break
  return prefix, inside


def has_linen_numbers(keys: Iterable[str]) -> bool:
  """Whether encoder layers have Linen's module numbers, judged by the MLP."""
  return any(re.search('/encoderblock(_.*)?/MlpBlock_0/', key) for key in keys)


def linen_name(name: str) -> str:
  """Converts one of our names to Linen's module numbers."""
  return '/'.join(_LINEN_NUMBERS.get(part, part) for part in name.split('/'))


def encoder_fields(
  lookup: archive.Lookup, stacked: bool = False
) -> dict[str, Any]:
  """Infers the fields that every ViT has, or raises ValueError.

  `stacked` means that all layers are stacked along a first axis.
  """
  layer = LAYERS if stacked else f'{LAYERS}_0'
  patch, _, _, width = lookup.shape('embedding/kernel', 4)
  query = f'{layer}/MultiHeadDotProductAttention_1/query/kernel'
  *_, heads, _ = lookup.shape(query, 3 + stacked)
  dense = lookup.shape(f'{layer}/MlpBlock_3/Dense_0/kernel', 2 + stacked)
  *depths, _, mlp_dim = dense
  depth = sum(depths or lookup.count(lookup.key_of(LAYERS), '(_[^/]+)/'))
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


def _layout(name: str, shape: tuple[int, ...]) -> table.Layout:
  if _GROUP_NORM.search(name):
    return lambda x: x.reshape(1, 1, 1, -1), lambda x: x.reshape(-1)
  return table.SAME
