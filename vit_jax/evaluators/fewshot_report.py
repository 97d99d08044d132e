"""Tables and plots of few-shot accuracy and of linear probes by layer."""

import csv
import dataclasses
import itertools
import math
import os
import pathlib
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from vit_jax.data import text_files
from vit_jax.evaluators.knn import K
from vit_jax.evaluators.shots import Result
from vit_jax.training import metric_log, plots

CSV = 'fewshot.csv'
COLUMNS = ('shots', 'seed', 'l2', 'accuracy')
# Values of the column `shots` for the linear probe and k-NN, which use every
# training example.
_ALL, _KNN = 'all', 'knn'
_NEIGHBOURS = f'{K} nearest neighbours'


class ProbeResult(NamedTuple):
  """A linear probe on all training examples. Accuracy is from 0 to 1."""

  l2: float
  accuracy: float


@dataclasses.dataclass(frozen=True)
class Curve:
  """Results of one checkpoint."""

  label: str  # text for legends
  results: Sequence[Result]
  probe: ProbeResult | None = None
  knn: float | None = None  # accuracy with all training examples

  def by_shots(self) -> dict[int, list[Result]]:
    """Groups the results by their number of shots, in ascending order."""
    ordered = sorted(self.results, key=lambda r: (r.shots, r.seed))
    groups = itertools.groupby(ordered, lambda r: r.shots)
    return {shots: list(results) for shots, results in groups}


def csv_text(curve: Curve) -> str:
  """Returns a CSV with a line for each draw of shots, the probe, and k-NN."""
  lines: list[Sequence[Any]] = [COLUMNS]
  for results in curve.by_shots().values():
    lines += [(r.shots, r.seed, r.l2, r.accuracy) for r in results]
  if curve.probe:
    lines.append((_ALL, '', *curve.probe))
  if curve.knn is not None:
    lines.append((_KNN, '', math.nan, curve.knn))
  return metric_log.csv_text(lines)


def read_csv(path: str, label: str) -> Curve:
  """Reads a file with the text of `csv_text`.

  Raises FileNotFoundError if it is missing, and ValueError if it is invalid.
  """
  place = epath.Path(path)
  if not place.is_file():
    raise FileNotFoundError(f'No file {path}. Give the path of a {CSV}.')
  results, probe, knn = [], None, None
  text = text_files.decoded(place.read_bytes(), path)
  lines = csv.reader(text.splitlines())
  try:
    if tuple(next(lines, ())) != COLUMNS:
      raise ValueError('other columns')
    for shots, seed, *numbers in lines:
      l2, accuracy = map(float, numbers)
      if shots == _ALL:
        probe = ProbeResult(l2, accuracy)
      elif shots == _KNN:
        knn = accuracy
      else:
        results.append(Result(int(shots), int(seed), l2, accuracy))
    if not results:
      raise ValueError('no results')
  except (ValueError, csv.Error) as e:
    raise ValueError(
      f'{path} is not a {CSV} with the columns {",".join(COLUMNS)}: line '
      f'{lines.line_num}: {e}.'
    ) from None
  return Curve(label, results, probe, knn)


def table(curve: Curve) -> str:
  """Returns a table for a terminal: shots, accuracy in percent, and l2."""
  n = max(len(results) for results in curve.by_shots().values())
  spread = f', mean ± standard deviation of {n} seeds' if n > 1 else ''
  rows = [('shots', f'accuracy in %{spread}', 'l2')]
  for shots, results in curve.by_shots().items():
    accuracies = [100 * r.accuracy for r in results]
    text = f'{statistics.mean(accuracies):.2f}'
    if len(results) > 1:
      text += f' ± {statistics.stdev(accuracies):.2f}'
    if len(results) != n:
      text += f' (seeds: {len(results)})'
    rows.append((str(shots), text, _range([r.l2 for r in results])))
  if curve.probe:
    accuracy = f'{100 * curve.probe.accuracy:.2f}'
    rows.append((_ALL, accuracy, f'{_range([curve.probe.l2])} (linear probe)'))
  if curve.knn is not None:
    rows.append((_ALL, f'{100 * curve.knn:.2f}', f'({_NEIGHBOURS})'))
  widths = [max(len(row[i]) for row in rows) for i in range(2)]
  return ''.join(
    f'{shots:>{widths[0]}}  {text:<{widths[1]}}  {l2}\n'
    for shots, text, l2 in rows
  )


