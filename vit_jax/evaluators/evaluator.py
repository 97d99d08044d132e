"""The interface of evaluators. Register a new class in `build.EVALUATORS`."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import bad_images, sources
from vit_jax.models.model import Batch, Params
from vit_jax.objectives.objective import Best, Facts, Objective
from vit_jax.training import features, sharding


@dataclasses.dataclass
class Evaluator:
  """Measures the quality of parameters.

  Attributes:
    fixed_metrics: the metrics that `metrics` returns by default.
    name: prefix of the metrics.
    entry: the entry of `config.evaluators` with this name.
  """

  fixed_metrics: ClassVar[Mapping[str, Best]] = {}

  parts: 'Parts'
  name: str
  entry: ConfigDict

  def __post_init__(self) -> None:
    """Opens the data; raises its errors, or ValueError for a bad entry."""

  @classmethod
  def check(cls, name: str, entry: ConfigDict) -> None:
    """Checks an entry before any data are opened.

    Raises ValueError if the entry is invalid, FileNotFoundError if a file of
    the entry is missing, or ImportError if a library is missing.
    """

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    """Returns for each metric whether 'highest' or 'lowest' is better.

    Names lack the prefix. `best_metric` can be any of these metrics.
    """
    return cls.fixed_metrics

  def run(self, params: Params) -> Mapping[str, float | np.ndarray]:
    """Returns metrics by prefixed name, such as 'test/loss'.

    Numbers are equal in all processes. Only the first process returns pictures,
    uint8 HWC.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Parts:
  """The parts of a run that evaluators are built from."""

  config: ConfigDict
  objective: Objective
  mesh: jax.sharding.Mesh
  facts: Facts  # of the training data

  @property
  def batches(self) -> dict[str, Any]:
    """Keyword arguments of `features.global_batches`."""
    return {
      # The size of a microbatch, which fits into memory in training.
      'batch_size': self.config.batch_size // self.config.accum_steps,
      'mesh': self.mesh,
      'workers': self.config.data.workers,
    }

  def source(self, split: str) -> sources.Source:
    """Opens a split of the training dataset, and checks its images.

    Raises the errors of `bad_images.open_checked`, and ValueError if the split
    does not have the training split's classes, or is missing and `data.split`
    is a sum.
    """
    data = self.config.data
    if '+' in data.split:
      # Fails if the split is missing, because `splits.select` substitutes no
      # split in a sum. Alone, `test` could select `val`, which is trained on.
      sources.open_config(data, f'{data.split}+{split}')
    source = bad_images.open_checked(data, split)
    sources.check_same_classes(
      data.name, (split, data.split), (source, self.facts)
    )
    return source

  def extractor(self, function: features.Function) -> features.Extractor:
    """Returns a function that computes a row per image of a source."""
    return features.Extractor(function, self.objective.images, **self.batches)

  def passes(self, source: sources.Source) -> Callable[[], Iterator[Batch]]:
    """Returns a function that starts a pass over the examples of a source."""
    transform = self.objective.eval_transform()
    return functools.partial(
      features.global_batches, source, transform, **self.batches
    )

  def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """Jits a function; every process can read its whole results."""
    everywhere = sharding.replicated(self.mesh)
    return jax.jit(function, out_shardings=everywhere)
