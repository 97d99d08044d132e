"""Files of named tensors, .safetensors and PyTorch's, trusting nobody.

What a file is, is told by its first bytes. No code in it ever runs: PyTorch's
pickles are read with `weights_only`.
"""

import argparse
import json
import math
import os
import pathlib
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from vit_jax.checkpoints.formats import archive
from vit_jax.checkpoints.formats.table import Flat
from vit_jax.data import whole

# Of torch.save before version 1.6: a protocol, and a number that torch chose.
_LEGACY_PICKLE = b'\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.'
# Where training code puts the parameters beside its optimizer's state; the
# average over time comes first, because it is what is evaluated.
_STATE_DICTS = ('state_dict_ema', 'model_ema', 'state_dict', 'model')

_FOLDER_FILES = (
  'model.safetensors',
  'model.safetensors.index.json',
  'pytorch_model.bin',
  'pytorch_model.bin.index.json',
)
# How often BatchNorm had been updated, which nothing reads.
_COUNTS = r'\.num_batches_tracked$'
_DTYPE_CODES = {'float32': 'F32', 'bfloat16': 'BF16', 'float16': 'F16'}


def is_tensors(path: str) -> bool:
  """Tells by its content whether `read` is for a file."""
  return _is_safetensors(path) or _is_torch(path)


def read(path: str, ignored: str = _COUNTS) -> Flat:
  """Returns every array of a .safetensors, .pth, .pt or .bin file.

  Of what training code saved, these are the parameters alone.

  Args:
    path: of the file.
    ignored: pattern of the keys of arrays that are not looked at.

  Raises:
    ImportError: if PyTorch is needed and not installed.
    ValueError: naming the file, and the array that is damaged or no number.
  """
  if _is_safetensors(path):
    return _read_safetensors(path, ignored)
  if _is_torch(path):
    return _read_torch(path, ignored)
  raise ValueError(f'{path} is no .safetensors file and none of PyTorch.')


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
  with whole.new_folder(target) as folder:
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

  The library's own writer wants every array contiguous at once, which doubles
  the memory where they are transposed views. The same arrays give the same
  bytes.

  Args:
    target: the new file.
    arrays: by key. Each is asked for twice, for its shape and for its values,
      which are made contiguous when its turn comes.
    dtype: 'float32', 'bfloat16' or 'float16', that each is written as.

  Raises:
    FileExistsError: if something is there already.
    ValueError: if an array has values that the type cannot hold.
  """
  stored_dtype = np.dtype(dtype)
  # As PyTorch's readers want it.
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for key in sorted(arrays):
    shape = arrays[key].shape
    begin, end = end, end + math.prod(shape) * stored_dtype.itemsize
    header[key] = {
      'dtype': _DTYPE_CODES[dtype],
      'shape': list(shape),
      'data_offsets': [begin, end],
    }
  head = json.dumps(header, separators=(',', ':')).encode()
  head += b' ' * (-len(head) % 8)
  with (
    whole.new_file(target) as path,
    open(path, 'wb') as file,
    archive.progress(f'writing {target}', end) as bar,
  ):
    file.write(struct.pack('<Q', len(head)) + head)
    for key in sorted(arrays):
      stored = _as_dtype(arrays[key], stored_dtype, key)
      file.write(stored.reshape(-1).view(np.uint8).data)
      bar.update(stored.nbytes)


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


def _read_safetensors(path: str, ignored: str) -> Flat:
  what = 'its header'
  flat: Flat = {}
  try:
    with (
      safetensors.safe_open(path, 'np') as file,
      archive.progress(f'reading {path}', os.path.getsize(path)) as bar,
    ):
      for key in file.keys():  # noqa: SIM118, it is no dictionary
        if re.search(ignored, key):
          continue
        what = f'the array {key!r}'
        _check_type(file.get_slice(key).get_dtype())
        flat[key] = file.get_tensor(key)
        bar.update(flat[key].nbytes)
  except Exception as e:
    raise ValueError(
      f'{path}: {what} cannot be read: {type(e).__name__}: {e}'
    ) from e
  return flat


def _check_type(code: str) -> None:
  # Of those with eight bits, NumPy has no types without more context.
  if (
    code not in _DTYPE_CODES.values() and code[0] not in 'IU' and code != 'F64'
  ):
    raise ValueError(f'its type is {code}, none of those of weights')


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
        f'{index_path} names {name!r}, which is no file beside it.'
      )
    if not os.path.isfile(os.path.join(folder, name)):
      raise FileNotFoundError(
        f'{index_path} names {name!r}, which is not there: fetch it too.'
      )
    part = read(os.path.join(folder, name), ignored)
    for key, x in part.items():
      if places.get(key) != name:
        raise ValueError(
          f'{os.path.join(folder, name)} has the array {key!r}, which '
          f'{index_path} says is in {places.get(key)!r}.'
        )
      flat[key] = x
  for key in sorted(places.keys() - flat.keys()):
    if re.search(ignored, key):
      continue
    raise ValueError(
      f'{os.path.join(folder, places[key])} lacks the array {key!r}, which '
      f'{index_path} says is there.'
    )
  return flat


def _read_torch(path: str, ignored: str) -> Flat:
  try:
    import torch
  except ImportError as e:
    raise ImportError(
      f'{path} is a file of PyTorch: install it to read it, pip install torch, '
      f'or convert the file to .safetensors where it is. ({e})'
    ) from e
  what = 'the file'
  flat: Flat = {}
  try:
    is_zip = not _start(path).startswith(_LEGACY_PICKLE)
    if is_zip:
      with zipfile.ZipFile(path) as zipped:
        archive.check_memory(sum(x.file_size for x in zipped.infolist()))
    # Training code likes to save its flags beside the parameters.
    with (
      torch.serialization.safe_globals([argparse.Namespace]),
      warnings.catch_warnings(),
    ):
      # About arrays that are refused below, and about how torch reads.
      warnings.simplefilter('ignore')
      saved = torch.load(
        path, map_location='cpu', weights_only=True, mmap=is_zip
      )
    state = _state_dict(saved)
    with archive.progress(f'reading {path}', os.path.getsize(path)) as bar:
      for key, x in state.items():
        if re.search(ignored, key):
          continue
        what = f'the array {key!r}'
        flat[key] = _to_numpy(x, torch)
        bar.update(flat[key].nbytes)
  except Exception as e:
    raise ValueError(
      f'{path}: {what} cannot be read: {type(e).__name__}: {_reason(e)}'
    ) from e
  return flat


def _reason(e: Exception) -> str:
  """Returns what was found, without torch's advice on how to run it anyway."""
  _, refused, found = str(e).rpartition('WeightsUnpickler error: ')
  lines = found.splitlines() or ['']
  reason = lines[0].split('. ')[0]
  return f'{reason}: save the state dict alone' if refused else reason


