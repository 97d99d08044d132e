"""Check a sweep before its first run, and read the results of ended runs."""

import functools
import json
from typing import Any

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.checkpoints import opening
from vit_jax.data import sources
from vit_jax.experiment import Experiment, facts_of
from vit_jax.models import flops
from vit_jax.objectives.objective import Facts
from vit_jax.objectives.teachers import STAGES
from vit_jax.sweeps import axes, choosing, stages
from vit_jax.sweeps.axes import Cell

RESULT = 'result.json'
DONE, DIVERGED = 'done', 'diverged'


class KnownData:
  """Facts about the data and the model of each run, for result.json."""

  def __init__(self) -> None:
    # Caches, since the runs of a sweep share most facts.
    self._by_config: dict[str, dict[str, Any]] = {}
    self._by_split: dict[tuple, Facts] = {}
    self._identities: dict[tuple, str | None] = {}
    self._opened = {''}

  def of(self, cell: Cell) -> dict[str, Any]:
    """Returns the facts; raises ValueError if the run cannot work."""
    config = cell.config
    key = json.dumps(json.loads(config.to_json()) | {'seed': None})
    if key not in self._by_config:
      with axes.naming(cell.name):
        checked = stages.check(config)
        if not (cell.workdir / RESULT).exists():
          self._open_init(config.init)
        facts = self.split(config, config.data.split)
        experiment = Experiment(checked, facts)
      model, size = experiment.objective.model, experiment.image_size
      self._by_config[key] = {
        'class_names': list(experiment.objective.class_names),
        'examples': facts.examples,
        'params': flops.count_params(model, size),
        'gflops': experiment.forward_flops / 1e9,
        'data': self._identities[self._key(config, config.data.split)],
      }
    return self._by_config[key]

  def _open_init(self, init: str) -> None:
    if init not in self._opened and not init.startswith(STAGES):
      opening.open_checkpoint(init)
      self._opened.add(init)

  def split(self, config: ConfigDict, name: str) -> Facts:
    key = self._key(config, name)
    if key not in self._by_split:
      source = sources.open_config(config.data, name)
      self._by_split[key] = facts_of(config, source)
      self._identities[key] = source.identity()
    return self._by_split[key]

  def examples(self, config: ConfigDict, name: str) -> int:
    return self.split(config, name).examples

  def _key(self, config: ConfigDict, name: str) -> tuple:
    data, weights = config.data, config.loss.class_weights
    names = name, data.name, data.class_order, weights
    return *names, data.dir, data.split_seed


def check(entries: list[choosing.PlannedRun], facts: KnownData) -> None:
  """Raises ValueError for an invalid run, trial or split of `tune`."""
  for entry in entries:
    facts.of(entry.runs[0])
  for group, config in {e.group: e.runs[0].config for e in entries}.items():
    for trial in group.trials:
      facts.of(trial)
    if group.trials:
      with axes.naming(group.name):
        count = functools.partial(facts.examples, config)
        choosing.check_held_out(config, count)


def finished(cell: Cell, facts: KnownData) -> dict[str, Any] | None:
  """Returns the result of a finished or diverged run; None for other runs.

  Raises ValueError if the result comes from an incompatible config.
  """
  path = cell.workdir / RESULT
  if not path.exists():
    return None
  given = facts.of(cell) | {'config': json.loads(cell.config.to_json())}
  with axes.naming(cell.workdir):
    result = json.loads(path.read_text())
    config_lib.check_resumable(result, given)
    _check_measured(result, given['config'])
  return result


def _check_measured(result: dict[str, Any], config: dict[str, Any]) -> None:
  """Raises ValueError if settings behind a result's metrics have changed."""
  old = result['config']
  # These fields choose the step whose metrics are reported.
  fields = ['early_stopping', 'patience']
  if config['early_stopping'] or config['patience']:
    fields += ['best_metric']
  pairs = {field: (old.get(field, False), config[field]) for field in fields}
  for name in {metric.split('/')[0] for metric in result['metrics']}:
    before, now = (c['evaluators'].get(name, {}) for c in (old, config))
    if now.get('on'):
      for field in before.keys() & now.keys():
        pairs[f'evaluators.{name}.{field}'] = before[field], now[field]
  changed = [f'{k}: {a!r} -> {b!r}' for k, (a, b) in pairs.items() if a != b]
  if changed:
    raise ValueError(
      'This run has finished with a different evaluation '
      f'({", ".join(sorted(changed))}). Undo the change, or give another '
      '--workdir.'
    )
