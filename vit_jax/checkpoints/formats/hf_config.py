"""The config.json of transformers' ViT and BiT, from our fields and to them.

Sizes come from the arrays; the configuration says what arrays cannot, and is
refused where it contradicts them.
"""

import re
from typing import Any

from vit_jax.checkpoints.formats.archive import Lookup

# How transformers calls the two functions; of a pair, the first is written.
_GELUS = {'gelu_pytorch_tanh': 'tanh', 'gelu_new': 'tanh', 'gelu': 'exact'}

# Of the pre-activation BiT, which is our ResNet of version 2.
_BIT = {
  'layer_type': 'preactivation',
  'hidden_act': 'relu',
  'global_padding': None,
  'num_groups': 32,
  'width_factor': 1,
  'embedding_dynamic_padding': False,
}

_ELSEWHERE = 'use --to=orbax, onnx or stablehlo.'


def vit_fields(config: dict[str, Any], lookup: Lookup) -> dict[str, Any]:
  """Returns the fields of a ViT but for its classes.

  Args:
    config: the parsed config.json.
    lookup: of the body's arrays by their keys without prefix.

  Raises:
    ValueError: if there is no such model here, or the configuration contradicts
      the arrays; names the file and key.
  """
  place = f'{lookup.path}/config.json'
  _check_tokens(lookup)
  pool = 'gap' if config['model_type'] == 'ijepa' else 'cls'
  width, _, patch, _ = lookup.shape(
    'embeddings.patch_embeddings.projection.weight', 4
  )
  mlp_dim, _ = lookup.shape('encoder.layer.0.intermediate.dense.weight', 2)
  _, tokens, _ = lookup.shape('embeddings.position_embeddings', 3)
  layer = re.compile(rf'{re.escape(lookup.key_of("encoder.layer."))}(\d+)\.')
  depth = len({m[1] for key in lookup.arrays if (m := layer.match(key))})
  lookup.check_layers(depth)
  # A classifier sees the class token itself, and no file has both.
  representation_size = 0
  if (
    pool == 'cls'
    and lookup.has('pooler.dense.weight')
    and 'classifier.weight' not in lookup.arrays
  ):
    representation_size = lookup.shape('pooler.dense.weight', 2)[0]
  _check(
    config,
    place,
    'the arrays have',
    {
      'hidden_size': (width,),
      'intermediate_size': (mlp_dim,),
      'num_hidden_layers': (depth,),
      'patch_size': (patch, [patch, patch]),
      'num_channels': (3,),
    },
  )
  _check(
    config,
    place,
    'a model here has',
    {'qkv_bias': (True,), 'hidden_act': tuple(_GELUS)}
    | ({'pooler_act': ('tanh',)} if representation_size else {}),
  )
  return {
    'patch_size': patch,
    'width': width,
    'depth': depth,
    'mlp_dim': mlp_dim,
    'heads': _integers(config, 'num_attention_heads', 12, 1, place)[0],
    'pool': pool,
    'representation_size': representation_size,
    'gelu': _GELUS[config.get('hidden_act', 'gelu')],
    'layer_norm_epsilon': config.get('layer_norm_eps', 1e-12),
    'image_size': _image_size(
      config, patch, tokens - int(pool == 'cls'), place
    ),
  }


def vit_config(fields: dict[str, Any]) -> dict[str, Any]:
  """Returns the configuration of a ViT but for its classes.

  Raises:
    ValueError: if transformers has no such model.
  """
  if fields['pool'] == 'map':
    raise ValueError(
      "transformers has no model with pool 'map', only 'cls' and 'gap': use "
      f'--to=timm or bigvision, or {_ELSEWHERE}'
    )
  for field, value in (
    ('posemb', 'learned1d'),
    ('posemb_at', 'input'),
    ('axial', False),
    ('stem_width', 0),
  ):
    _check_writable(fields, field, value, _ELSEWHERE)
  if fields['num_classes']:
    _check_writable(
      fields,
      'representation_size',
      0,
      'its classifiers see the class token itself. Use --head=representation '
      'to leave out the classifier, or --head=drop for the representation '
      'layer too.',
    )
  if fields['pool'] == 'gap':
    _check_writable(
      fields,
      'representation_size',
      0,
      'its representation layers see the first token. Use --head=drop.',
    )
  height, width = fields['image_size']
  return {
    'attention_probs_dropout_prob': 0.0,
    'encoder_stride': fields['patch_size'],
    'hidden_act': next(k for k, x in _GELUS.items() if x == fields['gelu']),
    'hidden_dropout_prob': 0.0,
    'hidden_size': fields['width'],
    'image_size': height if height == width else [height, width],
    'initializer_range': 0.02,
    'intermediate_size': fields['mlp_dim'],
    'layer_norm_eps': fields['layer_norm_epsilon'],
    'num_attention_heads': fields['heads'],
    'num_channels': 3,
    'num_hidden_layers': fields['depth'],
    'patch_size': fields['patch_size'],
    'pooler_act': 'tanh',
    'pooler_output_size': fields['representation_size'] or fields['width'],
    'qkv_bias': True,
  }


