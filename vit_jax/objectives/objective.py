"""What an objective has to say of itself: the contract of every task.

An objective is one file, here or in a project, with a line in `OBJECTIVES`.
It knows its model, what a record becomes, and the loss; the loop, the data
pipeline, checkpoints and evaluators know none of that.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import transforms
from vit_jax.data.images import Images
from vit_jax.data.sources import Record
from vit_jax.models import variants
from vit_jax.models.fields import Valid
from vit_jax.models.model import Batch, Metrics, Model, Params

# Arrays by name, of one example, before it is in a batch.
Example = dict[str, Any]
# Trees of arrays by name.
ObjectiveState = dict[str, Any]
# Whether higher or lower values of a metric are better.
Best = Literal['highest', 'lowest']


@dataclasses.dataclass(frozen=True)
class Facts:
  """The facts of the data that an objective needs.

  Attributes:
    class_names: C names by label; empty where the data have no labels.
    examples: in an epoch.
    several_labels: whether an image may have several classes, or none.
    class_counts: examples of each class, if `loss.class_weights` needs them.
  """

  class_names: tuple[str, ...]
  examples: int
  several_labels: bool = False
  class_counts: tuple[int, ...] = ()


# Config fields that need class labels, with their "off" values.
OF_CLASSES: Mapping[str, Any] = {
  'data.erasing': 0.0,
  'data.wrong_labels': 0.0,
  'loss.name': 'softmax',
  'loss.class_weights': '',
  'loss.label_smoothing': 0.0,
  'loss.mixup': 0.0,
  'loss.cutmix': 0.0,
}


class Objective:
  """What is learned, and of what.

  The defaults here are those of most objectives: images without labels, no
  teacher, no state, one image an example. Subclasses are frozen dataclasses.

  Attributes:
    defaults: the fields of `config.objective`, besides its name.
    valid: their valid values, as `fields.check_value` takes them.
    unused: fields of `config` that the objective ignores, with their "off"
      values; other values are refused.
    result: the entry of the state that is the result of training, with the
      names and shapes of the parameters: evaluators measure it, and checkpoints
      open with it. Empty for the parameters.
    metrics: what `evaluate` sums, besides `examples`, and whether higher or
      lower means are better; the first one stands for the others.
    model: the model that checkpoints are opened with.
    images: how images are brought to the model.
    class_names: C names; empty if nothing is classified.
  """

  defaults: ClassVar[Mapping[str, Any]] = {}
  valid: ClassVar[Mapping[str, Valid]] = {}
  unused: ClassVar[Mapping[str, Any]] = {}
  result: ClassVar[str] = ''
  metrics: ClassVar[Mapping[str, Best]]
  # Of the model, before `on_data` sets them.
  _classes: ClassVar[int] = 0

  model: Model
  images: Images
  class_names: tuple[str, ...]

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

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    """Returns the objective of a config, before its data are open.

    Raises:
      ValueError: for fields that cannot work.
      FileNotFoundError: if a checkpoint is missing.
    """
    return cls(**cls._arguments(config, image_size))

  @classmethod
  def _arguments(
    cls, config: ConfigDict, image_size: tuple[int, int]
  ) -> dict[str, Any]:
    """Returns the arguments of `cls`, after the checks of `from_config`."""
    model = variants.build(
      num_classes=cls._classes, image_size=image_size, **config.model
    )
    images = Images.from_config(config.data, image_size)
    return {'model': model, 'images': images} | cls.options(config)

  def on_data(self, config: ConfigDict, facts: Facts) -> Self:
    """Returns the objective with the classes of the data, if it learns any.

    Raises:
      ValueError: for data that the objective cannot learn.
    """
    del config, facts
    return self

  def train_transform(
    self,
  ) -> Callable[[Record, np.random.Generator], Example]:
    """Returns the picklable function from a record to a training example."""
    return transforms.WithoutLabel(self.images.train_transform())

  def eval_transform(self) -> Callable[[Record], Example]:
    """Returns the function for evaluation, which is never random."""
    return transforms.WithoutLabel(self.images.eval_transform())

  @property
  def images_seen(self) -> float:
    """How many images the model sees for an example of training.

    Smaller images, and parts of images, count by their operations.
    """
    return 1

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch of `size` training examples."""
    return {'image': self.images.batch_shape(size)}

  def batch_sizes(self) -> list[tuple[int, int]]:
    """Returns the (H, W) that a training batch may have, all equally likely."""
    *_, H, W, _ = self.batch_shapes(1)['image'].shape
    return [(H, W)]

  def fixed(self) -> Params:
    """Returns parameters of another model, such as a teacher; {} for none.

    They are placed like the model's and never updated. They follow from the
    config alone, so that a resumed run finds the same.
    """
    return {}

  def new_state(self, params: Params) -> ObjectiveState:
    """Returns the state that each step updates besides parameters.

    Examples are a momentum teacher and a centre. A tree with the names and
    shapes of the parameters is sharded like them.
    """
    del params
    return {}

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Turns a training batch into the input of `loss`, on the devices.

    Works on the whole batch, before it is split for gradient accumulation.
    """
    raise NotImplementedError

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
    raise NotImplementedError

  def loss_and_seen(
    self,
    params: Params,
    fixed: Params,
    state: ObjectiveState,
    batch: Batch,
    key: jax.Array,
  ) -> tuple[jax.Array, tuple[Metrics, Any]]:
    """Returns `loss` in training, and the means for `next_state`.

    Microbatches of an accumulated gradient have theirs averaged.
    """
    del state
    loss, metrics = self.loss(params, fixed, batch, key, train=True)
    return loss, (metrics, {})

  def next_state(
    self, state: ObjectiveState, params: Params, seen: Any
  ) -> ObjectiveState:
    """Returns the state after a step, from the new parameters and `seen`."""
    del params, seen
    return state

  def evaluate(self, params: Params, fixed: Params, batch: Batch) -> Metrics:
    """Returns sums over the examples of a batch whose `mask` is 1.

    They are named as in `metrics`, and `examples` is the number of examples.
    """
    raise NotImplementedError

  def measure_rows(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns metrics that are no means over examples.

    Args:
      rows: the arrays, NX, of all examples that `evaluate` gave as BX under
        `rows`.
    """
    del rows
    return {}


def sums(mask_B: jax.Array, found: Mapping[str, jax.Array]) -> Metrics:
  """Sums per-example values B over the rows whose mask is 1."""
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
