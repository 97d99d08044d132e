"""The training loop, for every task: read it top to bottom."""

import contextlib
import dataclasses
import json
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import inputs, optim, reader, sharding, transfer, workdir_lock
from vit_jax.checkpoint import Checkpoints
from vit_jax.data import loader, transforms
from vit_jax.evaluators import build
from vit_jax.models import flops, variants
from vit_jax.models.variants import Model
from vit_jax.objectives.classification import Classification
from vit_jax.run import Durations, Preempted, Run, preemption_notice

_log = logging.getLogger(__name__)

State = dict[str, Any]


def train(config: ConfigDict, workdir: str, start_over: bool = False) -> None:
  """Trains, or resumes, what a config describes.

  Args:
    config: from a file in `configs/`.
    workdir: receives checkpoints, metrics.csv, curves.png and TensorBoard logs.
    start_over: whether to start from step 0 where the workdir holds a run of
      which no checkpoint is whole.

  Raises:
    ValueError: for a config or data that cannot work, before anything is built;
      if another run is in the workdir, or no checkpoint there is whole.
    OSError: if a checkpoint cannot be read now.
    Diverged: if the loss stops being finite.
    Preempted: after SIGTERM, once the state is saved.
  """
  with workdir_lock.held(workdir):
    _train(config, workdir, start_over)


def _train(config: ConfigDict, workdir: str, start_over: bool) -> None:
  image_size = config_lib.image_size(config.data.image_size)
  # Before the data, which may take long to open and check.
  body = variants.build(num_classes=0, image_size=image_size, **config.model)
  mesh = sharding.make_mesh(config.mesh, width=config.model.width)
  check_batch_size(config, mesh)
  source = inputs.open_source(config.data, config.data.split)
  durations = durations_of(config, len(source))
  model = body.clone(num_classes=len(source.class_names))
  objective = make_objective(config, model)
  lr = make_schedule(config, durations)
  optimizer = make_optimizer(config, lr)
  evaluators = build.make_evaluators(
    config, objective, source.class_names, mesh
  )

  checkpoints = Checkpoints(
    workdir, config.keep_last, config.best_metric, start_over
  )
  meta = {
    'config': json.loads(config.to_json()),
    'class_names': list(source.class_names),
    'examples': len(source),
    'image_size': list(image_size),
    'elapsed_s': 0.0,
  }
  if saved_meta := checkpoints.latest_meta():
    config_lib.check_resumable(saved_meta, meta)
    meta['elapsed_s'] = saved_meta['elapsed_s']
  start_step, state = initial_state(
    config, model, image_size, optimizer, mesh, checkpoints
  )
  checkpoints.prepare(state)
  train_step = make_train_step(config, objective, optimizer, lr, mesh, state)
  batches = loader.train_batches(
    source,
    make_transform(config, image_size),
    batch_size=config.batch_size,
    seed=config.seed,
    start_step=start_step,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
    workers=config.data.workers,
  )
  forward_flops = flops.forward_flops(model, image_size)
  if jax.process_index() == 0:
    params = flops.count_params(model, image_size)
    print(
      f'model  {type(model).__name__}, {params:,} parameters, '
      f'{forward_flops / 1e9:.3g} GFLOPs an image of '
      f'{image_size[0]}x{image_size[1]} pixels\n'
      f'data   {config.data.name} {config.data.split}: {len(source):,} images, '
      f'{len(source.class_names):,} classes\n'
      f'run    {durations.total:,} steps of {config.batch_size:,} on '
      f'{sharding.describe(mesh)}'
    )
  run = Run(
    workdir=workdir,
    config=config,
    durations=durations,
    checkpoints=checkpoints,
    evaluators=evaluators,
    meta=meta,
    start_step=start_step,
    forward_flops=forward_flops,
  )
  with (
    contextlib.closing(checkpoints),
    contextlib.closing(batches),
    contextlib.closing(run),
    preemption_notice() as preempted,
  ):
    for step in range(start_step + 1, durations.total + 1):
      batch = run.wait_for(batches, mesh)
      state, metrics = train_step(state, batch, np.int32(step - 1))
      run.take(step, metrics)
      if run.is_eval_step(step):
        run.evaluate(step, state)
      if run.is_checkpoint_step(step):
        run.save(step, state)
      if preempted(step) and step < durations.total:
        run.save(step, state)
        raise Preempted(f'Preempted: saved step {step}.')
    run.finish()


