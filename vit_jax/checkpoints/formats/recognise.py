"""Detects the format of a checkpoint and reads it."""

import dataclasses
import os
import re
from typing import Any

from vit_jax.checkpoints.formats import archive, hf, table, tensors
from vit_jax.checkpoints.formats.table import File, Flat
from vit_jax.register import Register

# Modules with `matches` and `read`, as in `table`; see `format_of`.
TENSORS = Register(
  'format',
  {
    'torchvision': 'vit_jax.checkpoints.formats.torchvision',
    'detr': 'vit_jax.projects.detr.original',
    'timm': 'vit_jax.checkpoints.formats.timm',
  },
)
ARCHIVES = Register(
  'format',
  {
    'bit': 'vit_jax.checkpoints.formats.bit',
    'bigvision': 'vit_jax.checkpoints.formats.bigvision',
    'npz': 'vit_jax.checkpoints.formats.npz',
  },
)

# Matches prefixes of averaged weights: 'state_dict_ema.', 'teacher.backbone.'.
_AVERAGE = re.compile(r'(?<![a-z])ema(?![a-z])|teacher')

WHAT_OPENS = (
  'a workdir or one of its checkpoints/STEP, an .npz file (official, '
  'big_vision, BiT), a timm or transformers directory, a .safetensors or .pth '
  'file; or a name: augreg/b16 (`python -m vit_jax.models --pretrained` lists '
  'all), gs://..., hf://ORG/MODEL or timm://NAME.TAG'
)


def read(path: str) -> File:
  """Reads a file or directory in any foreign format.

  Raises the errors of `read` in `table`; FileNotFoundError if a directory lacks
  its weights; ValueError if the data is damaged or the format is unknown.
  """
  if os.path.isdir(path):
    return _read_folder(path)
  if tensors.is_tensors(path):
    return _read_tensors(path, tensors.read(path))
  if archive.is_archive(path):
    arrays = archive.load(path)
    return format_of(arrays, ARCHIVES).read(path, arrays)
  raise _no_checkpoint(path)


def _no_checkpoint(path: str) -> ValueError:
  # --to=stablehlo writes model.stablehlo, --to=board writes serve.py.
  names = 'model.stablehlo', 'serve.py'
  if path.endswith('.onnx') or any(
    os.path.exists(os.path.join(path, name)) for name in names
  ):
    return ValueError(
      f'{path} is an exported program. Give the checkpoint that it was '
      'exported from, or run it: docs/guides/convert.md says how.'
    )
  return ValueError(f'{path} is not a checkpoint. Give {WHAT_OPENS}.')


def _read_folder(path: str) -> File:
  place = os.path.join(path, 'config.json')
  if not os.path.exists(place):
    raise _no_checkpoint(path)
  config = tensors.read_json(place)
  # A timm model that transformers saved has timm's keys in config.json.
  if config.get('model_type', 'timm_wrapper') != 'timm_wrapper':
    file = hf.read(path, config)
  elif 'architecture' in config:
    file = _read_tensors(path, tensors.read_folder(path), config)
  else:
    raise ValueError(
      f'{place} must have the key architecture (timm) or model_type '
      '(transformers).'
    )
  if config.get('problem_type') == 'multi_label_classification':
    return dataclasses.replace(file, loss='sigmoid')
  return file


def _read_tensors(path: str, arrays: Flat, *config: dict[str, Any]) -> File:
  """Reads the first model of `_prefixes`; warns about all other arrays."""
  prefix, *others = _prefixes(arrays)
  inside = _under(prefix, arrays)
  if not config and not any(TENSORS.load(x).matches(inside) for x in TENSORS):
    keys = ', '.join(sorted(arrays)[:3])
    raise ValueError(
      f'{path} has {len(arrays)} arrays ({keys} ...), but they match no known '
      'model. For example, a ViT of timm has patch_embed.proj.weight.'
      f'{table.looks_like(arrays)} Give {WHAT_OPENS}.'
    )
  try:
    file = format_of(inside, TENSORS).read(path, inside, *config)
  except ValueError as e:
    raise ValueError(f'{e}{table.looks_like(inside)}') from e
  left_out = sorted(
    {
      next((x for x in others if key.startswith(x)), key)
      for key in arrays.keys() - {prefix + key for key in inside}
    }
  )
  if not left_out:
    return file
  more = f' and {len(left_out) - 5} more' if len(left_out) > 5 else ''
  warning = (
    f'{path}: vit_jax reads the model under {prefix!r} and leaves out '
    f'{", ".join(left_out[:5])}{more}.'
  )
  return dataclasses.replace(file, warnings=(warning, *file.warnings))


def _prefixes(arrays: Flat) -> list[str]:
  """Returns the key prefixes of all models in a file, averaged weights first.

  Leaves out a model inside another one, such as DETR's ResNet. Returns [''] if
  there is no model.
  """
  found: list[str] = []
  dots = (key[: m.end()] for key in arrays for m in re.finditer(r'\.', key))
  for prefix in ('', *sorted(dict.fromkeys(dots), key=len)):
    if prefix.startswith(tuple(found)):
      continue
    inside = _under(prefix, arrays)
    if any(TENSORS.load(name).matches(inside) for name in TENSORS):
      found.append(prefix)
  found.sort(key=lambda prefix: not _AVERAGE.search(prefix))
  return found or ['']


def _under(prefix: str, arrays: Flat) -> Flat:
  start = len(prefix)
  return {k[start:]: x for k, x in arrays.items() if k.startswith(prefix)}


def format_of(arrays: Flat, register: Register) -> Any:
  """Returns the first module whose `matches` accepts the arrays.

  Otherwise returns the module `timm` of `TENSORS`, or `npz` of `ARCHIVES`. Only
  `npz` has no `matches`.
  """
  usual = 'npz' if register is ARCHIVES else 'timm'
  others = (register.load(name) for name in register if name != usual)
  found = next((x for x in others if x.matches(arrays)), None)
  return found or register.load(usual)
