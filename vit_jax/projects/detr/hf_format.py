"""Read and write DETR directories of Hugging Face's transformers.

The arrays of timm's ResNet have torchvision's names. The panoptic head has the
names of the original code. All other arrays have transformers' names.
"""

import os
import re
from collections.abc import Callable
from typing import Any

from vit_jax.checkpoints.formats import (
  archive,
  hf_families,
  image_configs,
  table,
  tensors,
  torch_vit,
  torchvision,
)
from vit_jax.checkpoints.formats.json_config import (
  JsonConfig,
  only,
  without_nulls,
)
from vit_jax.checkpoints.formats.table import Entry, Shapes
from vit_jax.checkpoints.formats.torchvision import Rules
from vit_jax.models.variants import STAGES

# Namings of arrays: DETR's original code, transformers with timm's ResNet, and
# transformers with its own ResNet.
ORIGINAL, TIMM, OWN = 'original', 'timm', 'transformers'

_LEAVES = torchvision.LEAVES | {'query_embed': '.weight'}

_UNITS: Rules = (
  (r'^(conv|bn)_root', r'embedder.embedder.\1'),
  (
    r'block(\d+)/unit(\d+)/',
    lambda m: f'encoder.stages.{int(m[1]) - 1}.layers.{int(m[2]) - 1}.',
  ),
  (r'(conv|bn)(\d)$', lambda m: f'layer.{int(m[2]) - 1}.{m[1]}'),
  (r'(conv|bn)_proj', r'shortcut.\1'),
  ('conv$', 'convolution'),
  ('bn$', 'normalization'),
)
_LAYERS: dict[str, Rules] = {
  ORIGINAL: (
    (r'^(en|de)coder_layer', r'transformer.\1coder.layers.'),
    ('out$', 'out_proj'),
    ('^decoder_norm', 'transformer.decoder.norm'),
  ),
  OWN: (
    (r'^(en|de)coder_layer', r'model.\1coder.layers.'),
    (r'/(q|k|v)(uery|ey|alue)$', r'.\1_proj'),
    ('out$', 'out_proj'),
    ('linear', 'fc'),
    ('multihead_attn', 'encoder_attn'),
    ('norm1$', 'self_attn_layer_norm'),
    (r'(encoder.*)norm2$', r'\1final_layer_norm'),
    ('norm2$', 'encoder_attn_layer_norm'),
    ('norm3$', 'final_layer_norm'),
    ('^decoder_norm', 'model.decoder.layernorm'),
    ('^input_proj', 'model.input_projection'),
    ('^query_embed', 'model.query_position_embeddings'),
    ('^class_embed', 'class_labels_classifier'),
    ('^bbox_embed', 'bbox_predictor'),
  ),
}


def key_of(name: str, naming: str, prefix: str = '') -> str:
  """Returns the file's key for one of our parameter names.

  `naming` is ORIGINAL, TIMM or OWN. All keys start with `prefix`, except the
  keys of the panoptic head.
  """
  module, _, leaf = name.rpartition('/')
  module = module or name
  if module.startswith(('mask_head/', 'bbox_attention/')):
    return module.replace('/', '.') + _LEAVES[leaf]
  if module.startswith('backbone/'):
    rules = _UNITS if naming == OWN else torchvision.RULES
    module = module.removeprefix('backbone/')
    start = 'model.backbone.conv_encoder.model.'
    if naming == ORIGINAL:
      start = 'backbone.0.body.'
  else:
    rules = _LAYERS[ORIGINAL if naming == ORIGINAL else OWN]
    start = ''
  for pattern, to in rules:
    module = re.sub(pattern, to, module)
  module = re.sub(r'layers_(\d)', r'layers.\1', module)
  return prefix + start + module.replace('/', '.') + _LEAVES[leaf]


