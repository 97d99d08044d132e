"""Named sizes of table 1, and from a name to a model."""

import dataclasses
import difflib
import re
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import posemb
from vit_jax.models.vit import ViT


@dataclasses.dataclass(frozen=True)
class Size:
  """Layers, D, M and N of a row of table 1."""

  depth: int
  width: int
  mlp_dim: int
  heads: int


# B, L and H are table 1; Ti and S come from DeiT (2012.12877) and AugReg
# (2106.10270), g and G from "Scaling Vision Transformers" (2106.04560).
SIZES = {
  'ti': Size(12, 192, 768, 3),
  's': Size(12, 384, 1536, 6),
  'b': Size(12, 768, 3072, 12),
  'l': Size(24, 1024, 4096, 16),
  'h': Size(32, 1280, 5120, 16),
  'g': Size(40, 1408, 6144, 16),
  'G': Size(48, 1664, 8192, 16),
}
# Offered as nearest names; any other patch size works too.
PUBLISHED = (
  'ti16',
  's32',
  's16',
  'b32',
  'b16',
  'b8',
  'l32',
  'l16',
  'h14',
  'g14',
  'G14',
)


def nearest(name: str, valid: Iterable[str]) -> str:
  """Returns 'did you mean ...' with the valid names closest to `name`."""
  valid = sorted(valid)
  close = difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
  if close:
    return f'Did you mean {" or ".join(close)}?'
  return f'Valid: {", ".join(valid)}.'


def fields(variant: str) -> dict[str, Any]:
  """Returns the ViT fields of a variant written size and patch, as in `l16`.

  Raises:
    ValueError: if the name is none; names the nearest.
  """
  match = re.fullmatch(r'(ti|[a-zA-Z])/?([1-9]\d*)', variant)
  if not match or match[1] not in SIZES:
    raise ValueError(
      f'No model variant {variant!r}. {nearest(variant, PUBLISHED)} '
      'A variant is a size '
      f'({", ".join(SIZES)}) and a patch size in pixels, as in l16.'
    )
  return {'patch_size': int(match[2])} | dataclasses.asdict(SIZES[match[1]])


def build(
  *,
  num_classes: int,
  image_size: tuple[int, int],
  dtype: str = 'float32',
  **model_fields: Any,
) -> ViT:
  """Returns a ViT after checking that its fields fit together.

  Args:
    num_classes: C.
    image_size: (H, W) in pixels, for the check alone.
    dtype: 'float32' or 'bfloat16', of the computation.
    **model_fields: the other fields of `ViT`.

  Raises:
    ValueError: for values that cannot work, naming field, value and way out.
  """
  choices = {
    'pool': ('cls', 'gap'),
    'remat': ('none', *remat_policies()),
  }
  for field, valid in choices.items():
    value = model_fields.get(field, valid[0])
    if value not in valid:
      raise ValueError(
        f'model.{field} is {value!r}. {nearest(str(value), valid)}'
      )
  if dtype not in ('float32', 'bfloat16'):
    raise ValueError(f'model.dtype is {dtype!r}: use float32 or bfloat16.')
  for field in ('patch_size', 'width', 'depth', 'mlp_dim', 'heads'):
    if model_fields[field] < 1:
      raise ValueError(
        f'model.{field} is {model_fields[field]}: it must be at least 1.'
      )
  if model_fields['width'] % model_fields['heads']:
    raise ValueError(
      f'model.width {model_fields["width"]} is not a multiple of model.heads '
      f'{model_fields["heads"]}: every head takes an equal share.'
    )
  model = ViT(num_classes=num_classes, dtype=jnp.dtype(dtype), **model_fields)
  posemb.grid_shape(image_size, total_stride(model))
  return model


def remat_policies() -> tuple[str, ...]:
  """Returns the `jax.checkpoint_policies` that take no arguments."""
  return (
    'nothing_saveable',
    'dots_saveable',
    'dots_with_no_batch_dims_saveable',
    'everything_saveable',
  )


def total_stride(model: ViT) -> int:
  """Returns the side, in pixels of the image, of what a token stands for."""
  return model.patch_size * (4 if model.stem_width else 1)


def init(
  model: ViT, key: jax.Array, image_size: tuple[int, int]
) -> dict[str, Any]:
  """Returns fresh parameters, the same for scanned and unrolled layers.

  Args:
    model: what to initialise.
    key: random key.
    image_size: (H, W); decides the number of position embeddings.
  """
  images_1HWC = jnp.zeros((1, *image_size, 3))
  variables = model.clone(scan=False).init(key, images_1HWC)
  params = nn.unbox(variables['params'])
  return stack_blocks(params) if model.scan else params


def stack_blocks(params: dict[str, Any]) -> dict[str, Any]:
  """Turns unrolled layers into the leading axis that a scanned model has."""
  encoder = dict(params['Transformer'])
  depth = sum(name.startswith('encoderblock_') for name in encoder)
  blocks = [encoder.pop(f'encoderblock_{i}') for i in range(depth)]
  encoder['encoderblock'] = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
  return {**params, 'Transformer': encoder}


def unstack_blocks(params: dict[str, Any]) -> dict[str, Any]:
  """Turns a scanned model's leading layer axis into unrolled layers."""
  encoder = dict(params['Transformer'])
  stacked = encoder.pop('encoderblock')
  depth = len(jax.tree.leaves(stacked)[0])
  for i in range(depth):
    encoder[f'encoderblock_{i}'] = jax.tree.map(lambda x, i=i: x[i], stacked)
  return {**params, 'Transformer': encoder}
