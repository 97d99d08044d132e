"""Read and write causal iGPT models as directories of transformers' ImageGPT.

The palette is `clusters` in preprocessor_config.json. The embedding of the
start token is the last row of `wte.weight`, after the colour embeddings.
"""

import os
import re
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats import (
  archive,
  image_configs,
  table,
  tensors,
  torch_vit,
)
from vit_jax.checkpoints.formats.json_config import JsonConfig, only

# Values of config.json that are the same for every `IGPT`.
_CONFIG = {
  'activation_function': 'quick_gelu',
  'add_cross_attention': False,
  'layer_norm_epsilon': 1e-5,
  'scale_attn_by_inverse_layer_idx': False,
  'scale_attn_weights': True,
}
# Names of a layer's modules in our model and in the file.
_MODULES = {
  'ln_1': 'ln_1',
  'query': 'attn.c_attn',  # joins queries, keys and values
  'out': 'attn.c_proj',
  'ln_2': 'ln_2',
  'mlp/Dense_0': 'mlp.c_fc',
  'mlp/Dense_1': 'mlp.c_proj',
}
_PREFIX = 'transformer.'
# Causal masks and their fill values in old files; `read` ignores them.
_MASKS = r'\.attn\.(masked_)?bias$'


def read(path: str, config: dict[str, Any]) -> table.File:
  """Reads a directory; `config` is the content of config.json. See `table`."""
  arrays = tensors.read_folder(path, _MASKS)
  prefix = _PREFIX if any(key.startswith(_PREFIX) for key in arrays) else ''
  lookup = archive.Lookup(
    path, arrays, lambda key: prefix + key, 'transformers ImageGPT'
  )
  rows, width = lookup.shape('wte.weight', 2)
  positions, _ = lookup.shape('wpe.weight', 2)
  stated = JsonConfig({'n_head': 8} | config, f'{path}/config.json')
  stated.fields(only(_CONFIG), {}, 'imagegpt')
  place = os.path.join(path, image_configs.FILE)
  images = tensors.read_json(place) if os.path.exists(place) else {}
  size = _size(images, positions, path)
  preprocessing, _, warnings = image_configs.of_hf(path, 'imagegpt', size)
  fields = {
    'name': 'igpt',
    'num_classes': 0,
    'width': width,
    'depth': sum(lookup.count(f'{prefix}h.', r'(\d+)\.')),
    'mlp_dim': lookup.shape('h.0.mlp.c_fc.weight', 2)[1],
    'heads': stated.positive('n_head'),
    # The original model has no biases. Files converted from it have biases of
    # zero, which are dropped.
    'bias': any(
      np.any(x)
      for key, x in arrays.items()
      if re.search(r'\.c_\w+\.bias$', key)
    ),
    'palette': _palette(images, rows - 1, place),
    'image_size': size,
  }
  return table.File(
    path=path,
    arrays=arrays,
    fields=fields,
    table=lambda shapes: _table(shapes, prefix),
    preprocessing=preprocessing,
    warnings=warnings,
  )


def _size(images: dict[str, Any], positions: int, path: str) -> tuple[int, int]:
  """Returns the image size (H, W), whose product is `positions`.

  The image is square, unless `images` states another size that fits. `images`
  is the content of preprocessor_config.json.
  """
  for key in ('crop_size', 'size'):
    stated = images.get(key)
    if isinstance(stated, dict) and stated.keys() == {'height', 'width'}:
      height, width = JsonConfig({key: stated}, path).sides(key)
      if height * width == positions:
        return height, width
  side = table.square_side(positions, path)
  return side, side


