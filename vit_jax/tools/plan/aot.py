"""Programs compiled ahead of time, for devices that need not be there.

The training step and the way to logits, with the shapes of all that they take
and where on the devices it lies: enough for the compiler. `plan` describes them
and `bench` runs them.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from vit_jax.data import device_augmentation
from vit_jax.experiment import Experiment
from vit_jax.models import attention
from vit_jax.training import sharding


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
    # A TPU that is described is no backend of this process; CUDA and ROCm are
    # what JAX calls platforms of GPUs when it lowers.
    if platform == 'tpu':
      with attention.portable():
        traced = self.function.trace(*self.shapes)
        return traced.lower(lowering_platforms=('tpu',))
    return self.function.lower(*self.shapes)


def training(experiment: Experiment) -> Program:
  """Returns the training step of an experiment as `train` runs it.

  Its arguments are those of `Experiment.train_step`.
  """
  fixed = experiment.fixed_shapes()
  batch = experiment.objective.batch_shapes(experiment.config.batch_size)
  rows = _placed(batch, NamedSharding(experiment.mesh, sharding.BATCH))
  number = jax.ShapeDtypeStruct((), np.int32)
  step = _placed(number, sharding.replicated(experiment.mesh))
  return Program(
    experiment.train_step(), (experiment.state_shapes, fixed, rows, step)
  )


def inference(experiment: Experiment, device: jax.Device) -> Program:
  """Returns the way from uint8 images to what the model puts out.

  Its arguments are the parameters and the images, BHWC.
  """
  config, model = experiment.config, experiment.objective.model

  def apply(params: Any, images_BHWC: Any) -> Any:
    images_BHWC = device_augmentation.normalize(
      images_BHWC, config.data.mean, config.data.std
    )
    return model.apply({'params': params}, images_BHWC)[0]

  arguments = (
    experiment.state_shapes.params,
    experiment.objective.batch_shapes(config.batch_size)['image'],
  )
  return Program(
    jax.jit(apply), _placed(arguments, SingleDeviceSharding(device))
  )


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the most of a device's memory in use, arguments included."""
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


def _placed(tree: Any, where: Sharding) -> Any:
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree
  )
