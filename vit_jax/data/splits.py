"""Parses split strings such as `train[:98%]+test`, except for TFDS.

The syntax and its arithmetic are those of TensorFlow Datasets,
https://www.tensorflow.org/datasets/splits, without the unit `shard`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_BOUND = r'(-?\d+(?:_\d+)*(?:\.\d+)?%?)?'
_PART = re.compile(rf'([\w-]+)(?:\[(?!:\]){_BOUND}:{_BOUND}\])?')
_HELP = (
  'use names of splits, each with at most one slice, joined by +, like '
  'train, train[:98%], train[500:] or train[:-1000]+test; '
  'see https://www.tensorflow.org/datasets/splits'
)

# Names that mean the same split.
SAME = (
  ('train', 'training'),
  ('val', 'valid', 'validation'),
  ('test', 'testing'),
)
NAMES = tuple(name for names in SAME for name in names)


def select(
  split: str, splits: Mapping[str, Sequence[int]], owner: str
) -> np.ndarray:
  """Returns the indices that a split string selects, int64, in its order.

  Splits have several names, see `SAME`. `test` means `val` if `test` is
  missing, and the other way round. This does not hold in sums: if only `test`
  exists, `train+val` would train on it. `all` means all splits.

  Args:
    split: the split string.
    splits: the examples of each split, in the order to slice.
    owner: the name of the dataset in messages.

  Raises:
    ValueError: The syntax is wrong, a split does not exist, a bound exceeds the
      split, or no example is selected.
  """
  chosen: list[int] = []
  for name, part in _parts(split, splits, owner):
    chosen.extend(splits[name][_slice(part, len(splits[name]))])
  if not chosen:
    raise ValueError(
      f'split {split!r} of {owner} selects no example; sizes are '
      + ', '.join(
        f'{name}: {len(examples)}' for name, examples in splits.items()
      )
    )
  return np.array(chosen, np.int64)


def needed(split: str, names: Iterable[str], owner: str) -> set[str]:
  """Returns the names of the splits from which `select` takes examples."""
  return {name for name, _ in _parts(split, dict.fromkeys(names), owner)}


def _parts(
  split: str, splits: Mapping[str, Any], owner: str
) -> Iterator[tuple[str, re.Match[str]]]:
  """Yields each part's split name and its match of `_PART`."""
  parts = re.split(r'\s*\+\s*', split)
  for part in parts:
    match = _PART.fullmatch(part)
    if not match:
      raise ValueError(f'split {split!r} of {owner} is not valid: {_HELP}')
    if part == 'all':
      yield from ((name, match) for name in splits)
    else:
      yield _resolve(match[1], splits, owner, len(parts) > 1), match


def _resolve(
  name: str, splits: Mapping[str, Any], owner: str, joined: bool
) -> str:
  train, val, test = SAME
  own = next((names for names in SAME if name in names), ())
  other = () if joined or own in ((), train) else val + test
  for candidate in (name, *own, *other):
    if candidate in splits:
      return candidate
  raise ValueError(
    f'{owner} has no split {name!r}; it has {", ".join(splits)}, and slices '
    f'such as {next(iter(splits))}[:90%]'
  )


def _slice(part: re.Match[str], size: int) -> slice:
  """The slice of a match, its bounds rounded as TFDS rounds them."""
  bounds: list[int | None] = []
  for text in part.groups()[1:]:
    if not text:
      bounds.append(None)
      continue
    value = float(text.rstrip('%'))
    if '%' in part[0]:  # TFDS: one % makes both bounds percentages.
      value = round(value * size / 100)
    elif not value.is_integer():
      raise ValueError(f'split {part[0]!r} is not valid: {_HELP}')
    if abs(value) > size:
      raise ValueError(
        f'slice {part[0]!r} exceeds the {size} examples of that split'
      )
    bounds.append(int(value))
  return slice(*bounds)


def stratified_fifth(labels: Sequence[int], seed: int) -> dict[str, list[int]]:
  """Splits the examples of each class 80/20 into `train` and `test`.

  Positions are ascending. The only example of a class goes to `train`; larger
  classes are in both splits.
  """
  # RandomState instead of Generator, because its numbers never change between
  # versions of NumPy.
  rng = np.random.RandomState(seed)
  labels_array = np.asarray(labels)
  held_out = np.zeros(len(labels_array), bool)
  by_class = np.argsort(labels_array, kind='stable')
  starts = np.unique(labels_array[by_class], return_index=True)[1]
  for members in map(rng.permutation, np.split(by_class, starts[1:])):
    if len(members) > 1:
      held_out[members[: max(1, round(len(members) / 5))]] = True
  return {
    'train': np.flatnonzero(~held_out).tolist(),
    'test': np.flatnonzero(held_out).tolist(),
  }


def select_rows(
  split: str,
  sizes: Mapping[str, int],
  labels: np.ndarray,
  owner: str,
  seed: int,
) -> np.ndarray:
  """The rows of a table that a split string names; see `select`.

  Args:
    split: the split string.
    sizes: rows of each split, which follow each other in the table. If `train`
      is the only one, a fifth of each class becomes `test`.
    labels: the class of each row.
    owner: the name of the dataset in messages.
    seed: of the generated `test` split and of the shuffling before slices are
      taken. Many datasets are sorted by class.
  """
  members: dict[str, Sequence[int]] = {}
  start = 0
  for name, size in sizes.items():
    members[name] = range(start, start + size)
    start += size
  if list(members) == ['train']:
    members |= stratified_fifth(labels.tolist(), seed)
  return select(split, permuted(members, seed), owner)


def permuted(
  splits: Mapping[str, Sequence[int]], seed: int
) -> dict[str, list[int]]:
  """Shuffles each split by a seed, so that a slice has all classes."""
  return {
    name: np.random.RandomState(seed).permutation(examples).tolist()
    for name, examples in splits.items()
  }
