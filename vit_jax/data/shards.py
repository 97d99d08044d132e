"""Reads ArrayRecord and TFRecord shards, and finds shards of all kinds.

  arrayrecord:./photos          all shards of a folder
  tfrecord:gs://bucket/train-*  the files that match a pattern

A record is a tf.train.Example, as written by TFDS and by TensorFlow's scripts
for ImageNet. The first run reads the shards, to index the labels of the records
and their positions in TFRecord files. The index is stored in
`~/.cache/vit_jax/shards` (or under `$XDG_CACHE_HOME`).
"""

import contextlib
import glob
import hashlib
import io
import logging
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import fsspec
import google_crc32c
import grain
import numpy as np

from vit_jax.data import atomic_files, cores, splits, text_files
from vit_jax.data.decode import UnreadableImage
from vit_jax.data.source import Record, Source

_log = logging.getLogger(__name__)

# A glob pattern for the file extension of each kind of shard.
KINDS = {
  'arrayrecord': '.array*record*',
  'tfrecord': '.tfrecord*',
  'parquet': '.parquet*',
  'webdataset': '.tar',
}
# Field names of a record: in TFDS, then in TensorFlow's scripts for ImageNet.
_IMAGE = ('image', 'image/encoded')
_LABEL = ('label', 'image/class/label')
_FILE_NAME = ('file_name', 'image/filename')
# Files beside the shards that list class names. TFDS writes the second.
_CLASSES = ('classes.txt', 'label.labels.txt')
# This many records with large images take less than 1 GB of memory.
_READ_TOGETHER = 512


def open_shards(name: str, split: str, split_seed: int) -> 'Shards':
  kind = name.partition(':')[0]
  fs, by_split = find(name)
  names = class_file(fs, next(iter(by_split.values()))[0])
  if names and len(by_split) > 1:
    # The class file has all classes, so only the wanted splits must be indexed.
    needed = splits.needed(split, by_split, name)
    by_split = {x: y if x in needed else [] for x, y in by_split.items()}
  paths = [path for files in by_split.values() for path in files]
  states = [_state(fs, path) for path in paths]
  counts, values, places = _index(kind, fs, paths, states)
  sizes, start = {}, 0
  for key, files in by_split.items():
    sizes[key] = int(sum(counts[start : start + len(files)]))
    start += len(files)
  has_labels = any(value is not None for value in values)
  labels_N, class_names = numbered(values, names)
  rows = splits.select_rows(split, sizes, labels_N, name, split_seed)
  if has_labels and np.any(labels_N[rows] < 0):
    wrong = values[rows[np.argmin(labels_N[rows])]]
    said = 'no class' if wrong is None else f'the class {wrong!r}'
    raise ValueError(
      f'{name} {split}: a record has {said}; each needs one of the '
      f'{len(class_names)} classes. Name another split. If there is a file '
      f'{_CLASSES[0]}, it must have a line for each class, from class 0.'
    )
  records: Any
  if kind == 'arrayrecord':
    # With the number of records given, Grain opens each file only on first use.
    records = grain.sources.ArrayRecordDataSource(
      [f'{x}[0:{n}]' for x, n in zip(paths, counts, strict=True)]
    )
  else:
    records = _TfRecords(fs, paths, np.cumsum(counts), places)
  if not has_labels:
    return Shards(records, states, counts, rows)
  return LabelledShards(records, states, counts, rows, labels_N, class_names)


