"""The config.json of transformers' ViT and BiT, from our fields and to them.

Sizes come from the arrays; the configuration says what arrays cannot, and is
refused where it contradicts them. What is written of a model is what is
expected of a file of it.
"""

from typing import Any

from vit_jax.checkpoints.formats import table
from vit_jax.checkpoints.formats.archive import Lookup
from vit_jax.checkpoints.formats.stated import Stated

# How transformers calls the two functions; of a pair, the first is written.
GELUS = {
  'gelu_pytorch_tanh': 'tanh',
  'gelu_new': 'tanh',
  'gelu': 'exact',
  'quick_gelu': 'quick',
}

# What a configuration of a ViT leaves out.
_VIT_DEFAULTS = {
  'hidden_act': 'gelu',
  'image_size': 224,
  'layer_norm_eps': 1e-12,
  'num_attention_heads': 12,
}
# Of the ViT, which is ours.
_VIT = {'pooler_act': 'tanh', 'qkv_bias': True}

# Of the pre-activation BiT, which is our ResNet of version 2.
_BIT = {
  'layer_type': 'preactivation',
  'hidden_act': 'relu',
  'global_padding': None,
  'num_groups': 32,
  'width_factor': 1,
  'embedding_dynamic_padding': False,
}

_NO_MODEL = 'transformers has no model with'


def vit_fields(config: dict[str, Any], lookup: Lookup) -> dict[str, Any]:
  """Returns the fields of a ViT but for its classes.

  Args:
    config: the parsed config.json.
    lookup: of the body's arrays by their keys without prefix.

  Raises:
    ValueError: if there is no such model here, or the configuration contradicts
      the arrays; names the file and key.
  """
  stated = Stated(_VIT_DEFAULTS | config, f'{lookup.path}/config.json')
  for key in lookup.arrays:
    if key.endswith('mask_token'):
      raise ValueError(
        f'{lookup.path} has {key!r}: it paints masked images and classifies '
        'none. Save its body, '
        'ViTModel.from_pretrained(...).save_pretrained(...), and give that.'
      )
  cls = config['model_type'] != 'ijepa'
  distils = lookup.has('cls_classifier.weight')
  extra = int(lookup.has('embeddings.distillation_token'))
  width, _, patch, _ = lookup.shape(
    'embeddings.patch_embeddings.projection.weight', 4
  )
  mlp_dim, _ = lookup.shape('encoder.layer.0.intermediate.dense.weight', 2)
  _, tokens, _ = lookup.shape('embeddings.position_embeddings', 3)
  fields = {
    'name': 'deit' if distils else 'vit',
    'registers': 0 if distils else extra,
    'patch_size': patch,
    'width': width,
    'depth': sum(lookup.count(lookup.key_of('encoder.layer.'), r'(\d+)\.')),
    'mlp_dim': mlp_dim,
    'pool': 'cls' if cls else 'gap',
    # A classifier sees the class token itself, and no file has both.
    'representation_size': (
      lookup.size('pooler.dense.weight', 2)
      if cls and not any('classifier.' in key for key in lookup.arrays)
      else 0
    ),
  }
  sizes = _vit_sizes(fields) | {'patch_size': (patch, [patch, patch])}
  stated.check('the arrays have', sizes)
  wanted = _VIT | {'hidden_act': tuple(GELUS)}
  if not fields['representation_size']:
    del wanted['pooler_act']
  stated.check('a model here has', wanted)
  height, width = stated.sides('image_size')
  patches = tokens - cls - (extra if distils else 0)
  if (height // patch) * (width // patch) != patches:
    raise ValueError(
      f'{stated.place}: image_size is {height} x {width}, and the position '
      f'embeddings are for {patches} patches of {patch} x {patch} pixels.'
    )
  return fields | {
    'heads': stated.positive('num_attention_heads'),
    'gelu': GELUS[stated['hidden_act']],
    'layer_norm_epsilon': stated.above_zero('layer_norm_eps', 1),
    'image_size': (height, width),
  }


def vit_config(fields: dict[str, Any]) -> dict[str, Any]:
  """Returns the configuration of a ViT but for its classes.

  Raises:
    ValueError: if transformers has no such model.
  """
  holds = 'pool=gap gelu layer_norm_epsilon'
  ways_out = {'pool': f'use --to=timm or bigvision, or {table.ELSEWHERE}'}
  if fields['num_classes']:
    ways_out['representation_size'] = (
      'its classifiers see the class token itself. Use --head=representation '
      'to leave out the classifier, or --head=drop for the representation '
      'layer too.'
    )
  elif fields['pool'] == 'gap':
    ways_out['representation_size'] = (
      'its representation layers see the first token. Use --head=drop.'
    )
  else:
    holds += ' representation_size'
  names = ('vit', 'deit', 'resnet')  # the last by `bit_config`
  table.check_writable(fields, _NO_MODEL, names, holds, ways_out)
  height, width = fields['image_size']
  return {
    **_VIT,
    **_vit_sizes(fields),
    'attention_probs_dropout_prob': 0.0,
    'encoder_stride': fields['patch_size'],
    'hidden_act': next(k for k, x in GELUS.items() if x == fields['gelu']),
    'hidden_dropout_prob': 0.0,
    'image_size': height if height == width else [height, width],
    'initializer_range': 0.02,
    'layer_norm_eps': fields['layer_norm_epsilon'],
    'num_attention_heads': fields['heads'],
    'pooler_output_size': fields['representation_size'] or fields['width'],
  }


def _vit_sizes(fields: dict[str, Any]) -> dict[str, Any]:
  return {
    'hidden_size': fields['width'],
    'intermediate_size': fields['mlp_dim'],
    'num_channels': 3,
    'num_hidden_layers': fields['depth'],
    'patch_size': fields['patch_size'],
  }


def bit_fields(config: dict[str, Any], lookup: Lookup) -> dict[str, Any]:
  """Returns the fields of a ResNet but for its classes and image size.

  Args and errors are those of `vit_fields`.
  """
  stated = Stated({'output_stride': 32} | config, f'{lookup.path}/config.json')
  fields = {
    'name': 'resnet',
    'layers': lookup.count(
      lookup.key_of('encoder.stages.'), r'(\d{1,6})\.layers\.(\d+)\.'
    ),
    'width': lookup.shape('embedder.convolution.weight', 4)[0],
    'version': 2,
  }
  sizes = _bit_sizes(fields)
  least = sizes.pop('output_stride')
  stated.check('the arrays have', sizes)
  stated.check('a model here has', _BIT)
  if stated.positive('output_stride') < least:
    stated.refuse(
      'output_stride',
      f', and a model here has {least}: every stage after the first halves the '
      'sides.',
    )
  return fields


def bit_config(fields: dict[str, Any]) -> dict[str, Any]:
  """Returns the configuration of a ResNet but for its classes.

  Raises:
    ValueError: if transformers has no such model.
  """
  table.check_writable(fields, _NO_MODEL, ('resnet',), 'width')
  return _BIT | _bit_sizes(fields)


def _bit_sizes(fields: dict[str, Any]) -> dict[str, Any]:
  width, stages = fields['width'], len(fields['layers'])
  return {
    'depths': list(fields['layers']),
    'embedding_size': width,
    'hidden_sizes': [4 * width * 2**i for i in range(stages)],
    'num_channels': 3,
    'output_stride': 2 ** (stages + 1),
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