def _range(values: Sequence[float]) -> str:
  """Formats a range of penalties, such as '2^-2 to 2^10'."""
  texts = (
    f'2^{math.log2(l2):.0f}'
    if l2 > 0 and math.log2(l2).is_integer()
    else f'{l2:.3g}'
    for l2 in (min(values), max(values))
  )
  return ' to '.join(dict.fromkeys(texts))


def plot(curves: Sequence[Curve], title: str = '') -> bytes:
  """Returns a picture of accuracy against shots, as a PNG."""
  figure = plots.figure(8.5, 4.8)
  axes = plots.accuracy_axes(
    figure,
    _wrapped(title),
    'training examples of each class (log scale)',
    'test accuracy',
  )
  draw(axes, curves)
  plots.legend(figure, 'right upper')
  return plots.png(figure)


def draw(axes: Any, curves: Sequence[Curve]) -> None:
  """Draws accuracy against shots on a log scale.

  Each curve is the mean over seeds, with bars of one standard deviation.
  Horizontal lines show linear probes and k-NN.
  """
  from matplotlib.ticker import NullLocator

  axes.set_xscale('log')
  probed = [curve for curve in curves if curve.probe]
  for i, curve in enumerate(curves):
    label = _wrapped(curve.label, 30) if len(curves) > 1 else 'mean over seeds'
    style = plots.style(i)
    accuracies = {
      k: [r.accuracy for r in results]
      for k, results in curve.by_shots().items()
    }
    means = [*map(statistics.mean, accuracies.values())]
    deviations = [
      statistics.stdev(v) if len(v) > 1 else 0.0 for v in accuracies.values()
    ]
    axes.errorbar(
      [*accuracies], means, deviations, capsize=3, label=label, **style
    )
    if curve.probe:
      is_first = curve is probed[0]
      label = 'linear probe\n(all examples)' if is_first else ''
      axes.axhline(
        curve.probe.accuracy, color=style['color'], ls='--', label=label
      )
    if curve.knn is not None:
      is_first = curve is next(c for c in curves if c.knn is not None)
      label = f'{_NEIGHBOURS}\n(all examples)' if is_first else ''
      axes.axhline(curve.knn, color=style['color'], ls=':', label=label)
  shots = sorted({result.shots for c in curves for result in c.results})
  axes.set_xticks(shots, shots)
  axes.xaxis.set_minor_locator(NullLocator())
  axes.set_xlim(shots[0] / 1.15, shots[-1] * 1.15)


def _wrapped(text: str, width: int = 80) -> str:
  return '\n'.join(textwrap.fill(line, width) for line in text.splitlines())


def folder_labels(paths: Sequence[str]) -> list[str]:
  """Returns the names of the files' folders, or their paths if names repeat."""
  folders = [pathlib.PurePath(os.path.abspath(path)).parent for path in paths]
  names = [folder.name for folder in folders]
  if len(set(names)) == len(names):
    return names
  return [os.path.dirname(path) or '.' for path in paths]


def files(curve: Curve, title: str) -> dict[str, str | bytes]:
  """Returns the table and the picture of one checkpoint, by file name."""
  return {CSV: csv_text(curve), 'fewshot.png': plot([curve], title)}


def layers_files(
  found: Mapping[str, ProbeResult], title: str
) -> dict[str, str | bytes]:
  """Returns the table and the picture of all layers, by file name."""
  rows = [(name, x.l2, x.accuracy) for name, x in found.items()]
  figure = plots.figure(7, 4)
  y_label = 'test accuracy of a linear probe'
  axes = plots.accuracy_axes(
    figure, title, 'layer (the last: pre_logits)', y_label
  )
  accuracies = [x.accuracy for x in found.values()]
  axes.plot(range(len(found)), accuracies, markersize=5, **plots.style(0))
  every = 1 + len(found) // 20
  axes.set_xticks(range(0, len(found), every))
  return {
    'layers.csv': metric_log.csv_text([('layer', 'l2', 'accuracy'), *rows]),
    'layers.png': plots.png(figure),
  }


def layers_table(found: Mapping[str, ProbeResult]) -> str:
  """Returns a table of accuracies for a terminal; marks the best layer."""
  best = max(found, key=lambda name: found[name].accuracy)
  return '\n'.join(
    f'{name:<10}  {x.accuracy:7.2%}{"  best" if name == best else ""}'
    for name, x in found.items()
  )
