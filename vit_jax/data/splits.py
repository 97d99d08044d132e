"""Parses split strings such as `train[:98%]+test`.

Syntax and rounding follow TensorFlow Datasets (TFDS), except that there is no
unit `shard`: https://www.tensorflow.org/datasets/splits. TFDS itself parses the
splits of its own datasets.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
  """Returns the indices, int64, that a split string selects, part after part.

  A split can be given by any of its synonyms in `SAME`. If `test` is missing,
  `test` selects `val`, and vice versa. This does not apply to sums, because
  `train+val` must not train on `test`. `all` selects all splits. `splits` has
  the indices of each split's examples, and `owner` is the dataset in messages.

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


def resolved(split: str, opens: Callable[[str], object]) -> str:
  """Returns `split`, or the split that `select` selects if it is missing.

  `opens` opens a split string, and raises ValueError if a split is missing.
  """
  name, bracket, part = split.partition('[')
  _, val, test = SAME
  other = val[0] if name in test else test[0] if name in val else name
  pair = split, f'{other}{bracket}{part}'
  return next((x for x in pair if exists(x, opens)), split)


def exists(split: str, opens: Callable[[str], object]) -> bool:
  """Whether a split exists, so that `select` selects no other split for it."""
  with contextlib.suppress(ValueError):
    opens(f'{split}+{split}')  # in sums, no other split is selected
    return True
  return False


def needed(split: str, names: Iterable[str], owner: str) -> set[str]:
  """Returns the names of the splits from which `select` takes examples."""
  return {name for name, _ in _parts(split, dict.fromkeys(names), owner)}


def _parts(
  split: str, splits: Mapping[str, Any], owner: str
) -> Iterator[tuple[str, re.Match[str]]]:
  """Yields the split name of each part, and the part's match of `_PART`."""
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
  """Converts a part to a slice; bounds are rounded as in TFDS."""
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

  Returns ascending positions. If a class has one example, `train` gets it;
  larger classes are in both splits.
  """
  # RandomState instead of Generator: its random numbers are the same in all
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
  """Returns the row indices that a split string selects, int64; see `select`.

  Each split is shuffled before it is sliced, because many datasets are sorted
  by class. If `train` is the only split, a fifth of each class becomes `test`.
  `sizes` has the number of rows of each split, in the order of the rows.
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
  """Shuffles each split by a seed, so that a slice is a random sample."""
  return {
    name: np.random.RandomState(seed).permutation(examples).tolist()
    for name, examples in splits.items()
  }
