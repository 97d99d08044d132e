"""Opens tables of images, and folders with or without classes."""

from __future__ import annotations

import collections
import csv
import hashlib
import io
import logging
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data import decode, splits, text_files
from vit_jax.data.image_files import (
  Counter,
  by_stem,
  counted,
  find,
  list_images,
  nfc,
  sub_folders,
  warn_left_out,
)
from vit_jax.data.source import Source

_log = logging.getLogger(__name__)

# Maps column names to the cells of a row; a missing cell is None.
Row = dict[str, Any]

_YOLO = (
  ". If these are YOLO's labels, export the dataset in COCO's format from the "
  'tool that wrote it, and give the folder with instances.json'
)
_LAYOUTS = (
  '<folder>/train/<class>/<image> and <folder>/test/<class>/<image>, '
  'or <folder>/<class>/<image>'
)


def is_folder_name(name: str) -> bool:
  """Whether a dataset name means a folder instead of a TFDS dataset."""
  if name.startswith(('.', '~', '/')):
    return True
  if '/' not in name:
    return False
  # Names of TFDS may have slashes too: imagenet_v2/topimages.
  from vit_jax.data import tfds_source

  return os.path.isdir(name) or not tfds_source.is_known(name)


def open_folder(
  name: str, split: str, split_seed: int, has_classes: bool = True
) -> Files:
  """Opens a folder; see `sources.open_source`.

  The folder has `train/`, and optionally `val/` and `test/`. If it has several
  splits, synonyms in `splits.SAME` and names in upper case work too. Without
  `train/`, the folder itself holds the images, and a fifth of each class
  becomes `test`. Images have labels if the training folder has a sub-folder for
  each class. Without `has_classes`, sub-folders are not classes.
  """
  root = pathlib.Path(os.path.expanduser(name))
  if not root.is_dir():
    raise FileNotFoundError(
      f'no folder {root}; give a folder of images ({_LAYOUTS}), or a dataset '
      'name without a slash'
    )
  # Some archives write Train or TRAIN.
  inside = {name.lower(): name for name in sub_folders(root)}
  found = {x: root / inside[x] for x in splits.NAMES if x in inside}
  # Alone, `Train` or `training` may be a class.
  has_train = inside.get('train') == 'train' or (
    len(found) > 1 and not found.keys().isdisjoint(splits.SAME[0])
  )
  if found and not has_train and inside.keys() <= found.keys():
    raise ValueError(
      f'{root} has {", ".join(inside[x] for x in found)} but no train: rename '
      'the folder of training images to train, or give a folder whose '
      'sub-folders are classes'
    )
  if (beside := sorted(inside.keys() - found.keys())) and has_train:
    decode.warn_once(
      f'{root} has the splits {", ".join(found)}; its other folders are left '
      f'out, such as {", ".join(inside[x] for x in beside[:5])}'
    )
  folders = found if has_train else {'train': root}
  train = next(iter(folders.values()))
  # Names that differ only in the Unicode form of accents mean the same class.
  class_names: tuple[str, ...] = ()
  if has_classes:
    class_names = tuple(sorted({*map(nfc, sub_folders(train))}))
  files: list[tuple[str, int]] = []
  members: dict[str, list[int]] = {}
  left_out: Counter = collections.Counter()
  for name, folder in folders.items():
    if class_names and not sub_folders(folder):
      decode.warn_once(f'{folder} is left out: it has no class folders')
      continue
    own, others = list_files(folder, class_names)
    left_out += others
    members[name] = [*range(len(files), len(files) + len(own))]
    files += own
  labels = [label for _, label in files]
  warn_left_out(root, left_out)
  if train == root:
    members = splits.stratified_fifth(labels, split_seed)
  if split.startswith('train') and class_names:
    _warn_of_few(labels, members, class_names)
  members = splits.permuted(members, split_seed)
  chosen = splits.select(split, members, f'folder {root}')
  paths = [files[i][0] for i in chosen]
  if not class_names:
    return Files(paths)
  return LabelledFiles(paths, [labels[i] for i in chosen], class_names)


