"""What is measured: the contract of every evaluator, and what they are made of.

An evaluator is one class, which derives from `Evaluator`, with a line in
`build.EVALUATORS`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import bad_images, sources
from vit_jax.data.images import Images, sizes_of
from vit_jax.models.model import Params
from vit_jax.objectives.objective import Best, Facts, Objective
from vit_jax.training import features


class Evaluator(Protocol):
  """Measures parameters.

  Attributes:
    name: prefix of the metrics.
  """

  name: str

  @classmethod
  def check(cls, name: str, entry: ConfigDict) -> None:
    """Refuses an entry that cannot work, before any data are opened.

    Raises:
      ValueError: if something that the evaluator needs is missing.
      FileNotFoundError: if a file of the entry is missing.
    """
    del name, entry

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    """Returns what a run may be chosen by, without the prefix.

    From an entry of `config.evaluators` and an objective that need not have
    been built.
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


@dataclasses.dataclass(frozen=True)
class Parts:
  """What evaluators are made of.

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
    return sizes_of(self.config.data.image_size)[0]

  @functools.cached_property
  def images(self) -> Images:
    """How images are brought to the model."""
    return Images.from_config(self.config.data, self.image_size)

  @property
  def batches(self) -> dict[str, Any]:
    """What `features.global_batches` takes besides source and transform."""
    return {
      # What fits when training fits when evaluating.
      'batch_size': self.config.batch_size // self.config.accum_steps,
      'mesh': self.mesh,
      'workers': self.config.data.workers,
    }

  def source(self, split: str) -> sources.Source:
    """Opens a split of the data that the model is trained on.

    Raises:
      ValueError: if its classes are not those of the training split, or are
        those of objects where the objective learns one of an image, or if it is
        only there by another name (`test` as `val`) and what is learned is
        several splits joined.
    """
    data = self.config.data
    if '+' in data.split:
      # Of splits that are joined none is taken for another, so that what is
      # measured is not learned without a word.
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
    found = source.class_names
    check_classes(self.config, split, found, self.facts.class_names)
    return source

  def extractor(
    self, name: str, function: features.Function
  ) -> Callable[[Any, sources.Source], np.ndarray]:
    """Returns what applies a function of images to those of a source."""
    extract = features.Extractor(function, self.images, **self.batches)
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