def table_of(naming: str, prefix: str) -> Callable[[Shapes], list[Entry]]:
  """Returns the function `File.table`; see `key_of` for the arguments."""

  def entries(shapes: Shapes) -> list[Entry]:
    found = []
    for name, shape in shapes.items():
      layout = torch_vit.layout(name, shape)
      module, _, leaf = name.rpartition('/')
      attention, _, projection = module.rpartition('/')
      if naming != ORIGINAL or projection not in torch_vit.QKV:
        found.append(table.one(key_of(name, naming, prefix), name, layout))
      elif projection == 'query':
        # The original code joins queries, keys and values in one array.
        key = key_of(f'{attention}/in_proj/{leaf}', naming, prefix)
        key = key.replace('in_proj.', 'in_proj_')
        names = tuple(f'{attention}/{x}/{leaf}' for x in torch_vit.QKV)
        found.append(table.joined(key, names, layout))
    return found

  return entries


# Mean and std of ImageNet, and the image size (H, W) of the published models.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = (800, 1333)
HEADS = 8
MASKS = 'mask_head/lay1/kernel'
# Values of config.json that are the same for every `DETR`.
_CONFIG = {
  'activation_function': 'relu',
  'num_channels': 3,
  'position_embedding_type': 'sine',
}
_RESNET = {
  'downsample_in_bottleneck': False,
  'downsample_in_first_stage': False,
  'hidden_act': 'relu',
  'layer_type': 'bottleneck',
  'model_type': 'resnet',
  'num_channels': 3,
}


def read(path: str, config: dict[str, Any]) -> table.File:
  """Reads a directory; `config` is the content of config.json. See `table`."""
  arrays = tensors.read_folder(path)
  naming = OWN if any('.embedder.embedder.' in x for x in arrays) else TIMM
  lookup, prefix = lookup_of(path, arrays, naming)
  stated = JsonConfig(
    {'encoder_attention_heads': HEADS, 'decoder_attention_heads': HEADS}
    | config,
    f'{path}/config.json',
  )
  heads = stated.positive('encoder_attention_heads')
  stated.fields(only(_CONFIG | {'decoder_attention_heads': heads}), {}, 'detr')
  if naming == OWN:
    stated.part('backbone_config').fields(only(_RESNET), {}, 'detr')
  fields = fields_of(lookup, naming) | {
    'heads': heads,
    'dilation': config.get('dilation') is True,
  }
  preprocessing, size = _images(path)
  return table.File(
    path=path,
    arrays=lookup.arrays,
    fields=fields | {'image_size': size},
    table=table_of(naming, prefix),
    preprocessing=preprocessing,
    class_names=hf_families.class_names(config, fields['num_classes'], path),
  )


def lookup_of(
  path: str, arrays: table.Flat, naming: str
) -> tuple[archive.Lookup, str]:
  """Returns a lookup of arrays by parameter name, and `key_of`'s prefix."""
  prefix = 'detr.' if any(key.startswith('detr.') for key in arrays) else ''
  lookup = archive.Lookup(
    path, arrays, lambda name: key_of(name, naming, prefix), 'DETR'
  )
  return lookup, prefix


def fields_of(lookup: archive.Lookup, naming: str) -> dict[str, Any]:
  """Infers model fields from the names and shapes of the arrays.

  Raises ValueError as `Lookup.shape` does.
  """

  def start(name: str, end: str) -> str:
    return lookup.key_of(name).partition(end)[0] + end

  def layers(part: str) -> int:
    name = f'{part}_layer0/norm1/scale'
    return sum(lookup.count(start(name, '.layers.'), r'(\d+)\.'))

  end, unit = '.layer', r'(\d{1,6})\.(\d+)\.'
  if naming == OWN:
    end, unit = '.stages.', r'(\d{1,6})\.layers\.(\d+)\.'
  first = 'backbone/block1/unit1/conv1/kernel'
  queries, width = lookup.shape('query_embed', 2)
  return {
    'name': 'detr',
    'num_classes': lookup.shape('class_embed/kernel', 2)[0] - 1,
    'num_queries': queries,
    'width': width,
    'mlp_dim': lookup.shape('encoder_layer0/linear1/kernel', 2)[0],
    'encoder_layers': layers('encoder'),
    'decoder_layers': layers('decoder'),
    'masks': lookup.has(MASKS),
    'backbone_layers': lookup.count(start(first, end), unit),
    'backbone_width': lookup.shape('backbone/conv_root/kernel', 4)[0],
  }


