"""Files of named tensors: .safetensors and PyTorch's.

The first bytes tell which of them a file is. No code in it ever runs: PyTorch
unpickles tensors, numbers and text alone (`weights_only`).
"""

import json
import os
import pathlib
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from vit_jax.checkpoints.formats import archive
from vit_jax.checkpoints.formats.table import Flat
from vit_jax.data import atomic_files

# Of torch.save before version 1.6: a protocol, and a number that torch chose.
_LEGACY_PICKLE = b'\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.'

_FOLDER_FILES = (
  'model.safetensors',
  'model.safetensors.index.json',
  'pytorch_model.bin',
  'pytorch_model.bin.index.json',
)
# How often BatchNorm had been updated, which nothing reads.
_COUNTS = r'\.num_batches_tracked$'


def is_tensors(path: str) -> bool:
  """Tells by its content whether `read` is for a file."""
  return _is_safetensors(path) or _is_torch(path)


def read(path: str, ignored: str = _COUNTS) -> Flat:
  """Returns every array of a .safetensors, .pth, .pt or .bin file.

  The keys of nested dictionaries are joined by dots.

  Args:
    path: of the file.
    ignored: pattern of the keys of arrays that are left out.

  Raises:
    ImportError: if PyTorch is needed and not installed.
    ValueError: naming the file, and the array that is damaged or not numeric.
  """
  if not is_tensors(path):
    raise ValueError(f"{path} is neither a .safetensors file nor PyTorch's.")
  load = _safetensors if _is_safetensors(path) else _torch
  what = 'the file'
  flat: Flat = {}
  try:
    for key, x in load(path).items():
      what = f'the array {key!r}'
      if not re.search(ignored, key):
        flat[key] = archive.number(
          x if isinstance(x, np.ndarray) else _to_numpy(x)
        )
  except ImportError:
    raise
  except Exception as e:
    raise archive.unreadable(path, what, e) from e
  return flat


def read_folder(folder: str, ignored: str = _COUNTS) -> Flat:
  """Returns every array of a directory in the layout of the Hugging Face hub.

  Args:
    folder: the directory.
    ignored: as of `read`.

  Raises:
    FileNotFoundError: if it holds no file of tensors, or a part is missing.
    ImportError: as `read`.
    ValueError: as `read`, or if parts disagree with their index.
  """
  for name in _FOLDER_FILES:
    path = os.path.join(folder, name)
    if os.path.exists(path):
      if name.endswith('.json'):
        return _read_parts(path, ignored)
      return read(path, ignored)
  raise FileNotFoundError(
    f'{folder} has no weights: none of {", ".join(_FOLDER_FILES)}.'
  )


def read_json(path: str) -> dict[str, Any]:
  """Returns the object that a JSON file holds.

  Raises:
    ValueError: if it holds none; names the file and what is wrong where.
  """
  try:
    value = json.loads(pathlib.Path(path).read_text('utf-8'))
  except (ValueError, RecursionError) as e:
    raise ValueError(f'{path} is no JSON: {e}') from e
  if not isinstance(value, dict):
    raise ValueError(
      f'{path} holds a {type(value).__name__} where a JSON object, {{...}}, is '
      'expected.'
    )
  return value


def write_folder(
  target: str,
  configs: Mapping[str, dict[str, Any]],
  arrays: Mapping[str, np.ndarray],
  dtype: str,
) -> None:
  """Writes a directory in the layout of the Hugging Face hub.

  Args:
    target: the new directory.
    configs: JSON objects by file name.
    arrays, dtype: as of `write_safetensors`, as are the errors.
  """
  with atomic_files.new_folder(target) as folder:
    for name, config in configs.items():
      text = json.dumps(config, indent=2, sort_keys=True)
      (folder / name).write_text(f'{text}\n', 'utf-8')
    write_safetensors(os.fspath(folder / _FOLDER_FILES[0]), arrays, dtype)


def write_safetensors(
  target: str,
  arrays: Mapping[str, np.ndarray],
  dtype: str = 'float32',
) -> None:
  """Writes a .safetensors file, whole or not at all.

  The same arrays give the same bytes.

  Args:
    target: the new file.
    arrays: by key.
    dtype: 'float32', 'bfloat16' or 'float16', that each is written as.

  Raises:
    FileExistsError: if something is there already.
    ValueError: if an array has values that the type cannot hold.
  """
  stored = {x: _as_dtype(arrays[x], np.dtype(dtype), x) for x in sorted(arrays)}
  with atomic_files.new_file(target) as path:
    # As PyTorch's readers want it.
    safetensors.numpy.save_file(stored, path, {'format': 'pt'})


