"""Image encoders of transformers that are ViTs with more in their blocks.

DINOv2 (with registers, too), DINOv3, and the image towers of CLIP, SigLIP and
SigLIP 2, alone or beside their text towers. They are read; written are the
names of `hf`, or timm's directories. SigLIP 2 of a fixed resolution is saved as
SigLIP; the others take images of any aspect ratio there, and here the square
that their position embeddings are for.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats import (
  archive,
  hf_images,
  table,
  tensors,
  torch_table,
)
from vit_jax.checkpoints.formats.hf_config import GELUS, class_names
from vit_jax.checkpoints.formats.stated import Stated

_MSA = 'MultiHeadDotProductAttention_1'
_POOLING = 'MAPHead_0/MultiHeadDotProductAttention_0'
_POSITIONS = 'Transformer/posembed_input/pos_embedding'


@dataclasses.dataclass(frozen=True)
class _Family:
  """How a model type names what is ours.

  Attributes:
    modules: theirs by ours, those of a layer by what follows `layer`.
    layer: theirs before what is in a layer, with {} for its number.
    defaults: of the configuration.
    ignored: pattern of keys that say nothing of the images' features.
  """

  modules: Mapping[str, str]
  layer: str
  defaults: Mapping[str, Any]
  ignored: str = 'embeddings.mask_token$'


_LAYER_SCALES = {'LayerScale_0': 'layer_scale1', 'LayerScale_1': 'layer_scale2'}
_QKV = ('query', 'key', 'value')
_PROJECTIONS = {f'{_MSA}/{x}': f'{x[0]}_proj' for x in _QKV}
_DINO = _LAYER_SCALES | {
  'cls': 'embeddings.cls_token',
  'registers': 'embeddings.register_tokens',
  'LayerNorm_0': 'norm1',
  'LayerNorm_2': 'norm2',
}
_DINOV2 = _Family(
  _DINO
  | {f'{_MSA}/{x}': f'attention.attention.{x}' for x in _QKV}
  | {
    _POSITIONS: 'embeddings.position_embeddings',
    'embedding': 'embeddings.patch_embeddings.projection',
    f'{_MSA}/out': 'attention.output.dense',
    'MlpBlock_3/Dense_0': 'mlp.fc1',
    'MlpBlock_3/Dense_1': 'mlp.fc2',
    'Transformer/encoder_norm': 'layernorm',
  },
  'encoder.layer.{}.',
  {'hidden_act': 'gelu', 'layer_norm_eps': 1e-6, 'num_attention_heads': 12},
)
_DINOV3 = _Family(
  _DINO
  | {name: f'attention.{x}' for name, x in _PROJECTIONS.items()}
  | {
    'embedding': 'embeddings.patch_embeddings',
    f'{_MSA}/out': 'attention.o_proj',
    'MlpBlock_3/Dense_0': 'mlp.up_proj',
    'MlpBlock_3/Dense_1': 'mlp.down_proj',
    'Transformer/encoder_norm': 'norm',
  },
  'layer.{}.',
  {
    'hidden_act': 'gelu',
    'layer_norm_eps': 1e-5,
    'num_attention_heads': 6,
    'rope_theta': 100.0,
  },
)
_TOWER = {name: f'self_attn.{x}' for name, x in _PROJECTIONS.items()} | {
  _POSITIONS: 'embeddings.position_embedding.weight',
  'embedding': 'embeddings.patch_embedding',
  'LayerNorm_0': 'layer_norm1',
  f'{_MSA}/out': 'self_attn.out_proj',
  'LayerNorm_2': 'layer_norm2',
  'MlpBlock_3/Dense_0': 'mlp.fc1',
  'MlpBlock_3/Dense_1': 'mlp.fc2',
  'Transformer/encoder_norm': 'post_layernorm',
}
_TEXT = r'^text_|^logit_|position_ids$'
_CLIP = _Family(
  _TOWER
  | {
    'cls': 'embeddings.class_embedding',
    'Transformer/pre_norm': 'pre_layrnorm',
    'head': 'visual_projection',
  },
  'encoder.layers.{}.',
  {
    'hidden_act': 'quick_gelu',
    'layer_norm_eps': 1e-5,
    'num_attention_heads': 12,
  },
  _TEXT,
)
_SIGLIP = _Family(
  _TOWER
  | {
    'MAPHead_0/probe': 'head.probe',
    'MAPHead_0/LayerNorm_0': 'head.layernorm',
    'MAPHead_0/MlpBlock_0/Dense_0': 'head.mlp.fc1',
    'MAPHead_0/MlpBlock_0/Dense_1': 'head.mlp.fc2',
    f'{_POOLING}/out': 'head.attention.out_proj',
    'head': 'classifier',
  },
  'encoder.layers.{}.',
  {
    'hidden_act': 'gelu_pytorch_tanh',
    'layer_norm_eps': 1e-6,
    'num_attention_heads': 12,
  },
  _TEXT,
)
FAMILIES: Mapping[str, _Family] = {
  'dinov2': _DINOV2,
  'dinov2_with_registers': _DINOV2,
  'dinov3_vit': _DINOV3,
  'clip': _CLIP,
  'clip_vision_model': _CLIP,
  'siglip': _SIGLIP,
  'siglip_vision_model': _SIGLIP,
  'siglip2': _SIGLIP,
  'siglip2_vision_model': _SIGLIP,
}


def read(path: str, config: dict[str, Any]) -> table.File:
  """Reads a directory, of which `config` is the config.json.

  CLIP's projection is the head, without a bias. A classifier of SigLIP reads
  the mean of the tokens, which is all that is kept of its pooling then.

  Raises:
    ValueError: as all formats.
  """
  model_type = config['model_type']
  family = FAMILIES[model_type]
  arrays = {
    key: x
    for key, x in tensors.read_folder(path, family.ignored).items()
    # None of them are an empty array.
    if x.size or not key.endswith('register_tokens')
  }
  classifies = 'classifier.weight' in arrays
  if classifies and family is _SIGLIP:
    arrays = {k: x for k, x in arrays.items() if '.head.' not in k}
  elif classifies:
    raise ValueError(
      f"{path} has 'classifier.weight', which reads the class token joined "
      'with the mean of the patches, and no model here does. Save its body, '
      'Dinov2Model.from_pretrained(...).save_pretrained(...), and give that.'
    )
  prefixes = ('vision_model.', f'{model_type}.', 'model.')
  fitting = (p for p in prefixes if any(k.startswith(p) for k in arrays))
  prefix = next(fitting, '')
  lookup = archive.Lookup(
    path,
    arrays,
    lambda key: key if key in arrays else prefix + key,
    f'transformers {model_type}',
  )
  # All of a block's queries, keys and values have a bias, or none.
  for key, x in list(arrays.items()):
    sibling = key.replace('.k_proj.', '.q_proj.').replace('weight', 'bias')
    if key.endswith(('patch_embedding.weight', 'visual_projection.weight')) or (
      key.endswith('.k_proj.weight') and sibling in arrays
    ):
      arrays.setdefault(
        key.replace('weight', 'bias'), np.zeros(len(x), np.float32)
      )
  of_images = config.get('vision_config') or config
  stated = Stated(
    {'image_size': 224} | dict(family.defaults) | dict(of_images),
    f'{path}/config.json',
  )
  if model_type.startswith('siglip2'):
    _unfold_patches(lookup, stated)
  fields = _fields(lookup, family, stated)
  preprocessing, _, warnings = hf_images.read(
    path, model_type, fields['image_size']
  )
  return table.File(
    path=path,
    arrays=arrays,
    fields=fields,
    table=lambda shapes: _entries(shapes, lookup, family),
    preprocessing=preprocessing,
    class_names=(
      class_names(config, fields['num_classes'], path) if classifies else ()
    ),
    warnings=(*stated.warnings, *warnings),
  )


def _fields(
  lookup: archive.Lookup, family: _Family, stated: Stated
) -> dict[str, Any]:
  def key(name: str) -> str:
    return _key(name, family)

  first = 'Transformer/encoderblock_0/'
  width, _, patch, _ = lookup.shape(key('embedding/kernel'), 4)
  gated = any(
    lookup.has(family.layer.format(0) + x)
    for x in ('mlp.weights_in.weight', 'mlp.gate_proj.weight')
  )
  down = key(f'{first}MlpBlock_3/Dense_1/kernel')
  if not lookup.has(down):
    down = down.replace('fc2', 'weights_out')
  _, mlp_dim = lookup.shape(down, 2)
  # The gated MLP of DINOv2 is SwiGLU whatever its configuration says.
  act = 'gelu' if gated and family is _DINOV2 else stated['hidden_act']
  if gated and act == 'silu':
    act = 'gelu'
  elif gated and family is _DINOV3:
    stated.refuse('hidden_act', ', and a gated MLP here has silu.')
  if not isinstance(act, str) or act not in GELUS:
    stated.refuse('hidden_act', f', and a model here has {" or ".join(GELUS)}.')
  layers = lookup.key_of(family.layer.split('{')[0])
  pools = {'MAPHead_0/probe': 'map', 'cls': 'cls'}
  there = [x for x in pools if x in family.modules and lookup.has(key(x))]
  fields = {
    'patch_size': patch,
    'width': width,
    'depth': sum(lookup.count(layers, r'(\d{1,6})\.')),
    'mlp_dim': mlp_dim,
    'heads': stated.positive('num_attention_heads'),
    'pool': pools[there[0]] if there else 'gap',
    'posemb': 'learned1d' if _POSITIONS in family.modules else 'none',
    'gelu': GELUS[act],
    'layer_norm_epsilon': stated.above_zero('layer_norm_eps', 1),
    'registers': (
      lookup.size(key('registers'), 3, axis=1)
      if 'registers' in family.modules
      else 0
    ),
    'pre_norm': 'Transformer/pre_norm' in family.modules,
    'layer_scale': 1e-4 * ('LayerScale_0' in family.modules),
    'swiglu': gated,
    'qkv_bias': lookup.has(key(f'{first}{_MSA}/query/bias')),
    'rope': (
      stated.above_zero('rope_theta', 10**9) if 'rope_theta' in stated else 0.0
    ),
    'num_classes': (
      lookup.size(key('head/kernel'), 2) if 'head' in family.modules else 0
    ),
    'image_size': stated.tiled(stated.sides('image_size'), patch),
  }
  stated.check(
    'the arrays have',
    {
      'hidden_size': width,
      'num_hidden_layers': fields['depth'],
      'patch_size': patch,
      'num_channels': 3,
      'num_register_tokens': fields['registers'],
    },
  )
  return fields


def _unfold_patches(lookup: archive.Lookup, stated: Stated) -> None:
  """Gives SigLIP 2's patches two dimensions, and its images a size."""
  stated.setdefault('patch_size', 16)
  patch = stated.positive('patch_size')
  key = lookup.key_of(_key('embedding/kernel', _SIGLIP))
  _, columns = lookup.shape(key, 2)
  if columns != 3 * patch**2:
    stated.refuse('patch_size', f', and {key} has {columns} numbers a patch.')
  # Theirs has the channels of a pixel side by side.
  lookup.arrays[key] = (
    lookup.arrays[key].reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2)
  )
  count, _ = lookup.shape(_key(_POSITIONS, _SIGLIP), 2)
  stated.check('the arrays have', {'num_patches': count})
  stated['image_size'] = patch * math.isqrt(count)


