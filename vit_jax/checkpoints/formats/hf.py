"""Reads and writes directories of transformers, which have a config.json.

Reads the model types in `FAMILIES` and `PROJECTS`; `timm` reads timm_wrapper.
Writes ViT, DeiT, BiT and `PROJECTS`; a ViT without class token becomes I-JEPA.
Reads SigLIP 2 as a model for square images, with as many patches as position
embeddings.
"""

import math
import re
from typing import Any

from vit_jax.checkpoints.formats import (
  hf_families,
  image_configs,
  table,
  tensors,
  torch_vit,
)
from vit_jax.checkpoints.formats.hf_families import FAMILIES
from vit_jax.checkpoints.formats.json_config import JsonConfig, to_config
from vit_jax.register import Register

# Modules with their own `read` and `write`, by `model_type`.
PROJECTS = Register(
  'model_type',
  {
    'imagegpt': 'vit_jax.projects.igpt.hf_format',
    'detr': 'vit_jax.projects.detr.hf_format',
  },
)
# The first part of transformers' class names, by `model_type`.
_CLASSES = {'vit': 'ViT', 'deit': 'DeiT', 'ijepa': 'IJepa', 'bit': 'Bit'}
DTYPES: tuple[str, ...] = ('float32', 'bfloat16', 'float16')


def read(path: str, config: dict[str, Any]) -> table.File:
  """Reads a directory; `config` is its config.json.

  CLIP's projection becomes the head, with a bias of zeros. Raises the errors
  that `table` lists for `read`, and the errors of `tensors.read_folder`.
  """
  model_type = config['model_type']
  if isinstance(model_type, str) and model_type in PROJECTS:
    return PROJECTS.load(model_type).read(path, config)
  if not isinstance(model_type, str) or model_type not in FAMILIES:
    kinds = ', '.join(map(str, config.get('architectures') or ())) or 'none'
    raise ValueError(
      f'{path}/config.json: model_type is {model_type!r} (architectures: '
      f'{kinds}); it must be one of {", ".join([*FAMILIES, *PROJECTS])} or '
      'timm_wrapper.'
    )
  arrays = {
    key: x
    for key, x in tensors.read_folder(
      path, FAMILIES[model_type].ignored
    ).items()
    # A model without registers has an empty array of registers.
    if x.size or not key.endswith('register_tokens')
  }
  prefix = rf'({model_type}\.)?((vision_model|model|vit)\.)?'
  named = torch_vit.Arrays(path, arrays, model_type == 'bit', prefix)
  vision = JsonConfig(
    config.get('vision_config') or config, f'{path}/config.json'
  )
  fields_of = _bit_fields if model_type == 'bit' else _vit_fields
  fields, is_classifier = fields_of(named, vision, model_type)
  preprocessing, size, warnings = image_configs.of_hf(
    path, model_type, fields.get('image_size')
  )
  num_classes = fields['num_classes'] if is_classifier else 0
  return named.file(
    fields | {'image_size': size},
    preprocessing=preprocessing,
    class_names=hf_families.class_names(config, num_classes, path),
    warnings=(*vision.warnings, *warnings),
  )


def _vit_fields(
  named: torch_vit.Arrays, config: JsonConfig, model_type: str
) -> tuple[dict[str, Any], bool]:
  """Returns the model's fields, and whether it is a classifier."""
  family = FAMILIES[model_type]
  lookup = named.lookup(f'transformers {model_type}')
  head = named.key_of('head/kernel')
  is_classifier = lookup.has('head/kernel') and 'classifier' in head
  fixed = dict(family.fields)
  if is_classifier and family.classifier is None:
    raise ValueError(
      f'{named.path} is a {model_type} with the classifier {head!r}, which is '
      'not supported. Save the model without it: '
      'AutoModel.from_pretrained(...).save_pretrained(...).'
    )
  if is_classifier:
    fixed |= family.classifier or {}
    for name in [name for name in named if re.match(family.unused, name)]:
      del named[name]
  if model_type.startswith('siglip2'):
    _unfold_patches(named, config)
  found, channels, stride = torch_vit.fields(lookup)
  # DINOv2's gated MLP is always SwiGLU and ignores hidden_act.
  if found['swiglu']:
    act = config.get('hidden_act', 'gelu')
    if model_type == 'dinov3_vit' and act != 'silu':
      config.refuse('hidden_act', '; it must be silu for a gated MLP.')
    config['hidden_act'] = 'gelu'
  pools = {'MAPHead_0/probe': 'map', 'cls': 'cls'}
  pool = next((pools[name] for name in pools if lookup.has(name)), 'gap')
  found |= {'pool': pool} | fixed
  if is_classifier:
    # Classifiers do not use the pooler.
    found['representation_size'] = 0
  if config.get('image_size') is None:
    config['image_size'] = 224
  sides = config.whole_patches(config.sides('image_size'), stride)
  read = ('cls',) * ('cls' in found['pool'])
  if found['name'] == 'deit':
    read += ('dist',)
  registers = lookup.size('registers', 3, axis=1)
  known = found | {'channels': channels, 'registers': registers}
  known |= config.fields(family.config, known, model_type)
  del known['channels']
  named.convert_tokens(read, stride, sides, config)
  return known | {'image_size': sides}, is_classifier


