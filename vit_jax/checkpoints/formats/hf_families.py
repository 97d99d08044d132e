"""Tables of the keys in transformers' config.json, for each model type.

Reading and writing use the same tables. Reading raises an error if config.json
contradicts a field that the arrays determine. Keys outside the
tables are ignored, except `id2label` and SigLIP 2's `num_patches`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vit_jax.checkpoints.formats.json_config import (
  EPSILON,
  LARGE,
  POSITIVE,
  SIDES,
  SQUARE,
  Key,
  choices,
  only,
)

GELU = choices(
  {
    'gelu_pytorch_tanh': 'tanh',
    'gelu_new': 'tanh',
    'gelu': 'exact',
    'quick_gelu': 'quick',
  }
)
_POSITIONS = {'posemb': 'learned1d', 'layer_scale': 0.0}


@dataclasses.dataclass(frozen=True)
class Family:
  """A model type.

  Two attributes are regular expressions. `ignored` matches the keys of arrays
  that are not read. `unused` matches our names of arrays that a classifier does
  not use.
  """

  config: dict[str, Key]  # the keys in config.json
  # Values of our fields that all models of this type share.
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Further values for classifiers; None if classifiers are not supported.
  classifier: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)
  ignored: str = 'embeddings.mask_token$'
  unused: str = '$^'


def _config(
  act: str, epsilon: float, more: Mapping[str, Key], heads: int = 12
) -> dict[str, Key]:
  """Returns a table of the keys that all ViTs have, plus `more`."""
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


_MLP = {'intermediate_size': Key('mlp_dim')}
_BIAS = _MLP | {'qkv_bias': Key('qkv_bias', default=True)}
_REGISTERS = {'num_register_tokens': Key('registers')}
_VIT = Family(
  _config('gelu', 1e-12, _BIAS | only({'pooler_act': 'tanh'})), _POSITIONS
)
# A BiT with pre-activation is our ResNet with version=2.
_BIT = Family(
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
_DINO = {'layer_scale': 1e-4}
_DINOV2 = Family(
  _config('gelu', 1e-6, _REGISTERS),
  _POSITIONS | _DINO,
  {'pool': 'cls+gap'},
)
_TEXT = r'^text_|^logit_|position_ids$'
_CLIP = Family(
  _config('quick_gelu', 1e-5, _MLP),
  _POSITIONS | {'pre_norm': True},
  # CLIP's classifier averages the patches without the final norm.
  {'pool': 'gap', 'final_norm': False},
  _TEXT,
  'Transformer/encoder_norm/',
)
SIGLIP = Family(
  _config('gelu_pytorch_tanh', 1e-6, _MLP),
  _POSITIONS,
  {'pool': 'gap'},
  _TEXT,
  'MAPHead_0/',
)
FAMILIES: Mapping[str, Family] = {
  'vit': _VIT,
  'deit': _VIT,
  'ijepa': _VIT,
  'vit_mae': dataclasses.replace(_VIT, ignored='^decoder'),
  'vit_msn': Family(_config('gelu', 1e-6, _BIAS), _POSITIONS),
  'bit': _BIT,
  'dinov2': _DINOV2,
  'dinov2_with_registers': _DINOV2,
  'dinov3_vit': Family(
    _config(
      'gelu',
      1e-5,
      _MLP | _REGISTERS | {'rope_theta': Key('rope', LARGE, 100.0)},
      6,
    ),
    _DINO,
    None,
  ),
  'clip': _CLIP,
  'clip_vision_model': _CLIP,
  'siglip': SIGLIP,
  'siglip_vision_model': SIGLIP,
  'siglip2': SIGLIP,
  'siglip2_vision_model': SIGLIP,
}


def labels(
  num_classes: int, class_names: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
  """Returns the keys of config.json that name the classes.

  Predictions use id2label, which names every class. If classes share a name,
  label2id has only the last of them.
  """
  names = class_names or _unnamed(num_classes)
  return {
    'id2label': {str(i): name for i, name in enumerate(names)},
    'label2id': {name: i for i, name in enumerate(names)},
  }


def class_names(
  config: dict[str, Any], num_classes: int, path: str
) -> tuple[str, ...]:
  """Returns the class names of a config.json; () if missing or 'LABEL_0' etc.

  Raises ValueError if the keys of id2label are not the class indices.
  """
  names = config.get('id2label')
  if not num_classes or names is None:
    return ()
  keys = [str(i) for i in range(num_classes)]
  if not isinstance(names, dict) or names.keys() != set(keys):
    raise ValueError(
      f'{path}/config.json: id2label must have the keys 0 to '
      f'{num_classes - 1}, one for each class.'
    )
  found = tuple(str(names[key]) for key in keys)
  return () if found == _unnamed(num_classes) else found


def _unnamed(num_classes: int) -> tuple[str, ...]:
  return tuple(f'LABEL_{i}' for i in range(num_classes))
