"""What an objective has to say of itself: the contract of every task.

An objective is one file, here or in a project, with a line in `OBJECTIVES`.
It knows its model, what a record becomes, and the loss; the loop, the data
pipeline, checkpoints and evaluators know none of that.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data.sources import Record
from vit_jax.models.fields import Valid
from vit_jax.models.model import Batch, Metrics, Model, Params

# Arrays by name, of one example, before it is in a batch.
Example = dict[str, Any]
# Trees of arrays by name.
ObjectiveState = dict[str, Any]
# Which values of a metric are good.
Best = Literal['highest', 'lowest']


@dataclasses.dataclass(frozen=True)
class Facts:
  """What an objective has to know of the data.

  Attributes:
    class_names: C names by label; empty where the data have no labels.
    examples: in an epoch.
    several_labels: whether an image may have several classes, or none.
  """

  class_names: tuple[str, ...]
  examples: int
  several_labels: bool = False


# Fields that mean nothing where images are not varied as a class allows it, and
# what they are then.
OF_CLASSES: Mapping[str, Any] = {
  'data.erasing': 0.0,
  'data.wrong_labels': 0.0,
  'loss.name': 'softmax',
  'loss.label_smoothing': 0.0,
  'loss.mixup': 0.0,
  'loss.cutmix': 0.0,
}


class Objective(Protocol):
  """What is learned, and of what.

  Attributes:
    defaults: what `config.objective` has of this objective, besides its name.
    valid: their valid values, as `fields.check_value` takes them.
    unused: fields of `config` that it does nothing with, and what they are when
      they are off: other values are refused.
    metrics: what `evaluate` sums, besides `examples`, and which of the means
      are good; the first one stands for the others.
    model: what its checkpoints open as.
    class_names: C names; empty where nothing is classified.
  """

  defaults: ClassVar[Mapping[str, Any]]
  valid: ClassVar[Mapping[str, Valid]]
  unused: ClassVar[Mapping[str, Any]]
  metrics: ClassVar[Mapping[str, Best]]

  @property
  def model(self) -> Model: ...

  @property
  def class_names(self) -> tuple[str, ...]: ...

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    """Returns the objective of a config, before its data are open.

    Raises:
      ValueError: for fields that cannot work.
    """
    ...

  def on_data(self, config: ConfigDict, facts: Facts) -> Self:
    """Returns the objective with the classes of the data.

    Raises:
      ValueError: for data that the objective cannot learn.
    """
    ...

  def train_transform(
    self,
  ) -> Callable[[Record, np.random.Generator], Example]:
    """Returns what makes an example of a record, on the CPU; picklable."""
    ...

  def eval_transform(self) -> Callable[[Record], Example]:
    """Returns the same for evaluation, which is never random."""
    ...

  @property
  def images_seen(self) -> int:
    """How many images the model sees for an example of training."""
    ...

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what a batch of `size` examples of training is."""
    ...

  def batch_sizes(self) -> list[tuple[int, int]]:
    """Returns the (H, W) that a batch of training may have, all as likely."""
    ...

  def fixed(self) -> Params:
    """Returns parameters of others, such as a teacher; {} for none.

    They are placed like the model's and never updated. They follow from the
    config alone, so that a resumed run finds the same.
    """
    ...

  def new_state(self, params: Params) -> ObjectiveState:
    """Returns what each step updates besides parameters; {} for nothing.

    Examples are a momentum teacher and a centre. A tree with the names and
    shapes of the parameters is sharded and, at another image size, resized
    like them.
    """
    ...

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Returns what `loss` takes of a batch of training, on the devices.

    Works on the whole batch, before it is split for gradient accumulation.
    """
    ...

  def loss(
    self,
    params: Params,
    fixed: Params,
    batch: Batch,
    key: jax.Array,
    *,
    train: bool,
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean loss of an augmented batch, and means to be logged.

    `loss` is among the means.
    """
    ...

  def loss_and_seen(
    self,
    params: Params,
    fixed: Params,
    state: ObjectiveState,
    batch: Batch,
    key: jax.Array,
  ) -> tuple[jax.Array, tuple[Metrics, Any]]:
    """Returns what `loss` does in training, and the means for `next_state`.

    Microbatches of an accumulated gradient have theirs averaged.
    """
    ...

  def next_state(
    self, state: ObjectiveState, params: Params, seen: Any
  ) -> ObjectiveState:
    """Returns the state after a step, by the new parameters and by `seen`."""
    ...

  def evaluate(self, params: Params, fixed: Params, batch: Batch) -> Metrics:
    """Returns sums over the examples of a batch whose `mask` is 1.

    They are called as in `metrics`, and `examples` is the number of examples.
    """
    ...


