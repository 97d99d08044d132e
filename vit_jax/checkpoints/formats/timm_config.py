"""Reads and writes the config.json of timm's models.

timm's architectures have defaults that config.json does not repeat. This module
knows the defaults of plain ViTs, hybrids and DeiT. It reads the defaults of
other ViTs from a model that timm builds. ResNets need no defaults.
"""

import re
from typing import Any

from vit_jax.checkpoints.formats import image_configs, table, torch_vit
from vit_jax.checkpoints.formats.json_config import (
  LARGE,
  POSITIVE,
  SIDES,
  SQUARE,
  JsonConfig,
  Key,
  Kind,
  choices,
  only,
  to_config,
)
from vit_jax.models import variants

# Our size and timm's patch sizes, by timm's name of the size.
_SIZES = {
  'tiny': (variants.SIZES['ti'], (16,)),
  'small': (variants.SIZES['s'], (8, 16, 32)),
  'base': (variants.SIZES['b'], (8, 16, 32)),
  'large': (variants.SIZES['l'], (14, 16, 32)),
  'huge': (variants.SIZES['h'], (14,)),
  'giant': (variants.SIZES['g'], (14,)),
  'gigantic': (variants.SIZES['G'], (14,)),
}
_HYBRIDS = {
  (): 'vit_tiny_r_s16_p8_224',
  (2, 2, 2, 2): 'vit_small_r26_s32_224',
  (3, 4, 9): 'vit_base_r50_s16_224',
  (3, 4, 6, 3): 'vit_large_r50_s32_224',
}
# Depth and width factors of timm's BiTs, by the number of units in each stage.
_BITS = {
  (3, 4, 6, 3): (50, (1, 3)),
  (3, 4, 23, 3): (101, (1, 3)),
  (3, 8, 36, 3): (152, (2, 4)),
}
_KNOWN = re.compile(
  rf'(?:vit|deit)_({"|".join(_SIZES)})_(?:distilled_)?'
  r'(?:patch\d+|r_s16_p8|r26_s32|r50_s16|r50_s32)_\d+'
)
# Maps PyTorch's `repr` of activations to our names.
_ACTIVATIONS = {
  'GELU()': 'exact',
  "GELU(approximate='none')": 'exact',
  'GELUTanh()': 'tanh',
  "GELU(approximate='tanh')": 'tanh',
  'QuickGELU()': 'quick',
}
# The facts that are assumed without a configuration; see `architecture_facts`.
_UNKNOWN: dict[str, Any] = {
  'width': None,
  'heads': None,
  'pool': None,
  'gelu': 'exact',
  'layer_norm_epsilon': 1e-6,
  'rope': 0.0,
  'rope_side': 0,
  'rotation': None,
}
_POOL = choices({'token': 'cls', 'avg': 'gap', 'map': 'map'})
_NORM = Kind(
  # timm ignores case and `_`. The suffix fp32 only sets a dtype.
  lambda config, key: re.sub('_|norm|fp32', '', str(config[key]).lower()),
  lambda norm: f'{norm}norm',
)


def _free(keys: str) -> dict[str, Key]:
  """Returns a `Key()` for each key that is unused or read elsewhere."""
  return dict.fromkeys(keys.split(), Key())


# Keys of model_args for a ViT. Any other key raises an error.
_VIT = {
  'act_layer': Key(
    'gelu',
    choices({'gelu_tanh': 'tanh', 'gelu': 'exact', 'quick_gelu': 'quick'}),
  ),
  'class_token': Key('class_token'),
  'depth': Key('depth'),
  'embed_dim': Key('width'),
  'in_chans': Key('channels'),
  'init_values': Key('layer_scale', LARGE),
  'mlp_ratio': Key('mlp_ratio'),
  'no_embed_class': Key('grid_only'),
  'norm_layer': Key('norm', _NORM),
  'num_heads': Key('heads', POSITIVE),
  'patch_size': Key('patch_size', SQUARE),
  'pos_embed': Key(
    'posemb', choices({'learn': 'learned1d', 'none': 'none', '': 'none'})
  ),
  'pre_norm': Key('pre_norm'),
  'qk_norm': Key('qk_norm'),
  'qkv_bias': Key('qkv_bias'),
  'reg_tokens': Key('registers'),
  'scale_attn_norm': Key('attention_norm'),
  'scale_mlp_norm': Key('mlp_norm'),
  **only({'final_norm': True, 'pool_include_prefix': False, 'proj_bias': True}),
  **_free(
    'attn_drop_rate drop_path_rate drop_rate dynamic_img_pad dynamic_img_size '
    'fc_norm fix_init global_pool img_size num_classes patch_drop_rate '
    'pos_drop_rate proj_drop_rate strict_img_size weight_init'
  ),
}
# Keys of model_args for a ResNet.
_RESNET_ARGS = only({'global_pool': 'avg', 'in_chans': 3}) | _free(
  'channels drop_path_rate drop_rate num_classes stem_chs zero_init_last'
)
# Defaults of timm, which config.json need not repeat.
_USUAL = {
  'init_values': 0.0,
  'norm_layer': 'layernorm',
  'pos_embed': 'learn',
  'pre_norm': False,
  'qk_norm': False,
  'qkv_bias': True,
  'reg_tokens': 0,
  'scale_attn_norm': False,
  'scale_mlp_norm': False,
}
BIT = 'resnetv2_.*_bit.*'
# ResNets in current and older versions of timm. Other ResNets may have the same
# arrays but differ in layers without arrays, such as pooling or blurring.
RESNET = r'(tv_|gluon_|ssl_|swsl_)?resnet(26|50|101|152|200)(_v1b)?'

