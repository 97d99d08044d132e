"""Directories of transformers: config.json and model.safetensors.

Read are ViT, DeiT, I-JEPA (the ViT without a class token, classified by the
mean of its tokens), BiT, DINOv2 (with registers, too), DINOv3, and the image
towers of CLIP, SigLIP and SigLIP 2, alone or beside their text towers. Written
are the first four. SigLIP 2 of a fixed resolution is saved as SigLIP; the
others take images of any aspect ratio there, and here the square that their
position embeddings are for. ImageGPT and DETR are in modules of `PROJECTS`.
Keys are those that transformers 5 still writes, whatever its modules are called
now.
"""

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats import (
  archive,
  hf_images,
  table,
  tensors,
  torch_table,
)
from vit_jax.checkpoints.formats.hf_families import (
  CLIP,
  DEIT,
  FAMILIES,
  POOLING,
  POSITIONS,
  QKV,
  SIGLIP,
  Family,
  class_names,
  labels,
)
from vit_jax.checkpoints.formats.stated import Stated, written
from vit_jax.register import Register

# By `model_type`: modules with `read`, `write` and `open_peer` of their own. A
# model of ours is written by the module of its name.
PROJECTS = Register(
  'model_type',
  {
    'imagegpt': 'vit_jax.projects.igpt.hf_format',
    'detr': 'vit_jax.projects.detr.hf_format',
  },
)
DTYPES: tuple[str, ...] = ('float32', 'bfloat16', 'float16')

_UNIT = 'encoder.stages.{}.layers.{}.'
_LAYER = 'Transformer/encoderblock_0/'
_NO_MODEL = 'vit_jax writes no ViT, DeiT, I-JEPA or BiT of transformers with'


def read(path: str, config: dict[str, Any]) -> table.File:
  """Reads a directory, of which `config` is the config.json.

  CLIP's projection is the head, without a bias. A classifier of SigLIP reads
  the mean of the tokens, which is all that is kept of its pooling then.

  Raises:
    ValueError: as all formats.
  """
  model_type = config['model_type']
  if model_type in PROJECTS:
    return PROJECTS.load(model_type).read(path, config)
  if model_type not in tuple(FAMILIES):
    raise ValueError(
      f'{path}/config.json: model_type is {model_type!r}, which is not read. '
      f'Read are {", ".join([*FAMILIES, *PROJECTS])}.'
    )
  family = FAMILIES[model_type]
  arrays = {
    key: x
    for key, x in tensors.read_folder(path, family.ignored).items()
    # Registers that are switched off are an empty array.
    if x.size or not key.endswith('register_tokens')
  }
  if 'cls_classifier.weight' in arrays:
    family = DEIT
  classifies = any('classifier.' in key for key in arrays)
  if classifies and family is SIGLIP:
    arrays = {k: x for k, x in arrays.items() if '.head.' not in k}
  elif classifies and 'classifier' not in family.modules.get('head', ''):
    raise ValueError(
      f"{path} is a {model_type} with 'classifier.weight', and models here "
      'lack what its classifier reads. Save its body alone: '
      'AutoModel.from_pretrained(...).save_pretrained(...).'
    )
  prefixes = ('vision_model.', f'{model_type}.', 'model.')
  fitting = (p for p in prefixes if any(k.startswith(p) for k in arrays))
  prefix = next(fitting, '')
  lookup = archive.Lookup(
    path,
    arrays,
    lambda key: key if key in arrays else _prefixed(key, prefix),
    f'transformers {model_type}',
  )
  of_images = config.get('vision_config') or config
  stated = Stated(of_images, f'{path}/config.json')
  if model_type.startswith('siglip2'):
    _unfold_patches(lookup, stated)
  _complete(lookup)
  fields_of = _bit_fields if model_type == 'bit' else _vit_fields
  fields = fields_of(lookup, family, stated, model_type)
  preprocessing, size, warnings = hf_images.read(
    path, model_type, fields.get('image_size')
  )
  return table.File(
    path=path,
    arrays=arrays,
    fields=fields | {'image_size': size},
    table=lambda shapes: _entries(shapes, lookup.key_of, family, arrays),
    preprocessing=preprocessing,
    class_names=(
      class_names(config, fields['num_classes'], path) if classifies else ()
    ),
    warnings=(*stated.warnings, *warnings),
  )


