"""Builds the models of the ViT paper, and related models, by name."""

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vit_jax.models import fields as field_checks
from vit_jax.register import Register, nearest

if TYPE_CHECKING:  # keeps JAX and Flax out of `vit_jax.config`
  import jax

  from vit_jax.models.model import Model

# Model classes by `Model.kind`.
ARCHITECTURES = Register(
  'model.name',
  {
    'vit': 'vit_jax.models.vit:ViT',
    'deit': 'vit_jax.models.deit:DistilledViT',
    'masked_vit': 'vit_jax.models.masked_vit:MaskedViT',
    'dino_vit': 'vit_jax.projects.self_supervised.dino_model:DINOViT',
    'mae_vit': 'vit_jax.projects.self_supervised.mae_model:MAEViT',
    'rotation_vit': 'vit_jax.projects.few_labels.second_heads:RotationViT',
    'video_vit': 'vit_jax.projects.few_labels.second_heads:VideoViT',
    'segmentation_vit': ('vit_jax.projects.segmentation.model:SegmentationViT'),
    'resnet': 'vit_jax.models.resnet:ResNet',
    'igpt': 'vit_jax.projects.igpt.model:IGPT',
    'detr': 'vit_jax.projects.detr.model:DETR',
  },
)


class Size(NamedTuple):
  """Layers, width D, MLP width M and heads N, as in table 1."""

  depth: int
  width: int
  mlp_dim: int
  heads: int


# B, L and H are from table 1, Ti and S from DeiT (2012.12877) and AugReg
# (2106.10270), g and G from "Scaling Vision Transformers" (2106.04560). Half-B
# is the ViT-b of figure 4: B with all hidden dimensions halved.
SIZES = {
  'ti': Size(12, 192, 768, 3),
  's': Size(12, 384, 1536, 6),
  'halfb': Size(12, 384, 1536, 12),
  'b': Size(12, 768, 3072, 12),
  'l': Size(24, 1024, 4096, 16),
  'h': Size(32, 1280, 5120, 16),
  'g': Size(40, 1408, 6144, 16),
  'G': Size(48, 1664, 8192, 16),
}

# Sizes of iGPT (ICML 2020). The MLP width is 4 D, as in table 1.
IGPT_SIZES = {
  's': Size(24, 512, 2048, 8),
  'm': Size(36, 1024, 4096, 8),
  'l': Size(48, 1536, 6144, 16),
}

# Fields, besides `rope_side`, in which ViT-5 (2602.08071) differs from a ViT.
VIT5 = {
  'gelu': 'exact',
  'registers': 4,
  'norm': 'rms',
  'layer_scale': 1e-4,
  'qkv_bias': False,
  'qk_norm': True,
  'rope': 1e4,
  'rope_registers': 100.0,
}

# Units per stage of a ResNet, by its depth. 26 is from AugReg, the others are
# from He et al.
STAGES: dict[int, tuple[int, ...]] = {
  26: (2, 2, 2, 2),
  50: (3, 4, 6, 3),
  101: (3, 4, 23, 3),
  152: (3, 8, 36, 3),
  200: (3, 24, 36, 3),
}

# Where each listed model was published, in the order of `python -m
# vit_jax.models`. `fields` also accepts iGPT, other patch sizes, widths, stems.
PUBLISHED = {
  'ti16': 'AugReg, arXiv 2106.10270',
  's32': 'AugReg, arXiv 2106.10270',
  's16': 'AugReg, arXiv 2106.10270',
  'halfb32': 'ViT, figure 4 (ViT-b/32)',
  'b32': 'ViT, table 1',
  'b16': 'ViT, table 1',
  'b8': 'AugReg, arXiv 2106.10270',
  'l32': 'ViT, table 1',
  'l16': 'ViT, table 1',
  'h14': 'ViT, table 1',
  'g14': 'Scaling ViT, arXiv 2106.04560',
  'G14': 'Scaling ViT, arXiv 2106.04560',
  'r50x1': 'BiT, arXiv 1912.11370; ViT, table 6',
  'r50x2': 'ViT, table 6',
  'r50x3': 'BiT, arXiv 1912.11370',
  'r101x1': 'BiT, arXiv 1912.11370; ViT, table 6',
  'r101x3': 'BiT, arXiv 1912.11370',
  'r152x1': 'ViT, table 6',
  'r152x2': 'BiT, arXiv 1912.11370; ViT, table 6',
  'r152x4': 'BiT, arXiv 1912.11370; ViT, table 2',
  'r200x3': 'ViT, table 6',
  'r+ti16': 'AugReg, arXiv 2106.10270',
  'r26+s32': 'AugReg, arXiv 2106.10270',
  'r50+b32': 'ViT, table 6',
  'r50+b16': 'ViT, table 6',
  'r50+l32': 'ViT, table 6; AugReg',
  'r50+l16': 'ViT, table 6',
  'vit5_s16': 'ViT-5, arXiv 2602.08071',
  'vit5_b16': 'ViT-5, arXiv 2602.08071',
  'vit5_l16': 'ViT-5, arXiv 2602.08071',
  'axial_b32': 'ViT, figure 13',
  'axial_b16': 'ViT, figure 13',
  'axial_r50x1': 'ViT, figure 13; Wang et al. 2020b',
  'detr_r50': 'DETR, arXiv 2005.12872',
  'detr_r50_dc5': 'DETR, arXiv 2005.12872',
  'detr_r101': 'DETR, arXiv 2005.12872',
  'detr_r101_dc5': 'DETR, arXiv 2005.12872',
}


