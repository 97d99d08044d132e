"""Evaluators as a config describes them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import inputs, sharding
from vit_jax.data import benchmarks, objectnet, sources, transforms
from vit_jax.evaluators import features
from vit_jax.evaluators.classification import ClassificationEvaluator
from vit_jax.evaluators.fewshot import FewShotEvaluator
from vit_jax.evaluators.objectnet import ObjectNetEvaluator
from vit_jax.evaluators.pictures import PicturesEvaluator
from vit_jax.evaluators.real import RealEvaluator
from vit_jax.objectives.classification import Classification


class Evaluator(Protocol):
  """Measures parameters.

  Attributes:
    name: prefix of the metrics.
  """

  name: str

  def run(self, params: Any) -> Mapping[str, float | np.ndarray]:
    """Returns metrics by name, the same in every process.

    Arrays are pictures, uint8 HWC, which the first process has to show.
    """
    ...


def is_on(entry: ConfigDict) -> bool:
  """Whether an entry of `config.evaluators` says what it is to measure."""
  return all(entry.get(field, True) for field in ('split', 'labels', 'data'))


def make_evaluators(
  config: ConfigDict,
  objective: Classification,
  class_names: tuple[str, ...],
  mesh: jax.sharding.Mesh,
) -> list[Evaluator]:
  """Returns the config's evaluators.

  Raises:
    ValueError: for an entry that cannot work, or a `best_metric` that none of
      them gives.
  """
  entries = {n: e for n, e in config.evaluators.items() if is_on(e)}
  if config.best_metric.split('/')[0] not in entries:
    raise ValueError(
      f'best_metric is {config.best_metric!r}, which none of the evaluators '
      f'gives: {", ".join(f"{n}/accuracy" for n in entries)}.'
    )
  parts = _Parts(config, objective, class_names, mesh)
  evaluators = []
  for name, entry in entries.items():
    if entry.type not in _TYPES:
      raise ValueError(
        f'evaluators.{name}.type is {entry.type!r}. '
        + config_lib.nearest(entry.type, _TYPES)
      )
    evaluators.append(_TYPES[entry.type](parts, name, entry))
  return evaluators


def metrics_and_pictures(
  found: Mapping[str, float | np.ndarray],
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
  """Tells apart what evaluators return."""
  pictures = {k: v for k, v in found.items() if isinstance(v, np.ndarray)}
  metrics = {k: float(v) for k, v in found.items() if k not in pictures}
  return metrics, pictures


class _Parts:
  """What evaluators are made of."""

  def __init__(
    self,
    config: ConfigDict,
    objective: Classification,
    class_names: tuple[str, ...],
    mesh: jax.sharding.Mesh,
  ):
    self.config = config
    self.objective = objective
    self.class_names = class_names
    self.transform = transforms.EvalTransform(
      config_lib.image_size(config.data.image_size),
      config.data.resize_small,
      config.data.interpolation,
    )
    self.batches = {
      # What fits when training fits when evaluating.
      'batch_size': config.batch_size // config.accum_steps,
      'mesh': mesh,
      'workers': config.data.workers,
    }

  def source(self, split: str) -> sources.Source:
    """Opens a split of the data that the model is trained on."""
    source = inputs.open_source(self.config.data, split)
    if source.class_names != self.class_names:
      raise ValueError(
        f'The classes of {self.config.data.name} {split} are not those of '
        f'{self.config.data.split}.'
      )
    return source

  def extractor(
    self, name: str, function: features.Function
  ) -> Callable[[Any, sources.Source], np.ndarray]:
    extract = features.Extractor(
      function,
      self.transform,
      mean=self.objective.mean,
      std=self.objective.std,
      **self.batches,
    )
    return functools.partial(extract, description=name)


def _classification(parts: _Parts, name: str, entry: ConfigDict) -> Evaluator:
  source = parts.source(entry.split)
  evaluate = jax.jit(
    parts.objective.evaluate,
    out_shardings=sharding.replicated(parts.batches['mesh']),
  )
  return ClassificationEvaluator(
    name,
    evaluate,
    functools.partial(
      features.global_batches, source, parts.transform, **parts.batches
    ),
  )


def _real(parts: _Parts, name: str, entry: ConfigDict) -> Evaluator:
  return RealEvaluator(
    name,
    parts.extractor(name, features.top_k(parts.objective.model, 1)),
    parts.source(entry.split),
    entry.labels,
  )


def _objectnet(parts: _Parts, name: str, entry: ConfigDict) -> Evaluator:
  source = objectnet.ObjectNet(entry.data)
  return ObjectNetEvaluator(
    name,
    parts.extractor(name, features.top_k(parts.objective.model, 5)),
    inputs.checked(source, parts.config.data.on_bad_image),
    parts.class_names,
  )


def _fewshot(parts: _Parts, name: str, entry: ConfigDict) -> Evaluator:
  data = parts.config.data.copy_and_resolve_references()
  data.name = entry.data
  usual = benchmarks.benchmark(entry.data)
  train, test = (usual.train, usual.test) if usual else ('train', 'test')
  return FewShotEvaluator(
    name,
    parts.extractor(name, features.layer(parts.objective.model, entry.layer)),
    inputs.open_source(data, entry.train_split or train),
    inputs.open_source(data, entry.test_split or test),
    shots=entry.shots,
    seeds=entry.seeds,
    l2=entry.l2,
  )


def _pictures(parts: _Parts, name: str, entry: ConfigDict) -> Evaluator:
  return PicturesEvaluator(
    name,
    parts.objective,
    parts.source(entry.split),
    parts.transform,
    entry.images,
    parts.batches['mesh'],
  )


_TYPES: dict[str, Callable[[_Parts, str, ConfigDict], Evaluator]] = {
  'classification': _classification,
  'real': _real,
  'objectnet': _objectnet,
  'fewshot': _fewshot,
  'pictures': _pictures,
}
