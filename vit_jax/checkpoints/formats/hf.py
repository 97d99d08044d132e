"""Directories of transformers: config.json and model.safetensors.

`FAMILIES` has what is read. Written are ViT, DeiT, I-JEPA (the ViT without a
class token, classified by the mean of its tokens) and BiT. SigLIP 2 of a fixed
resolution is saved as SigLIP; the others take images of any aspect ratio there,
and here the square that their position embeddings are for. ImageGPT and DETR
are in modules of `PROJECTS`.
"""

import math
import re
from typing import Any

from vit_jax.checkpoints.formats import (
  image_configs,
  table,
  tensors,
  timm,
  torch_table,
  torch_vit,
)
from vit_jax.checkpoints.formats.hf_families import (
  FAMILIES,
  class_names,
  labels,
)
from vit_jax.checkpoints.formats.stated import Stated, written
from vit_jax.register import Register

# By `model_type`: modules with `read` and `write` of their own.
PROJECTS = Register(
  'model_type',
  {
    'imagegpt': 'vit_jax.projects.igpt.hf_format',
    'detr': 'vit_jax.projects.detr.hf_format',
  },
)
DTYPES: tuple[str, ...] = ('float32', 'bfloat16', 'float16')

# With a teacher, DeiT has two classifiers.
_CLS_HEAD = {(f'head/{leaf}', 'deit') for leaf in ('kernel', 'bias')}
_NO_MODEL = 'vit_jax writes no ViT, DeiT, I-JEPA or BiT of transformers with'


def read(path: str, config: dict[str, Any]) -> table.File:
  """Reads a directory, of which `config` is the config.json.

  CLIP's projection is the head, without a bias. A classifier of CLIP or SigLIP
  reads the mean of the tokens, and what else pools them is left out.

  Raises:
    ValueError: as all formats.
  """
  model_type = config['model_type']
  if model_type in PROJECTS:
    return PROJECTS.load(model_type).read(path, config)
  if model_type == 'timm_wrapper':
    arrays = tensors.read_folder(path)
    inside = {k.removeprefix('timm_model.'): x for k, x in arrays.items()}
    return timm.read(path, inside, config)
  if not isinstance(model_type, str) or model_type not in FAMILIES:
    kinds = ', '.join(map(str, config.get('architectures') or ())) or 'none'
    raise ValueError(
      f'{path}/config.json: model_type is {model_type!r} (architectures: '
      f'{kinds}), which is not read. Read are '
      f'{", ".join([*FAMILIES, *PROJECTS])} and timm_wrapper.'
    )
  family = FAMILIES[model_type]
  named = torch_vit.Arrays(
    path,
    {
      key: x
      for key, x in tensors.read_folder(path, family.ignored).items()
      # Registers that are switched off are an empty array.
      if x.size or not key.endswith('register_tokens')
    },
    'hf',
    model_type == 'bit',
    rf'({model_type}\.)?((vision_model|model|vit)\.)?',
  )
  of_images = config.get('vision_config') or config
  stated = Stated(of_images, f'{path}/config.json')
  fields_of = _bit_fields if model_type == 'bit' else _vit_fields
  fields, classifies = fields_of(named, stated, model_type)
  preprocessing, size, warnings = image_configs.of_hf(
    path, model_type, fields.get('image_size')
  )
  return named.file(
    fields | {'image_size': size},
    preprocessing=preprocessing,
    class_names=(
      class_names(config, fields['num_classes'], path) if classifies else ()
    ),
    warnings=(*stated.warnings, *warnings),
  )


def _vit_fields(
  named: torch_vit.Arrays, stated: Stated, model_type: str
) -> tuple[dict[str, Any], bool]:
  """Returns the fields, and whether there is a classifier."""
  family = FAMILIES[model_type]
  lookup = named.lookup(f'transformers {model_type}')
  head = named.key_of('head/kernel')
  classifies = lookup.has('head/kernel') and 'classifier' in head
  fixed = dict(family.fields)
  if classifies and family.classifier is None:
    raise ValueError(
      f'{named.path} is a {model_type} with {head!r}, and what such a '
      'classifier reads is not known here. Save its body alone: '
      'AutoModel.from_pretrained(...).save_pretrained(...).'
    )
  if classifies:
    fixed |= family.classifier or {}
    for name in [name for name in named if re.match(family.unused, name)]:
      del named[name]
  if model_type.startswith('siglip2'):
    _unfold_patches(named, stated)
  found, channels, stride = torch_vit.fields(lookup)
  # The gated MLP of DINOv2 is SwiGLU whatever its configuration says.
  if found['swiglu']:
    act = stated.get('hidden_act', 'gelu')
    if model_type == 'dinov3_vit' and act != 'silu':
      stated.refuse('hidden_act', ', and a gated MLP here has silu.')
    stated['hidden_act'] = 'gelu'
  pools = {'MAPHead_0/probe': 'map', 'cls': 'cls'}
  pool = next((pools[name] for name in pools if lookup.has(name)), 'gap')
  found |= {'pool': pool} | fixed
  if classifies:
    # A classifier sees the class token itself, and no file has both.
    found['representation_size'] = 0
  if stated.get('image_size') is None:
    stated['image_size'] = 224
  sides = stated.tiled(stated.sides('image_size'), stride)
  read = ('cls',) * ('cls' in found['pool'])
  if found['name'] == 'deit':
    read += ('dist',)
  registers = lookup.size('registers', 3, axis=1)
  known = found | {'channels': channels, 'registers': registers}
  known |= stated.fields(family.config, known, model_type)
  del known['channels']
  named.settle(read, stride, sides, stated)
  known['registers'] = lookup.size('registers', 3, axis=1)
  return known | {'image_size': sides}, classifies


