"""The contract of evaluators: one class each, with a line in `build`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, Self

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import bad_images, sources
from vit_jax.data.images import Images, size_of
from vit_jax.models.model import Params
from vit_jax.objectives.objective import Best, Facts, Objective
from vit_jax.training import features


class Evaluator(Protocol):
  """Measures parameters.

  Attributes:
    name: prefix of the metrics.
    fixed_metrics: the metrics, if they do not depend on the entry.
  """

  name: str
  fixed_metrics: ClassVar[Mapping[str, Best]] = {}

  @classmethod
  def check(cls, name: str, entry: ConfigDict) -> None:
    """Refuses an entry that cannot work, before any data are opened.

    Raises ValueError or FileNotFoundError.
    """
    del name, entry

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    """Returns the metrics that may be `best_metric`, without the prefix."""
    del entry, objective
    return cls.fixed_metrics

  @classmethod
  def from_entry(cls, parts: 'Parts', name: str, entry: ConfigDict) -> Self:
    """Builds the evaluator of an entry of `config.evaluators`.

    Raises:
      ValueError: for an entry that cannot work.
    """
    ...

  def run(self, params: Params) -> Mapping[str, float | np.ndarray]:
    """Returns metrics by name, the same in every process.

    Arrays are pictures, uint8 HWC, of the first process alone.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Parts:
  """The parts of a run that evaluators are built from.

  Attributes:
    config: of the run.
    objective: of the run.
    fixed: parameters of the objective, on the devices.
    mesh: of the parameters.
    facts: of the data that the model is trained on.
  """

  config: ConfigDict
  objective: Objective
  fixed: Params
  mesh: jax.sharding.Mesh
  facts: Facts

  @property
  def image_size(self) -> tuple[int, int]:
    """The (H, W) in pixels that evaluators measure at."""
    return size_of(self.config.data.image_size)

  @functools.cached_property
  def images(self) -> Images:
    """How images are prepared for the model."""
    return Images.from_config(self.config.data, self.image_size)

  @property
  def batches(self) -> dict[str, Any]:
    """Arguments of `features.global_batches` besides source and transform."""
    return {
      # A batch that fits in training fits in evaluation.
      'batch_size': self.config.batch_size // self.config.accum_steps,
      'mesh': self.mesh,
      'workers': self.config.data.workers,
    }

  def source(self, split: str) -> sources.Source:
    """Opens a split of the data that the model is trained on.

    Raises:
      ValueError: if its classes differ from those of the training split, if
        they belong to objects and the objective learns one class an image, or
        if joined training splits may hold it by another name (`test` as `val`).
    """
    data = self.config.data
    if '+' in data.split:
      # Refuses the join if this split may be part of it by another name, so
      # that a run never measures the images that it trains on.
      sources.open_config(data, f'{data.split}+{split}')
    source = bad_images.open_checked(data, split)
    o = self.objective
    learns_one = o.class_names and o.model.task == 'classes'
    if learns_one and isinstance(source, sources.BoxedSource):
      raise ValueError(
        f'{self.config.data.name} has objects with classes and '
        f'objective.name={self.config.objective.name} learns one class an '
        'image: use configs/detr.py, or a folder for each class.'
      )
    if source.class_names != self.facts.class_names:
      raise ValueError(
        f'The classes of {data.name} {split} are not those of {data.split}.'
      )
    return source

  def extractor(
    self, name: str, function: features.Function
  ) -> Callable[[Any, sources.Source], np.ndarray]:
    """Returns a function of parameters and a source to its images' rows."""
    extract = features.Extractor(function, self.images, **self.batches)
    return functools.partial(extract, description=name)