def list_files(
  folder: pathlib.Path, class_names: Sequence[str]
) -> tuple[list[tuple[str, int]], Counter]:
  """Lists the images of a folder with their labels, and counts other files.

  A label is the position of the sub-folder's name in `class_names`, which are
  in the Unicode form NFC. Without `class_names` all labels are 0. Raises
  ValueError if a sub-folder, or a folder without classes, has no images, or if
  a sub-folder is not a known class.
  """
  if not class_names:
    paths, others = list_images(folder)
    if not paths:
      raise ValueError(
        f'{folder} has no class folders and no images{counted(others)}; the '
        f'layout must be {_LAYOUTS}. Images without classes may lie in '
        '<folder> itself'
      )
    return [(path, 0) for path in paths], others
  if loose := sum(map(len, by_stem(folder).values())):
    decode.warn_once(
      f'{loose} images beside the class folders of {folder} are left out, '
      'because their class is unknown'
    )
  label_of = {name: i for i, name in enumerate(class_names)}
  files: list[tuple[str, int]] = []
  left_out: Counter = collections.Counter()
  for name in sub_folders(folder):
    if nfc(name) not in label_of:
      raise ValueError(
        f'class {name!r} of {folder} is not among the {len(label_of)} classes '
        f'of the training split; add it there, or remove {folder / name}'
      )
    paths, others = list_images(folder / name)
    left_out += others
    if not paths:
      raise ValueError(
        f'class folder {folder / name} has no images{counted(others)}; add '
        'images to it or remove it' + (_YOLO if {*others} == {'.txt'} else '')
      )
    files += [(path, label_of[nfc(name)]) for path in paths]
  return files, left_out


def _warn_of_few(
  labels: Sequence[int],
  members: Mapping[str, Sequence[int]],
  class_names: Sequence[str],
) -> None:
  """Warns of classes with too few images for training or evaluation."""
  for split, indices in members.items():
    counts = collections.Counter(labels[i] for i in indices)
    least = 2 if split in splits.SAME[0] else 1
    few = [name for i, name in enumerate(class_names) if counts[i] < least]
    if few:
      _log.warning(
        f'{len(few)} of {len(class_names)} classes have fewer than {least} '
        f'images in {split}, such as {", ".join(few[:5])}'
      )


def identity(paths: Sequence[str], annotations: bytes, parts: int) -> str:
  """Hashes annotations, files' sizes and the last `parts` of their paths."""
  digest = hashlib.sha256(annotations)
  for path in paths:
    name = '/'.join(path.split('/')[-parts:])
    try:
      size = os.stat(path).st_size
    except OSError:  # as in `decode.state_of`
      size = -1
    digest.update(f'{name}\0{size}\n'.encode(errors='surrogateescape'))
  return digest.hexdigest()


class Files(Source):
  """A source of image files, without labels."""

  # Bytes for `identity` to hash, if paths do not contain the labels.
  annotations = b''

  def __init__(
    self,
    paths: list[str],
    labels: Sequence[Any] = (),
    class_names: tuple[str, ...] = (),
  ):
    self.paths, self._labels = paths, labels
    self.class_names = class_names

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> dict:
    path = self.paths[index]
    return {'image': decode.read_file(path), 'name': path}

  def identity(self) -> str:
    # The folder of an image may be its class. Folders above may be renamed.
    folders_are_classes = self.class_names and not self.annotations
    return identity(self.paths, self.annotations, 1 + bool(folders_are_classes))

  def states(self, indices: Sequence[int]) -> Iterable[str]:
    # Includes the type, because the subclass `ObjectNet` reads the same file
    # without its border.
    kind = type(self).__name__
    return (f'{kind} {decode.state_of(self.paths[i])}' for i in indices)


class LabelledFiles(Files):
  """A source of image files whose labels are ints, one class per image."""

  def __getitem__(self, index: int) -> dict:
    return super().__getitem__(index) | {'label': self._labels[index]}

  def labels(self) -> np.ndarray:
    return np.array(self._labels, np.int32)


class MultiLabelFiles(Files):
  """A source of image files with several classes; labels are uint8 [C]."""

  several_labels = True

  def __getitem__(self, index: int) -> dict:
    label_C = np.zeros(len(self.class_names), np.uint8)
    label_C[self._labels[index]] = 1
    return super().__getitem__(index) | {'label': label_C}


