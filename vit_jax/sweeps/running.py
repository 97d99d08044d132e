"""Run a sweep, with tuning.

`stages.train` trains or resumes each run in WORKDIR/runs/. Runs that differ
only in the seed form a group. The trials of a group run before it, in
WORKDIR/tune/; see `choosing`.

A run that finished or diverged leaves result.json and is not run again. So the
same command resumes a sweep, and a command with more values on an axis trains
only the missing runs. Every run updates the tables in WORKDIR.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from vit_jax.checkpoints import from_init, saving
from vit_jax.data import atomic_files
from vit_jax.evaluators import build
from vit_jax.objectives import several_labels
from vit_jax.sweeps import REPORTS, axes, choosing, grid, refusing, stages
from vit_jax.sweeps.axes import Cell
from vit_jax.sweeps.refusing import DIVERGED, DONE, RESULT
from vit_jax.training import metric_log, processes, workdir_lock
from vit_jax.training.preemption import Preempted, preemption_notice
from vit_jax.training.run import Diverged

TUNE_CSV = 'tune.csv'


def run(config: ConfigDict, workdir: str, start_over: bool = False) -> None:
  """Runs the remaining runs of a config's sweep, one after the other.

  If a run diverges, its result says so, and the next run starts. `start_over`
  is as in `train.train`, for each run.

  Raises:
    ValueError: before any run starts, if a run cannot work or has finished with
      another config, or another run uses the workdir.
    Diverged: at the end, if all trials of a group have a NaN or missing metric.
    Preempted: after SIGTERM, or Ctrl-C in a run, once the state is saved.

  Also raises the other errors of `train.train`.
  """
  for field, does in (('eval_only', 'measures'), ('extend', 'continues')):
    if config[field]:
      raise ValueError(
        f'{field} {does} a single run, without a sweep. Remove sweep and '
        'tune.axes, set the values of the run, and give '
        f'--workdir={workdir}/runs/RUN.'
      )
  from_init.resolve(config)
  sweep = _Sweep(config, workdir, start_over)
  # Two sweeps in one workdir would overwrite each other's tables.
  with workdir_lock.held(workdir):
    sweep.write()
    # A run that receives SIGTERM in its last step finishes normally, so the
    # notice is checked here too.
    with preemption_notice(between_runs=True) as preempted:
      for trained, cell in enumerate(sweep.turns()):
        # Several processes agree when to stop inside each run, not here.
        if trained and jax.process_count() == 1 and preempted():
          raise Preempted('Preempted: every run so far is saved.')
        sweep.train(cell)
        sweep.write()
    sweep.finish()


class _Sweep:
  def __init__(self, config: ConfigDict, workdir: str, start_over: bool):
    """Plans all runs and reads the results of finished runs."""
    self._config = config
    self._start_over = start_over
    self._folder = saving.absolute(workdir)
    self._report = REPORTS.load(config.report)
    self._facts = refusing.KnownData()
    self._entries = choosing.entries(config, workdir)
    self._groups = list(dict.fromkeys(entry.group for entry in self._entries))
    self._trials = [trial for group in self._groups for trial in group.trials]
    refusing.check(self._entries, self._facts)
    # Results by the folder of a run. Only the first process has the metrics of
    # the runs that this command trains.
    self._results: dict[epath.Path, dict[str, Any]] = {}
    possible = [cell for entry in self._entries for cell in entry.runs]
    for cell in self._trials + possible:
      if result := refusing.finished(cell, self._facts):
        self._results[cell.workdir] = result
    processes.refuse_unlike(
      lambda: [x.workdir in self._results for x in self._trials + possible],
      f'The processes see different finished runs in {workdir}. Put the '
      'workdir on storage that all processes share. If it is there already, '
      'run the same command again.',
    )
    self._choices: dict[choosing.Group, int | None] = {}
    for group in self._groups:
      self._choose(group)

  def turns(self) -> Iterator[Cell]:
    """Yields the remaining runs; train each before asking for the next."""
    for entry in self._entries:
      yield from self._left(entry.group.trials)
      if cell := self._chosen(entry):
        yield from self._left([cell])

  def _left(self, cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.workdir not in self._results]

  def _metric(self, config: ConfigDict) -> str:
    """Returns the name of `best_metric` in metrics.csv.

    It differs if images have several labels.
    """
    name = config.best_metric
    several = self._facts.split(config, config.data.split).several_labels
    if several:
      return several_labels.metric_for(config.evaluators, name)
    return name

  def _chosen(self, entry: choosing.PlannedRun) -> Cell | None:
    """Returns the run with the chosen candidate, or None if none is chosen."""
    choice = self._choices.get(entry.group)
    return None if choice is None else entry.runs[choice]

  def train(self, cell: Cell) -> None:
    """Trains a run or trial.

    After the last trial of a group, chooses the group's values.
    """
    reported = [self._chosen(entry) or entry.runs[0] for entry in self._entries]
    cells = self._trials + reported
    number = len(cells) - len(self._left(cells)) + 1
    what = 'trial ' if cell in self._trials else ''
    _print(f'run {number} of {len(cells)}: {what}{cell.name} ({cell.workdir})')
    self._results[cell.workdir] = self._train(cell)
    for group in self._groups:
      if cell in group.trials and not self._left(group.trials):
        self._choose(group)
        if (choice := self._choices[group]) is not None:
          chosen = axes.name_of(group.candidates[choice][0])
          n = len(group.candidates)
          _print(f'chosen for {group.name}: {chosen}, the best of {n}')

  def _choose(self, group: choosing.Group) -> None:
    """Chooses the same candidate in all processes, once all trials are done."""
    if self._left(group.trials):
      return
    choice: int | None = 0
    if group.trials:
      # Only the first process has all metrics, so it decides for the others.
      # Trials that diverged lack the metric.
      config = group.trials[0].config
      metric, (_, good) = self._metric(config), choosing.metric_of(config)
      found = [self._results[x.workdir]['metrics'] for x in group.trials]
      values = [x.get(metric, math.nan) for x in found]
      choice = saving.best_index(values, good)
      sent = np.int32(-1 if choice is None else choice)
      received = int(multihost_utils.broadcast_one_to_all(sent))
      choice = None if received < 0 else received
    self._choices[group] = choice

  def _train(self, cell: Cell) -> dict[str, Any]:
    """Trains a run and returns its result, which the first process saves."""
    facts = self._facts.of(cell)
    prior_s = stages.elapsed_s(cell.config, str(cell.workdir))
    started_s = time.monotonic()
    status = DONE
    try:
      # A copy, because training changes fields such as `best_metric`.
      config = cell.config.copy_and_resolve_references()
      stages.train(config, str(cell.workdir), self._start_over)
    except Diverged as e:
      status = DIVERGED
      _print(f'diverged: {e}')
    if jax.process_index() != 0:
      return {'metrics': {}, 'status': status}
    result = facts | {
      'config': json.loads(cell.config.to_json()),
      'chosen': cell.chosen,
      'status': status,
      **_measured(cell, status, self._metric(cell.config)),
      'elapsed_s': prior_s + time.monotonic() - started_s,
    }
    text = json.dumps(result, indent=2) + '\n'
    atomic_files.replace(cell.workdir / RESULT, text.encode())
    # Later commands read the file; parsing its text gives the same values here.
    return json.loads(text)

  def write(self) -> None:
    """Writes the tables, in the first process."""
    if jax.process_index() != 0:
      return
    self._make_report().write(self._folder)
    if self._trials:
      text = choosing.csv_text(self._groups, self._results, self._choices)
      atomic_files.replace(self._folder / TUNE_CSV, text.encode())

  def _make_report(self) -> grid.GridReport:
    runs = []
    for entry in self._entries:
      cell = self._chosen(entry)
      result = self._results.get(cell.workdir) if cell else None
      workdir = (cell or entry.runs[0]).workdir
      runs.append(grid.GridRun(entry.labels, workdir, result))
    return self._report(
      axes={n: [v[0] for v in values] for n, values in self._config.sweep},
      averaged=axes.seed_axes(self._config),
      metric=self._metric(self._entries[0].runs[0].config),
      runs=runs,
    )

  def finish(self) -> None:
    """Prints the table; raises Diverged if a group has no choice."""
    if jax.process_index() == 0:
      print(self._make_report().summary(self._folder))
      if self._trials:
        print(f'written  {self._folder / TUNE_CSV}')
    lost = [self._lost(g) for g in self._groups if self._choices[g] is None]
    if lost:
      raise Diverged(
        f'No values could be chosen for {"; ".join(lost)}. Run the same '
        'command with more values, such as lower learning rates in '
        '--tune=optimizer.lr=...; it tries only the new values.'
      )

  def _lost(self, group: choosing.Group) -> str:
    """Says why no candidate of a group could be chosen."""
    states = [self._results[x.workdir]['status'] for x in group.trials]
    text = (
      f'{group.name}: {states.count(DIVERGED)} of {len(states)} trials diverged'
    )
    if DONE in states:
      metric = self._metric(group.trials[0].config)
      text += f', and {metric} of the rest is missing or NaN'
    return text


def _measured(cell: Cell, status: str, metric: str) -> dict[str, Any]:
  """Returns the evaluators' metrics at the last step, and the number of steps.

  With early stopping, the metrics are those of the first step with the best
  `best_metric`, and `best_step` is returned too. A diverged run has no metrics.
  """
  table = cell.workdir / 'metrics.csv'
  # The table is missing if an earlier stage of the run diverged.
  rows = metric_log.read_table(table)[1] if table.exists() else {}
  steps = max(rows, default=0)
  if status == DIVERGED:
    return {'metrics': {}, 'steps': steps}
  found = {'steps': steps}
  if cell.config.early_stopping:
    values = [float(row.get(metric, 'nan')) for row in rows.values()]
    good = build.shown(cell.config)[cell.config.best_metric]
    best = saving.best_index(values, good)
    found['best_step'] = steps if best is None else [*rows][best]
  evaluators = tuple(f'{name}/' for name in cell.config.evaluators)
  metrics = {
    name: float(text)
    for name, text in rows.get(found.get('best_step', steps), {}).items()
    if name.startswith(evaluators)
  }
  return {'metrics': metrics, **found}


def _print(text: str) -> None:
  if jax.process_index() == 0:
    print(text, flush=True)
