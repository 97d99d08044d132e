"""Makes tables 2 and 9 of the ViT paper from sweeps over its datasets.

`published.csv` has the paper's own results (arXiv 2010.11929v2), with a row for
each model of tables 2, 5 and 9. Results are accuracies in percent, named as in
`data.benchmarks`. The columns 'real' (ReaL labels), 'objectnet' and
'objectnet/top5' (appendix D.9) are for models fine-tuned on imagenet2012.
'vtab' is the unweighted mean of VTAB's 19 tasks. Noisy Student's 88.4 on
ImageNet is from its own paper; the ViT paper also prints 88.5, from Touvron et
al. (2020).
"""

import csv
import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.data.benchmarks import BENCHMARKS, SUITES
from vit_jax.models import variants
from vit_jax.sweeps import grid
from vit_jax.sweeps.grid import GridRun

# Accuracies by column, such as '88.4', or '88.55 ± 0.04': the mean and the
# standard deviation of three fine-tuning runs.
Results = dict[str, str]
# Columns of published.csv that are not results.
_FACTS = ('table', 'model', 'variant', 'pretraining')


def _table(number: int) -> list[tuple[dict[str, str], Results]]:
  """Returns the row and the non-empty results of each model of a table."""
  path = pathlib.Path(__file__).with_name('published.csv')
  rows = csv.DictReader(path.read_text(encoding='utf-8').splitlines())
  return [
    (row, {k: x for k, x in row.items() if x and k not in _FACTS})
    for row in rows
    if row['table'] == str(number)
  ]


TABLE_2 = {row['model']: results for row, results in _table(2)}
# Keys are (variant, pre-training data). Models are fine-tuned at 384 pixels.
TABLE_5 = {
  (row['variant'], row['pretraining']): results for row, results in _table(5)
}
TABLE_9 = {row['model']: results for row, results in _table(9)}

DATASET = 'Dataset'
METRIC = 'test/accuracy'

# Further metrics of models fine-tuned on ImageNet: (metric, column of
# published.csv, title).
EXTRAS = {
  'imagenet2012': (
    ('real/accuracy', 'real', 'ImageNet ReaL'),
    ('objectnet/accuracy', 'objectnet', 'ObjectNet'),
    ('objectnet/top5_accuracy', 'objectnet/top5', 'ObjectNet, top-5'),
  )
}

VTAB = 'vtab'
VTAB_TITLE = f'VTAB ({len(SUITES[VTAB])} tasks)'
# Symbols of task groups in column heads.
SYMBOLS = {'natural': '●', 'specialised': '■', 'structured': '▲'}


class Line(NamedTuple):
  """A row of table 2 or a column of table 9: a metric of a dataset, or VTAB."""

  name: str  # column of the published results
  title: str
  cells: dict[str, str]  # texts by model