def open_table(name: str, split: str, split_seed: int) -> Files:
  """Opens the images of a CSV file; see `sources.open_source`.

  The columns are:
    file: path of the image, relative to the folder of the table.
    label or labels: `label` has the name of one class. `labels` has any number
      of class names, separated by `;`.
    split: optional; a name in `splits.NAMES`. Without this column, `test` is a
      fifth of each class; if the table has `labels`, a fifth of all images.
  """
  path = pathlib.Path(os.path.expanduser(name))
  rows, column = _read_table(path)
  several = column == 'labels'
  paths = _paths_of(path, rows)
  cells = [nfc(row[column] or '').strip() for row in rows]
  if not several and '' in cells:
    i = cells.index('')
    raise ValueError(
      f'{path}, image {i + 1}: label is {rows[i][column]!r}: give a class'
    )
  named = [
    {name.strip() for name in cell.split(';')} - {''} if several else {cell}
    for cell in cells
  ]
  class_names = tuple(sorted(set().union(*named)))
  if not class_names:
    raise ValueError(f'{path}: the column labels is empty: give classes')
  if not several or not any(';' in cell for cell in cells):
    _refuse_combinations(path, column, class_names)
  label_of = {name: label for label, name in enumerate(class_names)}
  labels = [[label_of[name] for name in names] for names in named]
  strata = [0 if several else own[0] for own in labels]
  members = _members_of(path, rows, strata, split_seed)
  if split.startswith('train') and not several:
    _warn_of_few(strata, members, class_names)
  members = splits.permuted(members, split_seed)
  chosen = splits.select(split, members, f'table {path}')
  paths = [paths[i] for i in chosen]
  found = (
    MultiLabelFiles(paths, [labels[i] for i in chosen], class_names)
    if several
    else LabelledFiles(paths, [strata[i] for i in chosen], class_names)
  )
  found.annotations = repr([sorted(labels[i]) for i in chosen]).encode()
  return found


def _read_table(path: pathlib.Path) -> tuple[list[Row], str]:
  """Returns the rows of a table, and its class column: label or labels."""
  if not path.is_file():
    raise FileNotFoundError(f'no file {path}; give a CSV file of images')
  text = text_files.decoded(path.read_bytes(), path)
  try:
    reader = csv.DictReader(io.StringIO(text, newline=''), strict=True)
    rows: list[Row] = list(reader)
  except csv.Error as e:
    raise ValueError(f'{path} is not a CSV file: {e}') from e
  if not rows:
    raise ValueError(f'{path} has no rows: give one row for each image')
  for i, row in enumerate(rows, 1):
    # DictReader stores cells beyond the last column under the key None.
    surplus = row.pop(None, [])  # type: ignore[call-overload]
    if any(cell.strip() for cell in surplus):
      raise ValueError(
        f'{path}, image {i}: more cells than columns, {surplus}: put names '
        'with a comma into double quotes, and separate several classes by ;'
      )
  columns = reader.fieldnames or ()
  given = [column for column in columns if column in ('label', 'labels')]
  others = [column for column in columns if column in ('file', 'split')]
  if len(given) != 1 or 'file' not in others or len(set(others)) < len(others):
    raise ValueError(
      f'{path} has the columns {", ".join(map(repr, columns))}: the first line '
      "must have 'file', 'label' (or 'labels' if images have several classes) "
      "and optionally 'split', each once"
    )
  return rows, given[0]


def _refuse_combinations(
  path: pathlib.Path, column: str, names: Sequence[str]
) -> None:
  """Refuses a name that looks like several classes with a wrong separator."""
  keep = "write ';' after it" if column == 'labels' else 'rename it'
  for separator in '|,' if column == 'labels' else ';|':
    for name in names:
      if separator in name:
        raise ValueError(
          f'{path}: {name!r} in the column {column} looks like several classes '
          f"with {separator!r} between them. Separate them by ';' in a column "
          f'called labels. If it is one class, {keep}.'
        )


def _paths_of(path: pathlib.Path, rows: list[Row]) -> list[str]:
  paths: list[str] = []
  lines: dict[str, int] = {}
  for i, row in enumerate(rows, 1):
    if not (row['file'] or '').strip():
      raise ValueError(
        f'{path}, image {i}: file is {row["file"]!r}: give a path'
      )
    paths.append(str(find(path.parent, row['file'])))
    before = lines.setdefault(os.path.normpath(paths[-1]), i)
    if before != i:
      raise ValueError(
        f'{path}, image {i}: {row["file"]!r} is also image {before}, so it '
        'could be in the training and the test split: give one row for each '
        "image, and several classes in a column 'labels', separated by ;"
      )
  return paths


def _members_of(
  path: pathlib.Path, rows: list[Row], labels: list[int], split_seed: int
) -> dict[str, list[int]]:
  """Returns the row indices of each split."""
  if 'split' not in rows[0]:
    return splits.stratified_fifth(labels, split_seed)
  members: dict[str, list[int]] = {}
  for i, row in enumerate(rows):
    name = (row['split'] or '').strip()
    if name not in splits.NAMES:
      raise ValueError(
        f'{path}, image {i + 1}: split is {row["split"]!r}: use '
        f'{", ".join(names[0] for names in splits.SAME)}'
      )
    members.setdefault(name, []).append(i)
  return members