_CLASSIFIERS: dict[str, Any] = {
  'vit': 'head',
  'deit': ['head', 'head_dist'],
  'resnet': 'head.fc',
}
_DEIT = 'gelu norm layer_scale qkv_bias qk_norm attention_norm mlp_norm '
_HOLDS = {
  'vit': _DEIT
  + 'pool=gap pool=map registers pre_norm norm_pooled stem_width=64 '
  'stem_layers',
  'deit': _DEIT,
  'resnet': 'width',
}


def read(
  config: JsonConfig, arrays: dict[str, Any], known: dict[str, Any]
) -> dict[str, Any]:
  """Returns the fields of a ViT that its arrays do not determine.

  `arrays` has the values that the file's arrays determine. Its keys are our
  fields or timm's arguments. `known` is the result of `architecture_facts`.
  Raises ValueError if the model is not supported, or the configuration
  contradicts the arrays.
  """
  args = config.part('model_args')
  width, mlp_dim = arrays['width'], arrays['mlp_dim']
  ratio = args.get('mlp_ratio')
  fits = isinstance(ratio, int | float) and abs(ratio * width - mlp_dim) < 1
  arrays = arrays | {'mlp_ratio': ratio if fits else mlp_dim / width}
  if not arrays['class_token']:
    arrays['grid_only'] = args.get('no_embed_class')
  if arrays['layer_scale']:
    # The arrays do not determine the initial value of LayerScale.
    del arrays['layer_scale']
  if config and 'embed_dim' not in args and known['width'] != width:
    config.refuse(
      'architecture',
      f', whose width is {known["width"]}; the width of the arrays is {width}.',
    )
  facts = {
    key: known[key] for key in known.keys() - {'pool', 'width', 'rotation'}
  }
  if 'norm_layer' in args:
    facts['layer_norm_epsilon'] = _UNKNOWN['layer_norm_epsilon']
  return facts | _read_args(config, _VIT, arrays)


def check_resnet(config: JsonConfig, names: str) -> None:
  """Raises ValueError if a config.json does not describe a supported ResNet.

  `names` is a regular expression for the supported architectures.
  """
  name = str(config.get('architecture'))
  if config and not re.match(rf'(?:{names})($|\.)', name):
    config.refuse('architecture', f'; it must match {names}.')
  _read_args(config, _RESNET_ARGS, {})


def _read_args(
  config: JsonConfig, keys: dict[str, Key], arrays: dict[str, Any]
) -> dict[str, Any]:
  args = config.part('model_args')
  for key in sorted(args.keys() - keys.keys()):
    args.refuse(key, '; this argument is not supported.')
  return args.fields(keys, arrays, str(config.get('architecture')))


def _pretrained_cfg(config: JsonConfig) -> JsonConfig:
  """Returns pretrained_cfg; older files have its keys at the top level."""
  return config.part('pretrained_cfg') if 'pretrained_cfg' in config else config


def image_size(config: JsonConfig) -> tuple[int, int] | None:
  """Returns (H, W) in pixels, or None if the configuration lacks the size."""
  args, pretrained = config.part('model_args'), _pretrained_cfg(config)
  if 'img_size' in args:
    return args.sides('img_size')
  size = pretrained.get('input_size')
  if size is None:
    return None
  channels_first = isinstance(size, list)
  return pretrained.sides('input_size', size[1:] if channels_first else size)


def file_attributes(
  config: JsonConfig, fields: dict[str, Any], images: table.Preprocessing
) -> dict[str, Any]:
  """Returns the attributes of a `table.File` that a config.json determines.

  If `config` is empty, the preprocessing is `images`. Raises ValueError for a
  wrong number of classes or names, or invalid preprocessing.
  """
  num_classes = fields['num_classes']
  known = config.replace(_pretrained_cfg(config) | config)
  if known.get('num_classes', num_classes) != num_classes:
    known.refuse('num_classes', f'; the head has {num_classes:,} classes.')
  names = known.get('label_names', known.get('labels')) if num_classes else None
  if names is not None and (
    not isinstance(names, list) or len(names) != num_classes
  ):
    raise ValueError(
      f'{config.path}: label_names (or labels) must be a list of '
      f'{num_classes:,} names, one for each class.'
    )
  if config:
    images = image_configs.of_timm(
      _pretrained_cfg(config), fields['image_size']
    )
  return {
    'preprocessing': images,
    'class_names': tuple(map(str, names or ())),
    'warnings': tuple(config.warnings),
  }


