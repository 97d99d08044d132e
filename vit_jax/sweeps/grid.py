"""The tables of a sweep: results.csv and table.md."""

import dataclasses
import functools
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.data import atomic_files
from vit_jax.training import metric_log

CSV, TABLE = 'results.csv', 'table.md'


class GridRun(NamedTuple):
  """A run or a trial of a sweep."""

  labels: dict[str, str]  # by the name of the axis
  workdir: epath.Path
  result: dict[str, Any] | None  # content of result.json; None if pending

  @property
  def status(self) -> str:
    return self.result['status'] if self.result else 'pending'


@dataclasses.dataclass(frozen=True)
class GridReport:
  """The runs of a sweep as a table.

  The second axis gives the columns, not counting axes that only set the seed.
  Combinations of all other axes give the rows. Runs that differ only in the
  seed are averaged.
  """

  axes: dict[str, list[str]]  # all labels by the name of the axis
  averaged: Sequence[str]  # names of the axes that only set the seed
  metric: str  # taken at the best or last step of each run
  runs: Sequence[GridRun]  # finished or not

  def write(self, folder: epath.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in self.files().items():
      atomic_files.replace(folder / name, data)

  def files(self) -> dict[str, bytes]:
    return {CSV: self.csv_text().encode(), TABLE: self.markdown().encode()}

  def summary(self, folder: epath.Path) -> str:
    """Returns the final output: the table and the paths of the files."""
    return self.markdown() + '\n'.join(
      ['', *(f'written  {folder / name}' for name in self.files())]
    )

  def csv_text(self) -> str:
    """Returns a CSV with a line for every run that finished or diverged."""
    return csv_text(self.axes, self.runs, self.counts())

  def counts(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Maps columns of the CSV, such as `steps`, to functions of a result."""
    names = ('params', 'gflops', 'steps', 'elapsed_s')
    return {name: operator.itemgetter(name) for name in names}

  def markdown(self) -> str:
    """Returns the caption and the table; a cell without runs is n/a."""
    n = max(len(self.values(runs)) for runs in self.groups.values())
    rows, found = (dict.fromkeys(x) for x in zip(*self.groups, strict=True))
    columns = [c for c in self.axes.get(self.column_axis, found) if c in found]
    lines = []
    for row in rows:
      cells = (self.groups.get((row, column), []) for column in columns)
      lines.append([row, *(self._cell(runs, n) for runs in cells)])
    apart = {self.column_axis, *self.averaged}
    row_axes = ', '.join(name for name in self.axes if name not in apart)
    return f'{self._caption(n)}\n\n{table([row_axes, *columns], lines)}'

  def _caption(self, n: int) -> str:
    unit = ' in percent' if self.is_percentage() else ''
    return f'{self.metric} {self.when()}{unit}{self._counted(n)}.'

  def _counted(self, n: int) -> str:
    """Returns the number of runs per mean, and of ended runs, as text."""
    text = ''
    if n > 1:
      text += f', mean ± standard deviation of n = {n} runs'
      text += f' ({", ".join(self.averaged)})'
    ended = sum(run.result is not None for run in self.runs)
    if ended < len(self.runs):
      text += f'; {ended} of {len(self.runs)} runs have ended'
    return text

  def _cell(self, runs: Sequence[GridRun], usual_n: int) -> str:
    values = self.values(runs)
    if not values:
      return why_missing(runs)
    return mean_text(values, usual_n, diverged(runs), self.number)

  def when(self) -> str:
    """Returns 'at the best step' or 'at the last step'."""
    is_best = any('best_step' in run.result for run in self.runs if run.result)
    return f'at the {"best" if is_best else "last"} step'

  def number(self, value: float) -> str:
    return f'{100 * value:.2f}' if self.is_percentage() else f'{value:.4g}'

  def is_percentage(self) -> bool:
    return self.metric.endswith('accuracy')

  def values(self, runs: Sequence[GridRun], metric: str = '') -> list[float]:
    """Returns a metric, by default the report's, of all runs that have it."""
    metrics = (run.result['metrics'] for run in runs if run.result)
    name = metric or self.metric
    return [found[name] for found in metrics if name in found]

  def label(self, run: GridRun, *apart: str) -> str:
    """Joins a run's labels on all axes except `averaged` and `apart`."""
    names = {*self.averaged, *apart}
    return ', '.join(v for k, v in run.labels.items() if k not in names)

  @functools.cached_property
  def groups(self) -> dict[tuple[str, str], list[GridRun]]:
    groups: dict[tuple[str, str], list[GridRun]] = {}
    for run in self.runs:
      row = self.label(run, self.column_axis)
      column = run.labels.get(self.column_axis, self.metric)
      groups.setdefault((row or 'all runs', column), []).append(run)
    return groups

  @property
  def column_axis(self) -> str:
    """The name of the axis in the columns; empty without a second axis."""
    shown = [name for name in self.axes if name not in self.averaged]
    return shown[1] if len(shown) > 1 else ''


def csv_text(
  names: Iterable[str],
  runs: Sequence[GridRun],
  counts: Mapping[str, Callable[[dict[str, Any]], Any]],
) -> str:
  """Returns a CSV with a line for every run that has finished or diverged."""
  finished = [(run, run.result) for run in runs if run.result]
  metrics = dict.fromkeys(m for _, r in finished for m in r['metrics'])
  chosen = dict.fromkeys(f for _, r in finished for f in r.get('chosen', {}))
  lines = [[*names, *chosen, 'status', *metrics, *counts, 'folder']]
  lines += [
    [
      # The label lr=0.001 of the axis optimizer.lr becomes 0.001.
      *(
        label.removeprefix(f'{name.rpartition(".")[2]}=')
        for name, label in run.labels.items()
      ),
      *(result.get('chosen', {}).get(field, '') for field in chosen),
      result['status'],
      *(result['metrics'].get(name, '') for name in metrics),
      *(count(result) for count in counts.values()),
      f'{run.workdir.parent.name}/{run.workdir.name}',
    ]
    for run, result in finished
  ]
  return metric_log.csv_text(lines)


def diverged(runs: Sequence[GridRun]) -> int:
  return sum(run.status == 'diverged' for run in runs)


def why_missing(runs: Sequence[GridRun]) -> str:
  """Returns the text of a cell whose runs lack the metric."""
  states = {run.status for run in runs}
  if not states or 'done' in states:
    return 'n/a'
  if len(states) == 1:
    return states.pop()
  lost = diverged(runs)
  return f'{lost} diverged, {len(runs) - lost} pending'


def moments(values: Sequence[float]) -> tuple[float, float | None]:
  """Returns mean and standard deviation; of a single value, (mean, None)."""
  # Unlike `statistics.stdev`, np.std accepts NaN.
  deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
  return statistics.mean(values), deviation


def mean_text(
  values: Sequence[float],
  usual_n: int,
  lost: int,
  number: Callable[[float], str],
) -> str:
  """Formats mean ± standard deviation.

  Adds the number of values if it is not `usual_n`, and the number `lost` of
  diverged runs if it is not 0.
  """
  notes = [f'n = {len(values)}'] if len(values) != usual_n else []
  notes += [f'{lost} diverged'] if lost else []
  text = ' ± '.join(number(x) for x in moments(values) if x is not None)
  return f'{text} ({", ".join(notes)})' if notes else text


def table(
  heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1
) -> str:
  """Returns a Markdown table with the first `left` columns left-aligned."""
  rule = [':--'] * left + ['--:'] * (len(heads) - left)
  lines = [[c.replace('|', r'\|') for c in cells] for cells in (heads, *rows)]
  lines.insert(1, rule)
  return ''.join(f'| {" | ".join(cells)} |\n' for cells in lines)
