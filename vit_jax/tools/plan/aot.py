"""Prepares programs for compilation ahead of time (AOT).

The devices need not be attached. `plan` reports the costs of programs, and
`bench` runs them.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from vit_jax.experiment import Experiment
from vit_jax.models import attention
from vit_jax.training import sharding


class Program(NamedTuple):
  """A jitted function and the shapes of its arguments."""

  function: Any
  shapes: tuple[Any, ...]  # trees of `jax.ShapeDtypeStruct` with shardings

  def lower(self) -> jax.stages.Lowered:
    """Lowers the program for the platform of the arguments' devices."""
    placed = jax.tree.leaves(self.shapes)[0].sharding
    (platform,) = {device.platform for device in placed.device_set}
    # A TPU that is not attached has no backend in this process, so JAX must be
    # told the platform. For attached devices, JAX finds it out.
    if platform == 'tpu':
      with attention.portable():
        traced = self.function.trace(*self.shapes)
        return traced.lower(lowering_platforms=('tpu',))
    return self.function.lower(*self.shapes)


def training(experiment: Experiment) -> Program:
  """Returns the training step of an experiment, as `train` runs it."""
  fixed = experiment.fixed_shapes()
  batch = experiment.objective.batch_shapes(experiment.config.batch_size)
  rows = _placed(batch, NamedSharding(experiment.mesh, sharding.BATCH))
  number = jax.ShapeDtypeStruct((), np.int32)
  step = _placed(number, sharding.replicated(experiment.mesh))
  return Program(
    experiment.train_step(), (experiment.state_shapes, fixed, rows, step)
  )


def inference(experiment: Experiment, device: jax.Device) -> Program:
  """Returns a program that computes the model's main output.

  Its arguments are the parameters and uint8 images BHWC.
  """
  objective = experiment.objective

  def apply(params: Any, images_BHWC: Any) -> Any:
    images_BHWC = objective.images.normalize(images_BHWC)
    return objective.model.apply({'params': params}, images_BHWC)[0]

  arguments = (
    experiment.state_shapes.params,
    objective.batch_shapes(experiment.config.batch_size)['image'],
  )
  return Program(
    jax.jit(apply), _placed(arguments, SingleDeviceSharding(device))
  )


def peak_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the peak memory per device in bytes, including the arguments."""
  found: Any = compiled.memory_analysis()
  # On TPU, the compiler's peak counts each array only while it is in use. On
  # other platforms it omits temporary arrays, so return the sum of all arrays.
  placed = jax.tree.leaves(compiled.input_shardings)[0]
  if next(iter(placed.device_set)).platform == 'tpu':
    return found.peak_memory_in_bytes
  return (
    found.argument_size_in_bytes
    + found.output_size_in_bytes
    + found.temp_size_in_bytes
    - found.alias_size_in_bytes
  )


def _placed(tree: Any, where: Sharding) -> Any:
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree
  )
