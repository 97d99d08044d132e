"""Our training step and our inference, for a device at hand or a described one.

The step is that of `train`: uint8 images in, flipped and normalised on the
device, cross-entropy, Adam with decoupled weight decay, the norms that training
watches; the old state's memory is taken by the new one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import sharding, train
from vit_jax.data import augment
from vit_jax.models import variants
from vit_jax.run import Durations

NUM_CLASSES = 1000

# The rate changes nothing of what is measured: the full one, all along.
_DURATIONS = Durations(10**9, 0, (), 1, 1, 1)


def config_of(
  variant: str,
  image_size: int,
  batch_size: int,
  dtype: str,
  overrides: Mapping[str, str],
) -> ConfigDict:
  """Returns a config that trains a model.

  Args:
    variant: of a model, as in `ti16`.
    image_size: the side in pixels.
    batch_size: images a step.
    dtype: of the computation.
    overrides: fields of the config, as in {'model.remat': 'cheap'}.

  Raises:
    ValueError: for what cannot work.
  """
  if batch_size < 1:
    raise ValueError(f'--batch_sizes has {batch_size}: at least 1 image.')
  config = config_lib.base()
  config.batch_size = batch_size
  config.data.image_size = str(image_size)
  config_lib.choose_model(config, variant)
  config.model.dtype = dtype
  config_lib.override(config, dict(overrides))
  model_of(config)  # refuses what does not fit together
  train.make_objective(config, model_of(config))
  return config


def model_of(config: ConfigDict) -> variants.Model:
  """Returns the model of a config."""
  image_size = config_lib.image_size(config.data.image_size)
  return variants.build(
    num_classes=NUM_CLASSES, image_size=image_size, **config.model
  )


@dataclasses.dataclass(frozen=True)
class Program:
  """A program for one device.

  Attributes:
    function: jitted.
    shapes: of its arguments, with shardings.
  """

  function: Any
  shapes: tuple[Any, ...]

  def compile(self) -> jax.stages.Compiled:
    """Compiles it, for the platform of its arguments' device."""
    placed = jax.tree.leaves(self.shapes)[0].sharding
    (platform,) = {device.platform for device in placed.device_set}
    traced = self.function.trace(*self.shapes)
    # CUDA and ROCm are what JAX calls platforms of GPUs when it lowers.
    if platform == 'tpu':
      return traced.lower(lowering_platforms=('tpu',)).compile()
    return traced.lower().compile()


def training(config: ConfigDict, device: jax.Device) -> Program:
  """Returns the training step of a config; see `train.make_train_step`.

  Its arguments are the state, the batch and the number of steps taken before.
  """
  mesh = sharding.make_mesh(config.mesh, [device], config.model.width)
  train.check_batch_size(config, mesh)
  model = model_of(config)
  lr = train.make_schedule(config, _DURATIONS)
  optimizer = train.make_optimizer(config, lr)
  shapes = jax.eval_shape(lambda: _new_state(config, optimizer))
  step = train.make_train_step(
    config, train.make_objective(config, model), optimizer, lr, mesh, shapes
  )
  whole = sharding.replicated(mesh)
  arguments = (
    shapes,
    batch_shapes(config),
    jax.ShapeDtypeStruct((), np.int32),
  )
  return Program(step, _placed(arguments, whole))


def new_state(config: ConfigDict, program: Program) -> Any:
  """Returns the state that a training program starts from, on its device."""
  lr = train.make_schedule(config, _DURATIONS)
  optimizer = train.make_optimizer(config, lr)
  shardings = jax.tree.map(lambda x: x.sharding, program.shapes[0])
  return jax.jit(
    lambda: _new_state(config, optimizer), out_shardings=shardings
  )()


def _new_state(config: ConfigDict, optimizer: Any) -> Any:
  image_size = config_lib.image_size(config.data.image_size)
  return train.new_state(
    config, optimizer, train.new_params(config, model_of(config), image_size)
  )


def inference(config: ConfigDict, device: jax.Device) -> Program:
  """Returns the way from uint8 images to logits, BC.

  Its arguments are the parameters and the images, BHWC.
  """
  model = model_of(config)
  image_size = config_lib.image_size(config.data.image_size)

  def apply(params: Any, images_BHWC: Any) -> Any:
    images_BHWC = augment.normalize(
      images_BHWC, config.data.mean, config.data.std
    )
    return model.apply({'params': params}, images_BHWC)[0]

  arguments = (
    jax.eval_shape(lambda: train.new_params(config, model, image_size)),
    batch_shapes(config)['image'],
  )
  single = jax.sharding.SingleDeviceSharding(device)
  return Program(jax.jit(apply), _placed(arguments, single))


def batch_shapes(config: ConfigDict) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns what a batch of a config is."""
  B = config.batch_size
  H, W = config_lib.image_size(config.data.image_size)
  return {
    'image': jax.ShapeDtypeStruct((B, H, W, 3), np.uint8),
    'label': jax.ShapeDtypeStruct((B,), np.int32),
  }


def random_batch(config: ConfigDict) -> dict[str, np.ndarray]:
  """Returns a batch of noise."""
  rng = np.random.default_rng(0)
  shapes = batch_shapes(config)
  return {
    'image': rng.integers(0, 256, shapes['image'].shape, np.uint8),
    'label': rng.integers(0, NUM_CLASSES, config.batch_size, np.int32),
  }


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the most memory that a program has in use, arguments included."""
  found: Any = compiled.memory_analysis()
  whole = (
    found.argument_size_in_bytes
    + found.output_size_in_bytes
    + found.temp_size_in_bytes
    - found.alias_size_in_bytes
  )
  # TPUs know when each array is needed. Others say what all of them take; their
  # peak leaves out what is temporary.
  is_tpu = any(
    device.platform == 'tpu'
    for sharding in jax.tree.leaves(compiled.input_shardings)
    for device in sharding.device_set
  )
  return found.peak_memory_in_bytes if is_tpu else whole


def _placed(tree: Any, sharding: jax.sharding.Sharding) -> Any:
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
  )
