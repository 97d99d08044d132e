"""List the runs in a folder, best first, and draw their curves.

  python -m vit_jax.runs runs/

The command looks for workdirs at any depth. It prints a table with each run's
best and last value of a metric, planned steps, minutes so far, and the config
fields in which the runs differ. Runs with the same best_metric stay together.
It draws all curves in FOLDER/runs.png.
"""

import argparse
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from vit_jax import config as config_lib
from vit_jax.checkpoints import saving
from vit_jax.cli import flags
from vit_jax.data import atomic_files
from vit_jax.models import variants
from vit_jax.training import metric_log, plots


class FoundRun(NamedTuple):
  """A run with its curve of one metric."""

  name: str  # its folder, relative to the searched folder
  metric: str
  # Metadata of the newest checkpoint. Its 'best' says which value of the metric
  # is best: 'highest' (the default) or 'lowest'.
  meta: dict[str, Any]
  steps: list[int]  # at which the metric was measured
  values: list[float]

  @property
  def best(self) -> float:
    """The best value of the metric; NaN if all values are NaN."""
    good = self.meta.get('best', 'highest')
    return self.values[saving.best_index(self.values, good) or 0]


def find(folder: str, metric: str = '') -> list[FoundRun]:
  """Returns the runs that have the metric and a checkpoint, best first.

  The metric '' stands for each run's own `best_metric`. Runs are then sorted by
  the name of their metric first.

  Raises:
    FileNotFoundError: if the folder is missing.
    ValueError: if no run has the metric and a checkpoint, or if the newest
      checkpoint or the metrics.csv of a run is damaged.
  """
  root = pathlib.Path(folder).expanduser()
  if not root.is_dir():
    raise FileNotFoundError(f'No folder {folder}. Give a folder with runs.')
  found, other = [], set()
  for path in sorted(root.rglob('metrics.csv')):
    place = path.parent
    kept = saving.absolute(os.fspath(place)) / saving.FOLDER
    if not (saved := saving.steps(kept)):
      continue
    newest = kept / str(saved[-1])
    try:
      meta = saving.read_meta(newest)
    except (FileNotFoundError, ValueError, LookupError, TypeError) as e:
      raise ValueError(
        f'The checkpoint {newest} is damaged: {saving.first_line(e)}. Move its '
        'run out of the folder to list the other runs.'
      ) from e
    name = metric or meta['config']['best_metric']
    columns, rows = metric_log.read_table(path)
    other |= set(columns)
    points = [(x, float(row[name])) for x, row in rows.items() if name in row]
    if points:
      label = os.path.relpath(place, root)
      if name != meta['config']['best_metric']:
        meta['best'] = 'lowest' if name.endswith('loss') else 'highest'
      steps, values = map(list, zip(*points, strict=True))
      found.append(FoundRun(label, name, meta, steps, values))
  if not found:
    seen = f' Metrics there: {", ".join(sorted(other))}.' if other else ''
    raise ValueError(
      f'No run in {folder} has both a checkpoint and values of '
      f'{metric or "its best_metric"}.' + seen
    )

  def rank(run: FoundRun) -> tuple[str, bool, float]:
    sign = 1 if run.meta.get('best') == 'lowest' else -1
    return run.metric, math.isnan(run.best), sign * run.best

  return sorted(found, key=rank)


def differing(found: Sequence[FoundRun]) -> dict[str, list[str]]:
  """Returns the config fields in which runs differ, and each run's value.

  The value is '' if a run does not have the field.
  """
  configs = [_fields(run.meta['config']) for run in found]
  fields = sorted(set().union(*configs))
  texts = {f: [str(c.get(f, '')) for c in configs] for f in fields}
  return {f: values for f, values in texts.items() if len(set(values)) > 1}


def _fields(config: dict[str, Any]) -> dict[str, Any]:
  """Adds defaults to a saved config's fields, except in `objective`.

  A run that is older than a field behaves as with the field's default.
  """
  base = config_lib.base().to_dict()
  # The model of `base` is a ViT, whose fields other models do not have.
  name = config['model']['name']
  is_known = name in variants.ARCHITECTURES
  base['model'] = variants.defaults(name) if is_known else {}
  return config_lib.flatten(base) | config_lib.flatten(config)


def table(found: Sequence[FoundRun]) -> str:
  rows = [['run', 'best', 'at step', 'last', 'steps', 'minutes']]
  for run in found:
    at = run.steps[run.values.index(run.best)]
    minutes = run.meta['elapsed_s'] / 60
    row = [flags.printable(run.name), f'{run.best:.4f}', f'{at:,}']
    steps = run.meta.get('steps')  # missing in runs of older versions
    row += [f'{run.values[-1]:.4f}', f'{steps:,}' if steps else '']
    row.append(f'{minutes:.1f}')
    rows.append(row)
  for field, values in differing(found).items():
    for row, text in zip(rows, (field, *values), strict=True):
      row.append(flags.short(text))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return '\n'.join(
    '  '.join(f'{x:<{w}}' for x, w in zip(row, widths, strict=True)).rstrip()
    for row in rows
  )


def picture(found: Sequence[FoundRun]) -> bytes:
  """Draws the metrics of the runs over steps as a PNG."""
  figure = plots.figure(8, 4.5)
  axes = figure.subplots()
  for run in found:
    label = f'{flags.short(run.name)}  {run.best:.4f}'
    axes.plot(run.steps, run.values, marker='.', label=label)
  axes.set_xlabel('step')
  axes.set_ylabel(', '.join(dict.fromkeys(run.metric for run in found)))
  plots.tidy(axes)
  axes.legend(frameon=False, fontsize='small')
  return plots.png(figure)


def _run(args: argparse.Namespace) -> None:
  found = find(args.folder, args.metric)
  print(table(found))
  path = os.path.join(os.path.expanduser(args.folder), 'runs.png')
  atomic_files.replace(path, picture(found))
  flags.say(f'written {path}')


def main(argv: Sequence[str] | None = None) -> int:
  parser = flags.parser('runs', __doc__)
  parser.add_argument('folder', help='folder to search for workdirs')
  metric = "metric, such as test/loss (default: each run's best_metric)"
  parser.option('--metric', '', metric)
  return flags.command(_run, parser.parse_args(argv))


if __name__ == '__main__':
  sys.exit(main())