def _key(name: str, family: _Family) -> str:
  """Returns the key of an array of ours, without prefix."""
  key = torch_table.key_of(name, family.modules, family.layer, '')
  return re.sub(r'(layer_scale[12])\.weight$', r'\1.lambda1', key)


def _entries(
  shapes: table.Shapes, lookup: archive.Lookup, family: _Family
) -> list[table.Entry]:
  found = []
  for name, shape in shapes.items():
    layout = torch_table.layout(name, shape)
    if name.startswith(f'{_POOLING}/') and '/out/' not in name:
      part, leaf = name.split('/')[-2:]
      if part == 'query':
        theirs = {'kernel': 'weight', 'bias': 'bias'}[leaf]
        key = lookup.key_of(f'head.attention.in_proj_{theirs}')
        names = tuple(f'{_POOLING}/{x}/{leaf}' for x in _QKV)
        found.append(table.joined(key, names, layout))
      continue
    key = lookup.key_of(_key(name, family))
    gate = key.replace('up_proj', 'gate_proj')
    packed = key.replace('.fc1.', '.weights_in.').replace(
      '.fc2.', '.weights_out.'
    )
    if gate != key and gate in lookup.arrays:
      found.append(_gated(gate, key, name, layout))
      continue
    if packed in lookup.arrays:
      key = packed
    if name == 'cls' and family is _CLIP:
      layout = lambda x: x[0, 0], lambda x: x[None, None]
    elif name == _POSITIONS and key.endswith('.weight'):
      layout = lambda x: x[0], lambda x: x[None]
    found.append(table.one(key, name, layout))
  return found


def _gated(gate: str, up: str, name: str, layout: table.Layout) -> table.Entry:
  """Returns the entry of a gated MLP's two parts, of which ours is one."""
  to_file, to_ours = layout
  return table.Entry(
    (gate, up),
    (name,),
    lambda x: tuple(np.split(to_file(x), 2)),
    lambda a, b: (to_ours(np.concatenate([a, b])),),
  )
