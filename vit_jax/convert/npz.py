"""The official .npz checkpoints of the paper and its successors.

Flat keys joined by '/', float32. The names inside an encoder layer carry the
numbers of one of two Flax APIs; ours are the older, published ones.
"""

import math
import re
from typing import Any

import numpy as np

PREFIXES = ('opt/target/', 'params/img/', 'params/')

LINEN_NUMBERS = {
  'LayerNorm_1': 'LayerNorm_2',
  'MultiHeadDotProductAttention_0': 'MultiHeadDotProductAttention_1',
  'MlpBlock_0': 'MlpBlock_3',
}

Flat = dict[str, np.ndarray]


def read(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads a checkpoint.

  Args:
    path: of the .npz file.

  Returns:
    The nested parameters, float32, and what their shapes say of the model: the
    fields of `variants.build`, `image_size` and `num_classes` among them.

  Raises:
    ValueError: if the file is damaged, or is no ViT; names the file and key.
  """
  flat = _canonical(_load(path))
  return _nest(flat, path), _infer_fields(flat, path)


def _load(path: str) -> Flat:
  """Returns every array; damage shows in as many ways as there are bytes."""
  what = 'the file'
  flat: Flat = {}
  try:
    with open(path, 'rb') as stream:
      file = np.load(stream, allow_pickle=False)
      if not isinstance(file, np.lib.npyio.NpzFile):
        raise ValueError('it is a single array, no .npz archive of them')
      for key in file.files:
        what = f'the array {key!r}'
        flat[key] = np.asarray(file[key])
        if flat[key].dtype.kind not in 'fiu':
          raise ValueError(f'its type is {flat[key].dtype}, no number')
  except FileNotFoundError:
    raise
  except Exception as e:
    raise ValueError(
      f'{path}: {what} cannot be read: {type(e).__name__}: {e}'
    ) from e
  return flat


def _canonical(flat: Flat) -> Flat:
  for prefix in PREFIXES:
    if any(key.startswith(prefix) for key in flat):
      flat = {
        key.removeprefix(prefix): x
        for key, x in flat.items()
        if key.startswith(prefix)
      }
      break
  linen = any('/MlpBlock_0/' in key for key in flat)
  return {
    _published_name(key) if linen else key: _float32(key, x)
    for key, x in flat.items()
  }


def _published_name(key: str) -> str:
  return '/'.join(LINEN_NUMBERS.get(part, part) for part in key.split('/'))


def _float32(key: str, x: np.ndarray) -> np.ndarray:
  if re.search(r'(^|/)gn\w+/(scale|bias)$', key):
    x = x.reshape(-1)  # some files store GroupNorm as (1, 1, 1, C)
  return x.astype(np.float32)


def _nest(flat: Flat, path: str) -> dict[str, Any]:
  tree: dict[str, Any] = {}
  for key, x in flat.items():
    *parents, leaf = key.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
      if not isinstance(node, dict):
        raise ValueError(
          f'{path} is no ViT checkpoint: {key!r} lies below another array.'
        )
    node[leaf] = x
  return tree


def _infer_fields(flat: Flat, path: str) -> dict[str, Any]:
  def shape(key: str, ndim: int) -> tuple[int, ...]:
    if key not in flat or flat[key].ndim != ndim:
      found = flat[key].shape if key in flat else 'absent'
      raise ValueError(
        f'{path} is no ViT checkpoint: {key!r} should have {ndim} dimensions '
        f'and is {found}.'
      )
    return flat[key].shape

  patch, _, _, width = shape('embedding/kernel', 4)
  layer = 'Transformer/encoderblock_0'
  _, heads, _ = shape(f'{layer}/MultiHeadDotProductAttention_1/query/kernel', 3)
  _, mlp_dim = shape(f'{layer}/MlpBlock_3/Dense_0/kernel', 2)
  _, tokens, _ = shape('Transformer/posembed_input/pos_embedding', 3)
  depth = len({m[0] for m in map(_layer_number, flat) if m})
  stem_width = (
    shape('conv_root/kernel', 4)[3] if 'conv_root/kernel' in flat else 0
  )
  pool = 'cls' if 'cls' in flat else 'gap'
  patches = tokens - (pool == 'cls')
  side = math.isqrt(max(patches, 0))
  if side * side != patches:
    raise ValueError(
      f'{path} has position embeddings for {patches} patches, which is no '
      'square grid.'
    )
  stem_layers = _stem_layers(flat)
  stride = 4 * 2 ** max(len(stem_layers) - 1, 0) if stem_width else 1
  pixels = side * patch * stride
  return {
    'patch_size': patch,
    'width': width,
    'depth': depth,
    'mlp_dim': mlp_dim,
    'heads': heads,
    'pool': pool,
    'stem_width': stem_width,
    'stem_layers': stem_layers,
    'representation_size': (
      shape('pre_logits/kernel', 2)[1] if 'pre_logits/kernel' in flat else 0
    ),
    'num_classes': (shape('head/kernel', 2)[1] if 'head/kernel' in flat else 0),
    'image_size': (pixels, pixels),
  }


def _layer_number(key: str) -> re.Match[str] | None:
  return re.match(r'Transformer/encoderblock_\d+(?=/)', key)


def _stem_layers(flat: Flat) -> tuple[int, ...]:
  """Returns the units of each stage of a hybrid's stem."""
  units = {
    m[0] for m in (re.match(r'block(\d+)/unit\d+', k) for k in flat) if m
  }
  stages = sorted({int(re.findall(r'\d+', unit)[0]) for unit in units})
  return tuple(
    sum(unit.startswith(f'block{stage}/') for unit in units) for stage in stages
  )