def evaluate_only(config: ConfigDict, workdir: str) -> dict[str, float]:
  """Measures `config.init`, or else the workdir's last checkpoint.

  Returns:
    The evaluators' metrics.
  """
  checkpoint = reader.open_checkpoint(config.init or workdir)
  names = inputs.open_source(config.data, config.data.split).class_names
  if checkpoint.model.num_classes != len(names):
    raise ValueError(
      f'{checkpoint.path} knows {checkpoint.model.num_classes} classes and '
      f'{config.data.name} has {len(names)}: they cannot be compared.'
    )
  mesh = sharding.make_mesh(config.mesh, width=config.model.width)
  check_batch_size(config, mesh)
  with config.unlocked():
    config.data.image_size = 'x'.join(map(str, checkpoint.image_size))
    config.data.update(dataclasses.asdict(checkpoint.preprocessing))
  objective = make_objective(config, checkpoint.model)
  params = jax.device_put(
    checkpoint.params, sharding.tree_shardings(checkpoint.params, mesh)
  )
  results: dict[str, Any] = {}
  for evaluator in build.make_evaluators(config, objective, names, mesh):
    results |= evaluator.run(params)
  # Pictures belong to the TensorBoard of a training.
  return build.metrics_and_pictures(results)[0]


def durations_of(config: ConfigDict, examples: int) -> Durations:
  """Returns the config's durations in steps.

  Raises:
    ValueError: for values that are no duration or do not fit together.
  """
  kwargs = {'batch_size': config.batch_size, 'examples': examples}
  total = optim.steps_of(config.total, **kwargs)
  if total < 1:
    raise ValueError(f'total is {config.total!r}: less than one step.')

  def every(duration: str) -> int:
    return max(1, optim.steps_of(duration, **kwargs, total_steps=total))

  return Durations(
    total=total,
    warmup=optim.steps_of(config.optimizer.warmup, **kwargs, total_steps=total),
    milestones=tuple(
      optim.steps_of(duration, **kwargs, total_steps=total)
      for duration in config.optimizer.milestones
    ),
    log_every=every(config.log_every),
    eval_every=every(config.eval_every),
    checkpoint_every=every(config.checkpoint_every),
  )


def check_batch_size(config: ConfigDict, mesh: jax.sharding.Mesh) -> None:
  """Refuses a batch that cannot be shared out evenly.

  Raises:
    ValueError: naming the next batch size that can.
  """
  shards = mesh.shape['data'] * mesh.shape['fsdp']
  if config.accum_steps < 1 or config.batch_size < 1:
    raise ValueError(
      f'batch_size is {config.batch_size} and accum_steps '
      f'{config.accum_steps}: both must be at least 1.'
    )
  unit = shards * config.accum_steps
  if config.batch_size % unit:
    raise ValueError(
      f'batch_size {config.batch_size} cannot be shared evenly by accum_steps '
      f'{config.accum_steps} times {shards} devices along data and fsdp: use a '
      f'multiple of {unit}, such as {-(-config.batch_size // unit) * unit}.'
    )


def make_transform(
  config: ConfigDict, image_size: tuple[int, int]
) -> transforms.TrainTransform:
  """Returns what a config does to training images before they are a batch."""
  height, width = (round(config.data.crop_resize * side) for side in image_size)
  return transforms.TrainTransform(
    image_size,
    config.data.crop_min_area,
    (height, width) if config.data.crop_resize else None,
  )


def make_objective(config: ConfigDict, model: Model) -> Classification:
  """Returns the objective that a config describes."""
  if config.loss.name not in ('softmax', 'sigmoid'):
    raise ValueError(
      f'loss.name is {config.loss.name!r}: use softmax or sigmoid.'
    )
  if len(config.data.mean) != 3 or len(config.data.std) != 3:
    raise ValueError(
      f'data.mean is {config.data.mean} and data.std {config.data.std}: give '
      'one number a channel, red, green and blue.'
    )
  if not all(x > 0 for x in config.data.std):
    raise ValueError(f'data.std is {config.data.std}: all must be above 0.')
  return Classification(
    model=model,
    loss_name=config.loss.name,
    label_smoothing=config.loss.label_smoothing,
    mixup=config.loss.mixup,
    flip=config.data.flip,
    mean=tuple(config.data.mean),
    std=tuple(config.data.std),
  )


def make_schedule(config: ConfigDict, durations: Durations) -> optim.Schedule:
  """Returns the learning rate at each step that a config describes."""
  return optim.schedule(
    config.optimizer.lr,
    config.optimizer.decay,
    durations.warmup,
    durations.total,
    durations.milestones,
  )


def make_optimizer(
  config: ConfigDict, lr: optim.Schedule
) -> optax.GradientTransformation:
  """Returns the optimizer that a config describes."""
  o = config.optimizer
  return optim.make(
    name=o.name,
    lr=lr,
    b1=o.b1,
    b2=o.b2,
    momentum=o.momentum,
    momentum_dtype=o.momentum_dtype,
    weight_decay=o.weight_decay,
    clip_norm=o.clip_norm,
  )


def random_keys(config: ConfigDict) -> jax.Array:
  """Returns the keys of the initial parameters and of the steps."""
  return jax.random.split(jax.random.key(config.seed))


def new_params(
  config: ConfigDict, model: Model, image_size: tuple[int, int]
) -> Any:
  """Returns the random parameters that a config starts from."""
  return variants.init(model, random_keys(config)[0], image_size)