def _prefixed(key: str, prefix: str) -> str:
  return key if 'classifier' in key else prefix + key


def _complete(lookup: archive.Lookup) -> None:
  """Adds biases that are zero, and joins what is one array of ours."""
  arrays = lookup.arrays
  # All of a block's queries, keys and values have a bias, or none.
  for key, x in list(arrays.items()):
    sibling = key.replace('.k_proj.', '.q_proj.').replace('weight', 'bias')
    if key.endswith(('patch_embedding.weight', 'visual_projection.weight')) or (
      key.endswith('.k_proj.weight') and sibling in arrays
    ):
      arrays.setdefault(
        key.replace('weight', 'bias'), np.zeros(len(x), np.float32)
      )
  dist, positions = (
    lookup.key_of(f'embeddings.{name}')
    for name in ('distillation_token', 'position_embeddings')
  )
  if dist in arrays and not lookup.has('cls_classifier.weight'):
    # A register, which has no position here.
    if lookup.shape('embeddings.position_embeddings', 3)[1] > 1:
      arrays[dist] = arrays[dist] + arrays[positions][:, 1:2]
      arrays[positions] = np.delete(arrays[positions], 1, axis=1)


def _vit_fields(
  lookup: archive.Lookup, family: Family, stated: Stated, model_type: str
) -> dict[str, Any]:
  def key(name: str) -> str:
    return _key(name, family)

  def has(name: str) -> bool:
    return name in family.modules and lookup.has(key(name))

  def size(name: str, ndim: int = 2, axis: int = 0) -> int:
    module = name.removesuffix('/kernel')
    return lookup.size(key(name), ndim, axis) if module in family.modules else 0

  width, channels, patch, _ = lookup.shape(key('embedding/kernel'), 4)
  gated = [
    lookup.has(family.layer.format(0) + x)
    for x in ('mlp.weights_in.weight', 'mlp.gate_proj.weight')
  ]
  down = key(f'{_LAYER}MlpBlock_3/Dense_1/kernel')
  if not lookup.has(down):
    down = down.replace('fc2', 'weights_out')
  # The gated MLP of DINOv2 is SwiGLU whatever its configuration says.
  if gated[1] and stated.get('hidden_act', 'gelu') != 'silu':
    stated.refuse('hidden_act', ', and a gated MLP here has silu.')
  if any(gated):
    stated['hidden_act'] = 'gelu'
  pools = {'MAPHead_0/probe': 'map', 'cls': 'cls'}
  classifies = any('classifier.' in key for key in lookup.arrays)
  fields: dict[str, Any] = {
    'name': 'deit' if family is DEIT else 'vit',
    'patch_size': patch,
    'width': width,
    'depth': sum(
      lookup.count(lookup.key_of(family.layer.split('{')[0]), r'(\d{1,6})\.')
    ),
    'mlp_dim': lookup.shape(down, 2)[1],
    'pool': next((pools[x] for x in pools if has(x)), 'gap'),
    'posemb': 'learned1d' if POSITIONS in family.modules else 'none',
    'registers': size('registers', 3, axis=1),
    'pre_norm': 'Transformer/pre_norm' in family.modules,
    'layer_scale': 1e-4 * ('LayerScale_0' in family.modules),
    'swiglu': any(gated),
    'qkv_bias': lookup.has(
      key(f'{_LAYER}MultiHeadDotProductAttention_1/query/bias')
    ),
    # A classifier sees the class token itself, and no file has both.
    'representation_size': 0 if classifies else size('pre_logits/kernel'),
    'num_classes': size('head/kernel'),
  }
  fields |= stated.fields(
    family.config, fields | {'channels': channels}, model_type
  )
  return fields | {'image_size': stated.tiled(fields['image_size'], patch)}


