"""Reads and writes .npz archives of numeric arrays."""

import collections
import dataclasses
import re
import zipfile
from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.lib import format as npy

from vit_jax.checkpoints.formats.table import Flat, Preprocessing, Weights
from vit_jax.data import atomic_files


def is_archive(path: str) -> bool:
  """Whether a file starts like an .npz archive."""
  with open(path, 'rb') as file:
    return file.read(4) in (b'PK\x03\x04', b'PK\x05\x06')


def load(path: str) -> Flat:
  """Returns all arrays of an archive, two-byte void arrays as bfloat16.

  Raises ValueError if the archive is damaged, or the dtype of an array is
  neither integer nor float.
  """
  part = 'the archive'
  flat: Flat = {}
  try:
    # np.load alone would leave a damaged file open.
    with open(path, 'rb') as file, np.load(file, allow_pickle=False) as archive:
      for key in archive.files:
        part = f'the array {key!r}'
        # NumPy returns bytes for a member that is not an array.
        x = np.asarray(archive[key])
        if x.dtype == 'V2':
          x = x.view(ml_dtypes.bfloat16)
        flat[key] = numeric(x)
  except Exception as e:
    raise unreadable(path, part, e) from e
  return flat


def numeric(x: np.ndarray) -> np.ndarray:
  """Returns `x`; raises ValueError if its dtype is not integer or float."""
  if x.dtype.kind not in 'fiu' and x.dtype != ml_dtypes.bfloat16:
    raise ValueError(f'its dtype is {x.dtype}; it must be integer or float')
  return x


def unreadable(path: str, part: str, error: Exception) -> ValueError:
  """Returns the error for a file that its parser could not read."""
  # In PyTorch's message, advice precedes the reason. The advice is dropped,
  # because it explains how to run code from the file.
  _, refused, reason = str(error).rpartition('WeightsUnpickler error: ')
  reason = ' '.join(reason.partition('\n')[0].split())[:300]
  if refused:
    reason = f'{reason.partition(". ")[0]}. Save only model.state_dict()'
  return ValueError(
    f'{path}: {part[:200]} cannot be read: {type(error).__name__}: {reason}'
  )


def save(target: str, flat: Flat, dtype: str) -> None:
  """Writes an uncompressed archive completely or not at all.

  The same arrays in the same order give the same bytes. bfloat16 is stored as
  two-byte void, because .npz files cannot declare it. Raises the errors of
  `atomic_files.new_file`, such as FileExistsError.
  """
  with (
    atomic_files.new_file(target) as path,
    zipfile.ZipFile(path, 'w') as archive,
  ):
    for key, x in flat.items():
      # A new ZipInfo has a fixed date, so the bytes do not depend on the time.
      entry = zipfile.ZipInfo(f'{key}.npy')
      with archive.open(entry, 'w', force_zip64=True) as file:
        # Converts one array at a time, to save memory.
        stored = np.ascontiguousarray(x, dtype).reshape(x.shape)
        if dtype == 'bfloat16':
          stored = stored.view('V2')
        npy.write_array(file, stored, allow_pickle=False)


@dataclasses.dataclass(frozen=True)
class Lookup:
  """Looks up arrays of a file by vit_jax's parameter names ("our names").

  Formats infer the model's fields from the shapes. Messages contain `path`,
  `format_name` and `shown(key)`.
  """

  path: str
  arrays: Flat
  key_of: Callable[[str], str]  # from our name to the key in `arrays`
  format_name: str
  shown: Callable[[str], str] = str

  def has(self, name: str) -> bool:
    """Whether the file has the array with our name `name`."""
    return self.key_of(name) in self.arrays

  def shape(self, name: str, ndim: int) -> tuple[int, ...]:
    """Returns the shape of an array that determines a field.

    Raises ValueError if the array is missing, has another number of dimensions,
    or is empty. An empty array, such as (0, 1000000), would let a tiny file ask
    for a huge model.
    """
    key = self.key_of(name)
    x = self.arrays.get(key)
    if x is None or x.ndim != ndim or not x.size:
      found = 'is missing' if x is None else f'has shape {x.shape}'
      raise ValueError(
        f'{self.path} is not a {self.format_name} checkpoint: the array '
        f'{self.shown(key)!r} must have {ndim} non-empty dimensions; it '
        f'{found}.'
      )
    return x.shape

  def size(self, name: str, ndim: int, axis: int = 0) -> int:
    """Returns the size of an axis; 0 if the array is missing.

    If the array exists, raises the errors of `shape`.
    """
    return self.shape(name, ndim)[axis] if self.has(name) else 0

  def count(self, start: str, pattern: str) -> tuple[int, ...]:
    """Returns the number of layers of each stage, in the order of the stages.

    The layers' keys begin with `start`, then match the regular expression
    `pattern`. The last group of `pattern` identifies the layer. The group
    before, if any, is the number of the stage; otherwise there is one stage.
    """
    matches = (re.match(re.escape(start) + pattern, k) for k in self.arrays)
    layers = {match.groups() for match in matches if match}
    stages = collections.Counter(int(*stage) for *stage, _ in layers)
    return tuple(stages[stage] for stage in sorted(stages))


def notes(weights: Weights, assumed: Preprocessing | None = None) -> list[str]:
  """Lists settings that readers of an .npz file cannot know, as sentences.

  `assumed` is the original code's preprocessing (None: `Preprocessing()`).
  """
  fields, actual = weights.fields, weights.preprocessing
  assumed = assumed or Preprocessing()
  lines = []
  if weights.class_names:
    lines.append('The file does not store class names.')
  if actual.describe() != assumed.describe():
    lines.append(
      f'Images are resized as follows: {actual.describe()}. The original code '
      f'assumes {assumed.describe()}; timm has other defaults.'
    )
  if (actual.mean, actual.std) != (assumed.mean, assumed.std):
    lines.append(
      f'Images are normalised with mean {actual.mean} and std {actual.std}. '
      f'Readers of the file assume {assumed.mean} and {assumed.std}.'
    )
  if (gelu := fields.get('gelu', 'tanh')) != 'tanh':
    effect = ', which changes logits by about 1e-3' if gelu == 'exact' else ''
    lines.append(
      f'The model has the {gelu} GELU. The original code computes the tanh '
      f'approximation{effect}; timm by default computes the exact GELU.'
    )
  if (epsilon := fields.get('layer_norm_epsilon', 1e-6)) != 1e-6:
    lines.append(
      f'The LayerNorm epsilon is {epsilon}. Readers of the file use 1e-6.'
    )
  return lines
