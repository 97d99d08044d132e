"""Folders of images: one sub-folder per class, or images without classes.

Or with their classes in a table.
"""

from __future__ import annotations

import collections
import csv
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data import decode, splits
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

# Of a table: its cells by column, None where a line is too short.
Row = dict[str, Any]

_NAMED = 5  # classes in a message
_YOLO = (
  ". If these are YOLO's labels, export the data set in COCO's format from the "
  'tool that wrote it, and give the folder with instances.json'
)
_LAYOUTS = (
  '<folder>/train/<class>/<image> and <folder>/test/<class>/<image>, '
  'or <folder>/<class>/<image>'
)


def is_folder_name(name: str) -> bool:
  """Whether a dataset name means a folder rather than a dataset of TFDS."""
  if name.startswith(('.', '~', '/')):
    return True
  if '/' not in name:
    return False
  # TFDS has slashes in its names as well: imagenet_v2/topimages.
  from vit_jax.data import tfds_source

  return os.path.isdir(name) or not tfds_source.is_known(name)


def open_folder(name: str, split: str, split_seed: int) -> Files:
  """Opens a folder; see `sources.open_source`.

  Two layouts are understood. `train/`, and any of `val/` and `test/` (see
  `splits.SAME` for other names); or images without these, of which a fifth (of
  each class) becomes `test`. If the training side has class folders, the others
  have the same. If it has images alone, they have no labels. `list_images` says
  which files of these folders are images.

  Raises:
    FileNotFoundError: There is no such folder.
    ValueError: It has neither of the layouts, or no such split.
  """
  root = pathlib.Path(os.path.expanduser(name))
  if not root.is_dir():
    raise FileNotFoundError(
      f'no folder {root}; give a folder of images ({_LAYOUTS}), or the name '
      'of a dataset without any slash'
    )
  inside = set(sub_folders(root))
  found = {name: root / name for name in splits.NAMES if name in inside}
  # Alone, `training` may be a class.
  has_train = 'train' in found or ('training' in found and len(found) > 1)
  if found and not has_train and inside <= set(found):
    raise ValueError(
      f'{root} has {", ".join(found)} and no train: call so what there is to '
      'learn from, or give one of these folders, if its folders are classes'
    )
  if (others := inside - set(found)) and has_train:
    _log.warning(
      '%s has the splits %s; its other folders are left out: %s',
      root,
      ', '.join(found),
      ', '.join(sorted(others)[:5]),
    )
  folders = found if has_train else {'train': root}
  if not sub_folders(next(iter(folders.values()))):
    return Files(root, folders, split, split_seed)
  for name, folder in list(folders.items()):
    if not sub_folders(folder):
      _log.warning('%s is left out: it has no class folders', folder)
      del folders[name]
  return Folder(root, folders, split, split_seed)


class Files(Source):
  """The image files of a folder, as a source without labels."""

  def __init__(
    self,
    root: pathlib.Path,
    folders: dict[str, pathlib.Path],
    split: str,
    split_seed: int,
  ):
    """Lists the files of all splits, and takes those of one."""
    self.class_names = _class_names(next(iter(folders.values())))
    self._paths: list[str] = []
    self._labels: list[int] = []
    members = {}
    left_out: Counter = collections.Counter()
    for split_name, folder in folders.items():
      files = self._list(folder, left_out)
      first = len(self._paths)
      self._paths += [path for path, _ in files]
      self._labels += [label for _, label in files]
      members[split_name] = list(range(first, len(self._paths)))
    warn_left_out(root, left_out)
    if folders == {'train': root}:
      members = splits.stratified_fifth(self._labels, split_seed)
    self._take(members, split, split_seed, f'folder {root}')

  def _take(
    self,
    members: Mapping[str, Sequence[int]],
    split: str,
    split_seed: int,
    name: str,
  ) -> None:
    """Keeps of all images those of one split, of the members of each."""
    if split.startswith('train'):
      self._mention_few(members)
    members = splits.permuted(members, split_seed)
    chosen = splits.select(split, members, name)
    self._paths = [self._paths[i] for i in chosen]
    self._labels = [self._labels[i] for i in chosen]

  def _mention_few(self, members: Mapping[str, Sequence[int]]) -> None:
    """Says what there is too little of; here nothing."""

  def _list(
    self, folder: pathlib.Path, left_out: Counter
  ) -> list[tuple[str, int]]:
    """Lists the images of a split with their labels, and counts other files."""
    paths, others = list_images(folder)
    left_out += others
    if not paths:
      raise ValueError(
        f'{folder} has no class folders and no images{counted(others)}; the '
        f'layout must be {_LAYOUTS}, or the same without classes'
      )
    return [(path, 0) for path in paths]

  def __len__(self) -> int:
    return len(self._paths)

  def __getitem__(self, index: int) -> dict:
    path = self._paths[index]
    return {'image': decode.read_file(path), 'name': path}

  def fingerprint(self) -> str:
    """A hash of the paths, sizes and modification times of the files."""
    return f'folder {decode.state_of_files(self._paths)}'


