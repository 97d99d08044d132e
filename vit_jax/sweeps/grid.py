"""What a sweep leaves behind: results.csv, table.md and plot.png."""

import dataclasses
import functools
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.data import atomic_files
from vit_jax.sweeps.axes import value_of
from vit_jax.training import metric_log, plots

CSV, TABLE, PLOT = 'results.csv', 'table.md', 'plot.png'


@dataclasses.dataclass(frozen=True)
class GridRun:
  """One run of the sweep.

  Attributes:
    labels: by the names of the axes.
    workdir: of this run.
    result: what its result.json holds, None before it has finished.
  """

  labels: dict[str, str]
  workdir: epath.Path
  result: dict[str, Any] | None

  @property
  def status(self) -> str:
    return self.result['status'] if self.result else 'pending'


@dataclasses.dataclass(frozen=True)
class GridReport:
  """The runs of a sweep as a table.

  The first axis gives the rows and the second the columns. A further one
  multiplies the rows, but seeds are averaged.

  Attributes:
    axes: the labels by the name of the axis.
    averaged: the axes of seeds.
    metric: what the table and the plot show, of the step that counts.
    runs: all, whether finished or not.
  """

  axes: dict[str, list[str]]
  averaged: Sequence[str]
  metric: str
  runs: Sequence[GridRun]

  def write(self, folder: epath.Path) -> None:
    """Writes the files; there is no plot until a run has finished."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_files.replace(folder / CSV, self.csv_text().encode())
    atomic_files.replace(folder / TABLE, self.markdown().encode())
    if png := self.plot():
      atomic_files.replace(folder / PLOT, png)

  def summary(self, folder: epath.Path) -> str:
    """Returns what ends the command: the table, and where the files are."""
    names = [n for n in (CSV, TABLE, PLOT) if (folder / n).exists()]
    return self.markdown() + '\n'.join(
      ['', *(f'written  {folder / name}' for name in names)]
    )

  def csv_text(self) -> str:
    """Returns a line for every run that has finished or diverged."""
    return csv_text(self.axes, self.runs, self.counts())

  def counts(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Returns by column what the CSV file has of a result after its metrics."""
    names = ('params', 'gflops', 'steps', 'elapsed_s')
    return {name: operator.itemgetter(name) for name in names}

  def markdown(self) -> str:
    """Returns the table, with n/a where the sweep has no run."""
    n = max(len(self.values(runs)) for runs in self.groups.values())
    rows = []
    for row in self.rows:
      cells = (self.groups.get((row, column), []) for column in self.columns)
      rows.append([row, *(self._cell(runs, n) for runs in cells)])
    heads = [', '.join(self._row_axes), *self.columns]
    return f'{self._caption(n)}\n\n{table(heads, rows)}'

  def _caption(self, n: int) -> str:
    unit = ' in percent' if self.is_percentage() else ''
    return f'{self.metric} {self.when()}{unit}{self._counted(n)}.'

  def _counted(self, n: int) -> str:
    """Returns how many runs a mean has, and how many of all there are yet."""
    text = ''
    if n > 1:
      text += f', mean ± standard deviation of n = {n} runs'
      text += f' ({", ".join(self.averaged)})'
    done = sum(run.result is not None for run in self.runs)
    if done < len(self.runs):
      text += f'; {done} of {len(self.runs)} runs have finished'
    return text

  def _cell(self, runs: Sequence[GridRun], usual_n: int) -> str:
    values = self.values(runs)
    if not values:
      return why_missing(runs)
    return mean_text(values, usual_n, diverged(runs), self.number)

  def when(self) -> str:
    """Returns the step whose metrics are those of a run, as text."""
    is_best = any('best_step' in run.result for run in self.runs if run.result)
    return f'at the {"best" if is_best else "last"} step'

  def number(self, value: float) -> str:
    """Returns a value of the metric as text."""
    return f'{100 * value:.2f}' if self.is_percentage() else f'{value:.4g}'

  def is_percentage(self) -> bool:
    return self.metric.endswith('accuracy')

  def values(self, runs: Sequence[GridRun], metric: str = '') -> list[float]:
    """Returns the report's or another metric of those runs that have it."""
    metrics = (run.result['metrics'] for run in runs if run.result)
    name = metric or self.metric
    return [found[name] for found in metrics if name in found]

  def label(self, run: GridRun, *apart: str) -> str:
    """Returns a run's labels on all axes but those of seeds and `apart`."""
    names = {*self.averaged, *apart}
    return ', '.join(v for k, v in run.labels.items() if k not in names)

  @functools.cached_property
  def groups(self) -> dict[tuple[str, str], list[GridRun]]:
    """The runs of each row and column."""
    groups: dict[tuple[str, str], list[GridRun]] = {}
    for run in self.runs:
      row = self.label(run, self.column_axis)
      column = run.labels.get(self.column_axis, self.metric)
      groups.setdefault((row or 'all runs', column), []).append(run)
    return groups

  @property
  def rows(self) -> list[str]:
    return list(dict.fromkeys(row for row, _ in self.groups))

  @property
  def columns(self) -> list[str]:
    """The columns that have runs, in the order of their axis."""
    found = {column for _, column in self.groups}
    return [c for c in self.axes.get(self.column_axis, found) if c in found]

  @property
  def column_axis(self) -> str:
    """The name of the axis in the columns, empty if there is none."""
    shown = [name for name in self.axes if name not in self.averaged]
    return shown[1] if len(shown) > 1 else ''

  @property
  def _row_axes(self) -> list[str]:
    apart = {self.column_axis, *self.averaged}
    return [name for name in self.axes if name not in apart]

  def plot(self) -> bytes | None:
    """Returns a picture of the table and of how its numbers came about.

    Left the metric of each row and column, right the metric against steps.

    Returns:
      A PNG, or None where no run has finished.
    """
    if not self.values(self.runs):
      return None
    # Here, because it is slow to import.
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    row_height = max(0.4, 0.16 * len(self.columns))
    figure = plots.figure(12, max(3.6, 1.4 + len(self.rows) * row_height))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    self.draw_last(left)
    self.draw_curves(right)
    left.xaxis.set_major_locator(MaxNLocator(6))
    if self.is_percentage():
      left.xaxis.set_major_formatter(PercentFormatter(1))
      right.yaxis.set_major_formatter(PercentFormatter(1))
    plots.tidy(left, 'x')
    plots.tidy(right)
    plots.legend(figure, self._legend(), 'right upper')
    return plots.png(figure)

  def draw_last(self, axes: Any) -> None:
    """Draws every run as a dot, and their mean and standard deviation."""
    rows, columns = self.rows, self.columns
    for (row, column), runs in self.groups.items():
      r = rows.index(row)
      color, marker, _ = _style(r, columns.index(column))
      beside = [x for x in columns if (row, x) in self.groups]
      y = r + 0.6 * ((beside.index(column) + 0.5) / len(beside) - 0.5)
      values = self.values(runs)
      axes.plot(values, [y] * len(values), '.', color=color, alpha=0.4)
      if values:
        mean, deviation = moments(values)
        style = {'color': color, 'marker': marker, 'capsize': 3}
        axes.errorbar(mean, y, xerr=deviation, **style)
    for r in range(1, len(rows)):
      axes.axhline(r - 0.5, color='#cccccc', linewidth=0.8)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    axes.set_title(f'{self.metric} {self.when()}')
    if any(len(self.values(runs)) > 1 for runs in self.groups.values()):
      axes.set_xlabel('mean ± standard deviation; dots are single runs')

  def draw_curves(self, axes: Any) -> None:
    """Draws the metric against steps, the mean of the runs of a group."""
    rows, columns = self.rows, self.columns
    late: list[float] = []
    for (row, column), runs in self.groups.items():
      steps, values = self.curve(runs)
      late += filter(math.isfinite, values[len(values) // 2 :])
      color, marker, line = _style(rows.index(row), columns.index(column))
      axes.plot(
        steps, values, color=color, marker=marker, linestyle=line, markersize=4
      )
    # How a run starts would hide how the runs differ.
    if late:
      margin = 0.06 * (max(late) - min(late)) or 0.01
      axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set_xlabel('step')
    axes.xaxis.set_major_formatter('{x:,.0f}')
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f'{self.metric} during training')

  def curve(self, runs: Sequence[GridRun]) -> tuple[list[int], list[float]]:
    """Returns steps that all finished runs have, and their mean metric."""
    curves = []
    for run in runs:
      if run.status == 'done':
        _, rows = metric_log.read_table(run.workdir / 'metrics.csv')
        has = {s: row for s, row in rows.items() if self.metric in row}
        curves.append({s: float(row[self.metric]) for s, row in has.items()})
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    return common, [statistics.mean(c[s] for c in curves) for s in common]

  def _legend(self) -> list[Any]:
    """Returns what explains the colours of rows and the lines of columns."""
    handles = [plots.entry(', '.join(self._row_axes), linestyle='')]
    for r, row in enumerate(self.rows):
      handles.append(plots.entry(row, color=_style(r, 0)[0], linewidth=4))
    if name := self.column_axis:
      handles += [plots.entry(text, linestyle='') for text in ('', name)]
      for c, column in enumerate(self.columns):
        _, marker, line = _style(0, c)
        style = {'color': '#444444', 'marker': marker, 'linestyle': line}
        handles.append(plots.entry(column, **style))
    return handles


def csv_text(
  names: Iterable[str],
  runs: Sequence[GridRun],
  counts: Mapping[str, Callable[[dict[str, Any]], Any]],
) -> str:
  """Returns a line for every run that has finished or diverged.

  `names` are those of the axes; `counts` computes the columns after the metrics
  from a result.
  """
  finished = [(run, run.result) for run in runs if run.result]
  metrics = dict.fromkeys(m for _, r in finished for m in r['metrics'])
  chosen = dict.fromkeys(f for _, r in finished for f in r.get('chosen', {}))
  lines = [[*names, *chosen, 'status', *metrics, *counts, 'folder']]
  lines += [
    [
      *(value_of(name, label) for name, label in run.labels.items()),
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
  """Returns how many of the runs have."""
  return sum(run.status == 'diverged' for run in runs)


def why_missing(runs: Sequence[GridRun]) -> str:
  """Returns what to say of runs of which none has the metric."""
  states = {run.status for run in runs}
  if not states or 'done' in states:
    return 'n/a'
  if len(states) == 1:
    return states.pop()
  lost = diverged(runs)
  return f'{lost} diverged, {len(runs) - lost} pending'


def moments(values: Sequence[float]) -> tuple[float, float | None]:
  """Returns mean and deviation of a sample, None of a single value."""
  # Unlike `statistics.stdev`, numpy's takes NaN.
  deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
  return statistics.mean(values), deviation


def mean_text(
  values: Sequence[float],
  usual_n: int,
  lost: int,
  number: Callable[[float], str],
) -> str:
  """Returns the mean ± standard deviation, and what is unusual about them."""
  notes = [f'n = {len(values)}'] if len(values) != usual_n else []
  notes += [f'{lost} diverged'] if lost else []
  text = ' ± '.join(number(x) for x in moments(values) if x is not None)
  return f'{text} ({", ".join(notes)})' if notes else text


def _style(row: int, column: int) -> tuple[str, str, Any]:
  """Returns the colour of a row, and the marker and the line of a column."""
  return (
    plots.COLORS[row % len(plots.COLORS)],
    plots.MARKERS[column % len(plots.MARKERS)],
    plots.LINES[column % len(plots.LINES)],
  )


def table(
  heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1
) -> str:
  """Returns a Markdown table whose first columns are aligned to the left."""
  rule = [':--'] * left + ['--:'] * (len(heads) - left)
  lines = [[c.replace('|', r'\|') for c in cells] for cells in (heads, *rows)]
  lines.insert(1, rule)
  return ''.join(f'| {" | ".join(cells)} |\n' for cells in lines)