def new_state(
  config: ConfigDict, optimizer: optax.GradientTransformation, params: Any
) -> State:
  """Returns what training carries from step to step, at its beginning.

  That is `params`, `opt_state` and `average`, which is empty without Polyak
  averaging.
  """
  average = params if config.optimizer.polyak else {}
  return {
    'params': params,
    'opt_state': optimizer.init(params),
    'average': average,
  }


def initial_state(
  config: ConfigDict,
  model: Model,
  image_size: tuple[int, int],
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  checkpoints: Checkpoints,
) -> tuple[int, State]:
  """Restores the newest checkpoint, or starts from `init` or at random.

  Returns:
    Steps taken so far, and the state (see `new_state`), placed on the mesh.
  """

  def fresh_params() -> Any:
    return new_params(config, model, image_size)

  def state_of(params: Any) -> State:
    return new_state(config, optimizer, params)

  shapes = jax.eval_shape(lambda: state_of(fresh_params()))
  shardings = sharding.tree_shardings(shapes, mesh)
  restored = checkpoints.restore(
    jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes,
      shardings,
    )
  )
  if restored:
    step, state = restored
    _log.info('Resuming after step %d.', step)
    return step, {'average': {}} | state
  params = jax.jit(fresh_params, out_shardings=shardings['params'])()
  if config.init:
    checkpoint = reader.open_checkpoint(config.init)
    _log.info('Starting from %s with a new head.', checkpoint.path)
    theirs = checkpoint.preprocessing
    if (theirs.mean, theirs.std) != (
      tuple(config.data.mean),
      tuple(config.data.std),
    ):
      _log.warning(
        'It was trained on images with mean %s and std %s; here data.mean is '
        '%s and data.std %s.',
        theirs.mean,
        theirs.std,
        tuple(config.data.mean),
        tuple(config.data.std),
      )
    params = jax.device_put(
      transfer.to_new_task(checkpoint, model, image_size, params),
      shardings['params'],
    )
  return 0, jax.jit(state_of, out_shardings=shardings)(params)


def make_train_step(
  config: ConfigDict,
  objective: Classification,
  optimizer: optax.GradientTransformation,
  lr: optim.Schedule,
  mesh: jax.sharding.Mesh,
  state: State,
) -> jax.stages.Wrapped:
  """Returns the compiled step.

  It takes the state, a uint8 batch and the number of steps taken before, and
  returns the next state (the old one's buffers are reused) and metrics.
  """
  shardings = sharding.tree_shardings(state, mesh)

  def to_use(params: Any) -> Any:
    """Returns what the model works with: gathered, unless each layer does."""
    if mesh.shape['fsdp'] == 1 or config.gather == 'layer':
      return params
    cast = variants.cast_kernels(objective.model, params)
    return sharding.gather(cast, mesh)

  def gradients(params: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
    grad = jax.grad(objective.loss, has_aux=True)
    with sharding.activations(mesh):
      grads, metrics = grad(params, batch, key, train=True)
    grads = sharding.scatter(grads, mesh)
    return jax.tree.map(lambda x: x.astype(jnp.float32), grads), metrics

  def accumulated(params: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
    n = config.accum_steps
    if n == 1:
      return gradients(params, batch, key)

    # Rows are dealt out in turn, so that every device splits its own rows and
    # none travel.
    def split(x: jax.Array) -> jax.Array:
      return x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1)

    def add(total: Any, part: Any) -> tuple[Any, None]:
      part_batch, part_key = part
      part_batch = jax.lax.with_sharding_constraint(
        part_batch, jax.sharding.NamedSharding(mesh, sharding.BATCH)
      )
      one = gradients(params, part_batch, part_key)
      return jax.tree.map(lambda a, b: a + b / n, total, one), None

    keys = jax.random.split(key, n)
    parts = (jax.tree.map(split, batch), keys)
    zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(
        gradients, params, jax.tree.map(lambda x: x[0], parts[0]), key
      ),
    )
    return jax.lax.scan(add, zeros, parts)[0]

  def train_step(
    state: State, batch: dict[str, jax.Array], step: jax.Array
  ) -> tuple[State, dict[str, Any]]:
    key = jax.random.fold_in(random_keys(config)[1], step)
    key_augment, key_loss = jax.random.split(key)
    grads, metrics = accumulated(
      to_use(state['params']), objective.augment(batch, key_augment), key_loss
    )
    updates, opt_state = optimizer.update(
      grads, state['opt_state'], state['params']
    )
    params = optax.apply_updates(state['params'], updates)
    average = state['average']
    if average:
      average = optax.incremental_update(
        params, average, 1 - config.optimizer.polyak
      )
    metrics |= {
      'grad_norm': optax.tree.norm(grads),
      # Tells parameters that are spoilt before the next loss does, and before
      # they are saved.
      'param_norm': optax.tree.norm(params),
      'lr': lr(step),
    }
    state = {'params': params, 'opt_state': opt_state, 'average': average}
    return state, metrics

  return jax.jit(
    train_step,
    donate_argnums=0,
    out_shardings=(shardings, sharding.replicated(mesh)),
  )
