"""Accuracy against the compute of pre-training: figure 5 of the paper."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.models import variants
from vit_jax.sweeps import grid
from vit_jax.sweeps.grid import GridRun
from vit_jax.tools.paper import published
from vit_jax.training import plots

# In the order of the legend.
FAMILIES = ('ViT', 'ResNet (BiT)', 'Hybrid', 'Axial', 'Other')


class Point(NamedTuple):
  """A model in the picture.

  Attributes:
    name: beside the point.
    family: of `FAMILIES`.
    exaflops: of pre-training.
    mean: of the metric over the seeds.
    deviation: of a sample, None of a single value.
  """

  name: str
  family: str
  exaflops: float
  mean: float
  deviation: float | None = None


def exaflops(result: Mapping[str, Any]) -> float:
  """Returns what a run has computed, as table 6 counts it.

  That is 3 x forward x images: the backward pass takes twice the forward one's.
  """
  images = result['steps'] * result['config']['batch_size']
  return 3 * result['gflops'] * images / 1e9


def family(model: Mapping[str, Any]) -> str:
  """Returns which of `FAMILIES` the model of a config belongs to."""
  if 'axial' not in model:
    return 'Other'
  if model['axial']:
    return 'Axial'
  if model['name'] == 'resnet':
    return 'ResNet (BiT)'
  return 'Hybrid' if model['stem_width'] else 'ViT'


@dataclasses.dataclass(frozen=True)
class ScalingReport(grid.GridReport):
  """The models of a sweep by the compute that they took.

  Each combination of the axes but seeds is a model.
  """

  def counts(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
    return super().counts() | {'exaflops': exaflops}

  def models(self) -> dict[str, list[GridRun]]:
    """Returns the runs of each model, one a seed."""
    models: dict[str, list[GridRun]] = {}
    for run in self.runs:
      shown = [v for k, v in run.labels.items() if k not in self.averaged]
      models.setdefault(', '.join(shown) or 'all runs', []).append(run)
    return models

  def markdown(self) -> str:
    """Returns a row for each model, and the caption."""
    models = self.models()
    n = max(len(self.values(runs)) for runs in models.values())
    rows = []
    for name, runs in models.items():
      kind = params = computed = ''
      if result := next((run.result for run in runs if run.result), None):
        kind = family(result['config']['model'])
        params = f'{result["params"]:,}'
      # A run that diverged has not computed all that its model would take.
      if result := _finished(runs):
        computed = f'{exaflops(result):.4g}'
      rows.append([name, kind, params, computed, self._cell(runs, n)])
    heads = ['Model', 'Family', 'Parameters', 'exaFLOPs', self.metric]
    return f'{self._caption(n)}\n\n{grid.table(heads, rows, left=2)}'

  def points(self) -> list[Point]:
    """Returns the models of which a run has finished."""
    points = []
    for name, runs in self.models().items():
      if result := _finished(runs):
        kind = family(result['config']['model'])
        mean, deviation = grid.moments(self.values(runs))
        points.append(Point(name, kind, exaflops(result), mean, deviation))
    return points

  def plot(self) -> bytes | None:
    """Returns figure 5: left our models, right those of table 6.

    They stand apart because they were measured on other data.
    """
    points = self.points()
    if not points:
      return None
    # Here, because it is slow to import.
    from matplotlib.ticker import PercentFormatter

    figure = plots.figure(13, 5.5)
    left, right = figure.subplots(1, 2)
    draw_points(left, points, alpha=1)
    left.set_title('Models of this sweep')
    left.set_ylabel(f'{self.metric} {self.when()}')
    if self.is_percentage():
      left.yaxis.set_major_formatter(PercentFormatter(1))
    published_points = table_6()
    draw_points(right, published_points, alpha=0.55)
    right.set_title('Published: 7 or 14 epochs of JFT-300M (table 6)')
    right.set_ylabel('ImageNet accuracy after fine-tuning')
    right.yaxis.set_major_formatter(PercentFormatter(1))
    handles = [
      plots.entry(name, **_style(name))
      for name in FAMILIES
      if any(point.family == name for point in [*points, *published_points])
    ]
    plots.legend(figure, handles, 'lower center', columns=4)
    annotate(left, points)
    annotate(right, published_points)
    return plots.png(figure)


def draw_points(axes: Any, points: Sequence[Point], alpha: float) -> None:
  """Draws every model, and a line through those of a family."""
  from matplotlib.ticker import LogLocator

  for name in FAMILIES:
    members = [point for point in points if point.family == name]
    members.sort(key=lambda point: point.exaflops)
    if members:
      axes.errorbar(
        [point.exaflops for point in members],
        [point.mean for point in members],
        # A length of nothing draws no cap.
        [point.deviation or math.nan for point in members],
        capsize=3,
        alpha=alpha,
        **_style(name),
      )
  axes.set_xscale('log')
  axes.margins(0.12)
  low, high = (f(p.exaflops for p in points) for f in (min, max))
  axes.xaxis.set_major_locator(
    LogLocator(subs=(1,) if high > 50 * low else (1, 2, 5))
  )
  axes.xaxis.set_major_formatter('{x:g}')
  axes.xaxis.set_minor_formatter('')
  axes.set_xlabel('pre-training compute in exaFLOPs')
  plots.tidy(axes)


def annotate(axes: Any, points: Sequence[Point]) -> None:
  """Writes the names beside the points, each where it covers the least.

  The picture has to be complete: where a name is depends on all else.
  """
  from matplotlib.transforms import Bbox

  axes.figure.draw_without_rendering()
  taken = []
  for name in FAMILIES:
    line = sorted((p.exaflops, p.mean) for p in points if p.family == name)
    corners = axes.transData.transform(line) if line else []
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
      for t in np.linspace(0, 1, 30):
        x, y = x0 + t * (x1 - x0), y0 + t * (y1 - y0)
        taken.append(Bbox.from_bounds(x - 1, y - 1, 2, 2))
    # A marker weighs more than a line.
    taken += 5 * [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in corners]
  for point in sorted(points, key=lambda point: point.exaflops):
    text = axes.annotate(
      point.name,
      (point.exaflops, point.mean),
      xytext=(0, 0),
      textcoords='offset points',
      verticalalignment='center',
      fontsize='small',
      color=_style(point.family)['color'],
    )
    _place(text, taken)
    taken += 20 * [text.get_window_extent()]


def _place(text: Any, taken: Sequence[Any]) -> None:
  """Moves a name to where it overlaps the fewest of the boxes."""

  def move(offset: tuple[int, int]) -> int:
    x, _ = offset
    text.set_position(offset)
    text.set_horizontalalignment(
      'left' if x > 0 else 'right' if x < 0 else 'center'
    )
    return text.get_window_extent().count_overlaps(taken)

  # In points; below a rising line and above it are preferred.
  sides = [(8, -9), (-8, 9), (8, 9), (-8, -9), (8, 0), (-8, 0)]
  offsets = sides + [(x, y) for y in (-15, 15) for x in (8, -8, 0)]
  move(min(offsets, key=move))


def table_6() -> list[Point]:
  """Returns the models of table 6, by their accuracy on ImageNet."""
  points = []
  for row in published.TABLE_6:
    fields = variants.fields(row.variant)
    points.append(
      Point(
        row.model.replace('ViT-', ''),
        family(variants.defaults(fields['name']) | fields),
        row.exaflops,
        published.mean(row.results['imagenet2012']) / 100,
      )
    )
  return points


def _finished(runs: Sequence[GridRun]) -> dict[str, Any] | None:
  """Returns the result of the first run that is done, if one is."""
  return next((run.result for run in runs if run.status == 'done'), None)


def _style(name: str) -> dict[str, Any]:
  return plots.style(FAMILIES.index(name))
