"""The parts of a training run. Building an `Experiment` allocates no arrays.

Training, `plan`, `bench` and the checks of sweeps build the same experiment, so
all of them have the same checks and the same training step.
"""

import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.checkpoints import adapters, opening, transfer
from vit_jax.data import images, sources
from vit_jax.models import flops, variants
from vit_jax.models.model import Batch, Metrics, Model, Params
from vit_jax.objectives import objective_type
from vit_jax.objectives.objective import Facts
from vit_jax.objectives.teachers import STAGES
from vit_jax.training import hardware, optim, sharding
from vit_jax.training.durations import durations_of

_log = logging.getLogger(__name__)


@flax.struct.dataclass
class TrainState:
  """The state that training carries from step to step.

  The attributes are also the names of the items in a checkpoint.

  Attributes:
    average: Polyak average of the parameters; {} if it is off.
    objective_state: state that the objective updates; {} if it has no state.
  """

  params: Params
  opt_state: optax.OptState
  average: Params = dataclasses.field(default_factory=dict)
  objective_state: Any = dataclasses.field(default_factory=dict)


def facts_of(config: ConfigDict, source: sources.Source) -> Facts:
  """Returns the facts of a config's data; `source` is the opened data."""
  names = source.class_names
  has_label = isinstance(source, sources.LabelledSource)
  two_orders = has_label and sources.has_two_orders(names)
  if two_orders and not config.data.class_order:
    _log.warning(
      'The class names are numbers, sorted as text: %s, ..., as torchvision '
      'sorts folders. data.class_order=number sorts them by value, as timm '
      'does; data.class_order=text keeps this order without a warning.',
      ', '.join(names[:4]),
    )
  counts: tuple[int, ...] = ()
  if config.loss.class_weights and isinstance(source, sources.LabelledSource):
    found_C = np.bincount(source.labels(), minlength=len(names))
    counts = tuple(found_C.tolist())
  several = source.several_labels
  return Facts(names, len(source), several, counts, several or has_label)


class CheckedConfig:
  """A config whose ranges, mesh, batch size and objective are checked.

  These checks need no data. `train` runs them before it opens the data. Only
  fields left open (None) need the data first; see `own.resolve`.
  """

  def __init__(
    self, config: ConfigDict, devices: Sequence[jax.Device] | None = None
  ):
    """Checks a config for a mesh of `devices`, by default all.

    Raises:
      ValueError: if a field is invalid.
      OSError: if the teacher's checkpoint is missing or cannot be fetched.
      ImportError: if a package is missing.
    """
    config_lib.check_fields(config)
    self.config = config
    self.mesh = sharding.make_mesh(config.mesh, devices, config.model.width)
    check_batch_size(config, self.mesh)
    self.image_size = images.size_of(config.data.image_size)
    kind = objective_type(config)
    if on := [
      f'{field}={value!r} (off: {off!r})'
      for field, off in kind.unused.items()
      if (value := operator.attrgetter(field)(config)) != off
      # A stage inherits `teacher` even if its objective has no teacher.
      and not (field == 'teacher' and STAGES in value)
    ]:
      raise ValueError(
        f'objective.name={config.objective.name} ignores {", ".join(on)}: use '
        'the "off" values.'
      )
    self.objective = kind.from_config(config, self.image_size)