def _bit_fields(
  named: torch_vit.Arrays, stated: Stated, model_type: str
) -> tuple[dict[str, Any], bool]:
  lookup = named.lookup('transformers bit')
  fields = torch_vit.bit_fields(lookup)
  sizes = _bit_sizes(fields['layers'], fields['width'])
  stated.setdefault('output_stride', 32)
  # A greater one changes nothing.
  stride = max(sizes['stride'], stated.positive('output_stride'))
  _, channels, *_ = lookup.shape('conv_root/kernel', 4)
  found = fields | sizes | {'stride': stride, 'channels': channels}
  stated.fields(FAMILIES[model_type].config, found, model_type)
  return fields, lookup.has('head/kernel')


def _bit_sizes(layers: tuple[int, ...], width: int) -> dict[str, Any]:
  stages = len(layers)
  return {
    'depths': list(layers),
    'hidden_sizes': [4 * width * 2**i for i in range(stages)],
    'stride': 2 ** (stages + 1),
  }


def _unfold_patches(named: torch_vit.Arrays, stated: Stated) -> None:
  """Gives SigLIP 2's patches two dimensions, and its images a size."""
  lookup = named.lookup('SigLIP 2')
  stated.setdefault('patch_size', 16)
  patch = stated.positive('patch_size')
  name = 'embedding/kernel'
  _, columns = lookup.shape(name, 2)
  if columns != 3 * patch**2:
    stated.refuse(
      'patch_size', f', and {named.key_of(name)} has {columns} numbers a patch.'
    )
  # Theirs has the channels of a pixel side by side.
  named[name] = named[name].reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2)
  _, count, _ = lookup.shape(torch_vit.POSITIONS, 3)
  if stated.get('num_patches', count) != count:
    stated.refuse('num_patches', f', and the arrays have {count}.')
  stated['image_size'] = patch * math.isqrt(count)


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a directory that transformers opens."""
  fields = weights.fields
  own = {'igpt': 'imagegpt'}.get(fields['name'], fields['name'])
  if own in PROJECTS:
    return PROJECTS.load(own).write(weights, target, dtype)
  _check_writable(fields)
  model_type, name = 'vit', 'ViT'
  if fields['name'] == 'resnet':
    model_type, name = 'bit', 'Bit'
  elif fields['name'] == 'deit':
    model_type, name = 'deit', 'DeiT'
  elif fields['pool'] != 'cls':
    model_type, name = 'ijepa', 'IJepa'
  family = FAMILIES[model_type]
  num_classes = fields['num_classes']
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
  config |= written(family.config, known)
  task, prefix = 'Model', ''
  if num_classes:
    task, prefix = 'ForImageClassification', f'{model_type}.'
    if fields['name'] == 'deit':
      task += 'WithTeacher'
    config |= labels(num_classes, weights.class_names)
    if weights.loss == 'sigmoid':
      config['problem_type'] = 'multi_label_classification'
  config['architectures'] = [name + task]
  key_of = torch_vit.namer('hf', model_type == 'bit')

  def key_below(name: str) -> str:
    key = key_of(name)
    if 'classifier' not in key:
      return prefix + key
    return f'cls_{key}' if (name, model_type) in _CLS_HEAD else key

  arrays = table.ours_to_file(
    weights.arrays, table.renamed(key_below, torch_table.layout)
  )
  images = image_configs.to_hf(weights.preprocessing, fields['image_size'])
  configs = {'config.json': config, image_configs.FILE: images}
  tensors.write_folder(target, configs, arrays, dtype)
  return _not_held(weights)


def _check_writable(fields: dict[str, Any]) -> None:
  holds = 'width'
  ways_out = {'pool': f'use --to=timm or bigvision, or {table.ELSEWHERE}'}
  if fields['name'] != 'resnet':
    holds = 'pool=gap gelu layer_norm_epsilon qkv_bias'
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
  names = ('vit', 'deit', 'resnet')
  table.check_writable(fields, _NO_MODEL, names, holds, ways_out)


def _not_held(weights: table.Weights) -> list[str]:
  fields = weights.fields
  if fields['name'] == 'resnet':
    return [
      'The 1e-10 that BiT adds to the variance of kernels: transformers adds '
      '1e-8, which moves logits by about 1e-5, and by more where kernels are '
      'small.'
    ]
  if fields['pool'] == 'cls' and not (
    fields['num_classes'] or fields['representation_size']
  ):
    return [
      'The absence of a pooler: open it with '
      'ViTModel.from_pretrained(..., add_pooling_layer=False), or transformers '
      'adds one with random weights.'
    ]
  return []
