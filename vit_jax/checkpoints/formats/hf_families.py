"""How transformers names what is ours, for each type of model.

A family has a table of its arrays and a table of its config.json, both used to
read and to write. Sizes come from the arrays, and a configuration that
contradicts them is refused.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vit_jax.checkpoints.formats.stated import (
  EPSILON,
  LARGE,
  POSITIVE,
  SIDES,
  SQUARE,
  Key,
  named,
  only,
)

GELU = named(
  {
    'gelu_pytorch_tanh': 'tanh',
    'gelu_new': 'tanh',
    'gelu': 'exact',
    'quick_gelu': 'quick',
  }
)
QKV = ('query', 'key', 'value')
POOLING = 'MAPHead_0/MultiHeadDotProductAttention_0'
POSITIONS = 'Transformer/posembed_input/pos_embedding'
_MSA = 'MultiHeadDotProductAttention_1'


@dataclasses.dataclass(frozen=True)
class Family:
  """A type of model.

  Attributes:
    modules: theirs by ours, those of a layer by what follows `layer`.
    layer: theirs before what is in a layer, with {} for its number.
    config: the table of config.json.
    ignored: pattern of keys that say nothing of the images' features.
  """

  modules: dict[str, str]
  layer: str
  config: dict[str, Key]
  ignored: str = 'embeddings.mask_token$'


def _config(
  act: str, epsilon: float, more: dict[str, Key], heads: int = 12
) -> dict[str, Key]:
  """Returns a table with the defaults of transformers."""
  return {
    'hidden_size': Key('width'),
    'num_hidden_layers': Key('depth'),
    'num_channels': Key('channels'),
    'patch_size': Key('patch_size', SQUARE),
    'image_size': Key('image_size', SIDES, 224),
    'num_attention_heads': Key('heads', POSITIVE, heads),
    'hidden_act': Key('gelu', GELU, act),
    'layer_norm_eps': Key('layer_norm_epsilon', EPSILON, epsilon),
    **more,
  }


_LAYERS = {
  'LayerNorm_0': 'layernorm_before',
  **{f'{_MSA}/{x}': f'attention.attention.{x}' for x in QKV},
  f'{_MSA}/out': 'attention.output.dense',
  'LayerNorm_2': 'layernorm_after',
  'MlpBlock_3/Dense_0': 'intermediate.dense',
  'MlpBlock_3/Dense_1': 'output.dense',
}
_IJEPA = Family(
  _LAYERS
  | {
    POSITIONS: 'embeddings.position_embeddings',
    'embedding': 'embeddings.patch_embeddings.projection',
    'Transformer/encoder_norm': 'layernorm',
    'head': 'classifier',
  },
  'encoder.layer.{}.',
  _config(
    'gelu',
    1e-12,
    {
      'intermediate_size': Key('mlp_dim'),
      'qkv_bias': Key('qkv_bias', default=True),
      **only({'pooler_act': 'tanh'}),
    },
  ),
)
_VIT = dataclasses.replace(
  _IJEPA,
  modules=_IJEPA.modules
  | {
    'cls': 'embeddings.cls_token',
    # A distillation token that no classifier reads.
    'registers': 'embeddings.distillation_token',
    'pre_logits': 'pooler.dense',
  },
)
DEIT = dataclasses.replace(
  _IJEPA,
  modules=_IJEPA.modules
  | {
    'cls': 'embeddings.cls_token',
    'dist': 'embeddings.distillation_token',
    'head': 'cls_classifier',
    'head_dist': 'distillation_classifier',
  },
)
# The pre-activation BiT is our ResNet of version 2.
_BIT = Family(
  {
    'conv_root': 'embedder.convolution',
    'gn_final': 'norm',
    'head': 'classifier.1',
  },
  '',
  {
    'depths': Key('depths'),
    'embedding_size': Key('width'),
    'hidden_sizes': Key('hidden_sizes'),
    'num_channels': Key('channels'),
    'output_stride': Key('stride', default=32),
    **only(
      {
        'layer_type': 'preactivation',
        'hidden_act': 'relu',
        'global_padding': None,
        'num_groups': 32,
        'width_factor': 1,
        'embedding_dynamic_padding': False,
      }
    ),
  },
)
_DINO = {
  'cls': 'embeddings.cls_token',
  'registers': 'embeddings.register_tokens',
  'LayerNorm_0': 'norm1',
  'LayerScale_0': 'layer_scale1',
  'LayerNorm_2': 'norm2',
  'LayerScale_1': 'layer_scale2',
}
_REGISTERS = {'num_register_tokens': Key('registers')}
_FC = {'MlpBlock_3/Dense_0': 'mlp.fc1', 'MlpBlock_3/Dense_1': 'mlp.fc2'}
_DINOV2 = Family(
  {k: x for k, x in _VIT.modules.items() if k not in ('head', 'pre_logits')}
  | _DINO
  | _FC,
  'encoder.layer.{}.',
  _config('gelu', 1e-6, _REGISTERS),
)
_PROJECTIONS = {f'{_MSA}/{x}': f'{x[0]}_proj' for x in QKV}
_DINOV3 = Family(
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
  _config(
    'gelu', 1e-5, {'rope_theta': Key('rope', LARGE, 100.0), **_REGISTERS}, 6
  ),
)
_TOWER = {name: f'self_attn.{x}' for name, x in _PROJECTIONS.items()} | {
  POSITIONS: 'embeddings.position_embedding.weight',
  'embedding': 'embeddings.patch_embedding',
  'LayerNorm_0': 'layer_norm1',
  f'{_MSA}/out': 'self_attn.out_proj',
  'LayerNorm_2': 'layer_norm2',
  **_FC,
  'Transformer/encoder_norm': 'post_layernorm',
}
_TEXT = r'^text_|^logit_|position_ids$'
CLIP = Family(
  _TOWER
  | {
    'cls': 'embeddings.class_embedding',
    'Transformer/pre_norm': 'pre_layrnorm',
    'head': 'visual_projection',
  },
  'encoder.layers.{}.',
  _config('quick_gelu', 1e-5, {}),
  _TEXT,
)
SIGLIP = Family(
  _TOWER
  | {
    'MAPHead_0/probe': 'head.probe',
    'MAPHead_0/LayerNorm_0': 'head.layernorm',
    'MAPHead_0/MlpBlock_0/Dense_0': 'head.mlp.fc1',
    'MAPHead_0/MlpBlock_0/Dense_1': 'head.mlp.fc2',
    f'{POOLING}/out': 'head.attention.out_proj',
    'head': 'classifier',
  },
  'encoder.layers.{}.',
  _config('gelu_pytorch_tanh', 1e-6, {}),
  _TEXT,
)
FAMILIES: Mapping[str, Family] = {
  'vit': _VIT,
  'deit': _VIT,  # without a teacher
  'ijepa': _IJEPA,
  'bit': _BIT,
  'dinov2': _DINOV2,
  'dinov2_with_registers': _DINOV2,
  'dinov3_vit': _DINOV3,
  'clip': CLIP,
  'clip_vision_model': CLIP,
  'siglip': SIGLIP,
  'siglip_vision_model': SIGLIP,
  'siglip2': SIGLIP,
  'siglip2_vision_model': SIGLIP,
}


def labels(
  num_classes: int, class_names: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
  """Returns the part of a configuration that names the classes."""
  names = class_names or _unnamed(num_classes)
  return {
    'id2label': {str(i): name for i, name in enumerate(names)},
    'label2id': {name: i for i, name in enumerate(names)},
  }


def class_names(
  config: dict[str, Any], num_classes: int, path: str
) -> tuple[str, ...]:
  """Returns the names of the classes, none where they are only numbered.

  Raises:
    ValueError: if there is not one for each class.
  """
  names = config.get('id2label')
  if not num_classes or names is None:
    return ()
  keys = [str(i) for i in range(num_classes)]
  if not isinstance(names, dict) or names.keys() != set(keys):
    raise ValueError(
      f'{path}/config.json: id2label should have the keys 0 to '
      f'{num_classes - 1}, one for each class of the classifier.'
    )
  found = tuple(str(names[key]) for key in keys)
  return () if found == _unnamed(num_classes) else found


def _unnamed(num_classes: int) -> tuple[str, ...]:
  return tuple(f'LABEL_{i}' for i in range(num_classes))
