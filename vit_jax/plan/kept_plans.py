"""Plans in a CSV file, each of which is compiled once, and as a table."""

import csv
import datetime
import io
import pathlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from vit_jax.data import whole
from vit_jax.plan.costs import GIB, Cost, Step
from vit_jax.sweeps import grid
from vit_jax.training import metric_log
from vit_jax.training.progress import mfu_text

# What was asked, what came out, and when and by what.
_COLUMNS = (
  'plan',
  'fields',
  'outcome',
  'images',
  'devices',
  'gib',
  'computing_ms',
  'least_ms',
  'most_ms',
  'mfu',
  'sent_gib',
  'date',
  'versions',
)
_HEADS = (
  'plan',
  'images a device',
  'GiB',
  'computing, ms',
  'images/s a device (MFU)',
  'step, ms',
  'sent, GiB',
)
FITS = 'fits'
Row = Mapping[str, str]


class PlanTable:
  """A CSV file of plans, and beside it the same in Markdown."""

  def __init__(self, path: str):
    """Looks at the plans that are there.

    Raises:
      ValueError: for a path that does not end in .csv, or a file that is no
        such table.
      FileNotFoundError: if there is no folder for it.
    """
    self._path = pathlib.Path(path)
    if self._path.suffix != '.csv':
      raise ValueError(f'--table={path}: its name should end in .csv.')
    if not self._path.parent.is_dir():
      raise FileNotFoundError(f'--table={path}: there is no such folder.')
    self.rows()

  def rows(self) -> Sequence[Row]:
    """Returns the plans, as the file has them now."""
    if not self._path.exists():
      return []
    try:
      reader = csv.DictReader(io.StringIO(self._path.read_text()))
      rows = list(reader)
      if tuple(reader.fieldnames or ()) != _COLUMNS:
        raise ValueError('other columns')
      if any(None in row.values() for row in rows):
        raise ValueError('a line is too short')
      markdown(rows)
    except (csv.Error, ValueError) as e:
      raise ValueError(
        f'--table={self._path} has no plans with the columns '
        f'{", ".join(_COLUMNS)}: give another file ({e}).'
      ) from e
    return rows

  def find(self, plan: str) -> Row | None:
    """Returns the row of a plan, by the compiler and JAX that are installed."""
    for row in self.rows():
      if (row['plan'], row['versions']) == (plan, versions()):
        return row
    return None

  def add(self, plan: str, fields: str, step: Step, cost: Cost) -> None:
    """Writes what a plan came to.

    Args:
      plan: arguments of the command.
      fields: those that a search has found.
      step: as it was compiled.
      cost: of it.
    """
    numbers = {
      'images': str(cost.images),
      'devices': str(cost.devices),
      'gib': f'{step.peak_bytes / GIB:.2f}',
      'computing_ms': f'{1e3 * cost.computing_s:.2f}',
      'least_ms': f'{1e3 * cost.least_s:.2f}',
      'most_ms': f'{1e3 * cost.most_s:.2f}',
      'mfu': f'{cost.mfu(cost.computing_s):.4f}',
      'sent_gib': f'{cost.sent_bytes / GIB:.3f}',
    }
    self._put({'plan': plan, 'fields': fields, 'outcome': FITS, **numbers})

  def add_too_large(self, plan: str, reason: str) -> None:
    """Writes that the step of a plan does not fit."""
    self._put({'plan': plan, 'outcome': reason})

  def _put(self, found: Row) -> None:
    row = dict.fromkeys(_COLUMNS, '') | {
      **found,
      'date': datetime.date.today().isoformat(),
      'versions': versions(),
    }
    rows = [*(r for r in self.rows() if r['plan'] != row['plan']), row]
    cells = [_COLUMNS, *([r[name] for name in _COLUMNS] for r in rows)]
    whole.replace(self._path, ''.join(map(metric_log.csv_line, cells)).encode())
    whole.replace(self._path.with_suffix('.md'), markdown(rows).encode())


def markdown(rows: Sequence[Row]) -> str:
  """Returns a table of plans."""
  lines = []
  for row in rows:
    plan = f'`{" ".join(filter(None, (row["plan"], row["fields"])))}`'
    if row['outcome'] != FITS:
      lines.append([plan, row['outcome'], *[''] * (len(_HEADS) - 2)])
      continue
    images = float(row['images']) / float(row['devices'])
    rate = 1e3 * images / float(row['computing_ms'])
    steps = dict.fromkeys(
      f'{float(row[name]):,.1f}' for name in ('least_ms', 'most_ms')
    )
    lines.append(
      [
        plan,
        f'{images:g}',
        row['gib'],
        f'{float(row["computing_ms"]):,.1f}',
        f'{rate:,.1f} ({mfu_text(float(row["mfu"]))})',
        ' to '.join(steps),
        row['sent_gib'],
      ]
    )
  return grid.table(_HEADS, lines)


def versions() -> str:
  """Returns what compiles, and what it is given."""
  found = []
  for package in ('libtpu', 'jax'):
    try:
      found.append(f'{package} {version(package)}')
    except PackageNotFoundError:  # a compiler of $TPU_LIBRARY_PATH
      continue
  return ', '.join(found)
