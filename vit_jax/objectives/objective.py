"""The interface of objectives.

An objective is a class, here or in a project, with a line in `OBJECTIVES`. The
training loop and the data pipeline use objectives only through this interface.
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

# The arrays of one example by name, before batching.
Example = dict[str, Any]
# Trees of arrays by name.
ObjectiveState = dict[str, Any]
# Whether higher or lower values of a metric are better.
Best = Literal['highest', 'lowest']


@dataclasses.dataclass(frozen=True)
class Facts:
  """The facts of the data that an objective needs.

  Attributes:
    class_names: name of each of the C classes; empty if the data lack labels.
    examples: number of examples per epoch.
    several_labels: whether an image may have several classes, or no class.
    class_counts: number of examples of each class if `loss.class_weights` is
      set, else empty.
    of_images: whether images, instead of their objects or pixels, have classes.
  """

  class_names: tuple[str, ...]
  examples: int
  several_labels: bool = False
  class_counts: tuple[int, ...] = ()
  of_images: bool = True


# Config fields that only objectives with class labels use, with their "off"
# values.
OF_CLASSES: Mapping[str, Any] = {
  'data.erasing': 0.0,
  'data.train_size': '',
  'data.wrong_labels': 0.0,
  'loss.name': 'softmax',
  'loss.class_weights': '',
  'loss.label_smoothing': 0.0,
  'loss.mixup': 0.0,
  'loss.cutmix': 0.0,
}


@dataclasses.dataclass(frozen=True)
class Objective:
  """Base class of objectives, for images without labels by default.

  Subclasses are frozen dataclasses.

  Attributes:
    defaults: fields of `config.objective` except `name`, with their defaults.
    valid: valid values of these fields; see `fields.check_value`.
    unused: fields of `config` that the objective ignores, with their "off"
      values; other values are refused, except a stage's path as `teacher`.
    trained: the model class, if the objective needs a certain one. If the class
      extends a base such as ViT, `config.model` has the fields of the base, and
      `config.objective` has the added fields.
    result: name of an entry of the objective's state that is the result of
      training, such as a momentum teacher; empty if the result is the
      parameters. Evaluators measure the result, and checkpoints are opened with
      it. The entry has the names and shapes of the parameters.
    metrics: whether the 'highest' or the 'lowest' mean is better, for each
      metric that `evaluate` sums, except `examples`; by default the loss. The
      first metric is the main metric.
    classes: number of classes of the model, until `on_data` sets it.
    model: the model that checkpoints are opened with.
    class_names: C names; empty if the objective does not classify.
  """

  defaults: ClassVar[Mapping[str, Any]] = {}
  valid: ClassVar[Mapping[str, Valid]] = {}
  unused: ClassVar[Mapping[str, Any]] = {}
  trained: ClassVar[type[Model] | None] = None
  result: ClassVar[str] = ''
  metrics: ClassVar[Mapping[str, Best]] = {'loss': 'lowest'}
  classes: ClassVar[int] = 0

  model: Model
  images: Images
  class_names: tuple[str, ...] = ()

  def __init_subclass__(cls) -> None:
    """Adds the fields declared with `field` to `defaults` and `valid`.

    Without a `teacher`, the config's field of that name is unused. With a
    `result`, the Polyak average is unused.
    """
    super().__init_subclass__()
    # Fields are still Field objects, because `dataclass` runs later.
    own = {
      name: x
      for name, x in vars(cls).items()
      if isinstance(x, dataclasses.Field) and 'valid' in x.metadata
    } | cls._model_fields()
    cls.defaults = {**cls.defaults, **{k: x.default for k, x in own.items()}}
    if not hasattr(cls, 'teacher') and 'teacher' not in cls.__annotations__:
      cls.unused = {'teacher': '', **cls.unused}
    if cls.result:
      cls.unused = {'optimizer.polyak': 0.0, **cls.unused}
    cls.valid = {
      **cls.valid,
      **{k: x.metadata['valid'] for k, x in own.items() if x.metadata['valid']},
    }

  @classmethod
  def _model_fields(cls) -> dict[str, dataclasses.Field[Any]]:
    """Returns the fields that `trained` adds to its base model class."""
    model: Any = cls.trained
    if not hasattr(model and model.__base__, 'kind'):
      return {}
    inherited = {f.name for f in model.__base__.own_fields()}
    return {f.name: f for f in model.own_fields() if f.name not in inherited}

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    """Returns the objective of a config, before its data are opened.

    Raises:
      ValueError: if a field is invalid.

    With a teacher, also raises the errors of `open_checkpoint`.
    """
    fields = {**config.model}
    if cls.trained:
      needed = getattr(cls.trained.__base__, 'kind', cls.trained.kind)
      if fields['name'] != needed:
        raise ValueError(
          f'model.name is {fields["name"]!r}, and objective.name='
          f'{config.objective.name} needs {needed!r}. Choose a variant of it; '
          'docs/reference/models.md lists the names.'
        )
      fields |= {x: config.objective[x] for x in cls._model_fields()}
      fields['name'] = cls.trained.kind
    model = variants.build(
      num_classes=cls.classes, image_size=image_size, **fields
    )
    names = {x.name for x in dataclasses.fields(cls)}
    options = {
      name: tuple(value) if isinstance(value, list) else value
      for name, value in config.objective.items()
      if name in names & cls.defaults.keys()
    }
    images = Images.from_config(config.data, image_size)
    return cls(**{'model': model, 'images': images} | options)

  def on_data(self, config: ConfigDict, facts: Facts) -> Self:
    """Returns the objective with the classes of the data, if it classifies.

    Raises:
      ValueError: if the objective cannot learn from the data.
    """
    return self

  def train_transform(
    self,
  ) -> Callable[[Record, np.random.Generator], Example]:
    """Returns the function from a record to a training example.

    Worker processes receive this function through cloudpickle.
    """
    return transforms.without_label(self.images.train_transform())

  def eval_transform(self) -> Callable[[Record], Example]:
    """Returns the deterministic function from a record to an example."""
    return transforms.without_label(self.images.eval_transform())

  @property
  def images_seen(self) -> float:
    """Number of images that the model processes per training example.

    Cheaper passes, as on small images, count as fractions, by their FLOPs.
    """
    return 1

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch of `size` training examples."""
    return {'image': self.images.batch_shape(size)}

  def batch_sizes(self) -> list[tuple[int, int]]:
    """Returns the equally likely sizes (H, W) of images in training batches."""
    *_, H, W, _ = self.batch_shapes(1)['image'].shape
    return [(H, W)]

  def fixed(self) -> Params:
    """Returns the parameters of a frozen model such as a teacher, or {}.

    They depend only on the config, so that resumed runs have the same values.
    """
    return {}

  def new_state(self, params: Params) -> ObjectiveState:
    """Returns the initial state of the objective, which every step updates.

    Arrays with the names and shapes of parameters, as in a momentum teacher,
    are sharded like the parameters.
    """
    return {}

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Turns a training batch into the input of `loss`, on the devices.

    Works on the whole batch, before it is split for gradient accumulation.
    """
    raise NotImplementedError

  def loss(
    self, params: Params, batch: Batch, key: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean loss of an augmented batch, and metrics.

    The metrics include `loss`.
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
    """Returns the training loss, and a pair of metrics and `seen`.

    Objectives with a state or fixed parameters write this method instead of
    `loss`. `fixed` is the result of the method `fixed`. `seen` has the
    statistics of the batch that `next_state` needs. Gradient accumulation
    averages them over the microbatches.
    """
    loss, metrics = self.loss(params, batch, key)
    return loss, (metrics, {})

  def next_state(
    self, state: ObjectiveState, params: Params, seen: Any
  ) -> ObjectiveState:
    """Returns the state after a step.

    `params` are the parameters after the step; `seen` is from `loss_and_seen`.
    """
    return state

  def evaluate(self, params: Params, batch: Batch) -> Metrics:
    """Returns the sums of `metrics` over the examples whose `mask` is 1.

    The entry `examples` counts these examples. An objective may also return
    `rows` for `measure_rows`: arrays B or BX by name, with `mask`.
    """
    raise NotImplementedError

  def measure_rows(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns metrics that are not means over examples.

    `rows` has the `rows` of `evaluate` for all N examples, without `mask`.
    """
    return {}


def sums(mask_B: jax.Array, found: Mapping[str, jax.Array]) -> Metrics:
  """Sums per-example values B over the rows whose mask is 1."""
  kept = {k: jnp.sum(jnp.where(mask_B > 0, x, 0.0)) for k, x in found.items()}
  return {'examples': jnp.sum(mask_B)} | kept
