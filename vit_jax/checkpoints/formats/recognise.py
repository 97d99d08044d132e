"""Which format a checkpoint has, found by looking."""

import dataclasses
import os

from vit_jax.checkpoints.formats import (
  archive,
  bigvision,
  bit,
  hf,
  npz,
  tensors,
  timm,
  torchvision,
)
from vit_jax.checkpoints.formats.table import File, Flat, Format
from vit_jax.projects.detr import hf_format as hf_detr

WHAT_OPENS = (
  'a workdir or one of its checkpoints/STEP, an .npz file (official, '
  'big_vision, BiT), a timm or transformers directory, a .safetensors or .pth '
  'file; by name augreg/b16 (`python -m vit_jax.models --pretrained` has all), '
  'gs://..., hf://ORG/MODEL or timm://NAME'
)


def read(path: str) -> File:
  """Reads a checkpoint, a file or directory of any foreign format.

  Raises:
    ValueError: if it is damaged, or of no known format.
  """
  is_folder = os.path.isdir(path)
  for file in os.listdir(path) if is_folder else ['']:
    place = os.path.join(path, file) if file else path
    # A pipe or a device might never end.
    if os.path.exists(place) and not os.path.isfile(place) | os.path.isdir(
      place
    ):
      raise ValueError(
        f'{place} is no regular file: copy what it gives to one.'
      )
  if is_folder:
    return _read_folder(path)
  if tensors.is_tensors(path):
    arrays = tensors.read(path)
    if hf_detr.matches(arrays):
      return hf_detr.read_file(path, arrays)
    if torchvision.matches(arrays):
      return torchvision.read(path, arrays)
    return timm.read(path, arrays)
  if archive.is_archive(path):
    arrays = archive.load(path)
    return archive_format(arrays).read(path, arrays)
  raise _no_checkpoint(path)


def _no_checkpoint(path: str) -> ValueError:
  if path.endswith('.onnx') or any(
    os.path.exists(os.path.join(path, name))
    for name in ('model.stablehlo', 'serve.py')  # the second for boards
  ):
    return ValueError(
      f'{path} is a program that was exported: give the checkpoint that it was '
      'made of, or run it as vit_jax/convert/README.md says.'
    )
  return ValueError(f'{path} holds no checkpoint: give {WHAT_OPENS}.')


def _read_folder(path: str) -> File:
  place = os.path.join(path, 'config.json')
  if not os.path.exists(place):
    raise _no_checkpoint(path)
  config = tensors.read_json(place)
  if 'model_type' in config:
    file = hf.read(path, config)
    if config.get('problem_type') == 'multi_label_classification':
      return dataclasses.replace(file, loss='sigmoid')
    return file
  if 'architecture' in config:
    arrays = tensors.read_folder(path)
    if torchvision.matches(arrays):
      return torchvision.read(path, arrays, config)
    return timm.read(path, arrays, config)
  raise ValueError(
    f'{place} has neither architecture, as timm writes it, nor model_type, as '
    'transformers does.'
  )


def archive_format(arrays: Flat) -> Format:
  """Returns the module of the format that an .npz file's keys belong to."""
  if bit.matches(arrays):
    return bit
  return bigvision if bigvision.matches(arrays) else npz