def fields(variant: str) -> dict[str, Any]:
  """Returns the model fields of a variant, which are arguments of `build`.

  docs/reference/models.md explains the names, such as l16 or r50+b16.

  Raises:
    ValueError: if the variant is unknown. The message suggests similar names.
  """
  try:
    return _fields(variant)
  except LookupError:
    # timm's names, such as vit_base_patch16_224 for b16.
    theirs = re.match(r'(?:vit|deit)_(ti|[sblhg])\w*_patch(\d+)', variant)
    name = ''.join(theirs.groups()) if theirs else variant
    raise ValueError(
      f'Unknown model variant {variant!r}. {nearest(name, PUBLISHED)} '
      '`python -m vit_jax.models` lists models, and docs/reference/models.md '
      'explains their names.'
    ) from None


def _fields(variant: str) -> dict[str, Any]:
  """Returns the fields of a variant, or raises LookupError."""
  if match := re.fullmatch(r'igpt_(\w)', variant):
    return {'name': 'igpt'} | IGPT_SIZES[match[1]]._asdict()
  if match := re.fullmatch(r'detr_r(\d+)(_dc5)?', variant):
    layers = STAGES[int(match[1])]
    dilation = bool(match[2])
    return {'name': 'detr', 'backbone_layers': layers, 'dilation': dilation}
  if match := re.fullmatch(r'(axial_)?r(\d+)x([1-9]\d*)', variant):
    return {
      'name': 'resnet',
      'layers': STAGES[int(match[2])],
      'width': 64 * int(match[3]),
      # Wang et al. start from the ResNet of He et al., which normalises after
      # each convolution, as version 1 does.
      'version': 1 if match[1] else 2,
      'axial': bool(match[1]),
    }
  match = re.fullmatch(
    r'(axial_|vit5_|r\d*\+)?([a-zA-Z]+)/?([1-9]\d*)', variant
  )
  if not match:
    raise LookupError
  kind, stride = match[1] or '', int(match[3])
  found: dict[str, Any] = {'name': 'vit', 'patch_size': stride}
  found |= SIZES[match[2]]._asdict()
  if kind == 'axial_':
    return found | {'axial': True, 'pool': 'gap'}
  if kind == 'vit5_':
    return found | VIT5 | {'rope_side': 224 // stride}
  return found | _stem(kind[1:-1], stride) if kind else found


def _stem(depth: str, stride: int) -> dict[str, Any]:
  """Returns a hybrid's stem and patch size; depth '' means only the root."""
  if not depth and stride % 2 == 0:
    # The names in AugReg count the stride of the root's convolution, but not
    # the stride of its pooling: a token of R+Ti/16 covers 32 x 32 pixels.
    return {'stem_width': 64, 'patch_size': stride // 2}
  if not depth or stride not in (16, 32):
    raise LookupError
  layers = STAGES[int(depth)]
  if stride == 16:
    # Removes stage 4 and moves its layers into stage 3 (section 4.1).
    layers = (*layers[:2], sum(layers[2:]))
  return {'stem_width': 64, 'stem_layers': layers, 'patch_size': 1}


def defaults(name: str) -> dict[str, Any]:
  """Returns the defaults of an architecture's fields, for a config."""
  found = {
    field.name: field.default
    for field in ARCHITECTURES.load(name).own_fields()
    if field.default is not dataclasses.MISSING
  }
  return {'name': name} | found | {'dtype': 'float32'}


def carry_over(before: Mapping[str, Any], variant: str) -> dict[str, Any]:
  """Returns the fields of a variant for a config that had another model.

  If both models are ViTs or of the same class, keeps the previous fields that
  `variant` does not set. Exceptions: the stem, axial attention with its pool,
  and ViT-5's own fields if all have ViT-5's values. Otherwise keeps only
  dtype, scan, remat and head_bias. Raises ValueError if the variant is unknown.
  """
  new = fields(variant)
  known = defaults(new['name'])
  lost = {'name', 'axial', 'stem_width', 'stem_layers'}
  if before.get('axial'):
    lost.add('pool')
  if all(before.get(field) == value for field, value in VIT5.items()):
    lost |= VIT5.keys() | {'rope_side'}
  stays = known.keys() & set(before.keys()) - lost
  names = {before['name'], new['name']}
  if len(names) > 1 and not all('posemb' in defaults(name) for name in names):
    stays &= {'dtype', 'scan', 'remat', 'head_bias'}
  return known | {field: before[field] for field in stays} | new


def build(
  *,
  num_classes: int,
  image_size: tuple[int, int],
  name: str = 'vit',
  dtype: str = 'float32',
  **model_fields: Any,
) -> 'Model':
  """Returns a model after checking that its fields fit together.

  Args:
    num_classes: C; 0 for a model without a head.
    image_size: (H, W) in pixels, only used for the check.
    name: one of `ARCHITECTURES`.
    dtype: 'float32' or 'bfloat16'.
    **model_fields: other fields of the model.

  Raises:
    ValueError: if a value is invalid.
    TypeError: if a required field is missing.
  """
  kind: type[Model] = ARCHITECTURES.load(name)
  own = {field.name for field in kind.own_fields()}
  if strange := sorted(model_fields.keys() - own):
    raise ValueError(
      f'model.name is {name!r}; this architecture does not have the field '
      f'model.{strange[0]}. Remove the field. To change the model, choose a '
      'variant: on the command line --config=FILE.py:model=b16, in a config '
      'file config_lib.choose_model.'
    )
  if dtype not in ('float32', 'bfloat16'):
    raise ValueError(f'model.dtype is {dtype!r}: use float32 or bfloat16.')
  # JSON gives lists, but fields of a module must be hashable.
  model_fields = {
    field: tuple(value) if isinstance(value, list | tuple) else value
    for field, value in model_fields.items()
  }
  model_fields['num_classes'] = num_classes
  field_checks.check(kind.own_fields(), model_fields)
  model = kind(**model_fields | {'dtype': np.dtype(dtype)})
  model.check(image_size)
  return model


def build_model(
  variant: str,
  *,
  num_classes: int = 1000,
  image_size: int | tuple[int, int] = 224,
  **changes: Any,
) -> 'Model':
  """Returns a named model, as in `build_model('l16', num_classes=10)`.

  Args:
    variant: name of a variant; see `fields`.
    num_classes: C; 0 for a model without a head.
    image_size: (H, W) in pixels, or one number for both.
    **changes: fields of the model that differ from the variant.

  Raises:
    ValueError: if a value is invalid.
  """
  if isinstance(image_size, int):
    image_size = image_size, image_size
  return build(
    num_classes=num_classes,
    image_size=image_size,
    **fields(variant) | changes,
  )


def fields_of(model: 'Model') -> dict[str, Any]:
  """Returns JSON-serialisable arguments of `build`, except `image_size`."""
  found = {
    field.name: getattr(model, field.name) for field in model.own_fields()
  }
  return {'name': model.kind} | found | {'dtype': np.dtype(model.dtype).name}


def config_of(model: 'Model') -> dict[str, Any]:
  """Returns the fields of `config.model` for this model.

  The fields that an objective sets, such as `MaskedViT.target`, are left out.
  """
  body, own = fields_of(model.body()), fields_of(model)
  fields = {name: own[name] for name in body if name != 'num_classes'}
  return fields | {'name': body['name']}


def cast_kernels(model: 'Model', params: Any) -> Any:
  """Casts the model's `cast_params` to its dtype.

  The model casts these parameters before each use, so casting them early saves
  memory and does not change results.
  """
  import jax

  def cast(path: Any, x: jax.Array) -> jax.Array:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if any(re.search(pattern, name) for pattern in model.cast_params):
      return x.astype(model.dtype)
    return x

  return jax.tree_util.tree_map_with_path(cast, params)


def init(
  model: 'Model', key: 'jax.Array', image_size: tuple[int, int]
) -> dict[str, Any]:
  """Initialises the parameters of a model, float32.

  The values do not depend on `model.scan`. The image size (H, W) determines the
  number of position embeddings.
  """
  images_1HWC = np.zeros((1, *image_size, 3), np.float32)
  params: Any = model.clone(scan=False).init(key, images_1HWC)['params']
  return model.stack_layers(params) if model.scan else params