def _state_dict(saved: Any) -> dict[str, Any]:
  """Returns the parameters in what training code saved."""
  if isinstance(saved, dict):
    for name in _STATE_DICTS:
      if isinstance(saved.get(name), dict):
        saved = saved[name]
        break
  if not isinstance(saved, dict):
    raise ValueError(f'it holds a {type(saved).__name__} and no state dict')
  for key, x in saved.items():
    if not isinstance(key, str) or not hasattr(x, 'untyped_storage'):
      raise ValueError(
        f'its {key!r} is a {type(x).__name__} and no tensor, and none of '
        f'{", ".join(_STATE_DICTS)} is a state dict'
      )
  return saved


def _to_numpy(x: Any, torch: Any) -> np.ndarray:
  """Returns a tensor as an array that shares its memory."""
  if x.layout != torch.strided or x.is_quantized or x.device.type != 'cpu':
    raise ValueError(f'it is no dense array but {x.layout}, {x.dtype}')
  if x.nbytes > x.untyped_storage().nbytes():
    raise ValueError(
      f'it claims the shape {tuple(x.shape)}, {x.nbytes:,} bytes, and '
      f'{x.untyped_storage().nbytes():,} are there'
    )
  x = x.detach()
  if x.dtype == torch.bfloat16:
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
  array = x.numpy()
  if array.dtype.kind not in 'fiu':
    raise ValueError(f'its type is {x.dtype}, none of those of weights')
  return array
