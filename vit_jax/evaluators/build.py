"""Builds the evaluators that a config describes.

All functions raise ValueError for an invalid entry.
"""

from ml_collections import ConfigDict

from vit_jax.evaluators.evaluator import Evaluator, Parts
from vit_jax.objectives import objective_type
from vit_jax.objectives.objective import Best
from vit_jax.register import Register, nearest

# Keys are values of `type` in the entries of `config.evaluators`.
EVALUATORS = Register(
  'type',
  {
    'mean': 'vit_jax.evaluators.mean:MeanEvaluator',
    'real': 'vit_jax.evaluators.real:RealEvaluator',
    'objectnet': 'vit_jax.evaluators.objectnet_accuracy:ObjectNetEvaluator',
    'fewshot': 'vit_jax.evaluators.fewshot:FewShotEvaluator',
    'knn': 'vit_jax.evaluators.fewshot:KNNEvaluator',
    'coco': 'vit_jax.projects.detr.evaluator:CocoEvaluator',
    'segmentation': (
      'vit_jax.projects.segmentation.evaluator:SegmentationEvaluator'
    ),
    'pictures': 'vit_jax.evaluators.pictures:PicturesEvaluator',
  },
)
# Fields that must not be empty if the evaluator is on.
_REQUIRED = ('split', 'labels', 'data')


def entries(config: ConfigDict) -> dict[str, ConfigDict]:
  """Returns the entries of `config.evaluators` that are on."""
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
        f'evaluators.{name}.{empty[0]} is empty, but the evaluator is on. Set '
        f'this field, or set evaluators.{name}.on=False.'
      )
    if given and not entry.on:
      raise ValueError(
        f'evaluators.{name}.{given[0]} is {entry[given[0]]!r}, but the '
        f'evaluator is off. Set evaluators.{name}.on=True to use it.'
      )
    if entry.on:
      found[name] = entry
  return found


def metrics(config: ConfigDict) -> dict[str, Best]:
  """Returns for each metric whether 'highest' or 'lowest' is better."""
  objective = objective_type(config)
  return {
    f'{name}/{metric}': best
    for name, entry in entries(config).items()
    for metric, best in EVALUATORS.load(entry.type)
    .metrics(entry, objective)
    .items()
  }


def check(config: ConfigDict) -> None:
  """Runs `Evaluator.check` for the entries that are on.

  Raises the errors of `entries` and of `Evaluator.check`.
  """
  for name, entry in entries(config).items():
    EVALUATORS.load(entry.type).check(name, entry)


def splits(config: ConfigDict) -> list[str]:
  """Returns the splits of `config.data.name` on which evaluators run."""
  found = entries(config).values()
  return [x.split for x in found if 'split' in x and 'data' not in x]


def shown(config: ConfigDict) -> dict[str, Best]:
  """Selects from `metrics`: `best_metric` and each evaluator's first metric.

  Raises ValueError if the evaluators have no metrics, or lack `best_metric`.
  """
  known = metrics(config)
  if not known:
    raise ValueError(
      'Training needs an evaluator with metrics to select the best step, and '
      'none is on. Turn one on, as in --config.evaluators.test.on=True.'
    )
  if config.best_metric not in known:
    raise ValueError(
      f'best_metric is {config.best_metric!r}, which the evaluators do not '
      f'measure. Use one of: {", ".join(known)}.'
    )
  first = {name.partition('/')[0]: name for name in reversed(known)}
  names = {config.best_metric, *first.values()}
  return {name: best for name, best in known.items() if name in names}


def make_evaluators(parts: Parts) -> list[Evaluator]:
  """Builds a config's evaluators; also raises their constructors' errors."""
  return [
    EVALUATORS.load(entry.type)(parts, name, entry)
    for name, entry in entries(parts.config).items()
  ]