class Shards(Source):
  """A source of selected records of shards, without labels."""

  def __init__(
    self,
    records: Any,
    states: Sequence[str],
    counts: np.ndarray,
    rows: np.ndarray,
    labels_N: np.ndarray | None = None,
    class_names: tuple[str, ...] = (),
  ):
    """Selects records of all shards.

    Args:
      records: the records of all shards, one shard after the other.
      states: a string for each shard, see `_state`.
      counts: the number of records of each shard.
      rows: indices of the selected records in `records`.
      labels_N: the classes of all `records`, int32 [N], if they have classes.
      class_names: a name for each class.
    """
    self._records, self._states, self._rows = records, states, rows
    self._starts = np.cumsum(counts) - counts
    self._ends = np.cumsum(counts)
    self._labels = None if labels_N is None else labels_N[rows]
    self.class_names = class_names

  def __len__(self) -> int:
    return len(self._rows)

  def _place(self, index: int) -> tuple[str, int]:
    """Returns the state of a record's shard, and the position in the shard."""
    row = int(self._rows[index])
    shard = int(np.searchsorted(self._ends, row, 'right'))
    return self._states[shard], row - int(self._starts[shard])

  def __getitem__(self, index: int) -> Record:
    state, position = self._place(index)
    name = f'{state.partition(chr(0))[0]}/{position}'
    try:
      data = self._records[int(self._rows[index])]
    except (OSError, RuntimeError) as e:  # RuntimeError is ArrayRecord's
      raise UnreadableImage(name, str(e)) from e
    fields = _parse(data, name)
    image = _value(fields, _IMAGE)
    if not isinstance(image, bytes):
      raise UnreadableImage(
        name,
        f'its fields are {", ".join(sorted(fields))}; the encoded image must '
        f'be in {" or ".join(_IMAGE)}',
      )
    if file_name := _value(fields, _FILE_NAME):
      name = f'{posixpath.dirname(name)}/{_text(file_name)}'
    return {'image': image, 'name': name}

  def identity(self) -> str:
    parts = (state.split('\0') for state in self._states)
    texts = (f'{posixpath.basename(x[0])} {x[1]}' for x in parts)
    digest = hashlib.sha256('\n'.join(texts).encode(errors='surrogateescape'))
    digest.update(self._rows.tobytes())
    return f'shards {digest.hexdigest()}'

  def states(self, indices: Sequence[int]) -> Iterable[str]:
    places = map(self._place, indices)
    return (f'{state} {position}' for state, position in places)


class LabelledShards(Shards):
  """A source of selected records of shards, each with one class."""

  def __getitem__(self, index: int) -> Record:
    return super().__getitem__(index) | {'label': int(self.labels()[index])}

  def labels(self) -> np.ndarray:
    assert self._labels is not None
    return self._labels


class _TfRecords:
  """Random access to the records of TFRecord files.

  Grain can read these files only from start to end, and only on local disk.
  """

  def __init__(
    self, fs: Any, paths: list[str], ends: np.ndarray, places: np.ndarray
  ):
    self._fs, self._paths, self._ends, self._places = fs, paths, ends, places

  def __getitem__(self, row: int) -> bytes | None:
    path = self._paths[int(np.searchsorted(self._ends, row, 'right'))]
    start, end = map(int, self._places[row])
    return _next(io.BytesIO(self._fs.cat_file(path, start, end)), path)


def find(name: str) -> tuple[Any, dict[str, list[str]]]:
  """Returns a dataset's file system, and the sorted paths of each split.

  The first word of a file's name that is in `splits.NAMES` is its split. If no
  file has such a word, the names of folders count, if there are several folders
  and each has such a word. If neither names a split, all files are `train`.
  Paths outside the local disk start with their protocol, such as gs://.

  Raises:
    FileNotFoundError: No file matches.
    ImportError: The library for a bucket is missing.
    ValueError: Some files name a split and others do not, or the protocol is
      unknown.
  """
  kind, _, pattern = name.partition(':')
  fs, place = fsspec.core.url_to_fs(os.path.expanduser(pattern))
  if fs.isdir(place):
    place = f'{glob.escape(place.rstrip("/"))}/*{KINDS[kind]}'
  local = 'file' in fs.protocol
  paths = sorted(x for x in fs.glob(place) if posixpath.basename(x)[:1] != '.')
  if not paths:
    raise FileNotFoundError(
      f'{name} matches no file. Give a folder with files *{KINDS[kind]}, or a '
      f"pattern, as in '{kind}:./data/train-*'"
    )
  found = [_split_of(path) for path in paths]
  folders = [posixpath.dirname(path) for path in paths]
  by_folder = [_split_of(folder) for folder in folders]
  if not any(found) and len({*folders}) > 1 and all(by_folder):
    found = by_folder
  by_split: dict[str, list[str]] = {}
  for path, split in zip(paths, found, strict=True):
    path = path if local else fs.unstrip_protocol(path)
    by_split.setdefault(split, []).append(path)
  if without := by_split.pop('', []):
    if by_split:
      raise ValueError(
        f'{name}: {without[0]} has no split in its name, but other files do. '
        f'Add the word {" or ".join(names[0] for names in splits.SAME)} to '
        'its name, or give a pattern that does not match it.'
      )
    by_split['train'] = without
  return fs, by_split


