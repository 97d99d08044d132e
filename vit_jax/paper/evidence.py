"""The runs of a study as a small CSV file, from which others can go on.

A line is a run: what it was, what was measured, and when, where and how. It
counts as long as the config still says the same as then: `config` is a checksum
of the fields in which a run differs from `vit_jax.config.base`.
"""

import csv
import dataclasses
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.data import whole
from vit_jax.training import metric_log

FIRST = ('variant', 'seed', 'status')
LAST = ('config', 'date', 'hardware', 'versions', 'command')


@dataclasses.dataclass(frozen=True)
class RunRow:
  """A run that has finished or diverged.

  Attributes:
    texts: of the columns `FIRST` and `LAST`.
    numbers: by their columns: metrics, `params`, `gflops`, `steps`, `seconds`.
  """

  texts: Mapping[str, str]
  numbers: Mapping[str, float]

  @property
  def key(self) -> tuple[str, str]:
    return self.texts['variant'], self.texts['seed']


def read(path: epath.Path) -> list[RunRow]:
  """Returns the runs of a file, none if there is no such file.

  Raises:
    ValueError: for a file that is not of this form.
  """
  if not path.exists():
    return []
  try:
    lines = list(csv.DictReader(io.StringIO(path.read_text()), strict=True))
    if any(None in line.values() for line in lines):
      raise ValueError('a line is too short')
    return [
      RunRow(
        {name: line[name] for name in (*FIRST, *LAST)},
        {
          name: float(text)
          for name, text in line.items()
          if name not in (*FIRST, *LAST) and text
        },
      )
      for line in lines
    ]
  except (csv.Error, KeyError, TypeError, ValueError) as e:
    raise ValueError(
      f'{path} is no file of runs ({type(e).__name__}: {e}): remove it, and '
      'they are run again.'
    ) from e


def write(path: epath.Path, rows: Sequence[RunRow]) -> None:
  """Writes the file of a study."""
  names = list(dict.fromkeys(name for row in rows for name in row.numbers))
  lines: list[list[Any]] = [[*FIRST, *names, *LAST]]
  for row in rows:
    numbers = [_text(row.numbers.get(name)) for name in names]
    first, last = ([row.texts[n] for n in part] for part in (FIRST, LAST))
    lines.append([*first, *numbers, *last])
  path.parent.mkdir(parents=True, exist_ok=True)
  whole.replace(path, ''.join(map(metric_log.csv_line, lines)).encode())


def _text(value: float | None) -> str:
  if value is None:
    return ''
  # Counts are compared with those of the data.
  return str(int(value)) if float(value).is_integer() else f'{value:.6g}'


def checksum(config: ConfigDict) -> str:
  """Returns what tells whether a run is still that of the config."""
  plain = config_lib.base()
  if config.model.name != plain.model.name:
    plain.model = ConfigDict()
  defaults = config_lib.flatten(json.loads(plain.to_json()))
  fields = {
    field: value
    for field, value in config_lib.flatten(json.loads(config.to_json())).items()
    if field not in defaults or defaults[field] != value
  }
  return hashlib.sha256(
    json.dumps(fields, sort_keys=True).encode()
  ).hexdigest()[:12]


def by_seed(
  rows: Iterable[RunRow], variants: Sequence[str]
) -> dict[str, dict[str, Mapping[str, float]]]:
  """Returns by seed what all variants measured, where all have finished."""
  found: dict[str, dict[str, Mapping[str, float]]] = {}
  for row in rows:
    if row.texts['status'] == 'done':
      variant, seed = row.key
      found.setdefault(seed, {})[variant] = row.numbers
  return {
    seed: {variant: runs[variant] for variant in variants}
    for seed, runs in sorted(found.items(), key=lambda item: int(item[0]))
    if all(variant in runs for variant in variants)
  }
