"""Runs a sweep, and chooses what is tuned on the way.

Each combination of the axes in `config.sweep` is a run of its own in
WORKDIR/runs/, which `train` makes and resumes as any other. Before the first
run of a group that differs in the seed alone, the trials of `config.tune` are
run in WORKDIR/tune/; the run then takes the best candidate.

A run that has finished leaves result.json and is not run again, so that the
same command goes on where it stopped, and one with more values on an axis runs
only what is new. After every run results.csv, table.md and, with tuning,
tune.csv are written to WORKDIR.
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

from vit_jax.checkpoints import from_init
from vit_jax.checkpoints.saving import absolute
from vit_jax.data import atomic_files
from vit_jax.evaluators import build
from vit_jax.sweeps import axes, choosing, grid, refusing, stages
from vit_jax.sweeps.axes import Cell
from vit_jax.sweeps.refusing import DIVERGED, DONE, RESULT
from vit_jax.training import metric_log, processes, workdir_lock
from vit_jax.training.preemption import Preempted, preemption_notice
from vit_jax.training.run import Diverged

TUNE_CSV = 'tune.csv'


def run(
  config: ConfigDict,
  workdir: str,
  start_over: bool = False,
  report: type[grid.GridReport] = grid.GridReport,
) -> None:
  """Runs what is left of a config's sweep, one run after the other.

  A run that diverges is noted as such, and the next one starts.

  Args:
    config: with a `sweep`, or axes to `tune`.
    workdir: receives the runs' folders and the tables.
    start_over: as `train.train` takes it, for each run.
    report: of all runs.

  Raises:
    ValueError: for a run that cannot work, or is not the one in its folder,
      before any is started; or if another sweep is in the workdir.
    Diverged: at the end, if all candidates of a group did.
    Preempted: after SIGTERM, once the state is saved.
  """
  for field, does in (('eval_only', 'measures'), ('extend', 'trains on')):
    if config[field]:
      raise ValueError(
        f'{field} {does} a single run: use it without a sweep and with '
        f'--workdir={workdir}/runs/RUN.'
      )
  from_init.resolve(config)
  sweep = _Sweep(config, workdir, start_over, report)
  # Two would each write tables of its own runs alone.
  with workdir_lock.held(workdir):
    sweep.write()
    # A run that SIGTERM meets in its last step finishes as if nothing were.
    with preemption_notice() as preempted:
      for trained, cell in enumerate(sweep.turns()):
        # Several processes have to agree on a step, which is up to their runs.
        if trained and jax.process_count() == 1 and preempted():
          raise Preempted('Preempted: every run so far is saved.')
        sweep.train(cell)
        sweep.write()
    sweep.finish()


class _Sweep:
  """The state of a sweep."""

  def __init__(
    self,
    config: ConfigDict,
    workdir: str,
    start_over: bool,
    report: type[grid.GridReport],
  ):
    """Looks at what there is.

    Raises:
      ValueError: for a run that cannot work or be resumed.
    """
    self._config = config
    self._start_over = start_over
    self._folder = absolute(workdir)
    self._report = report
    self._facts = refusing.KnownData()
    self._entries = choosing.entries(config, workdir)
    self._groups = list(dict.fromkeys(entry.group for entry in self._entries))
    self._trials = [trial for group in self._groups for trial in group.trials]
    refusing.check(self._entries, self._facts)
    # By the folder of a run; processes but the first know no more of those
    # that they have trained than that.
    self._results: dict[epath.Path, dict[str, Any]] = {}
    possible = [cell for entry in self._entries for cell in entry.runs]
    for cell in self._trials + possible:
      if result := refusing.finished(cell, self._facts):
        self._results[cell.workdir] = result
    processes.refuse_unlike(
      lambda: [x.workdir in self._results for x in self._trials + possible],
      f'The processes see other finished runs in {workdir}: put it on storage '
      'that all of them share. If it is, the same command goes on.',
    )
    self._choices: dict[choosing.Group, int | None] = {}
    for group in self._groups:
      self._choose(group)

  def turns(self) -> Iterator[Cell]:
    """Yields what is left in its order; each has to be trained at once."""
    for entry in self._entries:
      yield from self._left(entry.group.trials)
      if cell := self._chosen(entry):
        yield from self._left([cell])

  def _left(self, cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.workdir not in self._results]

  def _chosen(self, entry: choosing.PlannedRun) -> Cell | None:
    """Returns the run with the group's choice; None if there is no choice."""
    choice = self._choices.get(entry.group)
    return None if choice is None else entry.runs[choice]

  def train(self, cell: Cell) -> None:
    """Runs one cell, and chooses if it was the last that had to be tried."""
    self._tell_start(cell)
    self._results[cell.workdir] = self._train(cell)
    for group in self._groups:
      if cell in group.trials:
        self._choose(group)
        self._tell_choice(group)

  def _choose(self, group: choosing.Group) -> None:
    """Takes a candidate, if all have been tried; the same in all processes."""
    if self._left(group.trials):
      return
    choice: int | None = 0
    if group.trials:
      # Processes but the first have no metrics, so that nothing is best there.
      results = [self._results[trial.workdir] for trial in group.trials]
      choice = choosing.best(group, results)
      sent = np.int32(-1 if choice is None else choice)
      received = int(multihost_utils.broadcast_one_to_all(sent))
      choice = None if received < 0 else received
    self._choices[group] = choice

  def _train(self, cell: Cell) -> dict[str, Any]:
    """Returns the result of a run, which the main process saves."""
    facts = self._facts.of(cell)
    prior_s = stages.elapsed_s(cell.config, str(cell.workdir))
    started_s = time.monotonic()
    status = DONE
    try:
      stages.train(cell.config, str(cell.workdir), self._start_over)
    except Diverged as e:
      status = DIVERGED
      _print(f'diverged: {e}')
    if jax.process_index() != 0:
      return {'metrics': {}, 'status': status}
    result = facts | {
      'config': json.loads(cell.config.to_json()),
      'chosen': cell.chosen,
      'status': status,
      **_measured(cell, status),
      'elapsed_s': prior_s + time.monotonic() - started_s,
    }
    text = json.dumps(result, indent=2) + '\n'
    atomic_files.replace(cell.workdir / RESULT, text.encode())
    # As a later command reads it, so that its tables are the same.
    return json.loads(text)

  def write(self) -> None:
    """Writes the tables, in the main process."""
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
      metric=self._config.best_metric,
      runs=runs,
    )

  def _tell_start(self, cell: Cell) -> None:
    reported = [self._chosen(entry) or entry.runs[0] for entry in self._entries]
    cells = self._trials + reported
    left = len(self._left(cells))
    what = 'trial ' if cell in self._trials else ''
    _print(
      f'run {len(cells) - left + 1} of {len(cells)}: {what}{cell.name} '
      f'({cell.workdir})'
    )

  def _tell_choice(self, group: choosing.Group) -> None:
    if group not in self._choices or jax.process_index() != 0:
      return
    n, choice = len(group.candidates), self._choices[group]
    if choice is None:
      _print(f'nothing chosen for {group.name}: all {n} candidates diverged')
      return
    trial = group.trials[choice]
    metric, _ = choosing.metric_of(trial.config)
    value = self._results[trial.workdir]['metrics'][metric]
    _print(
      f'chosen for {group.name}: {axes.name_of(group.candidates[choice][0])}, '
      f'the best of {n} with {metric} {value:.4f}'
    )

  def finish(self) -> None:
    """Prints where everything is.

    Raises:
      Diverged: if there is a group with nothing to choose from.
    """
    if jax.process_index() == 0:
      print(self._make_report().summary(self._folder))
      if self._trials:
        print(f'written  {self._folder / TUNE_CSV}')
    lost = [g.name for g in self._groups if self._choices[g] is None]
    if lost:
      raise Diverged(
        f'All candidates diverged for {", ".join(lost)}: nothing to choose. '
        'The same command with more values, such as lower learning rates in '
        '--tune=optimizer.lr=..., tries only the new ones.'
      )


