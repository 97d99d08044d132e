"""Reads and writes .npz archives of numeric arrays, showing progress."""

import collections
import dataclasses
import re
import zipfile
from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.lib import format as npy
from tqdm import tqdm

from vit_jax.checkpoints.formats.table import Flat, Preprocessing, Weights
from vit_jax.data import atomic_files


def is_archive(path: str) -> bool:
  """Whether a file starts like an .npz archive."""
  with open(path, 'rb') as file:
    return file.read(4) in (b'PK\x03\x04', b'PK\x05\x06')


def load(path: str) -> Flat:
  """Returns all arrays of an archive.

  Reads two-byte void arrays as bfloat16, which .npz files cannot declare.

  Raises:
    ValueError: if an array is damaged or not numeric; names file and array.
  """
  what = 'the archive'
  flat: Flat = {}
  try:
    # Opened here, because np.load does not close a damaged file.
    with open(path, 'rb') as file, np.load(file, allow_pickle=False) as archive:
      infos = archive.zip.infolist()
      with progress(f'reading {path}', sum(x.file_size for x in infos)) as bar:
        for key in archive.files:
          what = f'the array {key!r}'
          # A member that is not an array is returned as bytes.
          x = np.asarray(archive[key])
          flat[key] = number(
            x.view(ml_dtypes.bfloat16) if x.dtype == 'V2' else x
          )
          bar.update(x.nbytes)
  except Exception as e:
    raise unreadable(path, what, e) from e
  return flat


def number(x: np.ndarray) -> np.ndarray:
  """Returns an array of integers or floating-point numbers as it is.

  Raises:
    ValueError: with another type.
  """
  if x.dtype.kind not in 'fiu' and x.dtype != ml_dtypes.bfloat16:
    raise ValueError(f'its type {x.dtype} is not a type of weights')
  return x


def unreadable(path: str, what: str, error: Exception) -> ValueError:
  """Returns the error for a damaged file, whatever its parser raised."""
  # PyTorch gives the reason behind its advice on how to run the file anyway.
  _, refused, reason = str(error).rpartition('WeightsUnpickler error: ')
  reason = ' '.join(reason.partition('\n')[0].split())[:300]
  if refused:
    reason = f'{reason.partition(". ")[0]}: save the state dict alone'
  return ValueError(
    f'{path}: {what[:200]} cannot be read: {type(error).__name__}: {reason}'
  )


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
    atomic_files.new_file(target) as path,
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
  """Returns a progress bar that only appears for long operations."""
  return tqdm(
    desc=what,
    total=total_bytes,
    unit='B',
    unit_scale=True,
    delay=2,
    disable=None,
    leave=False,
  )


@dataclasses.dataclass(frozen=True)
class Lookup:
  """Looks up arrays of a file by our names, to infer the model's fields.

  Attributes:
    path: path of the file, for messages.
    arrays: arrays by the file's keys.
    key_of: function from our name to the file's key.
    what: kind of checkpoint, for messages.
    shown: function from this key to the one shown in messages.
  """

  path: str
  arrays: Flat
  key_of: Callable[[str], str]
  what: str
  shown: Callable[[str], str] = str

  def has(self, name: str) -> bool:
    """Whether the file has an array."""
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
        f'{self.path} is not a {self.what} checkpoint: {self.shown(key)!r} '
        f'should have {ndim} dimensions, none of them 0, and is {found}.'
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
