"""Tune fields of a sweep's runs on a validation split.

Runs that differ only in the seed form a group. If `tune.axes` has several
combinations of values, a group runs a trial of each combination. A trial trains
on `tune.train` and is measured on `tune.val`. All runs of the group then train
on `data.split` with the best combination.
"""

import collections
import dataclasses
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
  """Runs that differ only in the seed and are tuned together."""

  labels: dict[str, str]  # on all axes except the seed
  # Combinations of `tune.axes` to choose from. Without tuning, there is one
  # candidate, which sets no fields.
  candidates: tuple[Combination, ...]
  trials: tuple[Cell, ...]  # one per candidate; empty if there is only one

  @property
  def name(self) -> str:
    return axes.name_of(self.labels) or 'all runs'


class PlannedRun(NamedTuple):
  """A run of the sweep before its candidate is chosen."""

  labels: dict[str, str]  # on the axes of the sweep
  group: Group
  runs: tuple[Cell, ...]  # one per candidate; only the chosen one is trained


def entries(config: ConfigDict, workdir: str) -> list[PlannedRun]:
  """Returns the runs of a config, in the order of its sweep.

  Raises:
    ValueError: if two runs would share a folder, or a tuned field is invalid.

  Also raises the errors of `axes.cells`.
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
        f'{n} runs would share the folder {folder.name}. Give every value of '
        'an axis a unique label.'
      )
  return found


def _with_candidate(
  cell: Cell,
  labels: dict[str, str],
  candidate: Combination,
  workdir: str,
  kind: str,
) -> Cell:
  """Returns a run with a candidate's values; its labels name its folder."""
  chosen_labels, fields = candidate
  config = cell.config.copy_and_resolve_references()
  config.tune.axes = ()
  axes.set_fields(config, fields)
  labels = labels | chosen_labels
  return Cell(labels, config, axes.folder(workdir, kind, labels), fields)


def _trial(
  cell: Cell, labels: dict[str, str], candidate: Combination, workdir: str
) -> Cell:
  """Returns the trial of a candidate, on `tune.train` and `tune.val`."""
  trial = _with_candidate(cell, labels, candidate, workdir, TRIALS)
  tune, config = trial.config.tune, trial.config
  config.data.split = tune.train
  config.evaluators = ConfigDict(
    {'val': {'type': 'mean', 'on': True, 'split': tune.val}}
  )
  config.best_metric, _ = metric_of(config)
  return trial


def metric_of(config: ConfigDict) -> tuple[str, Best]:
  """Returns the trials' metric, and whether 'highest' or 'lowest' is best."""
  (name, best), *_ = objective_type(config).metrics.items()
  return f'val/{name}', best


def check_held_out(config: ConfigDict, count: Callable[[str], int]) -> None:
  """Checks that the splits of tuning are parts of `data.split` and disjoint.

  `count` returns the number of examples of a split. Splits without a common
  name, such as 'train' and 'validation', are not compared.

  Raises ValueError if `tune.val` shares examples with `tune.train` or with the
  split of `best_metric`, or if `tune.train` or `tune.val` has examples that are
  not in `data.split`.
  """
  whole, val = config.data.split, config.tune.val
  for field in ('train', 'val'):
    part = config.tune[field]
    shared = _shared(whole, part, count)
    if shared is not None and shared < (_shared(part, part, count) or 0):
      raise ValueError(
        f'tune.{field} is {part!r}; it has images that are not in data.split '
        f'{whole!r}. Set tune.train and tune.val to two parts of data.split.'
      )
  name = config.best_metric.split('/')[0]
  reported = config.evaluators.get(name, {}).get('split', '')
  held_out = splits.SAME[1] + splits.SAME[2]
  for other in (config.tune.train, reported):
    one, two = other, val
    if all(split.partition('[')[0] in held_out for split in (one, two)):
      # If one of them is missing, both may select the same images.
      one, two = (splits.resolved(split, count) for split in (one, two))
    if n := other and _shared(one, two, count):
      raise ValueError(
        f'tune.val {val!r} and {other!r} share {n:,} images. Set tune.val to a '
        f'part of {whole!r} that overlaps neither tune.train nor the split of '
        'best_metric.'
      )


def _shared(first: str, second: str, count: Callable[[str], int]) -> int | None:
  """Returns the number of examples that two split strings share.

  Returns None if they have no name in common. Their overlap is then unknown:
  two names, such as 'train' and 'train800', may stand for the same images.
  """
  pattern = r'([\w-]+)(?:\[[^\]]*\])?'
  ours, theirs = (set(re.findall(pattern, split)) for split in (first, second))
  if not ours & theirs:
    return None
  known: dict[str, range] = {}
  start = 0
  for name in sorted(ours | theirs):
    known[name] = range(start, start := start + count(name))
  rows, others = (splits.select(s, known, 'data') for s in (first, second))
  return len(np.intersect1d(rows, others))


def csv_text(
  groups: Sequence[Group],
  results: Mapping[epath.Path, Mapping[str, Any]],  # by the folder of a run
  choices: Mapping[Group, int | None],
) -> str:
  """Returns a CSV with a line for every trial that has finished or diverged.

  `choices` has the index of a group's chosen trial, or None if every trial's
  metric is missing or NaN.
  """
  runs = []
  for group in groups:
    for n, trial in enumerate(group.trials):
      taken = ''
      if group in choices:
        taken = 'yes' if choices[group] == n else 'no'
      if result := results.get(trial.workdir):
        known = {**result, 'taken': taken}
        runs.append(grid.GridRun(group.labels, trial.workdir, known))
  counts = {'chosen': 'taken', 'steps': 'steps', 'elapsed_s': 'elapsed_s'}
  return grid.csv_text(
    dict.fromkeys(name for group in groups for name in group.labels),
    runs,
    {name: operator.itemgetter(key) for name, key in counts.items()},
  )
