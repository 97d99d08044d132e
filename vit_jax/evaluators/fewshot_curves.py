"""What a few-shot evaluation leaves behind: fewshot.csv and a picture."""

import csv
import dataclasses
import math
import os
import pathlib
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.evaluators.few_examples import Result
from vit_jax.training import metric_log, plots

CSV, PLOT = 'fewshot.csv', 'fewshot.png'

COLUMNS = ('shots', 'seed', 'l2', 'accuracy')
# Stands for the shots of the linear probe, which has every example.
_ALL = 'all'


class ProbeResult(NamedTuple):
  """A linear probe on all training examples: accuracy from 0 to 1."""

  l2: float
  accuracy: float


@dataclasses.dataclass(frozen=True)
class Curve:
  """What was measured on one checkpoint, with the label of its legend."""

  label: str
  results: Sequence[Result]
  probe: ProbeResult | None = None

  def by_shots(self) -> dict[int, list[Result]]:
    """Returns the results of all seeds, in ascending order of the shots."""
    found: dict[int, list[Result]] = {}
    for result in sorted(self.results, key=lambda r: (r.shots, r.seed)):
      found.setdefault(result.shots, []).append(result)
    return found


def csv_text(curve: Curve) -> str:
  """Returns a line for every result, the probe last with 'all' as its shots."""
  lines: list[Sequence[Any]] = [COLUMNS]
  for results in curve.by_shots().values():
    lines += [(r.shots, r.seed, r.l2, r.accuracy) for r in results]
  if curve.probe:
    lines.append((_ALL, '', *curve.probe))
  return ''.join(map(metric_log.csv_line, lines))


def read_csv(path: str, label: str) -> Curve:
  """Reads what `csv_text` gave.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is another kind of file, naming the line.
  """
  place = epath.Path(path)
  if not place.is_file():
    raise FileNotFoundError(f'No file {path}: give a {CSV}.')
  try:
    lines = csv.reader(place.read_text().splitlines())
    header = next(lines, [])
    if tuple(header) != COLUMNS:
      raise ValueError(f'its columns are {",".join(header)!r:.60}')
    rows = [_parse(line, lines.line_num) for line in lines]
    results = [row for row in rows if isinstance(row, Result)]
    probe = next((row for row in rows if isinstance(row, ProbeResult)), None)
    if not results:
      raise ValueError('it has no results')
  except (ValueError, csv.Error) as e:
    raise ValueError(
      f'{path} is no {CSV} with the columns {",".join(COLUMNS)}: {e}.'
    ) from None
  return Curve(label, results, probe)


def _parse(line: Sequence[str], number: int) -> Result | ProbeResult:
  """Returns what a line of the file says; raises ValueError for nonsense."""
  try:
    shots, seed, *numbers = line
    l2, accuracy = map(float, numbers)
    # Not a number is not in between, either.
    if 0 <= accuracy <= 1:
      if shots == _ALL:
        return ProbeResult(l2, accuracy)
      if int(shots) > 0:
        return Result(int(shots), int(seed), l2, accuracy)
  except ValueError:
    pass
  raise ValueError(f'line {number} is {",".join(line)!r:.60}')


def table(curve: Curve) -> str:
  """Returns lines for people: shots, accuracy in percent, and l2."""
  n = max(len(results) for results in curve.by_shots().values())
  spread = f', mean ± standard deviation of {n} seeds' if n > 1 else ''
  rows = [('shots', f'accuracy in %{spread}', 'l2')]
  for shots, results in curve.by_shots().items():
    accuracies = [100 * r.accuracy for r in results]
    text = f'{statistics.mean(accuracies):.2f}'
    if len(results) > 1:
      text += f' ± {statistics.stdev(accuracies):.2f}'
    if len(results) != n:
      text += f' ({len(results)} {"seed" if len(results) == 1 else "seeds"})'
    rows.append((str(shots), text, _range([r.l2 for r in results])))
  if curve.probe:
    accuracy = f'{100 * curve.probe.accuracy:.2f}'
    rows.append((_ALL, accuracy, f'{_number(curve.probe.l2)} (linear probe)'))
  widths = [max(len(row[i]) for row in rows) for i in range(2)]
  return ''.join(
    f'{shots:>{widths[0]}}  {text:<{widths[1]}}  {l2}\n'
    for shots, text, l2 in rows
  )


def _range(values: Sequence[float]) -> str:
  low, high = _number(min(values)), _number(max(values))
  return low if low == high else f'{low} to {high}'


