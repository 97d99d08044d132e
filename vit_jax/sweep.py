"""Grids of runs: every combination of the axes in `config.sweep`.

Each combination is a run of its own in WORKDIR/runs/, which `train` makes and
resumes as any other. A run that has finished leaves result.json there and is
not run again, so that the same command goes on where it stopped, and one with
more values on an axis runs only what is new. After every run results.csv,
table.md and plot.png are written to WORKDIR.
"""

import dataclasses
import itertools
import json
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import metric_log, sharding, train
from vit_jax.checkpoint import FOLDER, Checkpoints, absolute
from vit_jax.data import sources
from vit_jax.models import flops, variants
from vit_jax.report import grid as grid_report
from vit_jax.run import Diverged, Preempted, preemption_notice

RESULT = 'result.json'
DONE, DIVERGED = 'done', 'diverged'

# A name, and by label the fields that a value of the axis sets.
Axis = tuple[str, tuple[tuple[str, dict[str, Any]], ...]]


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run of the grid.

  Attributes:
    labels: by the names of the axes.
    config: without a sweep.
    workdir: of this run alone.
  """

  labels: dict[str, str]
  config: ConfigDict
  workdir: epath.Path

  @property
  def name(self) -> str:
    return ' / '.join(self.labels.values())


def axis(config: ConfigDict, field: str, values: Iterable[str]) -> Axis:
  """Returns the axis, named after it, on which a field takes several values.

  Args:
    config: knows the field's type.
    field: dotted name.
    values: as text. 1e-3 and 0.001 give the same label, and thereby the same
      folder.

  Raises:
    ValueError: for a field or a value that there is not.
  """
  entries = []
  for text in values:
    trial = _without_sweep(config)
    config_lib.override(trial, {field: text})
    value = config_lib.flatten(trial)[field]
    entries.append((f'{field.rpartition(".")[2]}={value}', {field: value}))
  return field, tuple(entries)


def add_axes(config: ConfigDict, texts: Sequence[str]) -> None:
  """Adds axes given as FIELD=V1,V2,... to a config.

  Where the config sweeps the same field already, the new values replace those.

  Raises:
    ValueError: for what is no such text, or a field or value there is not.
  """
  fields = []
  for text in texts:
    field, _, values = (part.strip() for part in text.partition('='))
    if not values:
      raise ValueError(
        f'--sweep={text}: write a field and its values, as in '
        '--sweep=optimizer.lr=0.001,0.003.'
      )
    if field in fields:
      raise ValueError(
        f'--sweep={field}=... is given twice: give all values at once.'
      )
    fields.append(field)
    axes = list(config.sweep)
    same = (i for i, old in enumerate(axes) if _fields(old) == {field})
    at = next(same, len(axes))
    new = axis(config, field, config_lib.split_commas(values))
    axes[at : at + 1] = [new]
    config.sweep = tuple(axes)


def refuse_swept(config: ConfigDict, fields: Iterable[str]) -> None:
  """Refuses values for fields that the sweep sets anyway.

  Raises:
    ValueError: naming the first such field and how to set it.
  """
  for field in fields:
    for swept in config.sweep:
      if field in _fields(swept):
        raise ValueError(
          f'{field} is set by the axis {swept[0]!r} of the sweep: choose its '
          f'values with --sweep={field}=...'
        )


def cells(config: ConfigDict, workdir: str) -> list[Cell]:
  """Returns the runs of a config's sweep in their order.

  Raises:
    ValueError: for axes, labels or values that do not work.
  """
  _check_axes(config.sweep)
  found: dict[epath.Path, Cell] = {}
  for combination in itertools.product(*(values for _, values in config.sweep)):
    cell_config = _without_sweep(config)
    for _, fields in combination:
      config_lib.override(cell_config, {k: str(v) for k, v in fields.items()})
    flat = config_lib.flatten(cell_config)
    if any(
      all(flat.get(k) == v for k, v in skip.items())
      for skip in config.sweep_skip
    ):
      continue
    labels = {
      name: label
      for (name, _), (label, _) in zip(config.sweep, combination, strict=True)
    }
    folder = absolute(workdir) / 'runs' / '_'.join(map(slug, labels.values()))
    cell = Cell(labels, cell_config, folder)
    if folder in found:
      raise ValueError(
        f'{found[folder].name} and {cell.name} would share the folder '
        f'{folder.name}: give every value of an axis once, with its own label.'
      )
    found[folder] = cell
  if not found:
    raise ValueError(
      'The sweep has no runs: an axis has no values, or sweep_skip leaves all '
      'of them out.'
    )
  return list(found.values())


def _check_axes(axes: Sequence[Axis]) -> None:
  seen: dict[str, str] = {}
  for swept in axes:
    for field in _fields(swept):
      if field in seen:
        raise ValueError(
          f'The axes {seen[field]!r} and {swept[0]!r} of the sweep both set '
          f'{field}.'
        )
      seen[field] = swept[0]
  names = [name for name, _ in axes]
  for name in names:
    if names.count(name) > 1:
      raise ValueError(f'Two axes of the sweep are named {name!r}.')


def slug(label: str) -> str:
  """Returns a label as a part of a folder's name."""
  text = re.sub(r'[^\w.=+-]+', '-', label)
  return re.sub(r'\.(?!\d)', '', text).strip('-')


