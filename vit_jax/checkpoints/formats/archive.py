"""Reading and writing .npz archives of numeric arrays, trusting nobody.

Beyond what NumPy's own reader does, what a header claims is checked against the
archive before any memory is taken for it, and there is progress to see.
"""

import collections
import contextlib
import dataclasses
import math
import os
import pathlib
import re
import zipfile
from collections.abc import Callable
from typing import IO

import ml_dtypes
import numpy as np
from numpy.lib import format as npy
from tqdm import tqdm

from vit_jax.checkpoints.formats.table import Flat, Preprocessing, Weights
from vit_jax.data import whole

# Of a container or a job in Linux: its control group, and where those are.
_OWN_GROUP = pathlib.Path('/proc/self/cgroup')
_GROUPS = pathlib.Path('/sys/fs/cgroup')


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
    # A damaged directory can put all that follows into a name.
    raise ValueError(
      f'{path}: {what[:200]} cannot be read: {type(e).__name__}: {str(e)[:300]}'
    ) from e
  return flat


def save(target: str, flat: Flat, dtype: str) -> None:
  """Writes an uncompressed archive, whole or not at all.

  The same arrays give the same bytes at any time. Each is made contiguous when
  its turn comes, and written as `dtype`; bfloat16 becomes two-byte void.

  Raises:
    FileExistsError: if something is there already.
  """
  stored_dtype = np.dtype(dtype)
  total = sum(x.size for x in flat.values()) * stored_dtype.itemsize
  with (
    whole.new_file(target) as path,
    zipfile.ZipFile(path, 'w') as archive,
    progress(f'writing {target}', total) as bar,
  ):
    for key, x in flat.items():
      # An entry that is given as such, not by name, has the year 1980.
      entry = zipfile.ZipInfo(f'{key}.npy')
      with archive.open(entry, 'w', force_zip64=True) as file:
        stored = np.ascontiguousarray(x, stored_dtype).reshape(x.shape)
        if stored_dtype == ml_dtypes.bfloat16:
          stored = stored.view('V2')
        npy.write_array(file, stored, allow_pickle=False)
      bar.update(stored.nbytes)


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
  if version == (1, 0):
    shape, _, dtype = npy.read_array_header_1_0(file)
  else:
    shape, _, dtype = npy.read_array_header_2_0(file)
  if dtype != 'V2' and dtype.kind not in 'fiu':
    raise ValueError(f'its type is {dtype}, no number')
  claimed = math.prod(shape) * dtype.itemsize
  if claimed != size_bytes - file.tell():
    raise ValueError(
      f'its header claims the shape {shape} of {dtype}, {claimed:,} bytes, and '
      f'{size_bytes - file.tell():,} follow'
    )
  file.seek(0)
  x = npy.read_array(file, allow_pickle=False)
  bar.update(x.nbytes)
  return x.view(ml_dtypes.bfloat16) if dtype == 'V2' else x


def check_memory(needed_bytes: int) -> None:
  """Refuses what cannot fit, such as a small file that unpacks to terabytes.

  Raises:
    ValueError: with both sizes.
  """
  memory_bytes = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  group = _GROUPS
  with contextlib.suppress(OSError):
    group /= _OWN_GROUP.read_text().partition('0::/')[2].strip()
  files = [each / 'memory.max' for each in (group, *group.parents)]
  for file in (*files, _GROUPS / 'memory/memory.limit_in_bytes'):  # version 1
    with contextlib.suppress(OSError, ValueError):  # no file, or no limit: max
      memory_bytes = min(memory_bytes, int(file.read_text()))
  if needed_bytes > memory_bytes:
    raise ValueError(
      f'it unpacks to {needed_bytes / 1e9:,.0f} GB and this machine or '
      f'container has {memory_bytes / 1e9:,.0f} GB of memory'
    )


@dataclasses.dataclass(frozen=True)
class Lookup:
  """The arrays of a file by other names, to infer the fields of a model.

  Attributes:
    path: of the file, for messages.
    arrays: by the file's keys.
    key_of: from a name to the key of the file.
    what: the file should be.
  """

  path: str
  arrays: Flat
  key_of: Callable[[str], str]
  what: str

  def has(self, name: str) -> bool:
    """Tells whether the file has an array."""
    return self.key_of(name) in self.arrays

  def shape(self, name: str, ndim: int) -> tuple[int, ...]:
    """Returns the shape of an array that decides a field.

    Raises:
      ValueError: if it is absent, has another number of dimensions, or no
        elements: it could claim any size then.
    """
    key = self.key_of(name)
    x = self.arrays.get(key)
    if x is None or x.ndim != ndim or not x.size:
      found = 'absent' if x is None else f'of shape {x.shape}'
      raise ValueError(
        f'{self.path} is no {self.what} checkpoint: {key!r} should have {ndim} '
        f'dimensions, none of them 0, and is {found}.'
      )
    return x.shape

  def size(self, name: str, ndim: int, axis: int = 0) -> int:
    """Returns the size of an axis of an array, 0 if it is absent.

    Raises:
      ValueError: as `shape`.
    """
    return self.shape(name, ndim)[axis] if self.has(name) else 0

  def count(self, start: str, pattern: str) -> tuple[int, ...]:
    """Returns how many layers there are in each stage.

    Args:
      start: of their keys, as the file has it.
      pattern: of what follows; the last group tells layers apart, and one
        before it has the number of a stage. Without, all are one stage.
    """
    matches = (re.match(re.escape(start) + pattern, k) for k in self.arrays)
    layers = {match.groups() for match in matches if match}
    stages = collections.Counter(int(*stage) for *stage, _ in layers)
    return tuple(stages[stage] for stage in sorted(stages))


def not_held(
  weights: Weights, assumed: Preprocessing | None = None
) -> list[str]:
  """Says what an archive of parameters alone leaves out, a sentence each.

  Its readers prepare images as is `assumed`; None for the default.
  """
  fields, actual = weights.fields, weights.preprocessing
  assumed = assumed or Preprocessing()
  lines = []
  if weights.class_names:
    lines.append('The class names: the format has no place for them.')
  if actual.describe() != assumed.describe():
    lines.append(
      f'How images are resized ({actual.describe()}): its readers assume '
      f'{assumed.describe()}.'
    )
  if (actual.mean, actual.std) != (assumed.mean, assumed.std):
    lines.append(
      f'The mean {actual.mean} and deviation {actual.std} of images: its '
      'readers assume 0.5 for both.'
    )
  if fields.get('gelu', 'tanh') != 'tanh':
    lines.append(
      'The exact GELU: its readers compute the tanh approximation, which moves '
      'logits by about 1e-3.'
    )
  if fields.get('layer_norm_epsilon', 1e-6) != 1e-6:
    lines.append(
      f'The LayerNorm epsilon {fields["layer_norm_epsilon"]}: its readers use '
      '1e-6.'
    )
  return lines