def architecture_facts(config: JsonConfig) -> dict[str, Any]:
  """Returns the facts that a ViT's architecture and global_pool imply.

  These are fields of the model, and `rotation`: the last two arguments of
  `torch_vit.Arrays.reorder_channels`, or None without rotary embeddings. If
  `config` is empty, `width`, `heads` and `pool` are None. Raises ImportError if
  timm is needed but not installed, and ValueError if the model is not
  supported.
  """
  if not config:
    return _UNKNOWN
  name = str(config['architecture']).split('.')[0]
  if match := _KNOWN.fullmatch(name):
    size, _ = _SIZES[match[1]]
    facts = _UNKNOWN | {'heads': size.heads, 'width': size.width, 'pool': 'cls'}
  else:
    facts = _ask_timm(name, config)
  args = config.part('model_args')
  part = args if 'global_pool' in args else config
  if part.get('global_pool') is not None:
    facts = facts | {'pool': _POOL.read(part, 'global_pool')}
  return facts


def _ask_timm(name: str, config: JsonConfig) -> dict[str, Any]:
  """Returns the facts of an architecture by building it in timm."""
  try:
    import timm
    import torch
  except (ImportError, RuntimeError) as e:
    # A torchvision for another version of torch raises RuntimeError.
    raise ImportError(
      f'{config.path}: only timm knows the defaults of architecture {name!r}. '
      f'Run pip install timm. ({e})'
    ) from e
  if not timm.is_model(name):
    config.refuse(
      'architecture', f', which timm {timm.__version__} does not know.'
    )
  with torch.device('meta'):  # needs no memory for parameters
    model: Any = timm.create_model(name, num_classes=0)
  if wrong := _unlike(model):
    config.refuse(
      'architecture', f', and vit_jax does not support {", ".join(wrong)}.'
    )
  block = model.blocks[0]
  rope = getattr(model, 'rope', None)
  theirs = config.replace({'global_pool': model.global_pool})
  return _UNKNOWN | {
    'width': model.embed_dim,
    'heads': block.attn.num_heads,
    'gelu': _activation(block.mlp),
    'layer_norm_epsilon': _epsilons(model).pop(),
    'pool': _POOL.read(theirs, 'global_pool'),
    **({} if rope is None else _rotation(rope)),
  }


def _activation(mlp: Any) -> str | None:
  """Returns our field `gelu` ('exact' for SwiGLU), or None if unsupported."""
  is_gated = hasattr(mlp, 'gate_last') or hasattr(mlp, 'fc1_g')
  names = {'SiLU()': 'exact'} if is_gated else _ACTIVATIONS
  # ViTamin's GeGluMlp has no `fc2`, and multiplies two projections.
  if getattr(mlp, 'gate_last', False) or not hasattr(mlp, 'fc2'):
    return None
  return names.get(repr(mlp.act))


def _epsilons(model: Any) -> set[float]:
  block = model.blocks[0]
  return {
    x.eps
    for part in (model, block, block.attn, block.mlp)
    for name, x in part.named_children()
    if 'norm' in name and hasattr(x, 'eps')
  }


def _unlike(model: Any) -> list[str]:
  """Lists the parts of a timm model that are not supported."""
  from timm.models.eva import Eva, EvaBlock
  from timm.models.vision_transformer import Block, VisionTransformer

  if type(model) not in (VisionTransformer, Eva):
    return [f'the architecture of a {type(model).__name__}']
  kinds = {type(x) for x in model.blocks} - {Block, EvaBlock}
  if kinds:
    return [f'layers of type {x.__name__}' for x in kinds]
  attention = [x.attn for x in model.blocks]
  attention += [x for x in [getattr(model, 'attn_pool', None)] if x]
  heads = {x.num_heads for x in attention}
  heads |= {getattr(x, 'num_kv_heads', x.num_heads) for x in attention}
  mlp, epsilons = model.blocks[0].mlp, _epsilons(model)
  rope = getattr(model, 'rope', None)
  lacking = {
    f'attention with different numbers of heads, {heads}': len(heads) > 1,
    'pooled registers': getattr(model, 'pool_include_prefix', False),
    f'a {type(mlp).__name__} with {mlp.act!r}': _activation(mlp) is None,
    f'norms of different epsilons, {epsilons}': len(epsilons) > 1,
    f'the settings of its {type(rope).__name__}': (
      rope is not None and not _rotation(rope)
    ),
  }
  return [part for part, is_lacking in lacking.items() if is_lacking]


