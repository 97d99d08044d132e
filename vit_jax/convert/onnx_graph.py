"""Collects ONNX nodes while `onnx_trace` translates the JAX program of a model.

The inputs and outputs of convolutions are transposed, because ONNX has another
layout. onnxruntime cancels these transpositions when it opens a file.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from onnx import IR_VERSION, checker, defs, helper, numpy_helper

# Permutations from BHWC to BCHW and back.
NCHW = (0, 3, 1, 2)
NHWC = (0, 2, 3, 1)
# Before opset 13, Softmax and ReduceSum have another definition. All recent
# runtimes support opset 13.
OLDEST = 13
# Equal constants of up to this size are stored once.
SMALL_BYTES = 1024
# Limit of the size of all weights: a protobuf file holds at most 2 GiB.
MAX_BYTES = 2**31 - 2**22


@dataclasses.dataclass(frozen=True)
class Tensor:
  """An input of the graph, or the output of a node.

  Sizes are integers or symbolic dimensions of `jax.export`. An axis that ONNX
  broadcasts may have size 1 instead of its size in JAX.
  """

  name: str
  shape: tuple[Any, ...]
  dtype: np.dtype


# A tensor gets its value when the file runs; an array is stored in the file.
Value = Tensor | np.ndarray


class Graph:
  """A list of nodes in the order in which they run."""

  def __init__(self, inputs: Sequence[Tensor]):
    self.scope = ''  # prefix of the names of new nodes
    self._inputs = inputs
    self._nodes: list[Any] = []  # onnx.NodeProto, named like its only output
    self._constants: dict[str, np.ndarray] = {}
    self._small: dict[tuple, str] = {}
    self._made: dict[tuple, Tensor] = {}

  def node(
    self,
    op: str,
    inputs: Sequence[Value],
    shape: Sequence[Any],
    dtype: Any = None,
    **attributes: Any,
  ) -> Tensor:
    """Adds a node and returns its output, of the given shape and dtype.

    `dtype` defaults to the dtype of the first input.
    """
    name = f'{self.scope}/{op}_{len(self._nodes)}'.lstrip('/')
    names = [self._name(x, f'{name}.{i}') for i, x in enumerate(inputs)]
    made = helper.make_node(op, names, [name], name, **attributes)
    self._nodes.append(made)
    return Tensor(name, tuple(shape), np.dtype(dtype or inputs[0].dtype))

  def transpose(self, x: Value, permutation: Sequence[int]) -> Value:
    permutation = tuple(permutation)
    if isinstance(x, np.ndarray):
      return x.transpose(permutation)
    if permutation == tuple(range(len(x.shape))):
      return x
    shape = [x.shape[axis] for axis in permutation]
    return self.node('Transpose', [x], shape, perm=permutation)

  def elementwise(
    self, op: str, *inputs: Value, dtype: Any = None, **attributes: Any
  ) -> Value:
    """Adds an elementwise node; inputs are broadcast as in NumPy."""
    shape = jax.lax.broadcast_shapes(*(x.shape for x in inputs))
    return self.node(op, inputs, shape, dtype, **attributes)

  def reshape(self, x: Value, shape: Sequence[Any]) -> Value:
    """Reshapes a value; at most one size of the new shape may be symbolic."""
    shape = tuple(shape)
    if x.shape == shape:
      return x
    if isinstance(x, np.ndarray):
      return x.reshape(shape)
    sizes = [d if isinstance(d, int) else -1 for d in shape]
    return self.node('Reshape', [x, np.array(sizes, np.int64)], shape)

  def expand(self, x: Value, shape: Sequence[Any]) -> Value:
    """Returns a value repeated along its axes of size 1."""
    shape = tuple(shape)
    if x.shape == shape:
      return x
    if not is_static(shape):
      return self.node('Expand', [x, self._sizes(shape)], shape)
    if isinstance(x, np.ndarray):
      return np.broadcast_to(x, shape)
    return self.node('Expand', [x, np.array(shape, np.int64)], shape)

  def slice(
    self, x: Tensor, ranges: Mapping[int, tuple[int, int, int]]
  ) -> Tensor:
    """Slices a tensor; `ranges` maps an axis to its (start, end, step)."""
    if not ranges:
      return x
    shape = list(x.shape)
    for axis, bounds in ranges.items():
      shape[axis] = len(range(*bounds))
    starts, ends, steps = (
      np.array(column, np.int64)
      for column in zip(*ranges.values(), strict=True)
    )
    axes = np.array(list(ranges), np.int64)
    return self.node('Slice', [x, starts, ends, axes, steps], shape)

  def cast(self, x: Value, dtype: Any) -> Value:
    if x.dtype == dtype:
      return x
    if isinstance(x, np.ndarray):
      return x.astype(dtype)
    to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return self.elementwise('Cast', x, dtype=dtype, to=to)

  def _sizes(self, shape: tuple[Any, ...]) -> Tensor:
    """Returns a shape as a tensor; its first size is n times the batch size."""
    first, (first_size, *sizes) = self._inputs[0], shape
    batch = first.shape[0]
    times = first_size // batch
    if not is_static([times, *sizes]) or first_size != times * batch:
      raise NotImplementedError(
        f'the shape {shape}, which is not a multiple of the batch size,'
      )
    if shape not in self._made:
      first = self.node('Shape', [first], (1,), np.int64, start=0, end=1)
      if times != 1:
        factor = np.array([times], np.int64)
        first = self.node('Mul', [first, factor], (1,), np.int64)
      self._made[shape] = self.node(
        'Concat', [first, np.array(sizes, np.int64)], (len(shape),), axis=0
      )
    return self._made[shape]

  def _name(self, x: Value, name: str) -> str:
    """Returns the name of a value; a new constant gets the given name."""
    if isinstance(x, Tensor):
      return x.name
    if x.nbytes <= SMALL_BYTES:
      key = (x.dtype.str, x.shape, x.tobytes())
      name = self._small.setdefault(key, name)
    self._constants[name] = x
    return name

  def to_model(
    self,
    outputs: Mapping[str, Value],
    metadata: Mapping[str, str],
    opset: int | None = None,
  ) -> Any:
    """Returns an `onnx.ModelProto` of the nodes that the outputs need.

    The opset defaults to the lowest that suffices.

    Raises ValueError if the opset lacks an operator or is unknown, or the
    weights are too large for one file.
    """
    for name, x in outputs.items():
      source = self._name(x, 'constant')
      self._nodes.append(helper.make_node('Identity', [source], [name], name))
    needed, live = set(outputs), []
    for node in reversed(self._nodes):
      if node.name in needed:
        needed.update(node.input)
        live.append(node)
    constants = {k: x for k, x in self._constants.items() if k in needed}
    size_bytes = sum(x.nbytes for x in constants.values())
    if size_bytes > MAX_BYTES:
      raise ValueError(
        f'The model has {size_bytes / 1e9:.1f} GB of weights; an ONNX file '
        'holds at most 2 GB. Use --to=stablehlo or orbax.'
      )
    model = helper.make_model(
      helper.make_graph(
        live[::-1],
        'vit_jax',
        [_describe(x.name, x) for x in self._inputs],
        [_describe(name, x) for name, x in outputs.items()],
      ),
      producer_name='vit_jax',
    )
    # A generator, because a list would be a second copy of all weights.
    model.graph.initializer.extend(
      numpy_helper.from_array(x, name) for name, x in constants.items()
    )
    helper.set_model_props(model, dict(metadata))
    _set_opset(model, opset)
    return model


def _set_opset(model: Any, opset: int | None) -> None:
  """Sets a model's opset and the matching IR version.

  The default is the lowest opset that has all operators, because runtimes
  refuse files whose opset is newer than theirs.
  """
  newest = defs.onnx_opset_version()
  needed: dict[str, int] = {}
  for node in model.graph.node:
    opsets = range(OLDEST, newest)
    since = next((n for n in opsets if _is_valid(node, n)), newest)
    needed[node.op_type] = max(since, needed.get(node.op_type, OLDEST))
  least = max(needed.values())
  if opset is not None and not least <= opset <= newest:
    missing = ', '.join(f'{k} {n}' for k, n in needed.items() if n > opset)
    why = f'the model needs {missing}' if missing else 'onnx is too old'
    raise ValueError(
      f'--opset={opset} must be from {least} to {newest}: {why}. Without '
      f'--opset it is {least}.'
    )
  version = helper.make_opsetid('', opset or least)
  model.ClearField('opset_import')
  model.opset_import.append(version)
  model.ir_version = helper.find_min_ir_version_for([version])


def _is_valid(node: Any, opset: int) -> bool:
  """Whether an opset has a node's operator, inputs and attributes."""
  context = checker.C.CheckerContext()
  context.ir_version = IR_VERSION
  context.opset_imports = {'': opset}
  try:
    checker.check_node(node, context)
  except checker.ValidationError:
    return False
  return True


def _describe(name: str, x: Value) -> Any:
  """Returns the `onnx.ValueInfoProto` of a value."""
  return helper.make_tensor_value_info(
    name,
    helper.np_dtype_to_tensor_dtype(x.dtype),
    [d if is_static([d]) else str(d) for d in x.shape],
  )


def is_static(shape: Sequence[Any]) -> bool:
  """Whether all sizes are integers instead of symbolic dimensions."""
  return all(isinstance(d, int | np.integer) for d in shape)
