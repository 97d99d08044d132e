"""Runs the studies that claims are judged by, as far as a budget goes.

Each run is a sweep of one, in WORKDIR/STUDY/runs/, so that it resumes as any
other; when it has finished it becomes a line of RESULTS/DATA/STUDY.csv and is
not run again, here or anywhere that has the file. First comes the first seed of
every study, then the second: any budget shows something of all of them.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version

import jax
from etils import epath
from ml_collections import ConfigDict

from vit_jax.checkpoints import opening
from vit_jax.data.cores import usable_cores
from vit_jax.paper import claims, evidence, measures
from vit_jax.paper.evidence import RunRow
from vit_jax.sweeps import axes, refusing, running
from vit_jax.sweeps.axes import Cell
from vit_jax.training.run import Preempted, preemption_notice

# Of a run that nobody has timed: seconds to compile and to evaluate, and what
# two slow cores compute of a small model in a second. A study's own runs tell.
_FIXED_S = 20.0
_GFLOPS_PER_S = 20.0

Configs = Callable[[str], ConfigDict]


@dataclasses.dataclass(frozen=True)
class Planned:
  """A run that is wanted.

  Attributes:
    study: of `claims.STUDIES`.
    cell: its config and its folder.
    checksum: of the config.
  """

  study: str
  cell: Cell
  checksum: str

  @property
  def key(self) -> tuple[str, str]:
    """The variant and the seed."""
    seed = self.cell.labels['seed'].partition('=')[2]
    return self.cell.labels[self.study], seed


class Reproduction:
  """The studies of some claims on some data.

  Attributes:
    data: as the second value of configs/reproduce.py.
    studies: their names, in the order in which they are run.
    planned: all runs of each.
  """

  def __init__(
    self,
    names: Sequence[str],
    data: str,
    workdir: str,
    results: str,
    config_of: Configs,
  ):
    """Looks at what there is.

    Args:
      names: of `claims.CLAIMS`.
      data: as the attribute.
      workdir: receives the runs.
      results: folder of the CSV files, by data.
      config_of: from the name of a config and its values to the config.
    """
    self._workdir, self.data = workdir, data
    # Names that have one slug, as cifar10 and ./cifar10, are two data sets.
    self._folder = axes.slug(data)
    if self._folder != data:
      self._folder += f'-{hashlib.sha256(os.fsencode(data)).hexdigest()[:6]}'
    self._results = epath.Path(results) / self._folder
    wanted = {claims.CLAIMS[name].study for name in names}
    self.studies = [name for name in claims.STUDIES if name in wanted]
    self._configs = {
      name: config_of(f'reproduce:{name},{data}') for name in self.studies
    }
    self.planned = {name: self._plan(name) for name in self.studies}
    self._facts = refusing.KnownData()

  def _plan(self, name: str) -> list[Planned]:
    folder = f'{self._workdir}/{self._folder}/{name}'
    cells = axes.cells(self._configs[name], folder)
    return [Planned(name, c, evidence.checksum(c.config)) for c in cells]

  def path(self, study: str) -> epath.Path:
    """Returns the CSV file of a study."""
    return self._results / f'{study}.csv'

  def variants(self, study: str) -> list[str]:
    """Returns the labels of what differs in a study, seeds apart."""
    return list(dict.fromkeys(run.key[0] for run in self.planned[study]))

  def rows(self, study: str) -> list[RunRow]:
    """Returns the runs of a study that count, in the order of its plan."""
    known = {row.key: row for row in evidence.read(self.path(study))}
    return [
      row
      for run in self.planned[study]
      if (row := known.get(run.key)) and row.texts['config'] == run.checksum
    ]

  def left(self) -> list[Planned]:
    """Returns what is to be run, the first seed of all studies first."""
    found = []
    for study in self.studies:
      done = {row.key for row in self.rows(study)}
      found += [run for run in self.planned[study] if run.key not in done]
    return sorted(found, key=lambda run: int(run.key[1]))

  def seconds(self, run: Planned) -> float:
    """Returns how long a run may take: as others of its variant, or study.

    Where none was timed, its compute tells.
    """
    rows = self.rows(run.study)
    same = [row for row in rows if row.key[0] == run.key[0]] or rows
    if same:
      return statistics.mean(row.numbers['seconds'] for row in same)
    facts = self._facts.of(run.cell)
    config = run.cell.config
    number, unit = config.total.split()
    steps = float(number)
    if unit.startswith('epoch'):
      steps *= facts['examples'] / config.batch_size
    computed = 3 * facts['gflops'] * steps * config.batch_size
    return _FIXED_S + (1 + len(config.stages)) * computed / _GFLOPS_PER_S

  def run(self, budget_s: float) -> Iterator[str]:
    """Runs what is left until the budget is spent; tells of each run.

    A run is started if it can be expected to end in time, and then ends.

    Raises:
      ValueError: for a run that cannot work, or finished ones of data of
        another size.
      Preempted: after SIGTERM, once the state is saved.
    """
    started_s = time.monotonic()
    runs = self.left()
    for run in runs:
      self._check_data(run)
    # A run that SIGTERM meets in its last step finishes as if nothing were.
    with preemption_notice() as preempted:
      for i, run in enumerate(runs):
        left_s = budget_s - (time.monotonic() - started_s)
        expected_s = self.seconds(run)
        if expected_s > left_s:
          continue
        yield (
          f'{run.study} {i + 1} of {len(runs)}: {run.cell.name}, about '
          f'{span(expected_s)}; {span(left_s)} of the budget left'
        )
        self._run(run)
        if preempted(i):
          raise Preempted('Preempted: every run so far is saved.')

  def _check_data(self, run: Planned) -> None:
    """Refuses a run beside one that learned another number of images."""
    examples = self._facts.of(run.cell)['examples']
    for row in self.rows(run.study):
      had = row.numbers.get('examples', examples)
      if row.key[0] == run.key[0] and had != examples:
        raise ValueError(
          f'{self.path(run.study)} has runs of {had:,.0f} images, and '
          f'{self.data} has {examples:,}: give another --results.'
        )

  def _run(self, run: Planned) -> None:
    config = self._configs[run.study].copy_and_resolve_references()
    config.sweep = tuple(
      (name, tuple(v for v in values if v[0] == run.cell.labels[name]))
      for name, values in config.sweep
    )
    folder = run.cell.workdir.parent.parent
    running.run(config, str(folder))
    result = json.loads((run.cell.workdir / refusing.RESULT).read_text())
    started_s = time.monotonic()
    numbers = dict(result['metrics'])
    measure = claims.STUDIES[run.study].measure
    if measure and result['status'] == refusing.DONE:
      numbers |= measures.MEASURES[measure](
        opening.open_checkpoint(str(run.cell.workdir)),
        run.cell.config.data.name,
        run.cell.config.evaluators.test.split,
      )
    taken_s = result['elapsed_s'] + time.monotonic() - started_s
    numbers |= {name: result[name] for name in ('params', 'gflops', 'steps')}
    numbers['examples'] = self._facts.of(run.cell)['examples']
    variant, seed = run.key
    row = RunRow(
      {
        'variant': variant,
        'seed': seed,
        'status': result['status'],
        'config': run.checksum,
        'date': datetime.date.today().isoformat(),
        'hardware': hardware(),
        'versions': f'jax {jax.__version__}, flax {version("flax")}',
        'command': f'{command_of(run.study, self.data)} --sweep=seed={seed}',
      },
      numbers | {'seconds': taken_s},
    )
    # Read again: another process may have added to it.
    rows = {row.key: row for row in self.rows(run.study)} | {row.key: row}
    keys = [planned.key for planned in self.planned[run.study]]
    evidence.write(
      self.path(run.study), [rows[key] for key in keys if key in rows]
    )


def command_of(study: str, data: str) -> str:
  """Returns the command that makes a study's runs by itself."""
  return (
    f'python -m vit_jax.main --config=configs/reproduce.py:{study},{data} '
    f'--workdir=runs/{study}'
  )


def hardware() -> str:
  """Returns what the machine is, as text: '2 cores of Intel(R) Xeon(R) CPU'."""
  device = jax.devices()[0]
  if device.platform != 'cpu':
    return f'{jax.device_count()} x {device.device_kind}'
  name = platform.processor() or platform.machine()
  about = epath.Path('/proc/cpuinfo')
  if about.exists():
    lines = about.read_text().splitlines()
    names = [x.partition(':')[2] for x in lines if x.startswith('model name')]
    name = names[0].strip() if names else name
  cores = usable_cores()
  return f'{cores} {"core" if cores == 1 else "cores"} of {name}'


def span(seconds: float) -> str:
  """Returns a time for people: '1h 20m', '3m' or '40s'."""
  minutes = round(seconds / 60)
  if minutes >= 60:
    return f'{minutes // 60}h {minutes % 60:02}m'
  return f'{minutes}m' if seconds >= 100 else f'{round(seconds)}s'
