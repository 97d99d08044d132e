"""What a sweep refuses before its first run, and what it finds finished."""

import contextlib
import functools
import json
import logging
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.checkpoints import fetch
from vit_jax.checkpoints.saving import FOLDER, META, absolute, steps, verified
from vit_jax.data import sources
from vit_jax.evaluators import build
from vit_jax.evaluators.evaluator import check_classes
from vit_jax.experiment import Experiment, facts_of
from vit_jax.models import flops
from vit_jax.sweeps import choosing, stages
from vit_jax.sweeps.axes import Cell

_log = logging.getLogger(__name__)

RESULT = 'result.json'
DONE, DIVERGED = 'done', 'diverged'


class KnownData:
  """What result.json says of the data and the model of runs.

  What runs have in common is looked at once: a sweep has many runs of little
  difference.
  """

  def __init__(self) -> None:
    self._by_config: dict[str, dict[str, Any]] = {}
    self._split = functools.cache(_split)

  def of(self, cell: Cell) -> dict[str, Any]:
    """Does what `train` does before the first step, as far as it costs nothing.

    Raises:
      ValueError: for a run that could not work.
    """
    key = json.dumps(json.loads(cell.config.to_json()) | {'seed': None})
    if key not in self._by_config:
      with _naming(cell.name):
        self._by_config[key] = self._find(cell.config)
    return self._by_config[key]

  def _open(
    self, config: ConfigDict, split: str
  ) -> tuple[tuple[str, ...], int, bool]:
    data = config.data
    return self._split(data.name, split, data.dir, data.split_seed)

  def count(self, config: ConfigDict, split: str) -> int:
    """Returns the number of examples of a split of the config's data."""
    return self._open(config, split)[1]

  def _find(self, config: ConfigDict) -> dict[str, Any]:
    stages.check(config)
    found = self._open(config, config.data.split)
    class_names, examples, _ = found
    experiment = Experiment(config, facts_of(config, *found))
    for entry in build.entries(config).values():
      # The others open data of their own.
      if entry.type == 'mean':
        tested, *_ = self._open(config, entry.split)
        check_classes(config, entry.split, tested, class_names)
    model, size = experiment.objective.model, experiment.facts.image_size
    return {
      'class_names': list(experiment.objective.class_names),
      'examples': examples,
      'params': flops.count_params(model, size),
      'gflops': flops.forward_flops(model, size) / 1e9,
    }


def _split(
  name: str, split: str, folder: str, split_seed: int
) -> tuple[tuple[str, ...], int, bool]:
  source = sources.open_source(
    name, split, data_dir=folder or None, split_seed=split_seed
  )
  classes, several = sources.class_names(source), sources.has_several(source)
  return classes, len(source), several


@contextlib.contextmanager
def _naming(what: object) -> Iterator[None]:
  """Puts before a message what it is about."""
  try:
    yield
  except (ValueError, FileNotFoundError) as e:
    raise ValueError(f'{what}: {e}') from e


def check(entries: list[choosing.PlannedRun], facts: KnownData) -> None:
  """Refuses runs that could not work, before any is started.

  Raises:
    ValueError: naming the first of them.
  """
  for entry in entries:
    facts.of(entry.runs[0])
  for group, config in {e.group: e.runs[0].config for e in entries}.items():
    for trial in group.trials:
      facts.of(trial)
    if group.trials:
      count = functools.partial(facts.count, config)
      with _naming(group.name):
        choosing.check_held_out(config, count)


def finished(cell: Cell, facts: KnownData) -> dict[str, Any] | None:
  """Returns the result of a run, None where it has not finished.

  Raises:
    ValueError: if it is the result of another run.
  """
  path = cell.workdir / RESULT
  if not path.exists():
    return None
  given = facts.of(cell) | {'config': json.loads(cell.config.to_json())}
  with _naming(cell.workdir):
    result = json.loads(path.read_text())
    config_lib.check_resumable(result, given)
    _check_step(cell, result)
    _check_measured(result, given['config'])
    if result['status'] == DONE and jax.process_index() == 0:
      _mention_unmeasured(cell, result)
  return result


def _check_step(cell: Cell, result: dict[str, Any]) -> None:
  """Refuses a result of another step than is asked for, or without a metric."""
  for field in ('early_stopping', 'best_metric'):
    old, new = result['config'].get(field, False), cell.config[field]
    if old != new and (field == 'early_stopping' or cell.config.early_stopping):
      raise ValueError(
        f'This run has finished with {field} {old!r}, which tells the step '
        f'that counts; now it is {new!r}. Undo that, or give another --workdir.'
      )
  metric = cell.config.best_metric
  if result['status'] == DONE and metric not in result['metrics']:
    raise ValueError(
      f'best_metric is {metric!r}, and this finished run has '
      f'{", ".join(result["metrics"])}.'
    )


def _check_measured(result: dict[str, Any], config: dict[str, Any]) -> None:
  """Refuses a result beside those that would be measured on something else."""
  for name in {metric.split('/')[0] for metric in result['metrics']}:
    old = result['config']['evaluators'].get(name, {})
    new = config['evaluators'].get(name, {})
    changed = [
      f'evaluators.{name}.{field}: {old[field]!r} -> {new[field]!r}'
      for field in old.keys() & new.keys()
      if old[field] != new[field]
    ]
    if changed and new.get('on'):
      raise ValueError(
        f'This run has finished and was measured otherwise '
        f'({", ".join(sorted(changed))}). Undo that, or give another --workdir.'
      )


def _mention_unmeasured(cell: Cell, result: dict[str, Any]) -> None:
  """Says which evaluators have been switched on since a run has finished."""
  found = {metric.split('/')[0] for metric in result['metrics']}
  asked = {metric.split('/')[0] for metric in build.metrics(cell.config)}
  if lacking := sorted(asked - found):
    _log.warning(
      'Finished without %s, which is not in the tables: main with '
      '--config.eval_only=True --config.init=%s measures it.',
      ', '.join(f'evaluators.{name}' for name in lacking),
      cell.workdir,
    )


def seconds_taken(cell: Cell) -> float:
  """Returns the seconds that a run left unfinished has taken, 0 if it is new.

  Raises:
    FileNotFoundError: if there is nothing that it could start from.
    ValueError: if that was another run.
  """
  runs = stages.runs(cell.config, str(cell.workdir))
  metas = [_newest_meta(epath.Path(place) / FOLDER) for _, place in runs]
  taken_s = sum(meta['elapsed_s'] for meta in metas if meta)
  meta = metas[-1]
  if meta is None:
    init = runs[0][0].init
    # Fetching a name may take long; `train` does.
    if init and not fetch.is_name(init) and not absolute(init).exists():
      raise FileNotFoundError(f'init: no checkpoint at {init}.')
    return taken_s
  last, _ = runs[-1]
  config = json.loads(last.to_json())
  with _naming(cell.workdir):
    config_lib.check_resumable(meta, meta | {'config': config})
  return taken_s


def _newest_meta(folder: epath.Path) -> dict[str, Any] | None:
  """Returns the `meta` of the newest checkpoint, None where there is none.

  `Checkpoints` would remove half-saved ones in the background, where it would
  meet that of `train` which does the same.
  """
  if not folder.exists():
    return None
  for step in reversed(steps(folder)):
    # `train` steps over damaged ones, and says so.
    with contextlib.suppress(Exception):
      # A checkpointer would wait for all processes, and one may fail here.
      handler = ocp.JsonCheckpointHandler()
      return verified(handler.restore(folder / str(step) / META))
  return None
