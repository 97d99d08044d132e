"""ONNX files with weights that are in memory once.

Protocol Buffers would take three more copies to write them, and the checker two
to read them.
"""

import os
from typing import Any

import numpy as np

from vit_jax.convert.onnx_graph import describe

# That Protocol Buffers read, but for the names of the weights.
MAX_BYTES = 2**31 - 2**20

# Numbers of fields, in onnx.proto.
_MODEL_GRAPH = 7
_GRAPH_INITIALIZER = 5
_TENSOR_RAW_DATA = 9


def check(model: Any, weights: dict[str, np.ndarray]) -> None:
  """Checks a model with ONNX's own checker, types and shapes included.

  Raises:
    onnx.checker.ValidationError: if it is none.
    ValueError: if it is larger than a file can be.
  """
  import onnx

  size_bytes = model.ByteSize() + sum(x.nbytes for x in weights.values())
  if size_bytes > MAX_BYTES:
    raise ValueError(
      'An ONNX file holds at most 2 GB, and this model takes '
      f'{size_bytes / 1e9:.1f} GB: use --to=stablehlo or orbax.'
    )
  # As inputs, weights need no values.
  checked = onnx.ModelProto()
  checked.CopyFrom(model)
  checked.graph.input.extend(describe(k, x) for k, x in weights.items())
  onnx.checker.check_model(checked, full_check=True)


def save(model: Any, weights: dict[str, np.ndarray], path: os.PathLike) -> None:
  """Writes a model with its weights, one of which is copied at a time.

  Args:
    model: an `onnx.ModelProto` without the weights.
    weights: initializers by name.
    path: the new file.
  """
  import onnx

  rest = onnx.ModelProto()
  rest.CopyFrom(model)
  rest.ClearField('graph')
  # The length of everything inside comes before it.
  heads = {name: _tensor_head(name, x) for name, x in weights.items()}
  graph = model.graph.SerializeToString()
  size_bytes = len(graph) + sum(
    len(head) + weights[name].nbytes for name, head in heads.items()
  )
  with open(path, 'wb') as file:
    file.write(rest.SerializeToString())
    file.write(_start(_MODEL_GRAPH, size_bytes) + graph)
    for name, x in weights.items():
      file.write(heads[name])
      file.write(np.ascontiguousarray(x).data)


def joined(model: Any, weights: dict[str, np.ndarray]) -> Any:
  """Returns a model that has its weights in it."""
  import onnx

  whole = onnx.ModelProto()
  whole.CopyFrom(model)
  whole.graph.initializer.extend(
    onnx.numpy_helper.from_array(x, name) for name, x in weights.items()
  )
  return whole


def _tensor_head(name: str, x: np.ndarray) -> bytes:
  """Returns all of an initializer of a graph that comes before its values."""
  import onnx

  dtype = onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
  tensor = onnx.TensorProto(name=name, dims=x.shape, data_type=dtype)
  start = tensor.SerializeToString() + _start(_TENSOR_RAW_DATA, x.nbytes)
  return _start(_GRAPH_INITIALIZER, len(start) + x.nbytes) + start


def _start(field: int, size_bytes: int) -> bytes:
  """Returns what comes before a field whose length is written first."""
  return _varint(field << 3 | 2) + _varint(size_bytes)


def _varint(n: int) -> bytes:
  """Returns a number in groups of seven bits, the lowest first."""
  groups = bytearray()
  while n > 127:
    groups.append(n & 127 | 128)
    n >>= 7
  return bytes([*groups, n])
