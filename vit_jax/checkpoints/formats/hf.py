"""Directories of transformers: config.json and model.safetensors.

ViT, DeiT, I-JEPA (which is the ViT without a class token, classified by the
mean of its tokens) and BiT; DINOv2 to SigLIP are in `hf_towers`, ImageGPT and
DETR in modules of `PROJECTS`. Every key of a file is one of our names spelt
differently, so that the table has one entry an array. The keys are those
that transformers 5 still writes, whatever its modules are called now.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats import (
  archive,
  hf_config,
  hf_images,
  hf_towers,
  table,
  tensors,
  torch_table,
)
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

_VIT = {
  'cls': 'embeddings.cls_token',
  # A distillation token that no classifier reads.
  'registers': 'embeddings.distillation_token',
  'Transformer/posembed_input/pos_embedding': 'embeddings.position_embeddings',
  'embedding': 'embeddings.patch_embeddings.projection',
  'LayerNorm_0': 'layernorm_before',
  'MultiHeadDotProductAttention_1/query': 'attention.attention.query',
  'MultiHeadDotProductAttention_1/key': 'attention.attention.key',
  'MultiHeadDotProductAttention_1/value': 'attention.attention.value',
  'MultiHeadDotProductAttention_1/out': 'attention.output.dense',
  'LayerNorm_2': 'layernorm_after',
  'MlpBlock_3/Dense_0': 'intermediate.dense',
  'MlpBlock_3/Dense_1': 'output.dense',
  'Transformer/encoder_norm': 'layernorm',
  'pre_logits': 'pooler.dense',
  'head': 'classifier',
}
_DEIT = _VIT | {
  'dist': 'embeddings.distillation_token',
  'head': 'cls_classifier',
  'head_dist': 'distillation_classifier',
}
_BIT = {
  'conv_root': 'embedder.convolution',
  'gn_final': 'norm',
  'head': 'classifier.1',
}


def read(path: str, config: dict[str, Any]) -> table.File:
  """Reads a directory, of which `config` is the config.json."""
  model_type = config['model_type']
  if model_type in PROJECTS:
    return PROJECTS.load(model_type).read(path, config)
  if model_type in tuple(hf_towers.FAMILIES):
    return hf_towers.read(path, config)
  if model_type not in ('vit', 'deit', 'ijepa', 'bit'):
    raise ValueError(
      f'{path}/config.json: model_type is {model_type!r}, and there are models '
      f"here only for 'vit', 'ijepa', 'bit', 'imagegpt', 'detr', "
      f"{', '.join(map(repr, hf_towers.FAMILIES))}, and 'deit'."
    )
  arrays = tensors.read_folder(path)
  bit = model_type == 'bit'
  prefix = f'{model_type}.'
  if not any(key.startswith(prefix) for key in arrays):
    prefix = ''
  lookup = archive.Lookup(
    path,
    arrays,
    lambda key: _prefixed(key, prefix),
    f'transformers {"BiT" if bit else "ViT"}',
  )
  dist = lookup.key_of('embeddings.distillation_token')
  if dist in arrays and not lookup.has('cls_classifier.weight'):
    positions = lookup.key_of('embeddings.position_embeddings')
    _, tokens, _ = lookup.shape('embeddings.position_embeddings', 3)
    if tokens > 1:
      arrays[dist] = arrays[dist] + arrays[positions][:, 1:2]
      arrays[positions] = np.delete(arrays[positions], 1, axis=1)
  fields_of = hf_config.bit_fields if bit else hf_config.vit_fields
  fields = fields_of(config, lookup)
  preprocessing, size, warnings = hf_images.read(
    path, model_type, fields.get('image_size')
  )
  modules = {'resnet': _BIT, 'deit': _DEIT}.get(fields.get('name', ''), _VIT)
  num_classes = lookup.size(_key('head/kernel', modules), 2)
  return table.File(
    path=path,
    arrays=arrays,
    fields=fields | {'num_classes': num_classes, 'image_size': size},
    table=table.renamed(
      lambda name: lookup.key_of(_key(name, modules)), torch_table.layout
    ),
    preprocessing=preprocessing,
    class_names=hf_config.class_names(config, num_classes, path),
    warnings=warnings,
  )


def write(weights: table.Weights, target: str, dtype: str) -> list[str]:
  """Writes a directory that transformers opens."""
  fields = weights.fields
  own = {'igpt': 'imagegpt'}.get(fields['name'], fields['name'])
  if own in PROJECTS:
    return PROJECTS.load(own).write(weights, target, dtype)
  if fields['name'] == 'resnet':
    config = hf_config.bit_config(fields)
    modules, model_type, name = _BIT, 'bit', 'Bit'
  else:
    config = hf_config.vit_config(fields)
    modules, model_type, name = _VIT, 'vit', 'ViT'
    if fields['name'] == 'deit':
      modules, model_type, name = _DEIT, 'deit', 'DeiT'
    elif fields['pool'] != 'cls':
      model_type, name = 'ijepa', 'IJepa'
  num_classes = fields['num_classes']
  task, prefix = 'Model', ''
  if num_classes:
    task, prefix = 'ForImageClassification', f'{model_type}.'
    if fields['name'] == 'deit':
      task += 'WithTeacher'
    config |= hf_config.labels(num_classes, weights.class_names)
    if weights.loss == 'sigmoid':
      config['problem_type'] = 'multi_label_classification'
  config |= {
    'architectures': [name + task],
    'dtype': dtype,
    'model_type': model_type,
  }
  entries = table.renamed(
    lambda name: _prefixed(_key(name, modules), prefix),
    torch_table.layout,
  )
  images = hf_images.config(weights.preprocessing, fields['image_size'])
  tensors.write_folder(
    target,
    {'config.json': config, hf_images.FILE: images},
    table.ours_to_file(weights.arrays, entries),
    dtype,
  )
  return _not_held(weights)


def _prefixed(key: str, prefix: str) -> str:
  return key if 'classifier' in key else prefix + key


def _key(name: str, modules: Mapping[str, str]) -> str:
  """Returns the key of an array of ours, without prefix."""
  return torch_table.key_of(
    name, modules, 'encoder.layer.{}.', 'encoder.stages.{}.layers.{}.'
  )


def _not_held(weights: table.Weights) -> list[str]:
  fields = weights.fields
  lines = []
  if fields['name'] == 'resnet':
    lines.append(
      'The 1e-10 that BiT adds to the variance of kernels: transformers adds '
      '1e-8, which moves logits by about 1e-5, and by more where kernels are '
      'small.'
    )
  elif (
    fields['pool'] == 'cls'
    and not fields['num_classes']
    and not fields['representation_size']
  ):
    lines.append(
      'The absence of a pooler: open it with '
      'ViTModel.from_pretrained(..., add_pooling_layer=False), or transformers '
      'adds one with random weights.'
    )
  return lines


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
  if config.model_type in hf_towers.FAMILIES:
    ignored = hf_towers.FAMILIES[config.model_type].ignored
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