def _split_of(path: str) -> str:
  words = re.split('[^a-z]+', posixpath.basename(path).lower())
  return next((word for word in words if word in splits.NAMES), '')


def class_file(fs: Any, path: str) -> tuple[str, ...]:
  """Returns class names from a file beside a shard; () if missing or blank.

  Raises ValueError if the file is not UTF-8, or a line is empty or repeated.
  """
  for file_name in _CLASSES:
    place = f'{posixpath.dirname(path)}/{file_name}'
    if fs.exists(place):
      text = text_files.decoded(fs.cat_file(place), place)
      if not text.strip():
        return ()
      names = tuple(x.strip() for x in text.rstrip().split('\n'))
      if '' in names or len({*names}) < len(names):
        wrong = next(x for x in names if not x or names.count(x) > 1)
        raise ValueError(
          f'{place} has the line {wrong!r}, which is empty or repeated: name '
          'each class once.'
        )
      return names
  return ()


def numbered(
  values: Sequence[Any], names: Sequence[str] = ()
) -> tuple[np.ndarray, tuple[str, ...]]:
  """Numbers the classes of records; returns labels, int32 [N], and class names.

  A value is the number or the name of a class. The label of a value that is
  None, -1 or not among the classes is -1. `names` are all classes in order;
  without them, the classes are the distinct values except None and -1, sorted.
  """
  known: Sequence[Any] = sorted({*values} - {None, -1})
  if names:
    are_texts = bool(known) and isinstance(known[0], str)
    known = names if are_texts else range(len(names))
  number_of = {value: i for i, value in enumerate(known)}
  labels_N = np.array([number_of.get(x, -1) for x in values], np.int32)
  return labels_N, tuple(map(str, names or known))


def _state(fs: Any, path: str) -> str:
  """Formats a file's path, size, and mtime, ETag or creation time."""
  info = {key.lower(): value for key, value in fs.info(path).items()}
  time = info.get('mtime') or info.get('etag') or info.get('created')
  return f'{path}\0{info["size"]}\0{time}'


def _index(
  kind: str, fs: Any, paths: list[str], states: list[str]
) -> tuple[np.ndarray, list[Any], np.ndarray]:
  """Indexes all shards, or reads their index from the cache.

  Returns the number of records of each shard; the class of each record (a
  number, a name or None); and its start and end in bytes, int64 [N, 2]. Both
  are 0 for ArrayRecord.
  """
  # Increase the 2 when the code may read another class from the same record.
  text = '\n'.join([f'{kind} 2', *states]).encode(errors='surrogateescape')
  place = atomic_files.cache_folder() / 'shards'
  place /= f'{hashlib.sha256(text).hexdigest()}.npz'
  counts = None
  with contextlib.suppress(Exception):  # damaged files raise many types
    with np.load(place) as kept:
      counts, labels, places = (kept[x] for x in ('counts', 'labels', 'places'))
  if counts is None:
    scans = cores.in_threads(
      lambda i: _scan(kind, fs, paths[i]),
      range(len(paths)),
      cores.progress('Reading labels', len(paths), 'shards'),
    )
    found = list(scans)
    counts = np.array([len(scan) for scan in found], np.int64)
    rows = [row for scan in found for row in scan]
    values = [label for _, _, label in rows]
    lacking = '' if any(isinstance(x, str) for x in values) else -1
    labels = np.array([lacking if x is None else x for x in values])
    places = np.array([row[:2] for row in rows], np.int64).reshape(-1, 2)
    data = io.BytesIO()
    np.savez(data, counts=counts, labels=labels, places=places)
    try:
      place.parent.mkdir(parents=True, exist_ok=True)
      atomic_files.replace(place, data.getvalue())
    except OSError as e:  # training works with a read-only home too
      _log.warning('The index of shards could not be stored: %s', e)
  # -1 means a missing class, as in TFDS.
  return counts, [None if x in (-1, '') else x for x in labels.tolist()], places