class Experiment:
  """A config together with the facts of its data and a device mesh.

  Attributes:
    image_size: (H, W) in pixels.
    has_adapters: whether LoRA adapters are trained.
  """

  def __init__(self, checked: CheckedConfig, facts: Facts):
    """Builds the experiment of a config on data.

    Raises:
      ValueError: if a field is invalid or does not fit the data.
    """
    self.config, self.mesh, self.facts = checked.config, checked.mesh, facts
    config = self.config
    self.image_size = checked.image_size
    self.objective = checked.objective.on_data(config, facts)
    self._partitions = self.objective.model.partitions
    self.durations = durations = durations_of(config, facts.examples)
    o = config.optimizer
    self.lr = optim.schedule(
      o.lr, o.decay, durations.warmup, durations.total, durations.milestones
    )
    self.optimizer = optim.make(
      o, self.lr, self.objective.model, durations.total
    )
    self.has_adapters = o.lora > 0
    if self.has_adapters and self.objective.result:
      raise ValueError(
        f'optimizer.lora is {o.lora}, but the {self.objective.result} of '
        f'objective.name={config.objective.name} needs all parameters. '
        'Adapters are for fine-tuning: set optimizer.lora=0.'
      )
    if o.frozen or o.lr_scales or o.lora:
      # Also raises for patterns that match no parameter.
      trained = optim.first_match(self.state_shapes.params, o.frozen)
      paths = jax.tree_util.tree_leaves_with_path(trained)
      if o.lora and not any(
        i == len(o.frozen) for path, i in paths if path[-1].key == adapters.A
      ):
        raise ValueError(
          f'optimizer.frozen is {tuple(o.frozen)}, which matches all adapters '
          f'of optimizer.lora={o.lora}: remove a pattern of frozen.'
        )

  def new_params(self) -> Params:
    """Returns random initial parameters, sharded over the mesh."""
    shapes = self.placed(jax.eval_shape(self._new_params))
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    return jax.jit(self._new_params, out_shardings=shardings)()

  def params_from(self, checkpoint: opening.Checkpoint) -> Params:
    """Returns a checkpoint's parameters with a new head, sharded over the mesh.

    Raises:
      ValueError: if the checkpoint's body differs; see `transfer.to_new_task`.
        With adapters, also if it lacks a part of the body, because adapters
        would never train that part.
    """
    _log.info('Reading %s, without its head.', checkpoint.path)
    theirs, data = checkpoint.preprocessing, self.config.data
    mean, std = tuple(data.mean), tuple(data.std)
    if (theirs.mean, theirs.std) != (mean, std):
      _log.warning(
        f'{checkpoint.path} was trained on images with mean {theirs.mean} and '
        f'std {theirs.std}, but data.mean is {mean} and data.std is {std}. Set '
        'them to the values of the checkpoint.'
      )
    params = transfer.to_new_task(
      checkpoint, self.objective.model, self.image_size, self.new_params()
    )
    if self.has_adapters and not self._has_the_body_of(checkpoint.model):
      raise ValueError(
        f'{checkpoint.path} has only a part of the model. Adapters would leave '
        'the other parts untrained: set optimizer.lora=0.'
      )
    return self.place(params)

  def _has_the_body_of(self, old: Model) -> bool:
    model = self.objective.model
    return type(old.body()) is type(model.body()) and all(
      getattr(old, x) or not getattr(model, x) for x in old.optional_params
    )

  def start(self, params: Params) -> TrainState:
    """Returns the initial state; donates `params`, except with adapters."""
    shardings = jax.tree.map(lambda x: x.sharding, self.state_shapes)
    donated = () if self.has_adapters else (0,)
    new_state = jax.jit(
      self._new_state, donate_argnums=donated, out_shardings=shardings
    )
    return new_state(params)

  def all_fixed(self, fixed: Params, params: Params | None) -> Params:
    """Returns the parameters that a training step takes besides the state.

    `fixed` is the result of `Objective.fixed`. With adapters, adds the body of
    `params`.
    """
    if not self.has_adapters:
      return fixed
    body = adapters.body_of(self.objective.model, params)
    return {'adapted': body, 'objective': fixed}

  def fixed_shapes(self) -> Params:
    """Returns the shapes and shardings of a step's fixed parameters."""
    fixed = jax.eval_shape(self.objective.fixed)
    params = jax.eval_shape(self._new_params)
    return self.placed(self.all_fixed(fixed, params))

  def all_params(self, params: Params, fixed: Params) -> Params:
    """Returns all parameters of the model, with any adapters merged.

    `params` are the trained parameters, `fixed` the result of `all_fixed`.
    """
    if not self.has_adapters:
      return params
    return adapters.merged(fixed['adapted'], params)

  @functools.cached_property
  def state_shapes(self) -> TrainState:
    """Shapes, dtypes and shardings of the state's arrays."""
    return self.placed(
      jax.eval_shape(lambda: self._new_state(self._new_params()))
    )

  def _new_params(self) -> Params:
    return variants.init(self.objective.model, self._keys()[0], self.image_size)

  def _new_state(self, params: Params) -> TrainState:
    if self.has_adapters:
      o = self.config.optimizer
      params = optim.new_adapters(
        self.objective.model, params, o.lora, o.lora_on, self._keys()[0]
      )
    return TrainState(
      params=params,
      opt_state=self.optimizer.init(params),
      average=params if self.config.optimizer.polyak else {},
      objective_state=self.objective.new_state(params),
    )

  def placed(self, shapes: Any) -> Any:
    """Attaches shardings to shapes."""
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes,
      sharding.tree_shardings(shapes, self.mesh, self._partitions),
    )

  def place(self, params: Params) -> Params:
    """Returns parameters sharded over the mesh."""
    shardings = sharding.tree_shardings(params, self.mesh, self._partitions)
    return sharding.place(params, shardings)

  def _keys(self) -> jax.Array:
    """Returns the random keys for the initial parameters and for the steps."""
    return jax.random.split(jax.random.key(self.config.seed))

  @functools.cached_property
  def forward_flops(self) -> int:
    """FLOPs of one image's forward pass, averaged over the image sizes."""
    sizes = self.objective.batch_sizes()
    model = self.objective.model
    return sum(flops.forward_flops(model, size) for size in sizes) // len(sizes)

  def summary(self) -> str:
    """Describes the model, data and run in three lines."""
    config, facts, model = self.config, self.facts, self.objective.model
    classes = len(facts.class_names)
    sizes = dict.fromkeys(self.objective.batch_sizes())
    pixels = ', '.join(f'{h}x{w}' for h, w in sizes)
    return (
      f'model  {type(model).__name__}, '
      f'{flops.count_params(model, self.image_size):,} parameters, '
      f'{self.forward_flops / 1e9:.3g} GFLOPs an image of {pixels} pixels\n'
      f'data   {config.data.name} {config.data.split}: '
      f'{facts.examples:,} images'
      + (f', {classes:,} classes\n' if classes else ' without labels\n')
      + f'run    {self.durations.total:,} steps of {config.batch_size:,} '
      f'on {sharding.describe(self.mesh)}'
    )

  def train_step(self) -> jax.stages.Wrapped:
    """Returns the jitted training step.

    The step takes the state (donated), the result of `all_fixed`, a batch and
    the number of earlier steps. It returns the next state and the metrics.
    """
    shardings = jax.tree.map(lambda x: x.sharding, self.state_shapes)
    return jax.jit(
      self._train_step,
      donate_argnums=0,
      out_shardings=(shardings, sharding.replicated(self.mesh)),
      compiler_options=hardware.compiler_options(self.mesh.devices.flat[0]),
    )

  def _train_step(
    self, state: TrainState, fixed: Params, batch: Batch, step: jax.Array
  ) -> tuple[TrainState, Metrics]:
    key = jax.random.fold_in(self._keys()[1], step)
    key_augment, key_loss = jax.random.split(key)
    batch = self.objective.augment(batch, key_augment)

    def gradients(params: Params) -> tuple[Params, tuple[Metrics, Any]]:
      given = self._gathered(params), fixed, state.objective_state
      of_part = functools.partial(self._gradients, *given)
      return self._accumulated(of_part, batch, key_loss)

    grads, (metrics, seen) = gradients(state.params)
    if rho := self.config.optimizer.sam:
      grads, _ = gradients(optim.sharpest(state.params, grads, rho))
    updates, opt_state = self.optimizer.update(
      grads, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if average:
      # The decay is smaller in the first steps, as in TensorFlow's
      # ExponentialMovingAverage, so the average soon forgets initial values.
      decay = jnp.minimum(
        self.config.optimizer.polyak, (1 + step) / (10 + step)
      )
      average = optax.incremental_update(params, average, 1 - decay)
    metrics |= {
      'grad_norm': optax.tree.norm(grads),
      # Detects non-finite parameters before they are saved.
      'param_norm': optax.tree.norm(params),
      'lr': self.lr(step),
    }
    objective_state = self.objective.next_state(
      state.objective_state, params, seen
    )
    return TrainState(params, opt_state, average, objective_state), metrics

  def _gathered(self, params: Params) -> Params:
    """Gathers the parameters, unless each layer gathers its own."""
    if self.mesh.shape['fsdp'] == 1 or self.config.gather == 'layer':
      return params
    cast = variants.cast_kernels(self.objective.model, params)
    return sharding.gather(cast, self.mesh, self._partitions)

  def _accumulated(
    self, gradients: Callable[..., Any], batch: Batch, key: jax.Array
  ) -> tuple[Params, tuple[Metrics, Any]]:
    """Averages gradients and metrics over `accum_steps` microbatches."""
    n = self.config.accum_steps
    if n == 1:
      return gradients(batch, key)

    # Row i goes to microbatch i % accum_steps, so that rows stay on their
    # devices.
    def split(x: jax.Array) -> jax.Array:
      return x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1)

    def add(total: Any, part: Any) -> tuple[Any, None]:
      part_batch, part_key = part
      part_batch = jax.lax.with_sharding_constraint(
        part_batch, jax.sharding.NamedSharding(self.mesh, sharding.BATCH)
      )
      one = gradients(part_batch, part_key)
      return jax.tree.map(lambda a, b: a + b / n, total, one), None

    keys = jax.random.split(key, n)
    parts = (jax.tree.map(split, batch), keys)
    zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(gradients, jax.tree.map(lambda x: x[0], parts[0]), key),
    )
    return jax.lax.scan(add, zeros, parts)[0]

  def _gradients(
    self,
    params: Params,
    fixed: Params,
    state: Any,
    batch: Batch,
    key: jax.Array,
  ) -> tuple[Params, tuple[Metrics, Any]]:
    def loss(params: Params) -> tuple[jax.Array, tuple[Metrics, Any]]:
      params = optim.stop_frozen(params, self.config.optimizer.frozen)
      params = self.all_params(params, fixed)
      own = fixed['objective'] if self.has_adapters else fixed
      return self.objective.loss_and_seen(params, own, state, batch, key)

    with sharding.activations(self.mesh):
      grads, seen = jax.grad(loss, has_aux=True)(params)
    grads = sharding.scatter(grads, self.mesh, self._partitions)
    return jax.tree.map(lambda x: x.astype(jnp.float32), grads), seen


def check_batch_size(config: ConfigDict, mesh: jax.sharding.Mesh) -> None:
  """Checks that `batch_size` is a multiple of batch shards x `accum_steps`.

  Raises ValueError if it is not.
  """
  shards = sharding.shards(mesh)
  unit = shards * config.accum_steps
  if config.batch_size % unit:
    raise ValueError(
      f'batch_size {config.batch_size} is not divisible by accum_steps '
      f'{config.accum_steps} times {shards} devices along slice, data and '
      f'fsdp: use a multiple of {unit}, such as '
      f'{-(-config.batch_size // unit) * unit}.'
    )