def _measured(cell: Cell, status: str) -> dict[str, Any]:
  """Returns the metrics of the step that counts, and how many steps there were.

  That is the last one or, stopping early, the evaluated one with the best
  `best_metric`, the first of equal ones.
  """
  table = cell.workdir / 'metrics.csv'
  # There is none if a stage before the run itself diverged.
  rows = metric_log.read_table(table)[1] if table.exists() else {}
  steps = max(rows, default=0)
  if status == DIVERGED:
    return {'metrics': {}, 'steps': steps}
  metric = cell.config.best_metric
  counts, found = steps, {'steps': steps}
  if cell.config.early_stopping:
    values = {s: float(row.get(metric, 'nan')) for s, row in rows.items()}
    evaluated = [step for step in values if not math.isnan(values[step])]
    choose = max if build.shown(cell.config)[metric] == 'highest' else min
    counts = choose(evaluated, key=values.__getitem__, default=steps)
    found['best_step'] = counts
  evaluators = tuple(f'{name}/' for name in cell.config.evaluators)
  metrics = {
    name: float(text)
    for name, text in rows.get(counts, {}).items()
    if name.startswith(evaluators)
  }
  return {'metrics': metrics, **found}


def _print(text: str) -> None:
  if jax.process_index() == 0:
    print(text, flush=True)
