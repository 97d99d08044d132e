"""Evaluators as a config describes them."""

from ml_collections import ConfigDict

from vit_jax.evaluators.evaluator import Evaluator, Parts
from vit_jax.objectives import objective_type
from vit_jax.objectives.objective import Best
from vit_jax.register import Register, nearest

# By `type` of an entry of `config.evaluators`.
EVALUATORS = Register(
  'type',
  {
    'mean': 'vit_jax.evaluators.mean:MeanEvaluator',
    'real': 'vit_jax.evaluators.real:RealEvaluator',
    'objectnet': 'vit_jax.evaluators.objectnet_accuracy:ObjectNetEvaluator',
    'fewshot': 'vit_jax.evaluators.fewshot:FewShotEvaluator',
    'coco': 'vit_jax.projects.detr.evaluator:CocoEvaluator',
    'pictures': 'vit_jax.evaluators.pictures:PicturesEvaluator',
  },
)
# Fields that an evaluator which is on must have.
_REQUIRED = ('split', 'labels', 'data')


def entries(config: ConfigDict) -> dict[str, ConfigDict]:
  """Returns the entries of `config.evaluators` that are on.

  Raises:
    ValueError: for an entry that cannot work as it stands.
  """
  found = {}
  for name, entry in config.evaluators.items():
    if entry.type not in EVALUATORS:
      raise ValueError(
        f'evaluators.{name}.type is {entry.type!r}. '
        + nearest(entry.type, EVALUATORS)
      )
    empty = [f for f in _REQUIRED if f in entry and not entry[f]]
    given = [f for f in ('labels', 'data') if entry.get(f)]
    if entry.on and empty:
      raise ValueError(
        f'evaluators.{name} is on and its {empty[0]} is empty: give '
        f'evaluators.{name}.{empty[0]}, or set evaluators.{name}.on to False.'
      )
    if given and not entry.on:
      raise ValueError(
        f'evaluators.{name}.{given[0]} is {entry[given[0]]!r} and the '
        f'evaluator is off: set evaluators.{name}.on to True to measure it.'
      )
    if entry.on:
      found[name] = entry
  return found


def metrics(config: ConfigDict) -> dict[str, Best]:
  """Returns the metrics that a run may be chosen by, before anything is built.

  Raises:
    ValueError: as `entries`.
  """
  objective = objective_type(config)
  return {
    f'{name}/{metric}': best
    for name, entry in entries(config).items()
    for metric, best in EVALUATORS.load(entry.type)
    .metrics(entry, objective)
    .items()
  }


def check(config: ConfigDict) -> None:
  """Refuses what cannot be measured, before any data are opened.

  Raises:
    ValueError: as `entries`, or for what an evaluator needs besides the data.
    FileNotFoundError: likewise.
  """
  for name, entry in entries(config).items():
    EVALUATORS.load(entry.type).check(name, entry)


def splits(config: ConfigDict) -> list[str]:
  """Returns the splits of the training's data that evaluators look at.

  Raises:
    ValueError: as `entries`.
  """
  found = entries(config).values()
  return [x.split for x in found if 'split' in x and 'data' not in x]


def shown(config: ConfigDict) -> dict[str, Best]:
  """Returns what stands for a run: `best_metric`, and each evaluator's first.

  Raises:
    ValueError: if no evaluator gives `best_metric`, or as `entries`.
  """
  known = metrics(config)
  if config.best_metric not in known:
    raise ValueError(
      f'best_metric is {config.best_metric!r}, which none of the evaluators '
      f'gives: {", ".join(known) or "all are off"}.'
    )
  found: dict[str, str] = {}
  for name in known:
    found.setdefault(name.partition('/')[0], name)
  return {
    name: best
    for name, best in known.items()
    if name in (config.best_metric, *found.values())
  }


def make_evaluators(parts: Parts) -> list[Evaluator]:
  """Returns the evaluators of a config.

  Raises:
    ValueError: for an entry that cannot work.
  """
  return [
    EVALUATORS.load(entry.type).from_entry(parts, name, entry)
    for name, entry in entries(parts.config).items()
  ]
