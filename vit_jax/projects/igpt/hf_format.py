"""Read and write causal iGPT models as directories of transformers' ImageGPT.

The palette is `clusters` in preprocessor_config.json. The embedding of the
start token is the last row of `wte.weight`, after the colour embeddings.
"""

import os
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats import archive, image_configs, table, tensors
from vit_jax.checkpoints.formats.json_config import JsonConfig, only

# Values of config.json that are the same for every `IGPT`.
_CONFIG = {
  'activation_function': 'quick_gelu',
  'add_cross_attention': False,
  'layer_norm_epsilon': 1e-5,
  'scale_attn_by_inverse_layer_idx': False,
  'scale_attn_weights': True,
}
_BIASES = ('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')
# Arrays of a layer that have the same shape in both formats, as pairs of the
# name in the file and the name in our model.
_SAME = (
  ('ln_1.weight', 'ln_1/scale'),
  ('ln_2.weight', 'ln_2/scale'),
  ('mlp.c_fc.weight', 'mlp/Dense_0/kernel'),
  ('mlp.c_proj.weight', 'mlp/Dense_1/kernel'),
  ('attn.c_proj.bias', 'out/bias'),
  ('mlp.c_fc.bias', 'mlp/Dense_0/bias'),
  ('mlp.c_proj.bias', 'mlp/Dense_1/bias'),
)
_QKV = ('query', 'key', 'value')
_PREFIX = 'transformer.'
# Causal masks that older versions of transformers saved; `read` ignores them.
_MASKS = r'\.attn\.(masked_)?bias$'


def read(path: str, config: dict[str, Any]) -> table.File:
  """Reads a directory; `config` is its config.json.

  Raises:
    ValueError: if the palette is missing or invalid, its size differs from the
      number of colour embeddings, or the model is not supported.
  """
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
      if key.endswith(tuple(f'{name}.bias' for name in _BIASES))
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

  The image is square, unless preprocessor_config.json has a size that fits.

  Args:
    images: content of preprocessor_config.json.
    positions: number of position embeddings.
    path: the directory, for messages.

  Raises:
    ValueError: if no size fits and `positions` is not a square number.
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
  if found.ndim != 2 or found.shape[1] != 3 or not np.isfinite(found).all():
    raise ValueError(
      f'{place} has no valid palette. `clusters` must list red, green and blue '
      f'of {colours:,} colours.'
    )
  if len(found) != colours:
    raise ValueError(
      f'{place}: `clusters` has {len(found):,} colours, and the model embeds '
      f'{colours:,}. Use the preprocessor_config.json of this model.'
    )
  return tuple(found.ravel().tolist())


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a directory that transformers opens.

  Raises:
    ValueError: if transformers cannot represent the model.
  """
  fields = weights.fields
  table.check_writable(
    fields,
    'transformers has no ImageGPT with',
    ('igpt',),
    'bias palette',
  )
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
  entries = [
    wte,
    table.one(
      f'{prefix}wpe.weight',
      'pos_embedding',
      (lambda x: x[0], lambda x: x[None]),
    ),
    table.one(f'{prefix}ln_f.weight', 'ln_f/scale'),
    table.one(
      'lm_head.weight', 'prediction/kernel', (np.transpose, np.transpose)
    ),
  ]
  layer = 0
  while f'h{layer}/ln_1/scale' in shapes:
    entries += _layer(shapes, f'h{layer}', f'{prefix}h.{layer}')
    layer += 1
  return entries


def _layer(shapes: table.Shapes, ours: str, theirs: str) -> list[table.Entry]:
  D, N, K = shapes[f'{ours}/query/kernel']
  M = shapes[f'{ours}/mlp/Dense_0/kernel'][1]
  entries = [
    *(
      table.one(f'{theirs}.{their}', f'{ours}/{our}')
      for their, our in _SAME
      if f'{ours}/{our}' in shapes
    ),
    table.joined(
      f'{theirs}.attn.c_attn.weight',
      tuple(f'{ours}/{x}/kernel' for x in _QKV),
      (lambda x: x.reshape(D, D), lambda x: x.reshape(D, N, K)),
      axis=1,
    ),
    table.one(
      f'{theirs}.attn.c_proj.weight',
      f'{ours}/out/kernel',
      (lambda x: x.reshape(D, D), lambda x: x.reshape(N, K, D)),
    ),
  ]
  if f'{ours}/out/bias' in shapes:
    return [
      *entries,
      table.joined(
        f'{theirs}.attn.c_attn.bias',
        tuple(f'{ours}/{x}/bias' for x in _QKV),
        (lambda x: x.reshape(D), lambda x: x.reshape(N, K)),
      ),
    ]
  return entries + [
    _zeros(f'{theirs}.{name}.bias', size)
    for name, size in zip(_BIASES, (3 * D, D, M, D), strict=True)
  ]


def _zeros(key: str, size: int) -> table.Entry:
  """Returns the entry of a bias that our model lacks; it writes zeros."""
  return table.Entry(
    (key,), (), lambda: (np.zeros(size, np.float32),), lambda x: ()
  )