def _scan(kind: str, fs: Any, path: str) -> list[tuple[int, int, Any]]:
  """Returns (start, end, class) of each record of a shard; see `_index`."""
  rows: list[tuple[int, int, Any]] = []
  records = _walk(fs, path)
  try:
    if kind == 'arrayrecord':
      source = grain.sources.ArrayRecordDataSource([path])
      records = ((0, 0, data) for data in read_all(source))
    for start, end, data in records:
      label = _value(_parse(data, f'{path}/{len(rows)}'), _LABEL)
      rows.append((start, end, _text(label)))
  except (RuntimeError, UnreadableImage) as e:
    raise ValueError(
      f'{path} is damaged or has another format, after {len(rows):,} records: '
      f'{getattr(e, "reason", e)}. Write or download it again.'
    ) from None
  return rows


def read_all(records: Any) -> Iterator[bytes]:
  """Yields all records of an ArrayRecord source; reads many at a time."""
  for start in range(0, len(records), _READ_TOGETHER):
    some = range(start, min(start + _READ_TOGETHER, len(records)))
    yield from records.__getitems__(some)


def _walk(fs: Any, path: str) -> Iterator[tuple[int, int, bytes]]:
  with fs.open(path, 'rb') as file:
    start = 0
    while (data := _next(file, path)) is not None:
      end = file.tell()
      yield start, end, data
      start = end


def _next(file: Any, path: str) -> bytes | None:
  """Reads the next record of a TFRecord file; returns None at its end."""
  if not (head := file.read(12)):
    return None
  length = int.from_bytes(head[:8], 'little')
  if len(head) < 12 or not _is_whole(head[:8], head[8:]):
    raise UnreadableImage(
      path, 'the length of a record is damaged, or the file is compressed'
    )
  body = file.read(length + 4)
  data = body[:length]
  if len(body) < length + 4 or not _is_whole(data, body[length:]):
    raise UnreadableImage(path, 'a record is cut short, or its bytes changed')
  return data


def _is_whole(data: bytes, checksum: bytes) -> bool:
  """Whether data matches its TFRecord checksum, a masked CRC32C."""
  crc = google_crc32c.value(data)
  masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
  return masked.to_bytes(4, 'little') == checksum


def _parse(data: bytes, name: str) -> Mapping[str, Any]:
  """Parses a tf.train.Example; raises UnreadableImage if `data` is not one."""
  # Imported here, because importing TFDS takes a second.
  from google.protobuf.message import DecodeError
  from tensorflow_datasets.proto import tf_example_pb2

  try:
    return tf_example_pb2.Example.FromString(data).features.feature
  except DecodeError:
    raise UnreadableImage(name, 'a record is not a tf.train.Example') from None


def _value(fields: Mapping[str, Any], names: Sequence[str]) -> Any:
  """Returns the value of the first field in `names` with one value, or None.

  One-hot or several classes are not the class of an image.
  """
  for name in names:
    if name in fields and (kind := fields[name].WhichOneof('kind')):
      if len(values := getattr(fields[name], kind).value) == 1:
        return values[0]
  return None


def _text(value: Any) -> Any:
  return value.decode(errors='replace') if isinstance(value, bytes) else value
