"""What a sweep refuses before its first run, and what it finds finished."""

import contextlib
import json
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.checkpoints import fetch
from vit_jax.checkpoints.saving import FOLDER, META, absolute, steps, verified
from vit_jax.data import images, sources
from vit_jax.evaluators import build
from vit_jax.evaluators.evaluator import check_classes
from vit_jax.experiment import Experiment, facts_of
from vit_jax.models import flops, variants
from vit_jax.sweeps import choosing
from vit_jax.sweeps.axes import Cell

RESULT = 'result.json'
DONE, DIVERGED = 'done', 'diverged'


class KnownData:
  """What result.json says of the data and the model of runs.

  What runs have in common is looked at once: a sweep has many runs of little
  difference.
  """

  def __init__(self) -> None:
    self._by_config: dict[str, dict[str, Any]] = {}
    self._data: dict[str, tuple[tuple[str, ...], int]] = {}
    self._models: dict[str, dict[str, Any]] = {}

  def of(self, cell: Cell) -> dict[str, Any]:
    """Does what `train` does before the first step, as far as it costs nothing.

    Raises:
      ValueError: for a run that could not work.
    """
    key = json.dumps(json.loads(cell.config.to_json()) | {'seed': None})
    if key not in self._by_config:
      try:
        self._by_config[key] = self._find(cell.config)
      except (ValueError, FileNotFoundError) as e:
        raise ValueError(f'{cell.name}: {e}') from e
    return self._by_config[key]

  def count(self, config: ConfigDict, split: str) -> int:
    """Returns the number of examples of a split of the config's data."""
    return self._split(config, split)[1]

  def _find(self, config: ConfigDict) -> dict[str, Any]:
    build.best_of(config)
    class_names, examples = self._split(config, config.data.split)
    experiment = Experiment(config, facts_of(config, class_names, examples))
    for entry in build.entries(config).values():
      # The others open data of their own.
      if entry.type == 'mean':
        check_classes(
          config, entry.split, self._split(config, entry.split)[0], class_names
        )
    return {
      'class_names': list(experiment.objective.class_names),
      'examples': examples,
      **self._size(config, experiment.objective.model),
    }

  def _split(
    self, config: ConfigDict, split: str
  ) -> tuple[tuple[str, ...], int]:
    """Returns the class names and the number of examples of a split."""
    data = config.data
    key = json.dumps([data.name, split, data.dir, data.split_seed])
    if key not in self._data:
      source = sources.open_source(
        data.name, split, data_dir=data.dir or None, split_seed=data.split_seed
      )
      self._data[key] = sources.class_names(source), len(source)
    return self._data[key]

  def _size(self, config: ConfigDict, model: variants.Model) -> dict[str, Any]:
    key = repr((model, config.data.image_size))
    if key not in self._models:
      image_size = images.size_of(config.data.image_size)
      self._models[key] = {
        'params': flops.count_params(model, image_size),
        'gflops': flops.forward_flops(model, image_size) / 1e9,
      }
    return self._models[key]


def check(entries: list[choosing.PlannedRun], facts: KnownData) -> None:
  """Refuses runs that could not work, before any is started.

  Raises:
    ValueError: naming the first of them.
  """
  for entry in entries:
    facts.of(entry.runs[0])
  for group, config in {
    entry.group: entry.runs[0].config for entry in entries
  }.items():
    for trial in group.trials:
      facts.of(trial)
    if group.trials:
      _check_held_out(group, config, facts)


def _check_held_out(
  group: choosing.Group, config: ConfigDict, facts: KnownData
) -> None:
  try:
    choosing.check_held_out(config, lambda split: facts.count(config, split))
  except ValueError as e:
    raise ValueError(f'{group.name}: {e}') from e


def finished(cell: Cell, facts: KnownData) -> dict[str, Any] | None:
  """Returns the result of a run, None where it has not finished.

  Raises:
    ValueError: if it is the result of another run.
  """
  path = cell.workdir / RESULT
  if not path.exists():
    return None
  given = facts.of(cell) | {'config': json.loads(cell.config.to_json())}
  try:
    result = json.loads(path.read_text())
    config_lib.check_resumable(result, given)
    _check_step(cell, result)
  except ValueError as e:
    raise ValueError(f'{cell.workdir}: {e}') from e
  check_metric(cell, result)
  return result


def check_metric(cell: Cell, result: dict[str, Any]) -> None:
  """Refuses a result without what is reported.

  Raises:
    ValueError: naming what it has.
  """
  metric = cell.config.best_metric
  if result['status'] == DONE and metric not in result['metrics']:
    raise ValueError(
      f'{cell.workdir}: best_metric is {metric!r}, and this finished run has '
      f'{", ".join(result["metrics"])}.'
    )


def _check_step(cell: Cell, result: dict[str, Any]) -> None:
  """Refuses a result that is that of another step than is asked for."""
  for field in ('early_stopping', 'best_metric'):
    old, new = result['config'].get(field, False), cell.config[field]
    if old != new and (field == 'early_stopping' or cell.config.early_stopping):
      raise ValueError(
        f'This run has finished with {field} {old!r}, which tells the step '
        f'that counts; now it is {new!r}. Undo that, or give another --workdir.'
      )


def seconds_taken(cell: Cell) -> float:
  """Returns the seconds that a run left unfinished has taken, 0 if it is new.

  Raises:
    FileNotFoundError: if there is nothing that it could start from.
    ValueError: if that was another run.
  """
  meta = _newest_meta(cell.workdir / FOLDER)
  if meta is None:
    _check_init(cell.config.init)
    return 0.0
  config = json.loads(cell.config.to_json())
  try:
    config_lib.check_resumable(meta, meta | {'config': config})
  except ValueError as e:
    raise ValueError(f'{cell.workdir}: {e}') from e
  return meta['elapsed_s']


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
      checkpointer = ocp.Checkpointer(ocp.JsonCheckpointHandler())
      return verified(checkpointer.restore(folder / str(step) / META))
  return None


def _check_init(path: str) -> None:
  # Fetching a name may take long; `train` does.
  if path and not fetch.is_name(path) and not absolute(path).exists():
    raise FileNotFoundError(f'init: no checkpoint at {path}.')
