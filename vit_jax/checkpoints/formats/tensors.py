"""Reads .safetensors and PyTorch files, and writes .safetensors files.

Code in a file never runs: PyTorch unpickles only tensors, numbers and text.
"""

import functools
import json
import os
import pathlib
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict

from vit_jax.checkpoints.formats import archive
from vit_jax.checkpoints.formats.table import Flat
from vit_jax.data import atomic_files

# The first bytes of files that torch.save wrote before version 1.6.
_LEGACY_PICKLE = b'\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.'

_FOLDER_FILES = (
  'model.safetensors',
  'model.safetensors.index.json',
  'pytorch_model.bin',
  'pytorch_model.bin.index.json',
)
# Matches BatchNorm's update counters, which inference does not need.
_COUNTS = r'\.num_batches_tracked$'


def is_tensors(path: str) -> bool:
  """Whether a file is a .safetensors or PyTorch file, judged by its content."""
  return _loader(path) is not None


def read(path: str, ignored: str = _COUNTS) -> Flat:
  """Returns all named arrays of a .safetensors, .pth, .pt or .bin file.

  The keys of nested dictionaries are joined by dots. `ignored` is a regular
  expression for keys to leave out. Raises ImportError if PyTorch is needed but
  not installed, and OSError if the file cannot be opened. Raises ValueError if
  it is damaged or has another format, or if the dtype of an array is neither
  integer nor float.
  """
  load = _loader(path)
  if not load:
    raise ValueError(
      f'{path} is neither a .safetensors file nor a PyTorch file.'
    )
  part = 'the file'
  flat: Flat = {}
  try:
    for key, x in load(path).items():
      part = f'the array {key!r}'
      if not re.search(ignored, key):
        flat[key] = archive.numeric(
          x if isinstance(x, np.ndarray) else _to_numpy(x)
        )
  except ImportError:
    raise
  except Exception as e:
    raise archive.unreadable(path, part, e) from e
  return flat


def read_folder(folder: str, ignored: str = _COUNTS) -> Flat:
  """Returns all arrays of a directory in the layout of the Hugging Face hub.

  `ignored` is as in `read`. Raises the errors of `read`; ValueError if the
  index is invalid; FileNotFoundError if weights are missing.
  """
  paths = [os.path.join(folder, name) for name in _FOLDER_FILES]
  path = next(filter(os.path.exists, paths), '')
  if not path:
    raise FileNotFoundError(
      f'{folder} has no weights. It must have one of '
      f'{", ".join(_FOLDER_FILES)}.'
    )
  if not path.endswith('.json'):
    return read(path, ignored)
  places = read_json(path).get('weight_map')
  if not isinstance(places, dict):
    raise ValueError(f'{path}: weight_map must be an object.')
  flat: Flat = {}
  for part in sorted({str(part) for part in places.values()}):
    place = os.path.join(folder, part)
    if not os.path.isfile(place):
      raise FileNotFoundError(
        f'{path} names the file {part!r}, which is missing. Download this file.'
      )
    flat |= read(place, ignored)
  return flat


def read_json(path: str) -> dict[str, Any]:
  """Returns the object in a JSON file; raises ValueError for other content."""
  try:
    value = json.loads(pathlib.Path(path).read_text('utf-8'))
  except (ValueError, RecursionError) as e:
    raise ValueError(f'{path} is not JSON: {e}') from e
  if not isinstance(value, dict):
    raise ValueError(
      f'{path} contains a {type(value).__name__}; it must contain a JSON '
      'object, {...}.'
    )
  return value


def write_folder(
  target: str,
  configs: Mapping[str, dict[str, Any]],
  arrays: Mapping[str, np.ndarray],
  dtype: str,
) -> None:
  """Writes a new directory in the layout of the Hugging Face hub.

  `configs` are JSON objects by file name. `arrays`, `dtype` and the errors are
  as in `write_safetensors`.
  """
  with atomic_files.new_folder(target) as folder:
    for name, config in configs.items():
      text = json.dumps(config, indent=2, sort_keys=True)
      (folder / name).write_text(f'{text}\n', 'utf-8')
    write_safetensors(os.fspath(folder / _FOLDER_FILES[0]), arrays, dtype)


def write_safetensors(
  target: str, arrays: Mapping[str, np.ndarray], dtype: str = 'float32'
) -> None:
  """Writes a .safetensors file completely or not at all.

  The same arrays always give the same bytes. `dtype` is 'float32', 'bfloat16'
  or 'float16'. Raises the errors of `atomic_files.new_file`, such as
  FileExistsError, and ValueError if a value is too large for float16.
  """
  stored = {}
  for key, x in sorted(arrays.items()):
    with np.errstate(over='ignore'):
      stored[key] = np.ascontiguousarray(x, dtype)
    if dtype == 'float16' and not np.isfinite(stored[key]).all():
      raise ValueError(
        f'{key!r} has values up to {np.abs(x).max():g}; float16 ends at '
        '65,504. Use --dtype=bfloat16.'
      )
  with atomic_files.new_file(target) as path:
    # Older versions of transformers refuse files without this entry.
    safetensors.numpy.save_file(stored, path, {'format': 'pt'})


def _loader(path: str) -> Callable[[str], dict[str, Any]] | None:
  """Returns the function that loads a file, or None for other formats."""
  with open(path, 'rb') as file:
    start = file.read(16)
  # Eight bytes with the header's length precede the JSON header.
  if start[8:9] == b'{':
    return safetensors.numpy.load_file
  if start.startswith(_LEGACY_PICKLE):
    return _load_torch
  try:
    with zipfile.ZipFile(path) as archive_:
      is_torch = any(x.endswith('/data.pkl') for x in archive_.namelist())
  except (zipfile.BadZipFile, NotImplementedError, ValueError):
    return None
  return functools.partial(_load_torch, is_zip=True) if is_torch else None


class _Ignored(dict):
  """Replaces objects of classes that PyTorch does not unpickle."""

  def __init__(self, *args: Any, **kwargs: Any) -> None:
    super().__init__()

  def __setstate__(self, state: Any) -> None:
    pass


def _load_torch(path: str, is_zip: bool = False) -> dict[str, Any]:
  """Returns the tensors of a PyTorch file by key."""
  try:
    import torch
  except ImportError as e:
    raise ImportError(
      f'{path} is a PyTorch file. To read it, pip install torch, or convert it '
      f'to .safetensors where torch is installed. ({e})'
    ) from e
  # Objects that are not tensors, such as flags and metrics, become `_Ignored`.
  # PyTorch lists their classes only for zip files. In older files, only
  # Namespace is replaced, and most other classes raise an error.
  names = {'argparse.Namespace'}
  if is_zip:
    names |= set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
  with (
    torch.serialization.safe_globals([(_Ignored, name) for name in names]),
    warnings.catch_warnings(),
  ):
    # torch warns about types that it refuses, and about its internals.
    warnings.simplefilter('ignore')
    saved = torch.load(path, 'cpu', weights_only=True, mmap=is_zip)
  nested = flatten_dict(saved) if isinstance(saved, dict) else {}
  found = {
    '.'.join(path): x
    for path, x in nested.items()
    if isinstance(x, torch.Tensor) and all(isinstance(k, str) for k in path)
  }
  if not found:
    raise ValueError('it has no named tensors. Save model.state_dict() instead')
  return found


def _to_numpy(x: Any) -> np.ndarray:
  """Converts a dense tensor to an array that shares its memory."""
  import torch

  x = x.detach()
  if x.dtype == torch.bfloat16:
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
  return x.numpy()
