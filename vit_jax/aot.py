"""Programs compiled ahead of time, for devices that need not be there.

The training step and the way to logits, with the shapes of all that they take
and where on the devices it lies: enough for the compiler, and for `new_state`
to begin with. `plan` describes them and `bench` runs them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import sharding, train
from vit_jax.data import augment
from vit_jax.models import variants
from vit_jax.run import Durations

# Neither the length of training nor its rate changes the program; in so long a
# one the rate of the first steps is the full one.
_DURATIONS = Durations(10**9, 0, (), 1, 1, 1)


@dataclasses.dataclass(frozen=True)
class Program:
  """A program and where it runs.

  Attributes:
    function: jitted.
    shapes: of its arguments, with shardings.
  """

  function: Any
  shapes: tuple[Any, ...]

  def lower(self) -> jax.stages.Lowered:
    """Traces it for the platform of its arguments' devices."""
    placed = jax.tree.leaves(self.shapes)[0].sharding
    (platform,) = {device.platform for device in placed.device_set}
    traced = self.function.trace(*self.shapes)
    # A TPU that is described is no backend of this process; CUDA and ROCm are
    # what JAX calls platforms of GPUs when it lowers.
    if platform == 'tpu':
      return traced.lower(lowering_platforms=('tpu',))
    return traced.lower()


def model_of(config: ConfigDict, num_classes: int) -> variants.Model:
  """Returns the model of a config."""
  image_size = config_lib.image_size(config.data.image_size)
  return variants.build(
    num_classes=num_classes, image_size=image_size, **config.model
  )


def training(
  config: ConfigDict, devices: Sequence[jax.Device], num_classes: int
) -> Program:
  """Returns the training step of a config as `train` runs it.

  Its arguments are the state, the batch and the number of steps taken before;
  see `train.make_train_step`.

  Args:
    config: from a file in `configs/`.
    devices: that the config's mesh is laid over.
    num_classes: C.

  Raises:
    ValueError: for a config that cannot work.
  """
  mesh = sharding.make_mesh(config.mesh, devices, config.model.width)
  train.check_batch_size(config, mesh)
  model = model_of(config, num_classes)
  lr = train.make_schedule(config, _DURATIONS)
  optimizer = train.make_optimizer(config, lr)
  shapes = jax.eval_shape(lambda: _new_state(config, num_classes))
  step = train.make_train_step(
    config, train.make_objective(config, model), optimizer, lr, mesh, shapes
  )
  state = jax.tree.map(_placed, shapes, sharding.tree_shardings(shapes, mesh))
  rows = NamedSharding(mesh, sharding.BATCH)
  batch = jax.tree.map(lambda x: _placed(x, rows), batch_shapes(config))
  number = jax.ShapeDtypeStruct((), np.int32)
  return Program(
    step, (state, batch, _placed(number, sharding.replicated(mesh)))
  )


def new_state(config: ConfigDict, program: Program, num_classes: int) -> Any:
  """Returns the state that a training program starts from, on its devices."""
  shardings = jax.tree.map(lambda x: x.sharding, program.shapes[0])
  return jax.jit(
    lambda: _new_state(config, num_classes), out_shardings=shardings
  )()


def _new_state(config: ConfigDict, num_classes: int) -> Any:
  optimizer = train.make_optimizer(
    config, train.make_schedule(config, _DURATIONS)
  )
  params = train.new_params(
    config,
    model_of(config, num_classes),
    config_lib.image_size(config.data.image_size),
  )
  return train.new_state(config, optimizer, params)


def inference(
  config: ConfigDict, device: jax.Device, num_classes: int
) -> Program:
  """Returns the way from uint8 images to logits, BC.

  Its arguments are the parameters and the images, BHWC.
  """
  model = model_of(config, num_classes)
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
  single = SingleDeviceSharding(device)
  return Program(
    jax.jit(apply), jax.tree.map(lambda x: _placed(x, single), arguments)
  )


def batch_shapes(config: ConfigDict) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns what a batch of a config is."""
  B = config.batch_size
  H, W = config_lib.image_size(config.data.image_size)
  return {
    'image': jax.ShapeDtypeStruct((B, H, W, 3), np.uint8),
    'label': jax.ShapeDtypeStruct((B,), np.int32),
  }


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the most that a program has in use of a device's memory.

  Its arguments are included.
  """
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
    for placed in jax.tree.leaves(compiled.input_shardings)
    for device in placed.device_set
  )
  return found.peak_memory_in_bytes if is_tpu else whole


def _placed(x: jax.ShapeDtypeStruct, where: Sharding) -> Any:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
