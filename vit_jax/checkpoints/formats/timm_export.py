"""The config.json that timm builds our models from."""

from typing import Any

from vit_jax.checkpoints.formats.table import Weights
from vit_jax.checkpoints.formats.timm_config import EPSILON, GELUS, POOLS, SIZES
from vit_jax.checkpoints.formats.timm_table import BACKBONE

_PATCHES = {
  'tiny': (16,),
  'small': (8, 16, 32),
  'base': (8, 16, 32),
  'large': (14, 16, 32),
  'huge': (14,),
  'giant': (14,),
  'gigantic': (14,),
}
_HYBRIDS = {
  (): 'vit_tiny_r_s16_p8_224',
  (2, 2, 2, 2): 'vit_small_r26_s32_224',
  (3, 4, 9): 'vit_base_r50_s16_224',
  (3, 4, 6, 3): 'vit_large_r50_s32_224',
}
# By units of the stages: depth and the width factors that timm has.
_BITS = {
  (3, 4, 6, 3): (50, (1, 3)),
  (3, 4, 23, 3): (101, (1, 3)),
  (3, 8, 36, 3): (152, (2, 4)),
}

_ELSEWHERE = '--to=orbax, onnx or stablehlo.'


def config(weights: Weights, images: dict[str, Any]) -> dict[str, Any]:
  """Returns a config.json.

  Args:
    weights: of a model that timm has.
    images: the part of the pretrained_cfg that is not decided here.

  Raises:
    ValueError: if timm has no such model.
  """
  fields = weights.fields
  is_vit = fields['name'] == 'vit'
  conv = 'stem.conv'
  if is_vit:
    conv = 'patch_embed.proj'
    if fields['stem_width']:
      stem = 'stem.' if fields['stem_layers'] else ''
      conv = f'{BACKBONE}{stem}conv'
  num_classes = {'num_classes': fields['num_classes']}
  pretrained: dict[str, Any] = (
    images
    | num_classes
    | {
      'classifier': 'head' if is_vit else 'head.fc',
      'first_conv': conv,
      'fixed_input_size': is_vit,
    }
  )
  if weights.class_names and fields['num_classes']:
    pretrained['label_names'] = list(weights.class_names)
  architecture = _vit_config(fields) if is_vit else _bit_config(fields)
  return architecture | num_classes | {'pretrained_cfg': pretrained}


def _vit_config(fields: dict[str, Any]) -> dict[str, Any]:
  """Returns the architecture of a ViT and its arguments.

  Raises:
    ValueError: if timm has no such model.
  """
  _check_writable(
    fields,
    'representation_size',
    0,
    'use --head=drop to leave out all of the head, or --to=npz.',
  )
  _check_writable(
    fields, 'layer_norm_epsilon', EPSILON, f'use --to=hf, or {_ELSEWHERE}'
  )
  for field, value in {
    'posemb': 'learned1d',
    'posemb_at': 'input',
    'axial': False,
  }.items():
    _check_writable(fields, field, value, f'use {_ELSEWHERE}')
  width, mlp_dim, size = (
    fields['width'],
    fields['mlp_dim'],
    fields['image_size'],
  )
  ratio = mlp_dim / width
  return {
    'architecture': _vit_architecture(fields),
    'num_features': width,
    'global_pool': _invert(POOLS, fields['pool']),
    'model_args': {
      'act_layer': _invert(GELUS, fields['gelu']),
      'class_token': fields['pool'] == 'cls',
      'depth': fields['depth'],
      'embed_dim': width,
      # timm's default for 'avg' is a LayerNorm after the mean.
      'fc_norm': False,
      'global_pool': _invert(POOLS, fields['pool']),
      'img_size': size[0] if size[0] == size[1] else list(size),
      # timm rounds the product down.
      'mlp_ratio': (
        ratio if int(width * ratio) == mlp_dim else (mlp_dim + 0.5) / width
      ),
      'num_heads': fields['heads'],
      'patch_size': fields['patch_size'],
    },
  }


def _bit_config(fields: dict[str, Any]) -> dict[str, Any]:
  """Returns the architecture of a ResNet and its arguments.

  Raises:
    ValueError: if timm has no such model.
  """
  _check_writable(fields, 'version', 2, f'use {_ELSEWHERE}')
  _check_writable(fields, 'axial', False, f'use {_ELSEWHERE}')
  layers, width = tuple(fields['layers']), fields['width']
  if layers not in _BITS:
    raise ValueError(
      f'timm has no BiT with layers {layers}, only '
      f'{", ".join(map(str, _BITS))}: use --to=npz or hf, or {_ELSEWHERE}'
    )
  depth, factors = _BITS[layers]
  factor = width // 64 if width in [64 * x for x in factors] else factors[0]
  args: dict[str, Any] = {}
  if width != 64 * factor:
    # timm multiplies them by the factor; widths are multiples of 32.
    args = {
      'channels': [4 * width * 2**i // factor for i in range(len(layers))],
      'stem_chs': width // factor,
    }
  return {
    'architecture': f'resnetv2_{depth}x{factor}_bit',
    'num_features': 4 * width * 2 ** (len(layers) - 1),
    'global_pool': 'avg',
    'model_args': args,
  }


def _vit_architecture(fields: dict[str, Any]) -> str:
  """Returns the nearest name in timm's registry.

  Its arguments can be overridden, and only a hybrid's stem cannot.
  """
  if fields['stem_width']:
    stages = tuple(fields['stem_layers'])
    _check_writable(fields, 'stem_width', 64, f'use {_ELSEWHERE}')
    if stages not in _HYBRIDS:
      raise ValueError(
        f'timm has no hybrid with stem_layers {stages}, only '
        f'{", ".join(map(str, _HYBRIDS))}: use --to=npz, or {_ELSEWHERE}'
      )
    return _HYBRIDS[stages]
  patch = fields['patch_size']
  for name, size in SIZES.items():
    if fields['width'] == size.width and patch in _PATCHES[name]:
      return f'vit_{name}_patch{patch}_224'
  return 'vit_base_patch16_224'


def _check_writable(
  fields: dict[str, Any], field: str, value: Any, way_out: str
) -> None:
  if fields[field] != value:
    raise ValueError(
      f'timm has no model with {field} {fields[field]!r}, only {value!r}: '
      f'{way_out}'
    )


def _invert(names: dict[str, str], value: str) -> str:
  return next(theirs for theirs, ours in names.items() if ours == value)