class Folder(Files):
  """A folder with one sub-folder per class, as a labelled source."""

  def _list(
    self, folder: pathlib.Path, left_out: Counter
  ) -> list[tuple[str, int]]:
    label_of = {nfc(name): i for i, name in enumerate(self.class_names)}
    files: list[tuple[str, int]] = []
    if loose := sum(map(len, by_stem(folder).values())):
      _log.warning(
        '%s images beside the class folders of %s are left out: they have no '
        'class',
        loose,
        folder,
      )
    for class_name in sub_folders(folder):
      if nfc(class_name) not in label_of:
        raise ValueError(
          f'class {class_name!r} of {folder} is not among the '
          f'{len(label_of)} classes of the train side; add it there, or remove '
          f'{folder / class_name}'
        )
      paths, others = list_images(folder / class_name)
      left_out += others
      if not paths:
        raise ValueError(
          f'class folder {folder / class_name} has no images'
          f'{counted(others)}; add images to it or remove it'
          + (_YOLO if {*others} == {'.txt'} else '')
        )
      files += [(path, label_of[nfc(class_name)]) for path in paths]
    return files

  def _mention_few(self, members: Mapping[str, Sequence[int]]) -> None:
    labels, classes = np.array(self._labels), len(self.class_names)
    for split, indices in members.items():
      counts = np.bincount(labels[indices], minlength=classes)
      is_train = split in splits.SAME[0]
      few = [self.class_names[i] for i in np.flatnonzero(counts < 1 + is_train)]
      if few:
        _log.warning(
          '%d of %d classes have %s image in %s: %s%s',
          len(few),
          classes,
          'one or no' if is_train else 'no',
          split,
          ', '.join(few[:_NAMED]),
          ', ...' if len(few) > _NAMED else '',
        )

  def __getitem__(self, index: int) -> dict:
    return super().__getitem__(index) | {'label': self._labels[index]}

  def labels(self) -> np.ndarray:
    """The classes of all images, int32 [N]."""
    return np.array(self._labels, np.int32)


def _class_names(folder: pathlib.Path) -> tuple[str, ...]:
  """The names of the sub-folders, one if they differ in accents' form alone."""
  return tuple({nfc(name): name for name in sub_folders(folder)}.values())


def open_table(name: str, split: str, split_seed: int) -> Files:
  """Opens the images of a CSV file; see `sources.open_source`.

  It has the columns `file`, relative to the folder of the table, and `label`,
  the name of the class, or `labels`, any number of names with `;` between them;
  and may have `split`, a name of `splits.SAME`. Without it a fifth (of each
  class, where there is one an image) becomes `test`.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: It is no such table; names the line.
  """
  path = pathlib.Path(os.path.expanduser(name))
  if not path.is_file():
    raise FileNotFoundError(f'no file {path}; give a CSV file of images')
  try:
    with path.open(newline='', encoding='utf-8-sig') as file:
      reader = csv.DictReader(file, strict=True)
      rows: list[Row] = list(reader)
  except (UnicodeDecodeError, csv.Error) as e:
    raise ValueError(f'{path} is no CSV file in UTF-8: {e}') from e
  if not rows:
    raise ValueError(f'{path} has no rows: give a line for each image')
  for i, row in enumerate(rows, 1):
    # What DictReader has no column for.
    surplus = row.pop(None, [])  # type: ignore[call-overload]
    if any(cell.strip() for cell in surplus):
      raise ValueError(
        f'{path}, image {i}: more cells than columns, {surplus}: put a name '
        'with a comma in it into double quotes; several classes have ; between '
        'them'
      )
  columns = reader.fieldnames or ()
  given = [column for column in columns if column in ('label', 'labels')]
  others = [column for column in columns if column in ('file', 'split')]
  if len(given) != 1 or 'file' not in others or len(set(others)) < len(others):
    raise ValueError(
      f'{path} has the columns {", ".join(map(repr, columns))}: its first line '
      "names 'file' and 'label', or 'labels' where images have several "
      'classes, each once'
    )
  kind = Table if given == ['label'] else MultiLabelTable
  return kind(path, rows, split, split_seed)