def _as_dtype(x: np.ndarray, dtype: np.dtype, key: str) -> np.ndarray:
  with np.errstate(over='ignore'):
    stored = np.ascontiguousarray(x, dtype)
  if dtype == np.float16 and not np.isfinite(stored).all():
    raise ValueError(
      f'{key!r} has values up to {np.abs(x).max():g}, and float16 ends at '
      '65,504: use --dtype=bfloat16.'
    )
  return stored


def _start(path: str) -> bytes:
  with open(path, 'rb') as file:
    return file.read(16)


def _is_safetensors(path: str) -> bool:
  # The length of the header, and its first character.
  return _start(path)[8:9] == b'{'


def _is_torch(path: str) -> bool:
  if _start(path).startswith(_LEGACY_PICKLE):
    return True
  try:
    with zipfile.ZipFile(path) as archive_:
      names = archive_.namelist()
  except (zipfile.BadZipFile, NotImplementedError, ValueError):
    return False
  return any(name.endswith('/data.pkl') for name in names)


def _safetensors(path: str) -> Flat:
  return safetensors.numpy.load_file(path)


def _read_parts(index_path: str, ignored: str) -> Flat:
  """Returns the arrays of several files, found by their index."""
  folder = os.path.dirname(index_path)
  places = read_json(index_path).get('weight_map')
  if not isinstance(places, dict):
    raise ValueError(f'{index_path} has no object weight_map.')
  flat: Flat = {}
  for name in sorted({str(name) for name in places.values()}):
    if name != os.path.basename(name) or name in ('', '.', '..'):
      raise ValueError(
        f'{index_path} names {name!r}, which is not a file beside it.'
      )
    part = os.path.join(folder, name)
    if not os.path.isfile(part):
      raise FileNotFoundError(
        f'{index_path} names {name!r}, which is missing: fetch it too.'
      )
    flat |= read(part, ignored)
  for key in sorted(places.keys() - flat.keys()):
    if not re.search(ignored, key):
      raise ValueError(
        f'{os.path.join(folder, places[key])} lacks the array {key!r}, which '
        f'{index_path} says is there.'
      )
  return flat


class _Ignored(dict):
  """Stands for an object of any class but tensors, numbers and text."""

  def __init__(self, *args: Any, **kwargs: Any) -> None:
    super().__init__()

  def __setstate__(self, state: Any) -> None:
    pass


def _torch(path: str) -> dict[str, Any]:
  """Returns the tensors of a file of PyTorch's."""
  try:
    import torch
  except ImportError as e:
    raise ImportError(
      f"{path} is a file of PyTorch's: pip install torch to read it, or "
      f'convert it to .safetensors where it is. ({e})'
    ) from e
  is_zip = not _start(path).startswith(_LEGACY_PICKLE)
  # Training code saves its flags, metrics and NumPy numbers beside the weights.
  names = {'argparse.Namespace'}
  if is_zip:
    names |= set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
  with (
    torch.serialization.safe_globals([(_Ignored, name) for name in names]),
    warnings.catch_warnings(),
  ):
    # About types that are refused, and about how torch reads.
    warnings.simplefilter('ignore')
    saved = torch.load(path, 'cpu', weights_only=True, mmap=is_zip)
  found = dict(_tensors(saved, torch.Tensor))
  if not found:
    raise ValueError(
      'no tensor in it has a name: save model.state_dict() instead'
    )
  return found


def _tensors(
  saved: Any, kind: type, start: str = ''
) -> Iterator[tuple[str, Any]]:
  """Yields the tensors of nested dictionaries with their joined keys."""
  for key, x in saved.items() if isinstance(saved, dict) else ():
    if isinstance(key, str) and isinstance(x, kind):
      yield f'{start}{key}', x
    elif isinstance(key, str):
      yield from _tensors(x, kind, f'{start}{key}.')


def _to_numpy(x: Any) -> np.ndarray:
  """Returns a dense tensor as an array that shares its memory."""
  import torch

  x = x.detach()
  if x.dtype == torch.bfloat16:
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
  return x.numpy()
