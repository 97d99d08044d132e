"""What the config.json of a timm directory says of its model.

Sizes come from the arrays; the configuration says what arrays cannot, and is
refused where it contradicts them. What it leaves to the architecture is known
here for the models of the paper and its successors, and asked of timm for
others.
"""

import re
from typing import Any

from vit_jax.models import variants

# From timm's names of sizes to ours.
SIZES = {
  'tiny': variants.SIZES['ti'],
  'small': variants.SIZES['s'],
  'base': variants.SIZES['b'],
  'large': variants.SIZES['l'],
  'huge': variants.SIZES['h'],
  'giant': variants.SIZES['g'],
  'gigantic': variants.SIZES['G'],
}
_KNOWN = re.compile(
  rf'(?:vit|deit)_({"|".join(SIZES)})_'
  r'(?:patch\d+|r_s16_p8|r26_s32|r50_s16|r50_s32)_\d+'
)
GELUS = {'gelu_tanh': 'tanh', 'gelu': 'exact'}
# How PyTorch prints layers: timm has classes of its own, and uses PyTorch's.
_ACTIVATIONS = {
  'GELU()': 'exact',
  "GELU(approximate='none')": 'exact',
  'GELUTanh()': 'tanh',
  "GELU(approximate='tanh')": 'tanh',
}
POOLS = {'token': 'cls', 'avg': 'gap', 'map': 'map'}
EPSILON = 1e-6
# Arguments that make no difference to what a trained model puts out, or that
# the arrays answer.
_FREE_VIT = {
  'act_layer',
  'attn_drop_rate',
  'drop_path_rate',
  'drop_rate',
  'dynamic_img_pad',
  'dynamic_img_size',
  'fc_norm',
  'fix_init',
  'global_pool',
  'img_size',
  'norm_layer',
  'num_heads',
  'patch_drop_rate',
  'pos_drop_rate',
  'proj_drop_rate',
  'strict_img_size',
  'weight_init',
}
_FREE_BIT = {
  'channels',
  'drop_path_rate',
  'drop_rate',
  'stem_chs',
  'zero_init_last',
}
# What a model of timm has to be for there to be one here.
_PLAIN_VIT = {
  'final_norm': True,
  'init_values': None,
  'pool_include_prefix': False,
  'pre_norm': False,
  'proj_bias': True,
  'qk_norm': False,
  'qkv_bias': True,
  'reg_tokens': 0,
  'scale_attn_norm': False,
  'scale_mlp_norm': False,
}


def vit_facts(
  config: dict[str, Any],
  place: str,
  width: int,
  mlp_dim: int,
  found: dict[str, tuple[Any, ...]],
) -> dict[str, Any]:
  """Returns the fields of a ViT that its arrays do not show.

  Args:
    config: the parsed config.json; empty where there is only a file.
    place: of it, for messages.
    width: D of the arrays.
    mlp_dim: M of the arrays.
    found: by argument of timm's, the values that say what the arrays have.

  Returns:
    `heads`, `gelu`, `layer_norm_epsilon`, and `pool` or None if it is not said.

  Raises:
    ImportError: if only timm knows them, and it is not installed.
    ValueError: if there is no such model here, or the configuration contradicts
      the arrays; names the file and key.
  """
  args = model_args(config, place)
  found = found | {'embed_dim': (width,), 'in_chans': (3,)}
  plain = {key: (value,) for key, value in _PLAIN_VIT.items()}
  _check_args(args, place, 'the arrays have', found)
  _check_args(args, place, 'models here have', plain)
  _refuse_unknown(
    args, place, {*_FREE_VIT, *plain, *found, 'mlp_ratio', 'num_classes'}
  )
  ratio = args.get('mlp_ratio')
  if ratio is not None and not (
    isinstance(ratio, int | float) and abs(ratio * width - mlp_dim) < 1
  ):
    raise ValueError(
      f'{place}: model_args.mlp_ratio is {ratio!r}, and the arrays have '
      f'{mlp_dim} / {width}.'
    )
  facts = _architecture_facts(config, place)
  usual_width = facts.pop('width')
  if config and 'embed_dim' not in args and usual_width != width:
    raise ValueError(
      f'{place}: architecture is {config["architecture"]!r} of width '
      f'{usual_width}, and the arrays have {width}.'
    )
  facts |= _stated_facts(args, place)
  pool = args.get('global_pool', config.get('global_pool'))
  if pool is not None:
    facts['pool'] = _translate(POOLS, pool, 'global_pool', place)
  return facts


def check_bit(config: dict[str, Any], place: str) -> None:
  """Refuses a ResNet that is none of BiT's.

  Args:
    config: the parsed config.json; empty where there is only a file.
    place: of it, for messages.

  Raises:
    ValueError: naming the key.
  """
  if config and '_bit' not in str(config['architecture']):
    raise ValueError(
      f'{place}: architecture is {config["architecture"]!r}, and of the '
      'ResNets there are only those of BiT here, resnetv2_*_bit.'
    )
  args = model_args(config, place)
  _check_args(
    args, place, 'models here have', {'global_pool': ('avg',), 'in_chans': (3,)}
  )
  _refuse_unknown(
    args, place, {*_FREE_BIT, 'global_pool', 'in_chans', 'num_classes'}
  )


def model_args(config: dict[str, Any], place: str) -> dict[str, Any]:
  """Returns the arguments of a model, without those that are null."""
  args = config.get('model_args') or {}
  if not isinstance(args, dict):
    raise ValueError(
      f'{place}: model_args is {args!r} and should be an object.'
    )
  return {key: x for key, x in args.items() if x is not None}