def _rotation(rope: Any) -> dict[str, Any]:
  """Returns `rope`, `rope_side` and `rotation`; {} if `rope` is unsupported."""
  side, known = 0, False
  if type(rope).__name__ == 'RotaryEmbeddingDinoV3':
    known = rope.normalize_coords == 'separate' and rope.min_period is None
  elif type(rope).__name__ == 'RotaryEmbeddingCat':
    side, width = rope.ref_feat_shape or (-1, -1)
    known = rope.grid_type == 'index' and side == width
    known &= not (rope.in_pixels or rope.linear_bands)
  if not known or rope.grid_offset or rope.temperature is None:
    return {}
  return {
    'rope': float(rope.temperature),
    'rope_side': side,
    'rotation': (not rope.rotate_half, rope.grid_indexing == 'xy'),
  }


def config(weights: table.Weights, images: dict[str, Any]) -> dict[str, Any]:
  """Returns the config.json from which timm builds a model.

  `images` is from `image_configs.to_timm`. Raises ValueError if timm has no
  such model.
  """
  fields = weights.fields
  holds = _HOLDS.get(fields['name'], '')
  table.check_writable(fields, 'timm has no model with', tuple(_HOLDS), holds)
  is_vit = fields['name'] != 'resnet'
  root = 'embedding' if is_vit and not fields['stem_width'] else 'conv_root'
  stages = bool(is_vit and fields['stem_layers'])
  key = torch_vit.namer('timm', not is_vit, stages)(f'{root}/kernel')
  num_classes = {'num_classes': fields['num_classes']}
  pretrained = {
    **images,
    **num_classes,
    'classifier': _CLASSIFIERS[fields['name']],
    'first_conv': key.removesuffix('.weight'),
    'fixed_input_size': is_vit,
  }
  if weights.class_names:
    pretrained['label_names'] = list(weights.class_names)
  architecture = _vit_config(fields) if is_vit else _bit_config(fields)
  return architecture | num_classes | {'pretrained_cfg': pretrained}


def _vit_config(fields: dict[str, Any]) -> dict[str, Any]:
  width, mlp_dim = fields['width'], fields['mlp_dim']
  ratio = mlp_dim / width
  if int(width * ratio) != mlp_dim:
    ratio = (mlp_dim + 0.5) / width  # timm rounds the product down
  fields = fields | {'class_token': fields['pool'] == 'cls', 'mlp_ratio': ratio}
  keys = {key: row for key, row in _VIT.items() if row.field}
  pool = _POOL.write(fields['pool'])
  args = {
    'fc_norm': fields['norm_pooled'],  # timm's default for 'avg' is True
    'global_pool': pool,
    'img_size': SIDES.write(fields['image_size']),
    **{
      key: value
      for key, value in to_config(keys, fields).items()
      if key not in _USUAL or _USUAL[key] != value
    },
  }
  return {
    'architecture': _vit_architecture(fields),
    'num_features': width,
    'global_pool': pool,
    'model_args': args,
  }


def _bit_config(fields: dict[str, Any]) -> dict[str, Any]:
  layers, width = tuple(fields['layers']), fields['width']
  if layers not in _BITS:
    raise ValueError(
      f'timm has no BiT with layers {layers}, only '
      f'{", ".join(map(str, _BITS))}. {table.ELSEWHERE}'
    )
  depth, factors = _BITS[layers]
  factor = width // 64 if width in [64 * x for x in factors] else factors[0]
  args: dict[str, Any] = {}
  if width != 64 * factor:
    # timm multiplies both arguments by the factor. The factor is 1 or 2 here,
    # and widths are multiples of 32, so the quotients are exact.
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
  """Returns the name of timm's architecture for config.json.

  A hybrid is found by its stem, a DeiT by its width, and a ViT by its width and
  patch size. Without a match the name is that of B/16: config.json overrides
  all arguments except the stem. Raises ValueError if timm lacks the stem.
  """
  if fields['stem_width']:
    stages = tuple(fields['stem_layers'])
    if stages not in _HYBRIDS:
      raise ValueError(
        f'timm has no hybrid with stem_layers {stages}, only '
        f'{", ".join(map(str, _HYBRIDS))}. {table.ELSEWHERE}'
      )
    return _HYBRIDS[stages]
  patch = fields['patch_size']
  if fields['name'] == 'deit':
    names = {192: 'tiny', 384: 'small'}
    name = names.get(fields['width'], 'base')
    return f'deit_{name}_distilled_patch16_224'
  for name, (size, patches) in _SIZES.items():
    if fields['width'] == size.width and patch in patches:
      return f'vit_{name}_patch{patch}_224'
  return 'vit_base_patch16_224'
