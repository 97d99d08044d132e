"""The device mesh and the rules that place every array on it.

The mesh has four axes. The batch is sharded over `slice`, `data` and `fsdp`.
Kernels and embeddings are sharded over `fsdp`; in attention and MLP, kernels
and most biases are sharded over `tensor`. Optimizer state and averages are
sharded like their parameters. Each TPU slice holds a full copy of all
parameters, so little besides gradients crosses the network between slices.

Parameters sharded over `fsdp` are gathered before use: once per step (ZeRO-1,
2004.13336) or in each layer (FSDP, ZeRO-3). Gradients are reduce-scattered, and
every device updates its shard of the parameters. Between steps, arrays sharded
over `fsdp` are sharded over `data` too, if the shards are whole tiles of TPU
memory.
"""

import contextlib
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.models import heads, layers, tpu_layout
from vit_jax.models.model import BATCH_AXES, Axes, Partitions
from vit_jax.training import processes

AXES = ('slice', 'data', 'fsdp', 'tensor')
# A TPU's memory is laid out in tiles of 16 rows (of bfloat16) and 128 lanes.
_ROWS, _LANES = 16, 128
BATCH = PartitionSpec(BATCH_AXES)

# Sharding rules for all models. The first rule that matches a path applies;
# `Model.partitions` come before these rules.
RULES: Partitions = (
  *layers.PARTITIONS,
  *heads.PARTITIONS,
  (r'(kernel|_embedding)$', ('fsdp',)),
)


def make_mesh(
  sizes: Mapping[str, int],
  devices: Sequence[jax.Device] | None = None,
  width: int = 1,
) -> Mesh:
  """Arranges devices (by default all) in a mesh with the axes `AXES`.

  Args:
    sizes: devices along each axis. If `slice` is -1 or missing, it is the
      number of TPU slices. If one other axis is -1, it gets the remaining
      devices of a slice.
    width: width of the model, which decides `data` and `fsdp` if both are -1.
      The shard of a kernel has at least 16 rows, because TPUs gather smaller
      shards by all-reduce. If `data` and `fsdp` share eight or more devices,
      `fsdp` covers at most half of them. If it covers all, the TPU compiler
      all-reduces gradients instead of reduce-scattering them.

  Raises:
    ValueError: if the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  slices = _slices(devices, sizes.get('slice', -1))
  inside = len(slices[0])
  given = {axis: sizes[axis] for axis in AXES[1:]}
  sizes = dict(given)
  if sizes['data'] == sizes['fsdp'] == -1 and sizes['tensor'] > 0:
    rest = inside // sizes['tensor']
    most = rest // 2 if rest >= 8 else rest
    fitting = (
      n
      for n in range(1, most + 1)
      if rest % n == 0 and (n == 1 or (width % n == 0 and width // n >= _ROWS))
    )
    sizes['fsdp'] = max(fitting, default=1)
  shape = list(sizes.values())
  if shape.count(-1) == 1:
    rest = -math.prod(shape)
    shape[shape.index(-1)] = inside // rest if rest > 0 else 0
  if min(shape) < 1 or math.prod(shape) != inside:
    raise ValueError(
      f'mesh {given} does not multiply to the {inside} devices of each of '
      f'{len(slices)} slices. Sizes must be -1 or at least 1. Set one of data, '
      'fsdp and tensor, or both data and fsdp, to -1 to use the remaining '
      'devices.'
    )
  placed = np.stack([_placed(shape, each) for each in slices])
  types = (jax.sharding.AxisType.Auto,) * len(AXES)
  return Mesh(placed, AXES, axis_types=types)


def _slices(
  devices: Sequence[jax.Device], count: int
) -> list[Sequence[jax.Device]]:
  """Groups devices into `count` equal parts, or by TPU slice if it is -1.

  GPUs and CPUs count as one slice. (Their `slice_index` differs between hosts,
  but state may be sharded across hosts.)
  """
  found: dict[int, list[jax.Device]] = {}
  for device in devices:
    is_tpu = device.platform == 'tpu'
    index = getattr(device, 'slice_index', 0) if is_tpu else 0
    found.setdefault(index, []).append(device)
  if count in (-1, len(found)):
    return [found[index] for index in sorted(found)]
  if count < 1 or len(devices) % count or (len(found) > 1 and count > 1):
    raise ValueError(
      f'mesh.slice is {count}, which does not fit {len(devices)} devices '
      f'(slices: {len(found)}). Set it to -1 to use all slices.'
    )
  size = len(devices) // count
  return [devices[i : i + size] for i in range(0, len(devices), size)]


def _placed(shape: Sequence[int], devices: Sequence[jax.Device]) -> Any:
  """Returns the devices of one slice as an array of a shape."""
  if devices[0].device_kind == 'TPU v4' and devices[-1].core_on_chip:
    # A topology for ahead-of-time compilation lists the cores of a v4 chip one
    # by one, which `create_device_mesh` does not support.
    return np.asarray(devices).reshape(shape)
  # A mesh axis may take a part of a physical axis. In a slice of 16 x 16 chips,
  # an axis of 64 devices takes 16 x 4 chips.
  return mesh_utils.create_device_mesh(
    shape, devices, allow_split_physical_axes=True
  )


def describe(mesh: Mesh) -> str:
  """Describes the devices and the axes of a mesh."""
  axes = ', '.join(
    f'{axis}={n}' for axis, n in mesh.shape.items() if axis != 'slice' or n > 1
  )
  return f'{mesh.size} x {mesh.devices.flat[0].device_kind}, mesh {axes}'


def shards(mesh: Mesh | jax.sharding.AbstractMesh) -> int:
  """Returns the number of shards of a batch."""
  return math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of arrays that every device holds in full."""
  return NamedSharding(mesh, PartitionSpec())


