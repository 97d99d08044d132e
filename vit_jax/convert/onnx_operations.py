"""Translates the JAX operations of our models to ONNX nodes.

Each function takes the graph, the result's shape and dtype (`out`), the
operation's parameters and its inputs. It returns the result. It raises
NotImplementedError, with a noun phrase as message, for unsupported parameters.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.convert.onnx_graph import NCHW, NHWC, Graph, Tensor, Value


def _convolution(
  graph: Graph, out: Any, params: Any, x: Value, kernel: Value
) -> Value:
  spec = params['dimension_numbers']
  if params['lhs_dilation'] != (1, 1) or params['batch_group_count'] != 1:
    raise NotImplementedError('a transposed convolution')
  before, after = zip(*params['padding'], strict=True)
  y = graph.node(
    'Conv',
    [
      graph.transpose(x, spec.lhs_spec),
      graph.transpose(kernel, spec.rhs_spec),
    ],
    [out.shape[axis] for axis in spec.out_spec],
    strides=params['window_strides'],
    pads=[*before, *after],
    dilations=params['rhs_dilation'],
    group=params['feature_group_count'],
  )
  return graph.transpose(y, [spec.out_spec.index(axis) for axis in range(4)])


def _pool(op: str, graph: Graph, out: Any, params: Any, x: Value) -> Value:
  window = params['window_dimensions']
  before, after = zip(*params['padding'], strict=True)
  if (
    len(window) != 4
    or any(
      (window[axis], before[axis], after[axis]) != (1, 0, 0) for axis in (0, 3)
    )
    or set(params['base_dilation']) | set(params['window_dilation']) != {1}
  ):
    raise NotImplementedError(f'this pooling, with windows of {window},')
  if op == 'MaxPool' and not any([*before, *after]):
    # Without an operation between them, onnxruntime 1.31 fuses padding (BiT's,
    # with zeros) and pooling, and then pads with -inf.
    least = np.array(np.finfo(out.dtype).min, out.dtype)
    x = graph.elementwise('Max', x, least)
  more = {'count_include_pad': 1} if op == 'AveragePool' else {}
  y: Value = graph.node(
    op,
    [graph.transpose(x, NCHW)],
    [out.shape[axis] for axis in NCHW],
    kernel_shape=window[1:3],
    strides=params['window_strides'][1:3],
    pads=[*before[1:3], *after[1:3]],
    **more,
  )
  if op == 'AveragePool':
    y = graph.elementwise('Mul', y, np.array(np.prod(window), out.dtype))
  return graph.transpose(y, NHWC)


def _dot(graph: Graph, out: Any, params: Any, a: Value, b: Value) -> Value:
  """Translates a product to MatMul of [batch, M, K] and [batch, K, N]."""
  (contract_a, contract_b), (batch_a, batch_b) = params['dimension_numbers']
  free_a = _others(a, contract_a, batch_a)
  free_b = _others(b, contract_b, batch_b)
  if isinstance(a, np.ndarray) and isinstance(b, Tensor):
    # `onnx._quantize` expects constant weights as the second input.
    numbers = ((contract_b, contract_a), (batch_b, batch_a))
    y = _dot(graph, out, {'dimension_numbers': numbers}, b, a)
    batch, m, n = len(batch_a), len(free_a), len(free_b)
    order = [*range(batch), *range(batch + n, batch + n + m)]
    return graph.transpose(y, [*order, *range(batch, batch + n)])
  batch_sizes, rows, columns = (
    [x.shape[axis] for axis in axes]
    for x, axes in ((a, batch_a), (a, free_a), (b, free_b))
  )
  k = math.prod(a.shape[axis] for axis in contract_a)
  # Without batch axes, MatMul accepts any number of row axes.
  kept_rows = [math.prod(rows)] if batch_a else rows
  a = graph.transpose(a, [*batch_a, *free_a, *contract_a])
  b = graph.transpose(b, [*batch_b, *contract_b, *free_b])
  y = graph.node(
    'MatMul',
    [
      graph.cast(graph.reshape(x, sizes), out.dtype)
      for x, sizes in (
        (a, [*batch_sizes, *kept_rows, k]),
        (b, [*batch_sizes, k, math.prod(columns)]),
      )
    ],
    [*batch_sizes, *kept_rows, math.prod(columns)],
  )
  return graph.reshape(y, [*batch_sizes, *rows, *columns])


def _others(x: Value, *axes: Sequence[int]) -> list[int]:
  return [i for i in range(len(x.shape)) if not any(i in some for some in axes)]


def _reduce(op: str, graph: Graph, out: Any, params: Any, x: Value) -> Value:
  axes = np.array(params['axes'], np.int64)
  return graph.node(op, [x, axes], out.shape, keepdims=0)


def _slice(graph: Graph, out: Any, params: Any, x: Tensor) -> Value:
  steps = params['strides'] or [1] * len(x.shape)
  ranges = zip(
    params['start_indices'], params['limit_indices'], steps, strict=True
  )
  return graph.slice(
    x, {i: r for i, r in enumerate(ranges) if r != (0, x.shape[i], 1)}
  )


def _gather(
  graph: Graph, out: Any, params: Any, x: Value, start: Value
) -> Value:
  """Selects along one axis, as in x[:, 1:], x[:, [0, 2]] or table[i]."""
  numbers, sizes = params['dimension_numbers'], params['slice_sizes']
  (axis,) = numbers.start_index_map[:1]
  if start.shape[-1] != 1 or any(
    sizes[i] != x.shape[i] for i in range(len(sizes)) if i != axis
  ):
    raise NotImplementedError('gathering along more than one axis')
  if isinstance(start, np.ndarray):
    if start.min() < 0 or start.max() > x.shape[axis] - sizes[axis]:
      raise NotImplementedError('gathering out of bounds')
    if isinstance(x, np.ndarray):
      raise NotImplementedError('gathering from a constant')
    if start.shape == (1,):
      first = int(start[0])
      y = graph.slice(x, {axis: (first, first + sizes[axis], 1)})
      return graph.reshape(y, out.shape)
    start = start.astype(np.int64)
  places = range(axis, axis + len(start.shape) - 1)
  rest = tuple(i for i in range(len(out.shape)) if i not in places)
  if numbers.collapsed_slice_dims != (axis,) or numbers.offset_dims != rest:
    raise NotImplementedError('gathering anything but whole rows')
  index = graph.reshape(start, start.shape[:-1])
  return graph.node('Gather', [x, index], out.shape, x.dtype, axis=axis)


def _pad(graph: Graph, out: Any, params: Any, x: Value, value: Value) -> Value:
  before, after, interior = zip(*params['padding_config'], strict=True)
  if any(interior):
    raise NotImplementedError('padding between elements')
  pads = np.array([*before, *after], np.int64)
  return graph.node('Pad', [x, pads, value], out.shape)


def _stack(graph: Graph, out: Any, params: Any, *xs: Value) -> Value:
  axis = params['axis']
  shape = (*out.shape[:axis], 1, *out.shape[axis + 1 :])
  return graph.node(
    'Concat', [graph.reshape(x, shape) for x in xs], out.shape, axis=axis
  )


def _maximum(graph: Graph, out: Any, params: Any, a: Value, b: Value) -> Value:
  for x, other in ((a, b), (b, a)):
    if isinstance(x, np.ndarray) and not x.any():
      return graph.elementwise('Relu', other)
  return graph.elementwise('Max', a, b)


_SAME_NAME = 'add sub mul div neg min exp tanh sqrt sin cos or not'
ELEMENTWISE = {name: name.capitalize() for name in _SAME_NAME.split()} | {
  'eq': 'Equal',
  'ge': 'GreaterOrEqual',
  'logistic': 'Sigmoid',
}

OPERATIONS: dict[str, Callable[..., Value]] = {
  'argmin': lambda graph, out, params, x: graph.node(
    'ArgMin', [x], out.shape, np.int64, axis=params['axes'][0], keepdims=0
  ),
  'concatenate': lambda graph, out, params, *xs: graph.node(
    'Concat', xs, out.shape, axis=params['dimension']
  ),
  'conv_general_dilated': _convolution,
  'convert_element_type': lambda graph, out, params, x: graph.cast(
    x, out.dtype
  ),
  'cumsum': lambda graph, out, params, x: graph.node(
    'CumSum',
    [x, np.array(params['axis'], np.int64)],
    out.shape,
    reverse=int(params['reverse']),
  ),
  'dot_general': _dot,
  'erfc': lambda graph, out, params, x: graph.elementwise(
    'Sub', np.array(1, out.dtype), graph.elementwise('Erf', x)
  ),
  'gather': _gather,
  'integer_pow': lambda graph, out, params, x: graph.elementwise(
    'Pow', x, np.array(params['y'], out.dtype)
  ),
  'max': _maximum,
  'pad': _pad,
  'reduce_max': functools.partial(_reduce, 'ReduceMax'),
  'reduce_sum': functools.partial(_reduce, 'ReduceSum'),
  'reduce_window_max': functools.partial(_pool, 'MaxPool'),
  'reduce_window_sum': functools.partial(_pool, 'AveragePool'),
  'reshape': lambda graph, out, params, x: graph.reshape(x, out.shape),
  'rsqrt': lambda graph, out, params, x: graph.elementwise(
    'Reciprocal', graph.elementwise('Sqrt', x)
  ),
  'select_n': lambda graph, out, params, which, no, yes: graph.elementwise(
    'Where', which, yes, no, dtype=no.dtype
  ),
  'slice': _slice,
  'square': lambda graph, out, params, x: graph.elementwise('Mul', x, x),
  'squeeze': lambda graph, out, params, x: graph.reshape(x, out.shape),
  'stack': _stack,
  'transpose': lambda graph, out, params, x: graph.transpose(
    x, params['permutation']
  ),
}
