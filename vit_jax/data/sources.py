"""Opens datasets by name, as sources with random access.

A source has a length, and `source[i]` is a record

  {'image': encoded bytes or uint8 [H, W, 3], 'name': str}

where 'name' identifies the record in error messages. If images have classes, a
record also has 'label': an int, or uint8 [C] of 0 and 1 if `several_labels` is
set. A source of objects adds the values of `BoxedSource.objects`. A folder of
mask files adds 'mask', int64 [H, W], and its 'size', (height, width). Sources
must be picklable for the loader's worker processes.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import folder, splits, vtab
from vit_jax.data.source import BoxedSource, LabelledSource, Record, Source
from vit_jax.register import Register, nearest

# Maps a regular expression for `data.name` to a function of (name, split,
# split_seed). The function opens a source, or returns None if the name is not
# for it. The last two patterns match the same names. They are written
# differently, because keys must be unique.
SOURCES = Register(
  'data.name',
  {
    '(arrayrecord|tfrecord):.*': 'vit_jax.data.shards:open_shards',
    '(hf://|parquet:|webdataset:).*': 'vit_jax.data.hub_source:HubSource',
    'digits_canvas': 'vit_jax.projects.detr.canvas:DigitsCanvas',
    '[.~].*|.*/.*': 'vit_jax.projects.detr.coco:open_annotated',
    '.*/.*|[.~].*': 'vit_jax.projects.segmentation.data:open_masks',
  },
)


def labelled(source: Source, name: str) -> LabelledSource:
  """Returns `source`; raises ValueError unless each image has one class."""
  if source.several_labels:
    raise ValueError(
      f'{name} has images with several classes, but one class per image is '
      'needed. Use a table with a column "label", not "labels".'
    )
  if not isinstance(source, LabelledSource):
    raise ValueError(
      f'{name} has images without classes, but classes are needed: put the '
      'images of each class into their own folder.'
    )
  return source


def all_labels(source: Source, name: str) -> np.ndarray:
  """Returns the classes of all records.

  The array is int32 [N]. If records may have several classes, it is
  uint8 [N, C], with values 0 and 1.

  Raises ValueError if the records have no classes.
  """
  if source.several_labels:
    return np.stack([source[i]['label'] for i in range(len(source))])
  return labelled(source, name).labels()


def data_config(data: str | os.PathLike | Mapping[str, Any]) -> ConfigDict:
  """Returns the fields of `config.data` that `bad_images.open_checked` reads.

  `data` is the name of a dataset, the path of a folder or table, or a dict with
  `name` and some of the fields. Raises ValueError if a dict has other fields;
  other fields of a ConfigDict are ignored.
  """
  if isinstance(data, os.PathLike):
    # A name without a slash would be a dataset.
    data = os.path.join('.', os.path.expanduser(data))
  given = {'name': data} if isinstance(data, str) else dict(data)
  usual = {'name': '', 'dir': '', 'split_seed': 0, 'class_order': ''}
  usual |= {'on_bad_image': 'error'}
  if not isinstance(data, ConfigDict):
    for name in given.keys() - usual.keys():
      raise ValueError(f'No field {name!r} of data. {nearest(name, usual)}')
  return ConfigDict({key: given.get(key, x) for key, x in usual.items()})


def open_config(data: ConfigDict, split: str) -> Source:
  """Opens a split of `config.data`; sorts classes by `data.class_order`.

  A source without classes ignores `data.class_order`. Raises the errors of
  `open_source`. Raises ValueError if `data.class_order` is unknown, or if it is
  set and class names are not numbers, or would need to be sorted although
  images do not have one class each.
  """
  source = open_source(
    data.name, split, data_dir=data.dir or None, split_seed=data.split_seed
  )
  names, order = source.class_names, data.class_order
  if not names or not order:
    return source
  if order not in ('text', 'number'):
    raise ValueError(f'data.class_order is {order!r}: use text or number.')
  are_numbers = all(map(_is_number, names))
  key = int if order == 'number' else str
  ordered = tuple(sorted(names, key=key)) if are_numbers else ()
  if ordered == names:
    return source
  if not are_numbers or not isinstance(source, LabelledSource):
    raise ValueError(
      f'data.class_order is {order!r}, which needs one class per image and '
      f'numbers as class names; {data.name} has the class '
      f'{next((x for x in names if not _is_number(x)), names[0])!r}. Leave '
      'data.class_order empty.'
    )
  return Renumbered(source, ordered)


def has_two_orders(names: Sequence[str]) -> bool:
  """Whether names are numbers that are sorted as text but not by value."""
  return (
    all(map(_is_number, names))
    and list(names) == sorted(names)
    and list(names) != sorted(names, key=int)
  )


def check_same_classes(
  name: str, splits: tuple[str, str], found: tuple[Any, Any]
) -> None:
  """Raises ValueError unless two splits have the same `class_names`."""
  both = (x.class_names for x in found)
  for i, (a, b) in enumerate(itertools.zip_longest(*both)):
    if a != b:
      raise ValueError(
        f'{name} {splits[0]} and {splits[1]} have different classes: class {i} '
        f'is {a!r} in the first and {b!r} in the second. Give both splits the '
        'same classes.'
      )


def _is_number(name: str) -> bool:
  return name.isascii() and name.isdigit()


def open_source(
  name: str,
  split: str,
  *,
  data_dir: str | None = None,
  split_seed: int = 0,
) -> Source:
  """Opens one split of a dataset, without checking its images.

  Args:
    name: One of
      - `digits`, or `digits_canvas` (digits with boxes);
      - a folder: a path that starts with `.`, `~` or `/`, or has a slash and
        either exists or is not the name of a TFDS dataset; see `folder`,
        `detr.coco` and `segmentation.data`;
      - a CSV file, see `folder.open_table`;
      - `hf://datasets/OWNER/NAME`, `parquet:PLACE` or `webdataset:PLACE`, see
        `hub_source`;
      - `arrayrecord:PLACE` or `tfrecord:PLACE`, see `shards`;
      - a TFDS dataset such as `oxford_iiit_pet:4.0.0`, prepared as
        array_record;
      - a task of VTAB-1k such as `vtab/dtd`, see `vtab`.
    split: A split with an optional slice, such as `train[:98%]`; see `splits`.
      VTAB has only `train800`, `val200`, `train800val200` and `test`.
    data_dir: The folder of prepared TFDS datasets; None for TFDS's default.
    split_seed: Seed that shuffles each split before it is sliced. It also draws
      `test` if the data have no splits or, in shards and on the hub, only
      `train`. TFDS datasets ignore it; `digits_canvas` draws its images by it.

  Raises:
    ValueError: The name, the split or the data is invalid.
    FileNotFoundError: The folder, file or prepared dataset is missing.
    OSError: A folder or file cannot be read.
    ImportError: A library that this dataset needs is not installed.
  """
  if name == 'digits':
    return Digits(split, split_seed)
  if name.startswith(vtab.PREFIX):
    return vtab.open_task(name, split, data_dir)
  for pattern in SOURCES:
    if re.fullmatch(pattern, name, re.DOTALL):
      found: Source | None = SOURCES.load(pattern)(name, split, split_seed)
      if found is not None:
        return found
  if '://' in name:
    raise ValueError(
      f'{name} is a bucket or URL, but folders and tables must be on disk. '
      'Copy or mount the data, or use shards, as in '
      'arrayrecord:gs://BUCKET/FOLDER.'
    )
  if name.lower().endswith('.csv'):
    return folder.open_table(name, split, split_seed)
  if folder.is_folder_name(name):
    return folder.open_folder(name, split, split_seed)
  # TFDS takes a second to import.
  from vit_jax.data import tfds_source

  return tfds_source.open_dataset(name, split, data_dir)


class Digits(Source):
  """A source of scikit-learn's 1,797 handwritten digits, 8x8 pixels.

  A fifth of the images is the test split. Grey values are scaled from 0..16 to
  0..255 and copied to three channels.
  """

  def __init__(self, split: str, split_seed: int):
    import sklearn.datasets
    import sklearn.model_selection

    digits = sklearn.datasets.load_digits()
    positions = np.arange(len(digits.target))
    train, test = sklearn.model_selection.train_test_split(
      positions,
      test_size=0.2,
      random_state=split_seed,
      stratify=digits.target,
    )
    self._positions = splits.select(
      split, {'train': train, 'test': test}, 'digits'
    )
    self._images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    self._labels = digits.target
    self.class_names = tuple(str(digit) for digit in range(10))

  def __len__(self) -> int:
    return len(self._positions)

  def __getitem__(self, index: int) -> Record:
    position = int(self._positions[index])
    return {
      'image': np.repeat(self._images[position][:, :, None], 3, axis=2),
      'label': int(self._labels[position]),
      'name': f'digits/{position}',
    }

  def labels(self) -> np.ndarray:
    return self._labels[self._positions].astype(np.int32)


class Subset(Source):
  """Some records of another source, in a given order."""

  def __init__(self, source: Source, indices: Sequence[int]):
    self._source: Any = source
    self.skips_unreadable = source.skips_unreadable
    self.several_labels = source.several_labels
    self.class_names = source.class_names
    self._indices = np.asarray(indices, np.int64)

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: int) -> Record:
    return self._source[int(self._indices[index])]

  def identity(self) -> str | None:
    if (whole := self._source.identity()) is None:
      return None
    return f'{whole} {hashlib.sha256(self._indices.tobytes()).hexdigest()}'

  def states(self, indices: Sequence[int]) -> Iterable[str] | None:
    return self._source.states(self._indices[list(indices)].tolist())


class LabelledSubset(Subset):
  """Some records of a labelled source."""

  def labels(self) -> np.ndarray:
    return self._source.labels()[self._indices]


class Renumbered(LabelledSubset):
  """A labelled source with its classes in another order."""

  def __init__(self, source: LabelledSource, names: tuple[str, ...]):
    super().__init__(source, range(len(source)))
    self._number_C = np.array([names.index(x) for x in self.class_names])
    self.class_names = names

  def __getitem__(self, index: int) -> Record:
    record = super().__getitem__(index)
    return record | {'label': int(self._number_C[record['label']])}

  def labels(self) -> np.ndarray:
    return self._number_C[super().labels()].astype(np.int32)


class BoxedSubset(Subset):
  """Some records of a source of objects."""

  def objects(self, index: int) -> Mapping[str, Any]:
    return self._source.objects(int(self._indices[index]))


def subset(source: Source, indices: Sequence[int]) -> Subset:
  """Returns some records of a source, with the source's labels or objects."""
  if isinstance(source, BoxedSource):
    return BoxedSubset(source, indices)
  if isinstance(source, LabelledSource):
    return LabelledSubset(source, indices)
  return Subset(source, indices)