class Table(Folder):
  """The images of a table with a class each, as a labelled source."""

  def __init__(
    self, path: pathlib.Path, rows: list[Row], split: str, split_seed: int
  ):
    """Takes the images of a split.

    Raises:
      ValueError: A cell is wrong; names its line.
    """
    self._paths = _paths_of(path, rows)
    named = [nfc(row['label'] or '').strip() for row in rows]
    for i, name in enumerate(named):
      if not name:
        raise ValueError(
          f'{path}, image {i + 1}: label is {rows[i]["label"]!r}: name its '
          'class'
        )
    self.class_names = tuple(sorted(set(named)))
    _refuse_combinations(path, 'label', self.class_names)
    label_of = {name: label for label, name in enumerate(self.class_names)}
    self._labels = [label_of[name] for name in named]
    members = _members_of(path, rows, self._labels, split_seed)
    self._take(members, split, split_seed, f'table {path}')


class MultiLabelTable(Files):
  """The images of a table with any number of classes each."""

  several_labels = True

  def __init__(
    self, path: pathlib.Path, rows: list[Row], split: str, split_seed: int
  ):
    """Takes the images of a split.

    Raises:
      ValueError: A cell is wrong; names its line. No image has a class.
    """
    named = [
      {name.strip() for name in nfc(row['labels'] or '').split(';')} - {''}
      for row in rows
    ]
    self.class_names = tuple(sorted(set().union(*named)))
    if not self.class_names:
      raise ValueError(f'{path}: the column labels names no class')
    if not any(';' in (row['labels'] or '') for row in rows):
      _refuse_combinations(path, 'labels', self.class_names)
    label_of = {name: label for label, name in enumerate(self.class_names)}
    self._of_image = [[label_of[name] for name in names] for names in named]
    self._labels = list(range(len(rows)))
    self._paths = _paths_of(path, rows)
    members = _members_of(path, rows, [0] * len(rows), split_seed)
    self._take(members, split, split_seed, f'table {path}')

  def __getitem__(self, index: int) -> dict:
    label_C = np.zeros(len(self.class_names), np.uint8)
    label_C[self._of_image[self._labels[index]]] = 1
    return super().__getitem__(index) | {'label': label_C}


def _refuse_combinations(
  path: pathlib.Path, column: str, names: Sequence[str]
) -> None:
  """Refuses names that combine classes by another separator than `;`.

  Combinations share parts. Names of one class may too, after a comma or a blank
  ('red car', 'red bus'), so that in the column `label` these separators only
  count if there are half as many parts as names.
  """
  for separator in ';|, ':
    parts_of = {name: set(name.split(separator)) for name in names}
    times = collections.Counter(x for parts in parts_of.values() for x in parts)
    shared = [
      name
      for name, parts in parts_of.items()
      if len(parts) > 1 and any(times[x] > 1 for x in parts)
    ]
    certain = separator in ';|' or column == 'labels'
    if shared and (certain or 2 * len(times) <= len(names)):
      keep = f'replace {separator!r} in it'
      if column == 'labels':
        keep = "write ';' behind it"
      raise ValueError(
        f'{path}: {shared[0]!r} in the column {column} looks like several '
        f"classes with {separator!r} between them. Separate them by ';' in a "
        f'column called labels. If it is one class, {keep}.'
      )


def _paths_of(path: pathlib.Path, rows: list[Row]) -> list[str]:
  paths: list[str] = []
  lines: dict[str, int] = {}
  for i, row in enumerate(rows, 1):
    if not (row['file'] or '').strip():
      raise ValueError(
        f'{path}, image {i}: file is {row["file"]!r}: give its path'
      )
    paths.append(str(find(path.parent, row['file'])))
    before = lines.setdefault(os.path.normpath(paths[-1]), i)
    if before != i:
      raise ValueError(
        f'{path}, image {i}: {row["file"]!r} is image {before} too, and could '
        'be learned and tested both: give each a line of its own; where images '
        "have several classes, a column 'labels' has all of one image, with ; "
        'between them'
      )
  return paths


def _members_of(
  path: pathlib.Path, rows: list[Row], labels: list[int], split_seed: int
) -> dict[str, list[int]]:
  """Returns the images of each split that a table names, or of both."""
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