def _fields(swept: Axis) -> set[str]:
  return {field for _, fields in swept[1] for field in fields}


def _without_sweep(config: ConfigDict) -> ConfigDict:
  copy = config.copy_and_resolve_references()
  copy.sweep = copy.sweep_skip = ()
  return copy


def run(config: ConfigDict, workdir: str) -> None:
  """Runs what is left of a config's sweep, one run after the other.

  A run that diverges is noted as such, and the next one starts.

  Args:
    config: with a `sweep`.
    workdir: receives the runs' folders, results.csv, table.md and plot.png.

  Raises:
    ValueError: for a run that cannot work, or is not the one in its folder,
      before any is started.
    Preempted: after SIGTERM, once the state is saved.
  """
  if config.eval_only:
    raise ValueError(
      'eval_only measures a single run: use it without a sweep and with '
      f'--workdir={workdir}/runs/RUN.'
    )
  grid = cells(config, workdir)
  facts = _check_all(grid)
  found = [_result(*pair) for pair in zip(grid, facts, strict=True)]
  left = [i for i, result in enumerate(found) if result is None]
  prior_s = {i: _check_started(grid[i]) for i in left}
  is_main = jax.process_index() == 0
  folder = absolute(workdir)
  if is_main:
    _report(config, grid, found).write(folder)
  # A run that SIGTERM meets in its last step finishes as if nothing were.
  with preemption_notice() as preempted:
    for n, i in enumerate(left):
      if is_main:
        print(
          f'run {len(grid) - len(left) + n + 1} of {len(grid)}: {grid[i].name} '
          f'({grid[i].workdir}){_time_left(found)}',
          flush=True,
        )
      result = _train(grid[i], facts[i], prior_s[i])
      if is_main:
        found[i] = result
        _report(config, grid, found).write(folder)
      # Several processes have to agree on a step, which is up to their runs.
      if jax.process_count() == 1 and preempted(i) and i != left[-1]:
        raise Preempted('Preempted: every run so far is saved.')
  if is_main:
    print(_report(config, grid, found).summary(folder))


def _report(
  config: ConfigDict,
  grid: Sequence[Cell],
  found: Sequence[dict[str, Any] | None],
) -> grid_report.Report:
  return grid_report.Report(
    axes={name: [v[0] for v in values] for name, values in config.sweep},
    averaged=[s[0] for s in config.sweep if _fields(s) == {'seed'}],
    metric=config.best_metric,
    runs=[
      grid_report.Run(cell.labels, cell.workdir, result)
      for cell, result in zip(grid, found, strict=True)
    ],
  )


def _time_left(found: Sequence[dict[str, Any] | None]) -> str:
  """Returns how long the runs left will take if they are as those finished."""
  times_s = [r['elapsed_s'] for r in found if r and r['status'] == DONE]
  if not times_s:
    return ''
  left = sum(result is None for result in found)
  minutes, seconds = divmod(round(left * sum(times_s) / len(times_s)), 60)
  hours, minutes = divmod(minutes, 60)
  return f', about {hours}:{minutes:02}:{seconds:02} left'