def _images(path: str) -> tuple[table.Preprocessing, tuple[int, int]]:
  """Returns the preprocessing and the image size (H, W) of a directory."""
  place = os.path.join(path, image_configs.FILE)
  values = tensors.read_json(place) if os.path.exists(place) else {}
  defaults = {'image_mean': [*MEAN], 'image_std': [*STD], 'size': [*SIZE]}
  file = JsonConfig(defaults | without_nulls(values), place)
  size = file['size']
  edges = 'shortest_edge', 'longest_edge'
  if isinstance(size, dict) and size.keys() == {*edges}:
    size = [size[x] for x in edges]
  elif isinstance(size, int):
    size = [size, file.get('max_size', SIZE[1])]
  return (
    file.preprocessing(mean=file.rgb('image_mean'), std=file.rgb('image_std')),
    file.sides('size', size),
  )


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a directory that transformers opens; see `table`."""
  fields = weights.fields
  table.check_writable(
    fields,
    'transformers has no DETR with',
    ('detr',),
    'num_queries width heads mlp_dim encoder_layers decoder_layers masks '
    'backbone_layers backbone_width dilation',
  )
  if not fields['num_classes']:
    raise ValueError(
      'transformers cannot store a DETR without a class head. Give a '
      'checkpoint with a class head, and --head=keep.'
    )
  naming = TIMM if fields['dilation'] else OWN
  task = 'Segmentation' if fields['masks'] else 'ObjectDetection'
  config = _CONFIG | {
    'architectures': [f'DetrFor{task}'],
    'backbone_config': _backbone(fields),
    'd_model': fields['width'],
    'decoder_attention_heads': fields['heads'],
    'decoder_ffn_dim': fields['mlp_dim'],
    'decoder_layers': fields['decoder_layers'],
    'dilation': fields['dilation'],
    'dropout': fields['dropout'],
    'dtype': dtype,
    'encoder_attention_heads': fields['heads'],
    'encoder_ffn_dim': fields['mlp_dim'],
    'encoder_layers': fields['encoder_layers'],
    'model_type': 'detr',
    'num_queries': fields['num_queries'],
    **hf_families.labels(fields['num_classes'], weights.class_names),
  }
  H, W = fields['image_size']
  short, long = sorted((H, W))
  p = weights.preprocessing
  images = {
    'do_normalize': True,
    'do_pad': True,
    'do_rescale': True,
    'do_resize': True,
    'format': f'coco_{"panoptic" if fields["masks"] else "detection"}',
    'image_mean': list(p.mean),
    'image_processor_type': 'DetrImageProcessor',
    'image_std': list(p.std),
    'size': {'shortest_edge': short, 'longest_edge': long},
  }
  tensors.write_folder(
    target,
    {'config.json': config, image_configs.FILE: images},
    table.ours_to_file(
      weights.arrays,
      table_of(naming, 'detr.' if fields['masks'] else ''),
    ),
    dtype,
  )
  if H <= W:
    return []
  return [
    'transformers stores only the shorter and the longer side of images. If '
    f'you open the written directory, its image size is {short}x{long} instead '
    f'of {H}x{W}.'
  ]


def _backbone(fields: dict[str, Any]) -> dict[str, Any]:
  """Returns `backbone_config`. Only dilated models use timm's ResNet."""
  layers, width = tuple(fields['backbone_layers']), fields['backbone_width']
  stages = range(1, len(layers) + 1)
  if not fields['dilation']:
    return _RESNET | {
      'depths': list(layers),
      'embedding_size': width,
      'hidden_sizes': [2 * width * 2**i for i in stages],
      'out_features': [f'stage{i}' for i in stages],
    }
  names = {x: f'resnet{n}' for n, x in STAGES.items() if n != 200}
  if layers not in names or width != 64:
    raise ValueError(
      f'transformers has no dilated DETR with backbone_layers {layers} and '
      f"backbone_width {width}. Dilated models use timm's ResNet-26, 50, 101 "
      'or 152 of width 64.'
    )
  return {
    'backbone': names[layers],
    'features_only': True,
    'model_type': 'timm_backbone',
    'num_channels': 3,
    'out_indices': list(stages),
    'output_stride': 16,
    'use_pretrained_backbone': False,
  }