def _number(l2: float) -> str:
  """Returns 2^10 for 1024, as the grid has powers of two."""
  if l2 > 0 and math.log2(l2).is_integer():
    return f'2^{math.log2(l2):.0f}'
  return f'{l2:.3g}'


def plot(curves: Sequence[Curve], title: str = '') -> bytes:
  """Returns a picture of accuracy against shots, as a PNG."""
  figure = plots.figure(8.5, 4.8)
  axes = figure.subplots()
  draw(axes, curves)
  # Paths may have dollar signs, which would start a formula.
  title = '\n'.join(textwrap.fill(line, 80) for line in title.splitlines())
  axes.set_title(title, fontsize='medium', parse_math=False)
  legend = plots.legend(figure, _legend(curves), 'right upper')
  for text in legend.get_texts():
    text.set_parse_math(False)
  return plots.png(figure)


def draw(axes: Any, curves: Sequence[Curve]) -> None:
  """Draws accuracy against shots on a log scale.

  Each curve is the mean over seeds in a band of one standard deviation to
  either side, with single seeds as dots and the linear probe as a line.
  """
  from matplotlib.ticker import NullLocator, PercentFormatter

  axes.set_xscale('log')
  for i, curve in enumerate(curves):
    _draw(axes, curve, **plots.style(i))
  shots = sorted({result.shots for c in curves for result in c.results})
  axes.set_xticks(shots, _labels(shots))
  axes.xaxis.set_minor_locator(NullLocator())
  axes.set_xlim(shots[0] / 1.15, shots[-1] * 1.15)
  axes.yaxis.set_major_formatter(PercentFormatter(1))
  axes.set_xlabel('training examples of each class (log scale)')
  axes.set_ylabel('test accuracy')
  plots.tidy(axes)


def _draw(axes: Any, curve: Curve, color: str, marker: str) -> None:
  groups = curve.by_shots()
  accuracies = [[r.accuracy for r in results] for results in groups.values()]
  means = np.array([statistics.mean(values) for values in accuracies])
  deviations = np.array(
    [statistics.stdev(v) if len(v) > 1 else 0.0 for v in accuracies]
  )
  low, high = means - deviations, means + deviations
  axes.fill_between([*groups], low, high, color=color, alpha=0.2, linewidth=0)
  if any(deviations):
    for k, values in zip(groups, accuracies, strict=True):
      axes.plot([k] * len(values), values, '.', color=color, alpha=0.6)
  axes.plot([*groups], means, color=color, marker=marker, markersize=5)
  if curve.probe:
    axes.axhline(curve.probe.accuracy, color=color, linestyle='--')


def _labels(shots: Sequence[int]) -> list[str]:
  """Returns the ticks' labels, empty where they would run into the last one."""
  labels, last = [], 0.0
  for k in shots:
    labels.append(str(k) if k >= 1.12 * last else '')
    last = k if labels[-1] else last
  return labels


def _legend(curves: Sequence[Curve]) -> list[Any]:
  """Returns the checkpoints, where there are several, and what is drawn."""
  from matplotlib.patches import Patch

  color, marker = plots.style(0).values()
  handles: list[Any] = []
  if len(curves) > 1:
    for i, curve in enumerate(curves):
      label = textwrap.fill(curve.label, 30)
      handles.append(plots.entry(label, **plots.style(i)))
    color, marker = '#444444', ''
  seeds = {len(r) for c in curves for r in c.by_shots().values()}
  n = ' to '.join(map(str, sorted({min(seeds), max(seeds)})))
  unit = 'seed' if n == '1' else 'seeds'
  handles.append(plots.entry(f'mean of {n} {unit}', color=color, marker=marker))
  if max(seeds) > 1:
    handles += [
      Patch(color=color, alpha=0.2, linewidth=0, label='± standard deviation'),
      plots.entry('single seeds', color=color, marker='.', linestyle=''),
    ]
  if any(curve.probe for curve in curves):
    handles.append(
      plots.entry('linear probe\n(all examples)', color=color, linestyle='--')
    )
  return handles


def folder_labels(paths: Sequence[str]) -> list[str]:
  """Returns the names of the files' folders; whole paths where they repeat."""
  folders = [pathlib.PurePath(os.path.abspath(path)).parent for path in paths]
  names = [folder.name for folder in folders]
  if len(set(names)) == len(names):
    return names
  return [os.path.dirname(path) or '.' for path in paths]
