"""Reading and writing .npz archives of numeric arrays, trusting nobody.

Beyond what NumPy's own reader does, what a header claims is checked against the
archive before any memory is taken for it, and there is progress to see.
"""

import math
import os
import zipfile
from typing import IO

import ml_dtypes
import numpy as np
from numpy.lib import format as npy
from tqdm import tqdm

from vit_jax.convert import whole
from vit_jax.convert.table import Flat

_CHUNK_BYTES = 1 << 24


def is_archive(path: str) -> bool:
  """Tells whether a file starts as an .npz archive does."""
  with open(path, 'rb') as file:
    return file.read(4) in (b'PK\x03\x04', b'PK\x05\x06')


def load(path: str) -> Flat:
  """Returns every array of an archive, in memory once.

  Two-byte void arrays are bfloat16, which NumPy cannot name in a file.

  Raises:
    ValueError: naming the file and the array that is damaged or no number.
  """
  what = 'the archive'
  flat: Flat = {}
  try:
    with zipfile.ZipFile(path) as archive:
      infos = archive.infolist()
      total_bytes = sum(info.file_size for info in infos)
      check_memory(total_bytes)
      with progress(f'reading {path}', total_bytes) as bar:
        for info in infos:
          key = info.filename.removesuffix('.npy')
          what = f'the array {key!r}'
          if key in flat:
            raise ValueError('it is there twice')
          with archive.open(info) as file:
            flat[key] = _read_array(file, info.file_size, bar)
  except Exception as e:
    raise ValueError(
      f'{path}: {what} cannot be read: {type(e).__name__}: {e}'
    ) from e
  return flat


def save(target: str, flat: Flat) -> None:
  """Writes an uncompressed archive, whole or not at all.

  Args:
    target: the new file.
    flat: arrays by key; bfloat16 becomes two-byte void. Each is made contiguous
      when its turn comes.

  Raises:
    FileExistsError: if something is there already.
  """
  with (
    whole.new_file(target) as path,
    zipfile.ZipFile(path, 'w') as archive,
    progress(f'writing {target}', sum(x.nbytes for x in flat.values())) as bar,
  ):
    for key, x in flat.items():
      with archive.open(f'{key}.npy', 'w', force_zip64=True) as file:
        stored = np.ascontiguousarray(x).reshape(x.shape)
        if stored.dtype == ml_dtypes.bfloat16:
          stored = stored.view('V2')
        npy.write_array(file, stored, allow_pickle=False)
      bar.update(x.nbytes)


def progress(what: str, total_bytes: int) -> tqdm:
  """Returns a bar that shows itself where there is time to wonder."""
  return tqdm(
    desc=what,
    total=total_bytes,
    unit='B',
    unit_scale=True,
    delay=2,
    disable=None,
    leave=False,
  )


def _read_array(file: IO[bytes], size_bytes: int, bar: tqdm) -> np.ndarray:
  version = npy.read_magic(file)
  if version not in ((1, 0), (2, 0)):
    raise ValueError(f'its format has the unknown version {version}')
  read_header = (
    npy.read_array_header_1_0
    if version == (1, 0)
    else npy.read_array_header_2_0
  )
  shape, fortran_order, dtype = read_header(file)
  if dtype == np.dtype('V2'):
    dtype = np.dtype(ml_dtypes.bfloat16)
  elif dtype.kind not in 'fiu':
    raise ValueError(f'its type is {dtype}, no number')
  claimed = math.prod(shape) * dtype.itemsize
  if claimed != size_bytes - file.tell():
    raise ValueError(
      f'its header claims the shape {shape} of {dtype}, {claimed:,} bytes, and '
      f'{size_bytes - file.tell():,} follow'
    )
  data = np.empty(claimed, np.uint8)
  view = memoryview(data)
  while view:
    count = file.readinto(view[:_CHUNK_BYTES])  # type: ignore[attr-defined]
    if not count:
      raise ValueError(f'it ends {len(view):,} bytes too early')
    view = view[count:]
    bar.update(count)
  file.read(1)  # At its end the archive's reader compares the checksum.
  return data.view(dtype).reshape(shape, order='F' if fortran_order else 'C')


def check_memory(needed_bytes: int) -> None:
  """Refuses what cannot fit, such as a small file that unpacks to terabytes.

  Raises:
    ValueError: with both sizes.
  """
  memory_bytes = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  if needed_bytes > memory_bytes:
    raise ValueError(
      f'it unpacks to {needed_bytes / 1e9:,.0f} GB and this machine has '
      f'{memory_bytes / 1e9:,.0f} GB of memory'
    )