def tree_shardings(tree: Any, mesh: Mesh, partitions: Partitions = ()) -> Any:
  """Returns the sharding of every array of a tree by the sharding rules.

  Paths of optimizer state and averages end with the parameters' names, so the
  same rules apply. A mesh axis that does not divide an array's dimension does
  not shard it. Dimensions sharded over `fsdp` may be sharded over `data` too
  (see `_over_data`). The model's own rules, `partitions`, come before `RULES`.
  """

  def place(path: tuple[Any, ...], x: Any) -> NamedSharding:
    spec = _fit(_rule(path, partitions), x.shape, mesh)
    return NamedSharding(mesh, _over_data(spec, x.shape, mesh))

  return jax.tree_util.tree_map_with_path(place, tree)


def gather(params: Any, mesh: Mesh, partitions: Partitions = ()) -> Any:
  """Gathers parameters over `fsdp` and `data`; `tensor` still shards them."""
  return _constrained(params, mesh, partitions, {'fsdp'})


def scatter(grads: Any, mesh: Mesh, partitions: Partitions = ()) -> Any:
  """Shards gradients like the parameters.

  Otherwise the partitioner may keep full gradients on every device. The first
  constraint shards them over `fsdp`, the second constraint over `data` too.
  With both axes in one constraint, TPUs would all-reduce full gradients.
  """
  grads = _constrained(grads, mesh, partitions, set())
  shardings = tree_shardings(grads, mesh, partitions)
  return jax.tree.map(jax.lax.with_sharding_constraint, grads, shardings)


def _rule(path: tuple[Any, ...], partitions: Partitions) -> tuple[Axes, ...]:
  name = jax.tree_util.keystr(path, simple=True, separator='/')
  rules = (*partitions, *RULES)
  return next((spec for pattern, spec in rules if re.search(pattern, name)), ())