def _bit_fields(
  lookup: archive.Lookup, family: Family, stated: Stated, model_type: str
) -> dict[str, Any]:
  width, channels, *_ = lookup.shape(_key('conv_root/kernel', family), 4)
  layers = lookup.count(
    lookup.key_of('encoder.stages.'), r'(\d{1,6})\.layers\.(\d+)\.'
  )
  sizes = _bit_sizes(layers, width)
  stated.setdefault('output_stride', 32)
  # A greater one changes nothing.
  stride = max(sizes['stride'], stated.positive('output_stride'))
  found = sizes | {'stride': stride, 'width': width, 'channels': channels}
  stated.fields(family.config, found, model_type)
  return {
    'name': 'resnet',
    'version': 2,
    'layers': layers,
    'width': width,
    'num_classes': lookup.size(_key('head/kernel', family), 2),
  }


def _bit_sizes(layers: tuple[int, ...], width: int) -> dict[str, Any]:
  stages = len(layers)
  return {
    'depths': list(layers),
    'hidden_sizes': [4 * width * 2**i for i in range(stages)],
    'stride': 2 ** (stages + 1),
  }


def _unfold_patches(lookup: archive.Lookup, stated: Stated) -> None:
  """Gives SigLIP 2's patches two dimensions, and its images a size."""
  stated.setdefault('patch_size', 16)
  patch = stated.positive('patch_size')
  key = lookup.key_of(_key('embedding/kernel', SIGLIP))
  _, columns = lookup.shape(key, 2)
  if columns != 3 * patch**2:
    stated.refuse('patch_size', f', and {key} has {columns} numbers a patch.')
  # Theirs has the channels of a pixel side by side.
  lookup.arrays[key] = (
    lookup.arrays[key].reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2)
  )
  count, _ = lookup.shape(_key(POSITIONS, SIGLIP), 2)
  if stated.get('num_patches', count) != count:
    stated.refuse('num_patches', f', and the arrays have {count}.')
  stated['image_size'] = patch * math.isqrt(count)


def _key(name: str, family: Family) -> str:
  """Returns the key of an array of ours, without prefix."""
  key = torch_table.key_of(name, family.modules, family.layer, _UNIT)
  return re.sub(r'(layer_scale[12])\.weight$', r'\1.lambda1', key)


def _entries(
  shapes: table.Shapes,
  key_of: Callable[[str], str],
  family: Family,
  arrays: table.Flat,
) -> list[table.Entry]:
  """Returns the table; `arrays` of a file, if any, decide between names."""
  found = []
  for name, shape in shapes.items():
    layout = torch_table.layout(name, shape)
    if name.startswith(f'{POOLING}/') and '/out/' not in name:
      part, leaf = name.split('/')[-2:]
      if part == 'query':
        theirs = {'kernel': 'weight', 'bias': 'bias'}[leaf]
        key = key_of(f'head.attention.in_proj_{theirs}')
        names = tuple(f'{POOLING}/{x}/{leaf}' for x in QKV)
        found.append(table.joined(key, names, layout))
      continue
    key = key_of(_key(name, family))
    gate = key.replace('up_proj', 'gate_proj')
    packed = key.replace('.fc1.', '.weights_in.').replace(
      '.fc2.', '.weights_out.'
    )
    if gate != key and gate in arrays:
      found.append(_gated(gate, key, name, layout))
      continue
    if packed in arrays:
      key = packed
    if name == 'cls' and family is CLIP:
      layout = lambda x: x[0, 0], lambda x: x[None, None]
    elif name == POSITIONS and key.endswith('.weight'):
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
  family = DEIT if model_type == 'deit' else FAMILIES[model_type]
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
  arrays = table.ours_to_file(
    weights.arrays,
    lambda shapes: _entries(
      shapes, lambda key: _prefixed(key, prefix), family, {}
    ),
  )
  images = hf_images.config(weights.preprocessing, fields['image_size'])
  configs = {'config.json': config, hf_images.FILE: images}
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


def open_peer(path: str) -> table.Peer:
  """Opens a directory with transformers itself, in float32.

  Without a classifier its outputs are CLIP's projection, the pooler's, or else
  the class token or the mean of the tokens.

  Raises:
    ImportError: if transformers or what it needs is not installed.
    ValueError: if arrays are missing, left over or of another shape, or the
      model takes no images.
  """
  try:
    return _open_peer(path)
  except ImportError as e:
    raise ImportError(
      'transformers cannot run: pip install transformers torch torchvision '
      f'pillow. ({e})'
    ) from e


