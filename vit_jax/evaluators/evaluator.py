"""What is measured: the contract of every evaluator, and what they are made of.

An evaluator is one file beside this one, with a line in `build`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import bad_images, images, sources
from vit_jax.data.images import Images
from vit_jax.evaluators import features
from vit_jax.models.model import Params
from vit_jax.objectives.objective import Best, Objective


class Evaluator(Protocol):
  """Measures parameters.

  Attributes:
    name: prefix of the metrics.
  """

  @property
  def name(self) -> str: ...

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    """Returns what a run may be chosen by, without the prefix.

    Args:
      entry: of `config.evaluators`.
      objective: of the run, which need not have been built.
    """
    ...

  @classmethod
  def from_entry(cls, parts: 'Parts', name: str, entry: ConfigDict) -> Self:
    """Returns the evaluator of an entry of `config.evaluators`.

    Raises:
      ValueError: for an entry that cannot work.
    """
    ...

  def run(self, params: Params) -> Mapping[str, float | np.ndarray]:
    """Returns metrics by name, the same in every process.

    Arrays are pictures, uint8 HWC, which the first process has to show.
    """
    ...


class Parts:
  """What evaluators are made of.

  Attributes:
    config: of the run.
    objective: of the run.
    fixed: parameters of the objective, on the devices.
    mesh: of the parameters.
    class_names: of the data that the model is trained on.
    images: how images are brought to the model.
    batches: what `features.global_batches` takes besides source and transform.
  """

  def __init__(
    self,
    config: ConfigDict,
    objective: Objective,
    fixed: Params,
    mesh: jax.sharding.Mesh,
    class_names: tuple[str, ...],
  ):
    """Takes the attributes."""
    self.config = config
    self.objective = objective
    self.fixed = fixed
    self.mesh = mesh
    self.class_names = class_names
    self.images = Images.from_config(
      config.data, images.size_of(config.data.image_size)
    )
    self.batches: dict[str, Any] = {
      # What fits when training fits when evaluating.
      'batch_size': config.batch_size // config.accum_steps,
      'mesh': mesh,
      'workers': config.data.workers,
    }

  def source(self, split: str) -> sources.Source:
    """Opens a split of the data that the model is trained on.

    Raises:
      ValueError: if its classes are not those of the training split.
    """
    source = bad_images.open_checked(self.config.data, split)
    found = sources.class_names(source)
    check_classes(self.config, split, found, self.class_names)
    return source

  def extractor(
    self, name: str, function: features.Function
  ) -> Callable[[Any, sources.Source], np.ndarray]:
    """Returns what applies a function of images to those of a source."""
    extract = features.Extractor(
      function,
      self.images.eval_transform(),
      mean=self.images.mean,
      std=self.images.std,
      **self.batches,
    )
    return functools.partial(extract, description=name)


def check_classes(
  config: ConfigDict,
  split: str,
  found: tuple[str, ...],
  class_names: tuple[str, ...],
) -> None:
  """Raises ValueError where a split has other classes than the training has."""
  if found != class_names:
    raise ValueError(
      f'The classes of {config.data.name} {split} are not those of '
      f'{config.data.split}.'
    )