def _constrained(
  tree: Any, mesh: Mesh, partitions: Partitions, without: set[str]
) -> Any:
  def place(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
    spec: tuple[Axes, ...] = tuple(
      tuple(axis for axis in _names(axes) if axis not in without)
      for axes in _rule(path, partitions)
    )
    matrix, spec = tpu_layout.as_matrix(x, spec)
    sharding = NamedSharding(mesh, _fit(spec, matrix.shape, mesh))
    return jax.lax.with_sharding_constraint(matrix, sharding).reshape(x.shape)

  return jax.tree_util.tree_map_with_path(place, tree)


@contextlib.contextmanager
def activations(mesh: Mesh) -> Iterator[None]:
  """Applies the models' activation sharding constraints on a mesh.

  Examples then stay on their devices. Without constraints, the partitioner may
  all-reduce activations over `fsdp` instead of gathering weights.
  """
  with (
    jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    nn.logical_axis_rules([('B', BATCH[0])]),
  ):
    yield


def _fit(
  spec: tuple[Axes, ...], shape: tuple[int, ...], mesh: Mesh
) -> PartitionSpec:
  """Returns a rule without mesh axes that do not divide their dimension."""
  if len(shape) < len(spec):
    # The array has the name of a parameter, but fewer dimensions.
    return PartitionSpec()
  fitting: list[Axes] = [None] * (len(shape) - len(spec))
  for axes, n in zip(spec, shape[len(fitting) :], strict=True):
    kept: tuple[str, ...] = ()
    for axis in _names(axes):
      if n % math.prod(mesh.shape[name] for name in (*kept, axis)) == 0:
        kept += (axis,)
    fitting.append(kept[0] if len(kept) == 1 else kept or None)
  return PartitionSpec(*fitting)


def _over_data(
  spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh
) -> PartitionSpec:
  """Shards dimensions of `fsdp` over `data` too, if shards are whole tiles."""
  if min(mesh.shape['data'], mesh.shape['fsdp']) == 1:
    return spec
  split: list[Axes] = []
  for i, (axes, n) in enumerate(zip(spec, shape, strict=False)):
    names = _names(axes)
    parts = math.prod(mesh.shape[axis] for axis in (*names, 'data'))
    tile = _LANES if i == len(shape) - 1 else _ROWS
    fits = 'fsdp' in names and n % (parts * tile) == 0
    split.append((*names, 'data') if fits else axes)
  return PartitionSpec(*split)


def _names(axes: Axes) -> tuple[str, ...]:
  return (axes,) if isinstance(axes, str) else axes or ()


def batch_share(mesh: Mesh) -> tuple[int, int]:
  """Returns the index of this process's part of a batch, and the part count.

  Processes whose devices differ only along `tensor` load the same part. Raises
  ValueError if the parts of two processes overlap partially.
  """
  rows: dict[int, set[tuple[int, ...]]] = {}
  for (*row, _), device in np.ndenumerate(mesh.devices):
    rows.setdefault(device.process_index, set()).add(tuple(row))
  parts = sorted({tuple(sorted(found)) for found in rows.values()})
  if sum(map(len, parts)) != shards(mesh):
    each = mesh.size // len(rows)
    raise ValueError(
      f'mesh.tensor is {mesh.shape["tensor"]}, and each of the {len(rows)} '
      f'processes has {each} devices. Choose a divisor or multiple of {each}.'
    )
  mine = tuple(sorted(rows[jax.process_index()]))
  return parts.index(mine), len(parts)


def place(tree: Any, shardings: Any) -> Any:
  """Places NumPy arrays on the devices, by one sharding or a tree of shardings.

  Raises ValueError if the arrays differ between processes.
  """
  if jax.process_count() == 1:
    return jax.device_put(tree, shardings)
  # `device_put` would gather whole arrays to compare them.
  sums = [zlib.crc32(np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]
  processes.refuse_unlike(
    lambda: sums,
    'The processes start from different parameters: give all of them the same '
    'checkpoint, and use machines of one kind.',
  )
  if isinstance(shardings, NamedSharding):
    shardings = jax.tree.map(lambda _: shardings, tree)
  return jax.tree.map(
    lambda x, s: jax.make_array_from_callback(x.shape, s, lambda i: x[i]),
    tree,
    shardings,
  )


def on_each_device(function: Callable[..., Any]) -> Callable[..., Any]:
  """Makes a function of rows run separately on each device's rows.

  Otherwise a data-dependent loop would synchronise all devices in every
  iteration. The mesh comes from `activations`. Without a mesh, or if the rows
  do not divide evenly, the function runs unchanged.
  """

  def apply(*rows: jax.Array) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    parts = shards(mesh)
    if parts == 1 or len(rows[0]) % parts:
      return function(*rows)
    # check_vma rejects loops whose initial values are equal on all devices.
    whole = jax.shard_map(
      function, in_specs=BATCH, out_specs=BATCH, check_vma=False
    )
    return whole(*rows)

  return apply


def global_batch(
  batch: Mapping[str, np.ndarray], mesh: Mesh
) -> dict[str, jax.Array]:
  """Assembles this process's part of a batch into arrays over all devices."""
  sharding = NamedSharding(mesh, BATCH)
  return {
    name: jax.make_array_from_process_local_data(sharding, x)
    for name, x in batch.items()
  }


def replicate(x: np.ndarray | np.generic, mesh: Mesh) -> jax.Array:
  """Replicates an array, equal in all processes, to all devices."""
  return jax.make_array_from_process_local_data(replicated(mesh), np.asarray(x))