class OfImages:
  """Most objectives: no teacher, no state, one image an example.

  Fields that a subclass declares by `fields.field` are those of
  `config.objective`; `defaults` and `valid` come from their declarations.
  """

  defaults: ClassVar[Mapping[str, Any]] = {}
  valid: ClassVar[Mapping[str, Valid]] = {}
  unused: ClassVar[Mapping[str, Any]] = {}

  def __init_subclass__(cls) -> None:
    """Adds the declared fields to those of the base class."""
    super().__init_subclass__()
    # The decorator `dataclass` has not replaced them yet.
    own = {
      name: x
      for name, x in vars(cls).items()
      if isinstance(x, dataclasses.Field) and 'valid' in x.metadata
    }
    cls.defaults = {**cls.defaults, **{k: x.default for k, x in own.items()}}
    cls.valid = {
      **cls.valid,
      **{k: x.metadata['valid'] for k, x in own.items() if x.metadata['valid']},
    }

  @classmethod
  def options(cls, config: ConfigDict) -> dict[str, Any]:
    """Returns the values of the declared fields, as `cls` takes them."""
    names = {x.name for x in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return {
      name: tuple(value) if isinstance(value, list) else value
      for name, value in config.objective.items()
      if name in names & cls.defaults.keys()
    }

  def on_data(self, config: ConfigDict, facts: Facts) -> Self:
    """Returns the objective as it is: it needs no labels."""
    del config, facts
    return self

  @property
  def images_seen(self) -> int:
    """One: an example is an image."""
    return 1

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what a batch of `size` examples of training is."""
    raise NotImplementedError

  def batch_sizes(self) -> list[tuple[int, int]]:
    """Returns the one size of `batch_shapes`."""
    *_, H, W, _ = self.batch_shapes(1)['image'].shape
    return [(H, W)]

  def fixed(self) -> Params:
    """Returns nothing: there is no teacher."""
    return {}

  def new_state(self, params: Params) -> ObjectiveState:
    """Returns nothing: only parameters are updated."""
    del params
    return {}

  def loss_and_seen(
    self: Objective,
    params: Params,
    fixed: Params,
    state: ObjectiveState,
    batch: Batch,
    key: jax.Array,
  ) -> tuple[jax.Array, tuple[Metrics, Any]]:
    """Returns what `loss` does in training."""
    del state
    loss, metrics = self.loss(params, fixed, batch, key, train=True)
    return loss, (metrics, {})

  def next_state(
    self, state: ObjectiveState, params: Params, seen: Any
  ) -> ObjectiveState:
    """Returns the state, which is nothing."""
    del params, seen
    return state


def sums(mask_B: jax.Array, found: Mapping[str, jax.Array]) -> Metrics:
  """Returns what `evaluate` does, of what was found of each example, B."""
  kept = {k: jnp.sum(jnp.where(mask_B > 0, x, 0.0)) for k, x in found.items()}
  return {'examples': jnp.sum(mask_B)} | kept


def check_classes(config: ConfigDict, facts: Facts, one_class: bool) -> None:
  """Refuses data whose classes cannot be learned.

  Args:
    config: of the run, for messages.
    facts: of its data.
    one_class: whether an image must have exactly one class.

  Raises:
    ValueError: naming the data and the objective.
  """
  names, learned = facts.class_names, config.objective.name
  if len(names) < 2:
    found = f'one class, {names[0]!r}' if names else 'no labels'
    raise ValueError(
      f'{config.data.name} {config.data.split} has {found}, and '
      f'objective.name={learned} learns to tell classes apart: give at least '
      'two, each in a folder of its own or, as yes and no, in the column label '
      'of a table.'
    )
  if facts.several_labels and one_class:
    raise ValueError(
      f'{config.data.name} has several classes an image, and '
      f'objective.name={learned} learns one: use classification.'
    )
