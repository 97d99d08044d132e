"""Choosing fields of a sweep's runs by a part held out of training.

The cells of a sweep that differ in the seed alone form a group. With
`config.tune.axes`, a group tries every combination of their values once: a
trial trains on `tune.train` and is measured on `tune.val`. The best combination
is then set in all runs of the group, which train on the whole `data.split`.
"""

import collections
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax.data import splits
from vit_jax.objectives import objective_type
from vit_jax.objectives.objective import Best
from vit_jax.sweeps import axes, grid
from vit_jax.sweeps.axes import Cell, Combination

TRIALS = 'tune'


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
      axes.check_axes(config.sweep, cell.config.tune.axes)
      candidates = tuple(axes.combinations(cell.config.tune.axes))
      tried = candidates if len(candidates) > 1 else ()
      made = tuple(_trial(cell, labels, each, workdir) for each in tried)
      groups[key] = Group(labels, candidates, made)
    runs = tuple(
      _with_candidate(cell, cell.labels, each, workdir, axes.RUNS)
      for each in groups[key].candidates
    )
    found.append(PlannedRun(cell.labels, groups[key], runs))
  cells = [run for entry in found for run in entry.runs]
  cells += [trial for group in groups.values() for trial in group.trials]
  for folder, n in collections.Counter(c.workdir for c in cells).items():
    if n > 1:
      raise ValueError(
        f'{n} runs would share the folder {folder.name}: give every value of '
        'an axis a label of its own.'
      )
  return found


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
  """Returns a candidate's run on one part of the data, measured on another."""
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
  whole, val = config.data.split, config.tune.val
  for part in (config.tune.train, val):
    if 0 < _shared(whole, part, count) < _shared(part, part, count):
      raise ValueError(
        f'{part!r} has images that are not in data.split {whole!r}: set '
        'tune.train and tune.val to two parts of it.'
      )
  name = config.best_metric.split('/')[0]
  reported = config.evaluators.get(name, {}).get('split', '')
  for other in (config.tune.train, reported):
    if n := other and _shared(other, val, count):
      raise ValueError(
        f'tune.val {val!r} and {other!r} share {n:,} images: choose by a part '
        f'of {whole!r} that is neither trained on nor reported.'
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
  """Returns the index of the best trial, the first of equal ones.

  Ignores trials that diverged or whose metric is NaN; returns None if no trial
  is left.
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
  runs = []
  for group in groups:
    for n, trial in enumerate(group.trials):
      taken = (
        ('yes' if choices[group] == n else 'no') if group in choices else ''
      )
      if result := results.get(trial.workdir):
        known = {**result, 'taken': taken}
        runs.append(grid.GridRun(group.labels, trial.workdir, known))
  counts = {'chosen': 'taken', 'steps': 'steps', 'elapsed_s': 'elapsed_s'}
  return grid.csv_text(
    dict.fromkeys(name for group in groups for name in group.labels),
    runs,
    {name: operator.itemgetter(key) for name, key in counts.items()},
  )