def _open_peer(path: str) -> table.Peer:
  import torch
  import transformers

  model_type = tensors.read_json(f'{path}/config.json')['model_type']
  with _quiet(transformers.utils.logging):
    if model_type in PROJECTS:
      return PROJECTS.load(model_type).open_peer(path)
    model, pooled = _load_model(path)
    processor: Any
    if any(
      os.path.exists(os.path.join(path, name))
      for name in (hf_images.FILE, hf_images.BOTH)
    ):
      processor = transformers.AutoImageProcessor.from_pretrained(path)
    else:
      p, *_ = hf_images.read(path, model_type, (224, 224))
      processor = transformers.ViTImageProcessor(
        image_mean=list(p.mean), image_std=list(p.std)
      )

  def run(images_BHWC: np.ndarray) -> np.ndarray:
    pixels = processor(
      list(images_BHWC),
      do_resize=False,
      do_center_crop=False,
      input_data_format='channels_last',
      return_tensors='pt',
    )
    with torch.inference_mode():
      outputs = model(**pixels)
    if 'logits' in outputs:
      return outputs.logits.numpy()
    tokens = outputs.last_hidden_state
    if 'image_embeds' in outputs:
      return outputs.image_embeds.numpy()
    if model.config.model_type == 'ijepa':
      return tokens.mean(1).numpy()
    if pooled:
      return outputs.pooler_output.flatten(1).numpy()
    return tokens[:, 0].numpy()

  if model.config.model_type == 'bit':
    size = processor.crop_size if processor.do_center_crop else processor.size
    height, width = (
      size.get(side) or size['shortest_edge'] for side in ('height', 'width')
    )
  else:
    of_images = getattr(model.config, 'vision_config', model.config)
    # One number stands for both.
    height, width = np.broadcast_to(of_images.image_size, 2).tolist()
  return table.Peer(
    f'transformers {transformers.__version__}', (height, width), run
  )


def _load_model(path: str) -> tuple[Any, bool]:
  """Returns a model of transformers, and whether the file has its pooler."""
  import torch
  import transformers

  config = transformers.AutoConfig.from_pretrained(path)
  name = (config.architectures or ('',))[0]
  if config.model_type.startswith('siglip2'):
    raise ValueError(
      f'{path} is a {name}, to which transformers gives patches of images of '
      'any shape instead of images: nothing can be compared.'
    )
  auto: Any = transformers.AutoModelForImageClassification
  options = {}
  if name in ('CLIPModel', 'CLIPVisionModelWithProjection'):
    auto = transformers.CLIPVisionModelWithProjection
    # Of the configuration of both towers, not of that of images.
    options['projection_dim'] = config.projection_dim
  elif name == 'SiglipModel':
    auto = transformers.SiglipVisionModel
  elif name.endswith('Model'):
    auto = transformers.AutoModel
  elif name.endswith('WithTeacher'):
    auto = transformers.DeiTForImageClassificationWithTeacher
  model, report = auto.from_pretrained(
    path,
    dtype=torch.float32,
    # Else they would be in a report that nobody sees.
    ignore_mismatched_sizes=True,
    output_loading_info=True,
    **options,
  )
  # The one thing that transformers makes up without being told to.
  pooler = {'pooler.dense.weight', 'pooler.dense.bias'}
  pooled = not pooler <= set(report['missing_keys'])
  report['missing_keys'] = set(report['missing_keys']) - pooler
  ignored = FAMILIES[config.model_type].ignored
  report['unexpected_keys'] = {
    key for key in report['unexpected_keys'] if not re.search(ignored, key)
  }
  for what, keys in report.items():
    if keys:
      raise ValueError(f'{path}: transformers reports {what}: {keys}.')
  return model.eval(), pooled


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
  """Keeps transformers from reporting what is checked here."""
  verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
  logging.set_verbosity_error()
  logging.disable_progress_bar()
  try:
    yield
  finally:
    logging.set_verbosity(verbosity)
    if bars:
      logging.enable_progress_bar()
