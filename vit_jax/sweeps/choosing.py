"""Choosing fields of a sweep's runs by a part held out of training.

The cells of a sweep that differ in the seed alone form a group. With
`config.tune.axes`, a group tries every combination of their values once: a
trial trains on `tune.train` and is measured on `tune.val`. The best combination
is then set in all runs of the group, which train on the whole `data.split`.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax.data import splits
from vit_jax.objectives import objective_type
from vit_jax.objectives.objective import Best
from vit_jax.sweeps import axes
from vit_jax.sweeps.axes import Cell, Combination
from vit_jax.training import metric_log

TRIALS = 'tune'
# What trials set themselves, or what would no longer be one question.
_NOT_TUNED = (
  r'seed|data\.(name|dir|split|split_seed)|evaluators\..*|tune\..*'
  r'|best_metric|early_stopping|eval_only|report|sweep|sweep_skip'
)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
  """What chooses together.

  Attributes:
    labels: of its cells, without those of seeds.
    candidates: to choose from; without tuning one that sets nothing.
    trials: one for each candidate, none where there is no choice.
  """

  labels: dict[str, str]
  candidates: tuple[Combination, ...]
  trials: tuple[Cell, ...]

  @property
  def name(self) -> str:
    return axes.name_of(self.labels) or 'all runs'


@dataclasses.dataclass(frozen=True)
class PlannedRun:
  """One run of the sweep, whichever candidate it will take.

  Attributes:
    labels: by the names of the axes of the sweep.
    group: that chooses for it.
    runs: one for each candidate of the group, one of which is run.
  """

  labels: dict[str, str]
  group: Group
  runs: tuple[Cell, ...]


def entries(config: ConfigDict, workdir: str) -> list[PlannedRun]:
  """Returns the runs of a config, in the order of its sweep.

  A run's folder tells what was chosen for it, so that another choice never
  meets the run of this one.

  Raises:
    ValueError: for axes, labels or values that do not work.
  """
  seeds = axes.seed_axes(config)
  groups: dict[tuple[str, ...], Group] = {}
  found = []
  for cell in axes.cells(config, workdir):
    labels = {k: v for k, v in cell.labels.items() if k not in seeds}
    key = tuple(labels.values())
    if key not in groups:
      candidates = _candidates(config, cell)
      tried = candidates if len(candidates) > 1 else ()
      made = tuple(_trial(cell, labels, each, workdir) for each in tried)
      groups[key] = Group(labels, candidates, made)
    runs = tuple(
      _with_candidate(cell, cell.labels, each, workdir, axes.RUNS)
      for each in groups[key].candidates
    )
    found.append(PlannedRun(cell.labels, groups[key], runs))
  seen: dict[epath.Path, Cell] = {}
  trials = [trial for group in groups.values() for trial in group.trials]
  for run in [run for entry in found for run in entry.runs] + trials:
    first = seen.setdefault(run.workdir, run)
    if first is not run:
      raise ValueError(
        f'{first.name} and {run.name} would share the folder '
        f'{run.workdir.name}: give every value of an axis once, with its own '
        'label.'
      )
  return found


def _candidates(config: ConfigDict, cell: Cell) -> tuple[Combination, ...]:
  tuned = cell.config.tune.axes
  for name, values in tuned:
    if not values:
      raise ValueError(f'The axis {name!r} of the tuning has no values.')
    for field in sorted({field for _, fields in values for field in fields}):
      if re.fullmatch(_NOT_TUNED, field):
        raise ValueError(
          f'{field} cannot be tuned: candidates are compared on the same data, '
          f'by the same metric. --sweep={field}=... runs every value.'
        )
  axes.check_axes(config.sweep, tuned)
  return tuple(axes.combinations(tuned))


def _with_candidate(
  cell: Cell,
  labels: dict[str, str],
  candidate: Combination,
  workdir: str,
  kind: str,
) -> Cell:
  chosen_labels, fields = candidate
  config = cell.config.copy_and_resolve_references()
  config.tune.axes = ()
  axes.set_fields(config, fields)
  labels = labels | chosen_labels
  return Cell(labels, config, axes.folder(workdir, kind, labels), fields)


def _trial(
  cell: Cell, labels: dict[str, str], candidate: Combination, workdir: str
) -> Cell:
  trial = _with_candidate(cell, labels, candidate, workdir, TRIALS)
  tune, config = trial.config.tune, trial.config
  config.data.split = tune.train
  config.evaluators = ConfigDict(
    {'val': {'type': 'mean', 'on': True, 'split': tune.val}}
  )
  config.best_metric, _ = metric_of(config)
  return trial


def metric_of(config: ConfigDict) -> tuple[str, Best]:
  """Returns the metric that trials are compared by, and which values win.

  Raises:
    ValueError: if the config names no objective.
  """
  (name, best), *_ = objective_type(config).metrics.items()
  return f'val/{name}', best


def check_held_out(config: ConfigDict, count: Callable[[str], int]) -> None:
  """Refuses to choose by what was trained on, or by what is reported.

  `count` gives the number of examples of a split.

  Raises:
    ValueError: if `tune.val` shares examples with either, or the trials have
      others than those that are trained on in the end.
  """
  train, val = config.tune.train, config.tune.val
  for field, part in (('tune.train', train), ('tune.val', val)):
    n = _shared(config.data.split, part, count)
    if 0 < n < (whole := _shared(part, part, count)):
      raise ValueError(
        f'{field} {part!r} has {whole:,} images, {whole - n:,} of them not in '
        f'data.split {config.data.split!r}: values would be chosen by more '
        'than is trained on. Choose two parts of that.'
      )
  if n := _shared(train, val, count):
    raise ValueError(
      f'tune.train {train!r} and tune.val {val!r} share {n:,} images: a '
      'candidate has to be measured on images that it was not trained on.'
    )
  name = config.best_metric.split('/')[0]
  reported = config.evaluators.get(name, {}).get('split', '')
  if n := reported and _shared(reported, val, count):
    raise ValueError(
      f'tune.val {val!r} has {n:,} of the images that {config.best_metric} is '
      f'measured on: choose by a part of {config.data.split!r}, or look at '
      'every value with --sweep.'
    )


def _shared(first: str, second: str, count: Callable[[str], int]) -> int:
  """Returns how many examples two splits have in common, as far as names tell.

  'test' and 'validation' may be two names for the same images, which shows in
  none of them.
  """
  pattern = r'([\w-]+)(?:\[[^\]]*\])?'
  ours, theirs = (set(re.findall(pattern, split)) for split in (first, second))
  if not ours & theirs:
    return 0
  known: dict[str, range] = {}
  start = 0
  for name in sorted(ours | theirs):
    known[name] = range(start, start := start + count(name))
  rows, others = (splits.select(s, known, 'data') for s in (first, second))
  return len(np.intersect1d(rows, others))


def best(group: Group, results: Sequence[Mapping[str, Any]]) -> int | None:
  """Returns which trial's result is best, the first of equal ones.

  Those that diverged have none, and a NaN is none; None if that is all.
  """
  metric, good = metric_of(group.trials[0].config)
  sign = 1 if good == 'highest' else -1
  found = {
    i: sign * r['metrics'].get(metric, math.nan) for i, r in enumerate(results)
  }
  known = [i for i, value in found.items() if not math.isnan(value)]
  return max(known, key=lambda i: found[i], default=None)


def csv_text(
  groups: Sequence[Group],
  results: Mapping[epath.Path, Mapping[str, Any]],
  choices: Mapping[Group, int | None],
) -> str:
  """Returns a line for every trial that has finished or diverged.

  That is by `results`: what result.json holds, by the folder of the run.
  `choices` are the candidates that groups have taken, None if all diverged.
  """
  names = dict.fromkeys(name for group in groups for name in group.labels)
  tuned = dict.fromkeys(
    field for g in groups for _, fields in g.candidates for field in fields
  )
  metrics = dict.fromkeys(
    metric_of(trial.config)[0] for g in groups for trial in g.trials
  )
  counts = ('steps', 'elapsed_s')
  lines = [[*names, *tuned, *metrics, 'status', 'chosen', *counts, 'folder']]
  for group in groups:
    for n, trial in enumerate(group.trials):
      chosen = ''
      if group in choices:
        chosen = 'yes' if choices[group] == n else 'no'
      if result := results.get(trial.workdir):
        lines.append(
          [
            *(axes.value_of(name, group.labels[name]) for name in names),
            *(result['chosen'].get(field, '') for field in tuned),
            *(result['metrics'].get(name, '') for name in metrics),
            result['status'],
            chosen,
            *(result[name] for name in counts),
            f'{TRIALS}/{trial.workdir.name}',
          ]
        )
  return ''.join(map(metric_log.csv_line, lines))
