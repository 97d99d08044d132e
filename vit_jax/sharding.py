"""The device mesh and the rules that place every array on it.

The mesh has three axes. The batch is split over `data` and `fsdp`; parameters,
optimizer state and averages are split over `fsdp` (ZeRO style: gathered where
they are used, gradients scattered) and, for heads and MLP, over `tensor`.
Which axes are longer than one decides what happens; the rules stay the same.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ('data', 'fsdp', 'tensor')
BATCH = PartitionSpec(('data', 'fsdp'))

# First match of the parameter's path wins. A specification belongs to the last
# dimensions of the array, so that layers stacked for a scan need no rules of
# their own.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
  (r'(query|key|value)/kernel$', ('fsdp', 'tensor', None)),
  (r'(query|key|value)/bias$', ('tensor', None)),
  (r'out/kernel$', ('tensor', None, 'fsdp')),
  (r'Dense_0/kernel$', ('fsdp', 'tensor')),
  (r'Dense_0/bias$', ('tensor',)),
  (r'Dense_1/kernel$', ('tensor', 'fsdp')),
  (r'head/kernel$', ('fsdp', None)),
  (r'(kernel|_embedding)$', ('fsdp',)),
)


def make_mesh(
  sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Returns the mesh over all devices.

  Args:
    sizes: devices along `data`, `fsdp` and `tensor`; one may be -1 for what the
      others leave.
    devices: to use instead of all there are.

  Raises:
    ValueError: if the sizes do not multiply to the number of devices.
  """
  shape = [sizes[axis] for axis in AXES]
  devices = jax.devices() if devices is None else devices
  if any(n < 1 and n != -1 for n in shape) or shape.count(-1) > 1:
    raise ValueError(
      f'mesh is {dict(sizes)}: sizes are at least 1, and one may be -1.'
    )
  if -1 in shape:
    rest = math.prod(n for n in shape if n != -1)
    shape[shape.index(-1)] = len(devices) // rest
  if math.prod(shape) != len(devices):
    raise ValueError(
      f'mesh {dict(sizes)} does not multiply to the {len(devices)} '
      'devices that there are. Set one of data, fsdp, tensor to -1 to fill '
      'it up.'
    )
  return jax.make_mesh(
    shape,
    AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
    devices=devices,
  )


def describe(mesh: Mesh) -> str:
  """Returns the devices and the axes in words."""
  axes = ', '.join(f'{axis}={n}' for axis, n in mesh.shape.items())
  return f'{mesh.size} x {mesh.devices.flat[0].device_kind}, mesh {axes}'


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of what every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
  """Returns the sharding of every array of a tree by the first rule that fits.

  Optimizer state and averages carry the parameters' names at the end of their
  paths, so the same rules place them. An axis that does not divide its
  dimension is left out for that array.

  Args:
    tree: arrays or their shapes.
    mesh: from `make_mesh`.
  """

  def place(path: tuple[Any, ...], x: Any) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    for pattern, spec in RULES:
      if re.search(pattern, name):
        return NamedSharding(mesh, _fit(spec, x.shape, mesh))
    return replicated(mesh)

  return jax.tree_util.tree_map_with_path(place, tree)


def _fit(
  spec: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh
) -> PartitionSpec:
  if len(shape) < len(spec):
    return PartitionSpec()  # named like a parameter, and less than it
  padded = (None,) * (len(shape) - len(spec)) + spec
  return PartitionSpec(
    *(
      axis if axis and n % mesh.shape[axis] == 0 else None
      for axis, n in zip(padded, shape, strict=True)
    )
  )


def global_batch(
  batch: Mapping[str, np.ndarray], mesh: Mesh
) -> dict[str, jax.Array]:
  """Assembles this process's part of a batch into arrays over all devices."""
  sharding = NamedSharding(mesh, BATCH)
  return {
    name: jax.make_array_from_process_local_data(sharding, x)
    for name, x in batch.items()
  }