def _check_all(grid: Sequence[Cell]) -> list[dict[str, Any]]:
  """Returns facts about every run, having refused what could not work."""
  # Runs that differ in nothing but the seed are checked once.
  known: dict[str, dict[str, Any]] = {}
  facts = []
  for cell in grid:
    key = json.dumps(json.loads(cell.config.to_json()) | {'seed': None})
    if key not in known:
      try:
        known[key] = _facts(cell.config)
      except (ValueError, FileNotFoundError) as e:
        raise ValueError(f'{cell.name}: {e}') from e
    facts.append(known[key])
  return facts


def _facts(config: ConfigDict) -> dict[str, Any]:
  """Does what `train` does before the first step, as far as it costs nothing.

  Returns:
    What result.json says of the data and the model.
  """
  image_size = config_lib.image_size(config.data.image_size)
  body = variants.build(num_classes=0, image_size=image_size, **config.model)
  train.check_batch_size(config, sharding.make_mesh(config.mesh))
  source = sources.open_source(
    config.data.name,
    config.data.split,
    data_dir=config.data.dir or None,
    split_seed=config.data.split_seed,
    on_bad_image=None,  # which reads them all; `train` does
  )
  durations = train.durations_of(config, len(source))
  model = body.clone(num_classes=len(source.class_names))
  train.make_objective(config, model)
  train.make_optimizer(config, train.make_schedule(config, durations))
  return {
    'class_names': list(source.class_names),
    'examples': len(source),
    'params': flops.count_params(model, image_size),
    'gflops': flops.forward_flops(model, image_size) / 1e9,
  }


def _result(cell: Cell, facts: dict[str, Any]) -> dict[str, Any] | None:
  """Returns the result of a run, None where it has not finished.

  Raises:
    ValueError: if it is the result of another run.
  """
  path = cell.workdir / RESULT
  if not path.exists():
    return None
  config = json.loads(cell.config.to_json())
  try:
    result = json.loads(path.read_text())
    config_lib.check_resumable(result, facts | {'config': config})
  except ValueError as e:
    raise ValueError(f'{cell.workdir}: {e}') from e
  _check_metric(cell, result)
  return result


def _check_metric(cell: Cell, result: dict[str, Any]) -> None:
  metric = cell.config.best_metric
  if result['status'] == DONE and metric not in result['metrics']:
    raise ValueError(
      f'{cell.workdir}: best_metric is {metric!r}, and this finished run has '
      f'{", ".join(result["metrics"])}.'
    )


def _check_started(cell: Cell) -> float:
  """Returns the seconds that a run left unfinished has taken, 0 if it is new.

  Raises:
    ValueError: if that was another run.
  """
  if not (cell.workdir / FOLDER).exists():
    return 0.0
  checkpoints = Checkpoints(
    str(cell.workdir), cell.config.keep_last, cell.config.best_metric
  )
  meta = checkpoints.latest_meta()
  checkpoints.close()
  if meta is None:
    return 0.0
  config = json.loads(cell.config.to_json())
  try:
    config_lib.check_resumable(meta, meta | {'config': config})
  except ValueError as e:
    raise ValueError(f'{cell.workdir}: {e}') from e
  return meta['elapsed_s']


def _train(cell: Cell, facts: dict[str, Any], prior_s: float) -> dict[str, Any]:
  """Runs one cell and returns its result, which the main process saves."""
  started_s = time.monotonic()
  status = DONE
  try:
    train.train(cell.config, str(cell.workdir))
  except Diverged as e:
    status = DIVERGED
    if jax.process_index() == 0:
      print(f'diverged: {e}', flush=True)
  if jax.process_index() != 0:
    return {}
  _, rows = metric_log.read_table(cell.workdir / 'metrics.csv')
  step, row = list(rows.items())[-1] if rows else (0, {})
  evaluators = tuple(f'{name}/' for name in cell.config.evaluators)
  metrics = {k: float(v) for k, v in row.items() if k.startswith(evaluators)}
  result = facts | {
    'config': json.loads(cell.config.to_json()),
    'status': status,
    'metrics': metrics if status == DONE else {},
    'steps': step,
    'elapsed_s': prior_s + time.monotonic() - started_s,
  }
  text = json.dumps(result, indent=2) + '\n'
  metric_log.replace_file(cell.workdir / RESULT, text.encode())
  _check_metric(cell, result)
  return result