def bit_fields(config: dict[str, Any], lookup: Lookup) -> dict[str, Any]:
  """Returns the fields of a ResNet but for its classes and image size.

  Args:
    config: the parsed config.json.
    lookup: of the body's arrays by their keys without prefix.

  Raises:
    ValueError: as `vit_fields` does.
  """
  place = f'{lookup.path}/config.json'
  width = lookup.shape('embedder.convolution.weight', 4)[0]
  layer = re.compile(
    rf'{re.escape(lookup.key_of("encoder.stages."))}(\d+)\.layers\.(\d+)\.'
  )
  units = {m.groups() for key in lookup.arrays if (m := layer.match(key))}
  lookup.check_layers(len(units))
  stages = sorted({int(stage) for stage, _ in units})
  layers = tuple(sum(int(s) == stage for s, _ in units) for stage in stages)
  sizes = _bit_sizes(width, layers)
  output_stride = sizes.pop('output_stride')
  _check(config, place, 'the arrays have', {k: (x,) for k, x in sizes.items()})
  _check(config, place, 'a model here has', {k: (x,) for k, x in _BIT.items()})
  found = _integers(config, 'output_stride', 32, 1, place)[0]
  if found < output_stride:
    raise ValueError(
      f'{place}: output_stride is {found}, and a model '
      f'here has {output_stride}: every stage after the first halves the sides.'
    )
  return {'name': 'resnet', 'layers': layers, 'width': width, 'version': 2}


def bit_config(fields: dict[str, Any]) -> dict[str, Any]:
  """Returns the configuration of a ResNet but for its classes.

  Raises:
    ValueError: if transformers has no such model.
  """
  for field, value in (('version', 2), ('axial', False)):
    _check_writable(fields, field, value, _ELSEWHERE)
  return _BIT | _bit_sizes(fields['width'], fields['layers'])


def _bit_sizes(width: int, layers: tuple[int, ...]) -> dict[str, Any]:
  return {
    'depths': list(layers),
    'embedding_size': width,
    'hidden_sizes': [4 * width * 2**i for i in range(len(layers))],
    'num_channels': 3,
    'output_stride': 2 ** (len(layers) + 1),
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
  named = config.get('id2label')
  if not num_classes or named is None:
    return ()
  keys = [str(i) for i in range(num_classes)]
  if not isinstance(named, dict) or named.keys() != set(keys):
    raise ValueError(
      f'{path}/config.json: id2label should have the keys 0 to '
      f'{num_classes - 1}, one for each class of the classifier.'
    )
  names = tuple(str(named[key]) for key in keys)
  return () if names == _unnamed(num_classes) else names


def _unnamed(num_classes: int) -> tuple[str, ...]:
  return tuple(f'LABEL_{i}' for i in range(num_classes))


def _check_tokens(lookup: Lookup) -> None:
  path = lookup.path
  for key in sorted(lookup.arrays):
    if key.endswith('distillation_token'):
      raise ValueError(
        f'{path} has {key!r}: a distilled DeiT has a second class token and '
        'classifier, for which there is no model here.'
      )
    if key.endswith('mask_token'):
      raise ValueError(
        f'{path} has {key!r}: it paints masked images and classifies none. '
        'Save its body, ViTModel.from_pretrained(...).save_pretrained(...), '
        'and give that.'
      )


def _image_size(
  config: dict[str, Any], patch: int, patches: int, place: str
) -> tuple[int, int]:
  height, width = _integers(config, 'image_size', 224, 2, place)
  if (height // patch) * (width // patch) != patches:
    raise ValueError(
      f'{place}: image_size is {height} x {width}, and the position embeddings '
      f'are for {patches} patches of {patch} x {patch} pixels.'
    )
  return height, width


def _integers(
  config: dict[str, Any], key: str, default: int, count: int, place: str
) -> tuple[int, ...]:
  """Returns a value as `count` positive integers; one stands for all."""
  value = config.get(key, default)
  values = value if isinstance(value, list) else [value] * count
  if len(values) != count or any(type(x) is not int or x < 1 for x in values):
    raise ValueError(f'{place}: {key} is {value!r}, no positive integer.')
  return tuple(values)


def _check(
  config: dict[str, Any],
  place: str,
  what: str,
  wanted: dict[str, tuple[Any, ...]],
) -> None:
  """Refuses a key whose value, if it is there, is none of those wanted."""
  for key, values in wanted.items():
    if key in config and config[key] not in values:
      raise ValueError(
        f'{place}: {key} is {config[key]!r}, and {what} '
        f'{" or ".join(map(repr, values))}.'
      )


def _check_writable(
  fields: dict[str, Any], field: str, value: Any, way_out: str
) -> None:
  if fields[field] != value:
    raise ValueError(
      f'transformers has no model with {field} {fields[field]!r}, only '
      f'{value!r}: {way_out}'
    )