def _bit_fields(
  named: torch_vit.Arrays, config: JsonConfig, model_type: str
) -> tuple[dict[str, Any], bool]:
  lookup = named.lookup('transformers bit')
  fields = torch_vit.bit_fields(lookup)
  sizes = _bit_sizes(fields['layers'], fields['width'])
  config.setdefault('output_stride', 32)
  # An output_stride above the model's stride has no effect.
  stride = max(sizes['stride'], config.positive('output_stride'))
  _, channels, *_ = lookup.shape('conv_root/kernel', 4)
  found = fields | sizes | {'stride': stride, 'channels': channels}
  config.fields(FAMILIES[model_type].config, found, model_type)
  return fields, lookup.has('head/kernel')


def _bit_sizes(layers: tuple[int, ...], width: int) -> dict[str, Any]:
  stages = len(layers)
  return {
    'depths': list(layers),
    'hidden_sizes': [4 * width * 2**i for i in range(stages)],
    'stride': 2 ** (stages + 1),
  }


def _unfold_patches(named: torch_vit.Arrays, config: JsonConfig) -> None:
  """Reshapes SigLIP 2's patch kernel for a convolution; sets image_size."""
  lookup = named.lookup('SigLIP 2')
  config.setdefault('patch_size', 16)
  patch = config.positive('patch_size')
  name = 'embedding/kernel'
  _, columns = lookup.shape(name, 2)
  if columns != 3 * patch**2:
    config.refuse(
      'patch_size',
      f', and {named.key_of(name)} has {columns} values per patch.',
    )
  # The three channels of a pixel are adjacent.
  named[name] = named[name].reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2)
  _, count, _ = lookup.shape(torch_vit.POSITIONS, 3)
  if config.get('num_patches', count) != count:
    config.refuse('num_patches', f', and the arrays have {count}.')
  config['image_size'] = patch * math.isqrt(count)


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a directory that transformers opens."""
  fields = weights.fields
  own = {'igpt': 'imagegpt'}.get(fields['name'], fields['name'])
  if own in PROJECTS:
    return PROJECTS.load(own).write(weights, target, dtype)
  num_classes = fields['num_classes']
  holds = 'width'
  if fields['name'] != 'resnet':
    holds = 'pool=gap gelu layer_norm_epsilon qkv_bias'
    # Classifiers and I-JEPA have no representation layer.
    if not num_classes and fields['pool'] != 'gap':
      holds += ' representation_size'
  start = 'The ViT, DeiT, I-JEPA and BiT of transformers do not support'
  table.check_writable(fields, start, ('vit', 'deit', 'resnet'), holds)
  model_type = {'resnet': 'bit'}.get(fields['name'], fields['name'])
  if model_type == 'vit' and fields['pool'] != 'cls':
    model_type = 'ijepa'
  family = FAMILIES[model_type]
  known = fields | {'channels': 3}
  config: dict[str, Any] = {'dtype': dtype, 'model_type': model_type}
  if model_type == 'bit':
    known |= _bit_sizes(tuple(fields['layers']), fields['width'])
  else:
    config |= {
      'attention_probs_dropout_prob': 0.0,
      'encoder_stride': fields['patch_size'],
      'hidden_dropout_prob': 0.0,
      'initializer_range': 0.02,
      'pooler_output_size': fields['representation_size'] or fields['width'],
    }
  config |= to_config(family.config, known)
  task, prefix = 'Model', ''
  if num_classes:
    task, prefix = 'ForImageClassification', f'{model_type}.'
    if fields['name'] == 'deit':
      task += 'WithTeacher'
    config |= hf_families.labels(num_classes, weights.class_names)
    if weights.loss == 'sigmoid':
      config['problem_type'] = 'multi_label_classification'
  config['architectures'] = [_CLASSES[model_type] + task]
  key_of = torch_vit.namer('hf', model_type == 'bit')

  def full_key_of(name: str) -> str:
    key = key_of(name)
    if 'classifier' not in key:
      return prefix + key
    # DeiT's other head is called 'distillation_classifier'.
    is_deit = model_type == 'deit' and key.startswith('classifier')
    return f'cls_{key}' if is_deit else key

  arrays = table.ours_to_file(
    weights.arrays, table.renamed(full_key_of, torch_vit.layout)
  )
  images = image_configs.to_hf(weights.preprocessing, fields['image_size'])
  configs = {'config.json': config, image_configs.FILE: images}
  tensors.write_folder(target, configs, arrays, dtype)
  if fields['name'] == 'resnet':
    return [
      'transformers adds 1e-8 to the variance of kernels, BiT 1e-10. This '
      'changes logits by about 1e-5, and more if kernels are small.'
    ]
  if fields['pool'] == 'cls' and not (
    num_classes or fields['representation_size']
  ):
    return [
      'The model has no pooler. transformers adds one with random weights, '
      'unless you open it with from_pretrained(..., add_pooling_layer=False).'
    ]
  return []