@dataclasses.dataclass(frozen=True)
class TransferReport(grid.GridReport):
  """Reports the runs of a sweep beside the published results.

  The axis 'Dataset' lists the datasets. Each combination of the other axes,
  except seeds, is a model. The tables show test accuracy and `EXTRAS`,
  even if another metric chose the best step.
  """

  def __post_init__(self) -> None:
    if DATASET not in self.axes:
      raise ValueError(
        f"config.report is 'transfer', which needs the axis {DATASET!r} of "
        'configs/transfer.py. Set --config.report=grid.'
      )

  def markdown(self) -> str:
    """Returns table 9 for tasks of VTAB, and table 2 for other datasets."""
    parts = [self._caption(self._usual_n) + '\n']
    if len(self._tasks) < len(self.axes[DATASET]):
      parts.append(self._table_2())
    if self._tasks:
      parts.append(self._table_9())
    return '\n'.join(parts)

  def _caption(self, n: int) -> str:
    return (
      f'{METRIC} {self.when()} in percent{self._counted(n)}. '
      'Results of models not marked (ours) are from the paper.'
    )

  def _table_2(self) -> str:
    """Returns a table with a row per `Line` and a column per model."""
    lines = self.data_lines()
    if self._tasks:
      lines.append(self._mean_line(VTAB_TITLE, decimals=2))
    columns = self.published_columns(lines)
    rows = []
    for line in lines:
      theirs = (results.get(line.name, 'n/a') for results in columns.values())
      rows.append([line.title, *line.cells.values(), *theirs])
    return grid.table(['', *self.models, *columns], rows)

  def _table_9(self) -> str:
    """Returns a table with a row per model, and a legend of the symbols."""
    lines = [
      *(self._line_of(task, decimals=1) for task in self._tasks),
      self._mean_line('Mean', decimals=1),
    ]
    tasks = [BENCHMARKS[name] for name in self._tasks]
    heads = [f'{SYMBOLS[task.group]} {task.title}' for task in tasks]
    groups = dict.fromkeys(task.group for task in tasks)
    legend = ', '.join(f'{SYMBOLS[group]} {group}' for group in groups)
    models = {
      model: {line.name: line.cells[model] for line in lines}
      for model in self.models
    } | TABLE_9
    rows = [
      [model, *(texts.get(line.name, 'n/a') for line in lines)]
      for model, texts in models.items()
    ]
    return f'VTAB-1k: {legend}.\n\n' + grid.table(['', *heads, 'Mean'], rows)

  def _text(self, values: Sequence[float], lost: int, decimals: int) -> str:
    return grid.mean_text(
      values, self._usual_n, lost, lambda x: f'{x:.{decimals}f}'
    )

  @property
  def models(self) -> list[str]:
    """The names of your models, in the order of their runs."""
    return list(dict.fromkeys(map(self._model, self.runs)))

  def _model(self, run: GridRun) -> str:
    return f'{self.label(run, DATASET) or "model"} (ours)'

  def _runs(self, model: str, *datasets: str) -> list[GridRun]:
    return [
      run
      for run in self.runs
      if self._model(run) == model and run.labels[DATASET] in datasets
    ]

  @property
  def _tasks(self) -> list[str]:
    """The tasks of VTAB in this sweep, in the order of table 9."""
    return [name for name in SUITES[VTAB] if name in self.axes[DATASET]]

  @functools.cached_property
  def _usual_n(self) -> int:
    """The largest number of values (finished runs) in a cell."""
    return max(
      len(self.values(self._runs(model, name), METRIC))
      for model in self.models
      for name in self.axes[DATASET]
    )

  def data_lines(self) -> list[Line]:
    """Returns a line for each metric of the datasets outside of VTAB."""
    lines = []
    for name in self.axes[DATASET]:
      if name not in SUITES[VTAB]:
        lines.append(self._line_of(name))
        lines += [
          self._line_of(name, *extra)
          for extra in EXTRAS.get(name, ())
          if self.values(self.runs, extra[0])
        ]
    return lines

  def _line_of(
    self,
    dataset: str,
    metric: str = METRIC,
    key: str = '',
    title: str = '',
    decimals: int = 2,
  ) -> Line:
    cells = {}
    for model in self.models:
      runs = self._runs(model, dataset)
      if values := [100 * value for value in self.values(runs, metric)]:
        cells[model] = self._text(values, grid.diverged(runs), decimals)
      else:
        cells[model] = grid.why_missing(runs)
    if not title:
      known = BENCHMARKS.get(dataset)
      title = known.title if known else dataset
    return Line(key or dataset, title, cells)

  def _mean_line(self, title: str, decimals: int) -> Line:
    """Returns VTAB's mean over its tasks, for seeds that finished all tasks."""
    tasks = SUITES[VTAB]
    cells = {}
    for model in self.models:
      runs = self._runs(model, *tasks)
      seeds: dict[tuple[str, ...], list[GridRun]] = {}
      for run in runs:
        seed = tuple(run.labels[name] for name in self.averaged)
        seeds.setdefault(seed, []).append(run)
      values = [self.values(group, METRIC) for group in seeds.values()]
      means = [100 * statistics.mean(v) for v in values if len(v) == len(tasks)]
      lost = grid.diverged(runs)
      if means:
        cells[model] = self._text(means, lost, decimals)
        continue
      done = max(map(len, values), default=0)
      cells[model] = f'{done} of {len(tasks)} tasks'
      if lost:
        cells[model] += f' ({lost} diverged)'
    return Line(VTAB, title, cells)

  def published_columns(self, lines: Sequence[Line]) -> dict[str, Results]:
    """Returns the published models to show, and their results.

    These are the models of table 2, and the models of table 5 with the patch
    size, depth and widths of a run that ended. Models without a result for any
    of `lines` are left out.
    """
    columns = dict(TABLE_2)
    models = [run.result['config']['model'] for run in self.runs if run.result]
    for (variant, data), results in TABLE_5.items():
      shape = {'axial': False, 'stem_width': 0} | variants.fields(variant)
      if any(shape.items() <= model.items() for model in models):
        name = f'ViT-{variant[0].upper()}/{variant[1:]} ({data}, table 5)'
        columns[name] = results
    names = {line.name for line in lines}
    return {k: v for k, v in columns.items() if names & v.keys()}
