"""Plots a metric over pre-training compute: figure 5 of the ViT paper."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.sweeps import grid
from vit_jax.sweeps.grid import GridRun
from vit_jax.training import plots

# Families in the order of the legend.
FAMILIES = ('ViT', 'ResNet (BiT)', 'Hybrid', 'Axial', 'Other')

# Offsets of labels from the models' points, in typographic points. Successive
# labels of a family alternate between the two.
_OFFSETS = ((6, -10), (-4, 6))


class Point(NamedTuple):
  """A model in the plot."""

  name: str
  family: str  # one of `FAMILIES`
  exaflops: float  # of pre-training
  mean: float  # of the metric over seeds
  deviation: float | None = None  # standard deviation; None for one seed


def exaflops(result: Mapping[str, Any]) -> float:
  """Returns the compute of a run in exaFLOPs, as in table 6 of the paper.

  It is 3 x forward FLOPs x examples, because the backward pass costs twice as
  much as the forward pass. It counts one view of each example, and omits
  teachers and SAM's second gradient.
  """
  images = result['steps'] * result['config']['batch_size']
  return 3 * result['gflops'] * images / 1e9


def family(model: Mapping[str, Any]) -> str:
  """Returns the family of a config's model, one of `FAMILIES`."""
  if 'axial' not in model:
    return 'Other'
  if model['axial']:
    return 'Axial'
  if model['name'] == 'resnet':
    return 'ResNet (BiT)'
  return 'Hybrid' if model['stem_width'] else 'ViT'


@dataclasses.dataclass(frozen=True)
class ScalingReport(grid.GridReport):
  """Reports the models of a sweep with their training compute.

  Each combination of swept values is a model. Runs that differ only in their
  seed are the same model.
  """

  def counts(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
    return super().counts() | {'exaflops': exaflops}

  def models(self) -> dict[str, list[GridRun]]:
    """Returns the runs of each model, one per seed."""
    models: dict[str, list[GridRun]] = {}
    for run in self.runs:
      models.setdefault(self.label(run) or 'all runs', []).append(run)
    return models

  def markdown(self) -> str:
    """Returns the caption, and a table with a row for each model."""
    models = self.models()
    n = max(len(self.values(runs)) for runs in models.values())
    rows = []
    for name, runs in models.items():
      kind = params = computed = ''
      if result := next((run.result for run in runs if run.result), None):
        kind = family(result['config']['model'])
        params = f'{result["params"]:,}'
      # A diverged run has stopped early, so its compute would be too small.
      if result := _finished(runs):
        computed = f'{exaflops(result):.4g}'
      rows.append([name, kind, params, computed, self._cell(runs, n)])
    heads = ['Model', 'Family', 'Parameters', 'exaFLOPs', self.metric]
    return f'{self._caption(n)}\n\n{grid.table(heads, rows, left=2)}'

  def points(self) -> list[Point]:
    """Returns the models with at least one finished run."""
    points = []
    for name, runs in self.models().items():
      if result := _finished(runs):
        kind = family(result['config']['model'])
        mean, deviation = grid.moments(self.values(runs))
        points.append(Point(name, kind, exaflops(result), mean, deviation))
    return points

  def files(self) -> dict[str, bytes]:
    """Adds figure 5 as plot.png if a run has finished."""
    png = self.plot()
    return super().files() | ({'plot.png': png} if png else {})

  def plot(self) -> bytes | None:
    """Returns figure 5 as PNG, or None if no run has finished."""
    points = self.points()
    if not points:
      return None
    # Imported here, because importing matplotlib is slow.
    from matplotlib.ticker import PercentFormatter

    figure = plots.figure(8, 5.5)
    axes = figure.subplots()
    draw_points(axes, points)
    axes.set_ylabel(f'{self.metric} {self.when()}')
    if self.is_percentage():
      axes.yaxis.set_major_formatter(PercentFormatter(1))
    plots.legend(figure, 'lower center', columns=4)
    return plots.png(figure)


def draw_points(axes: Any, points: Sequence[Point]) -> None:
  """Draws a point and a name for each model, and a line for each family."""
  for number, name in enumerate(FAMILIES):
    style = plots.style(number)
    members = [point for point in points if point.family == name]
    members.sort(key=lambda point: point.exaflops)
    if members:
      axes.errorbar(
        [point.exaflops for point in members],
        [point.mean for point in members],
        # NaN draws no error bar; 0 would draw a cap.
        [point.deviation or math.nan for point in members],
        capsize=3,
        label=name,
        **style,
      )
    for i, point in enumerate(members):
      offset = _OFFSETS[i % 2]
      axes.annotate(
        point.name,
        (point.exaflops, point.mean),
        xytext=offset,
        textcoords='offset points',
        horizontalalignment='left' if offset[0] > 0 else 'right',
        fontsize='small',
        color=style['color'],
      )
  axes.set_xscale('log')
  axes.margins(0.12)
  axes.xaxis.set_major_formatter('{x:g}')
  axes.set_xlabel('pre-training compute in exaFLOPs')
  plots.tidy(axes)


def _finished(runs: Sequence[GridRun]) -> dict[str, Any] | None:
  return next((run.result for run in runs if run.status == 'done'), None)