def _palette(
  images: dict[str, Any], colours: int, place: str
) -> tuple[float, ...]:
  try:
    found = np.array(images.get('clusters'), np.float64)
  except (OverflowError, TypeError, ValueError):
    found = np.empty(0)
  if found.shape != (colours, 3) or not np.isfinite(found).all():
    raise ValueError(
      f'{place} has no valid palette: `clusters` must list finite red, green '
      f'and blue values of {colours:,} colours, and it has the shape '
      f'{found.shape}. Use the preprocessor_config.json of this model.'
    )
  return tuple(found.ravel().tolist())


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a directory that transformers opens; see `table`."""
  fields = weights.fields
  start = 'transformers has no ImageGPT with'
  table.check_writable(fields, start, ('igpt',), 'bias palette')
  if fields['num_classes']:
    raise ValueError(
      f'A head of {fields["num_classes"]} classes cannot be written: '
      "transformers' ImageGPT classifiers lack the bias. Use --head=drop."
    )
  height, width = fields['image_size']
  palette = np.reshape(fields['palette'], (-1, 3))
  config = _CONFIG | {
    'architectures': ['ImageGPTForCausalImageModeling'],
    'attn_pdrop': 0.0,
    'dtype': dtype,
    'embd_pdrop': 0.0,
    'model_type': 'imagegpt',
    'n_embd': fields['width'],
    'n_head': fields['heads'],
    'n_inner': fields['mlp_dim'],
    'n_layer': fields['depth'],
    'n_positions': height * width,
    'resid_pdrop': 0.0,
    'tie_word_embeddings': False,
    'vocab_size': len(palette) + 1,
  }
  images = image_configs.to_hf(weights.preprocessing, fields['image_size']) | {
    'clusters': palette.tolist(),
    'do_color_quantize': True,
    'image_processor_type': 'ImageGPTImageProcessor',
  }
  tensors.write_folder(
    target,
    {'config.json': config, image_configs.FILE: images},
    table.ours_to_file(weights.arrays, lambda shapes: _table(shapes, _PREFIX)),
    dtype,
  )
  return []


def _table(shapes: table.Shapes, prefix: str) -> list[table.Entry]:
  wte = table.Entry(
    (f'{prefix}wte.weight',),
    ('pixel_embedding', 'start_embedding'),
    lambda wte_KD, sos_D: (np.concatenate([wte_KD, sos_D[None]]),),
    lambda x: (x[:-1], x[-1]),
  )
  wpe = (lambda x: x[0], lambda x: x[None])
  entries = [
    wte,
    table.one(f'{prefix}wpe.weight', 'pos_embedding', wpe),
    table.one(f'{prefix}ln_f.weight', 'ln_f/scale'),
    table.one(
      'lm_head.weight', 'prediction/kernel', (np.transpose, np.transpose)
    ),
  ]
  for name in shapes:
    layer, _, rest = name.partition('/')
    if rest.rpartition('/')[0] in _MODULES:
      entries += _layer(shapes, layer, rest, f'{prefix}h.{layer[1:]}.')
  return entries


def _layer(
  shapes: table.Shapes, layer: str, rest: str, start: str
) -> list[table.Entry]:
  """Returns an array's entry, and one for a zero bias if our layers lack it."""
  module, _, leaf = rest.rpartition('/')
  ours, theirs = f'{layer}/{rest}', start + _MODULES[module]
  key = theirs + torch_vit.LEAVES[leaf]
  torch_to_file, torch_to_ours = torch_vit.layout(ours, shapes[ours])
  # The file's kernels are the transposes of PyTorch's.
  layout = (lambda x: torch_to_file(x).T, lambda x: torch_to_ours(x.T))
  columns = shapes[ours][-1]
  if module == 'query':
    names = tuple(f'{layer}/{x}/{leaf}' for x in torch_vit.QKV)
    entries = [table.joined(key, names, layout, axis=-1)]
    columns = 3 * shapes[ours][0]
  else:
    entries = [table.one(key, ours, layout)]
  if leaf == 'kernel' and f'{layer}/out/bias' not in shapes:
    zeros = np.zeros(columns, np.float32)
    bias = (f'{theirs}.bias',)
    entries.append(table.Entry(bias, (), lambda: (zeros,), lambda x: ()))
  return entries