def pretrained_cfg(config: dict[str, Any], place: str) -> dict[str, Any]:
  """Returns the part on images and classes; older timm wrote nothing else."""
  pretrained = config.get('pretrained_cfg', config)
  if not isinstance(pretrained, dict):
    raise ValueError(
      f'{place}: pretrained_cfg is {pretrained!r} and should be an object.'
    )
  return pretrained


def image_size(config: dict[str, Any], place: str) -> tuple[int, int] | None:
  """Returns (H, W) in pixels that a configuration is for, if it says so.

  Raises:
    ValueError: if they are no sizes.
  """
  size = model_args(config, place).get('img_size')
  if size is None:
    stated = pretrained_cfg(config, place).get('input_size')
    if stated is None:
      return None
    size = stated[1:] if isinstance(stated, list) else stated
  sides = [size, size] if isinstance(size, int) else size
  if (
    isinstance(sides, list)
    and len(sides) == 2
    and all(type(x) is int and 0 < x < 1 << 16 for x in sides)
  ):
    return sides[0], sides[1]
  raise ValueError(
    f'{place}: the image size is {size!r}, and should be two numbers of pixels.'
  )


def class_names(
  config: dict[str, Any], num_classes: int, place: str
) -> tuple[str, ...]:
  """Returns the names of classes, empty where there are none.

  Raises:
    ValueError: if the configuration has another number of classes than the
      arrays.
  """
  pretrained = pretrained_cfg(config, place)
  stated = config.get('num_classes', pretrained.get('num_classes', num_classes))
  if stated != num_classes:
    raise ValueError(
      f'{place}: num_classes is {stated!r}, and the head in the arrays has '
      f'{num_classes:,}.'
    )
  for key in ('label_names', 'labels'):
    names = config.get(key, pretrained.get(key))
    if names is None:
      continue
    if not isinstance(names, list) or len(names) != num_classes:
      raise ValueError(
        f'{place}: {key} should be a list of {num_classes:,} names, one for '
        'each class of the head.'
      )
    return tuple(map(str, names))
  return ()


def _architecture_facts(config: dict[str, Any], place: str) -> dict[str, Any]:
  """Returns what an architecture's name says, or timm's default."""
  facts: dict[str, Any] = {'gelu': 'exact', 'layer_norm_epsilon': EPSILON}
  if not config:
    return facts | {'pool': None, 'heads': None, 'width': None}
  name = str(config['architecture']).split('.')[0]
  match = _KNOWN.fullmatch(name)
  if not match:
    return _ask_timm(name, place)
  size = SIZES[match[1]]
  return facts | {'pool': 'cls', 'heads': size.heads, 'width': size.width}


def _ask_timm(name: str, place: str) -> dict[str, Any]:
  """Returns what timm builds by a name, in no memory."""
  try:
    import timm
    import torch
    from timm.models.vision_transformer import VisionTransformer
  except (ImportError, RuntimeError) as e:
    # The second is a torchvision built for another torch.
    raise ImportError(
      f'{place}: architecture is {name!r}, whose heads and activation only '
      f'timm knows: pip install timm. ({e})'
    ) from e
  if not timm.is_model(name):
    raise ValueError(
      f'{place}: architecture is {name!r}, which timm {timm.__version__} does '
      'not know.'
    )
  with torch.device('meta'):
    model = timm.create_model(name, num_classes=0)
  if type(model) is not VisionTransformer:
    raise ValueError(
      f'{place}: architecture is {name!r}, a {type(model).__name__}, and there '
      'are only ViT, its hybrids and BiT here.'
    )
  block: Any = model.blocks[0]
  activation = repr(block.mlp.act)
  if activation not in _ACTIVATIONS:
    raise ValueError(
      f'{place}: architecture is {name!r}, whose activation is {activation}: '
      'here there are GELU and its tanh approximation.'
    )
  return {
    'width': model.embed_dim,
    'heads': block.attn.num_heads,
    'gelu': _ACTIVATIONS[activation],
    'layer_norm_epsilon': block.norm1.eps,
    'pool': _translate(POOLS, model.global_pool, 'global_pool', place),
  }


def _stated_facts(args: dict[str, Any], place: str) -> dict[str, Any]:
  """Returns what the arguments of a model override."""
  facts: dict[str, Any] = {}
  if 'num_heads' in args:
    if type(args['num_heads']) is not int:
      raise ValueError(
        f'{place}: model_args.num_heads is {args["num_heads"]!r} and should be '
        'a number.'
      )
    facts['heads'] = args['num_heads']
  if 'act_layer' in args:
    facts['gelu'] = _translate(GELUS, args['act_layer'], 'act_layer', place)
  if 'norm_layer' in args:
    # Without what timm ignores in it.
    name = str(args['norm_layer']).replace('_', '').lower()
    epsilons = {'layernorm': EPSILON, 'layernormfp32': EPSILON}
    facts['layer_norm_epsilon'] = _translate(
      epsilons, name, 'norm_layer', place
    )
  return facts


def _check_args(
  args: dict[str, Any],
  place: str,
  because: str,
  valid: dict[str, tuple[Any, ...]],
) -> None:
  for key, values in valid.items():
    if key in args and args[key] not in values:
      raise ValueError(
        f'{place}: model_args.{key} is {args[key]!r}, and {because} '
        f'{values[0]!r}.'
      )


def _refuse_unknown(args: dict[str, Any], place: str, known: set[str]) -> None:
  for key in sorted(args.keys() - known):
    raise ValueError(
      f'{place}: model_args.{key} is {args[key]!r}, and whether a model here '
      'can do that is not known.'
    )


def _translate(names: dict[str, Any], value: Any, key: str, place: str) -> Any:
  if not isinstance(value, str) or value not in names:
    raise ValueError(
      f'{place}: {key} is {value!r}, and there is no such model here, only '
      f'{", ".join(names)}.'
    )
  return names[value]
