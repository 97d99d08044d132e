"""Functions of our models that become one ONNX node or a few.

The exporter searches the program for the operations of each function. If it
finds no match, for example in another version of JAX or Flax, it translates the
operations one by one. The file is then slower, but gives the same numbers
(except for `max_pool`).
"""

import functools
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from vit_jax.convert.onnx_graph import NCHW, NHWC, Graph, Value
from vit_jax.convert.onnx_trace import Pattern


def softmax() -> Pattern:
  """The softmax over the last axis."""
  return Pattern(
    jax.nn.softmax,
    0,
    lambda graph, x: graph.node('Softmax', [x], x.shape, axis=-1),
  )


def gelu(kind: str) -> Pattern:
  """The exact GELU, or its tanh approximation if `kind` is 'tanh'."""
  approximate = kind == 'tanh'
  return Pattern(
    functools.partial(nn.gelu, approximate=approximate),
    0,
    lambda graph, x: graph.elementwise(
      'Gelu', x, approximate='tanh' if approximate else 'none'
    ),
  )


def layer_norm(epsilon: float) -> Pattern:
  """LayerNorm over the last axis."""

  def function(x: jax.Array, bias: jax.Array, scale: jax.Array) -> Any:
    params = {'bias': bias, 'scale': scale}
    layer = nn.LayerNorm(epsilon=epsilon, dtype=x.dtype)
    return layer.apply({'params': params}, x)

  def emit(graph: Graph, x: Value, bias: Value, scale: Value) -> Value:
    # All inputs must have one dtype; mean and variance are always in float32.
    inputs = [graph.cast(value, x.dtype) for value in (x, scale, bias)]
    return graph.node('LayerNormalization', inputs, x.shape, epsilon=epsilon)

  return Pattern(function, 2, emit)


def group_norm(epsilon: float) -> Pattern:
  """GroupNorm of images, with 32 groups of channels.

  Uses InstanceNormalization, because onnxruntime has a fast kernel for it and
  decomposes GroupNormalization.
  """

  def function(x: jax.Array, bias: jax.Array, scale: jax.Array) -> Any:
    params = {'bias': bias, 'scale': scale}
    layer = nn.GroupNorm(
      32, epsilon=epsilon, dtype=x.dtype, use_fast_variance=False
    )
    return layer.apply({'params': params}, x)

  def emit(graph: Graph, x: Value, bias: np.ndarray, scale: np.ndarray):
    dtype = x.dtype
    x = graph.cast(graph.transpose(x, NCHW), np.float32)
    B, C, h, w = x.shape
    y = graph.reshape(x, (B, 32, C // 32 * h * w))
    ones, zeros = np.ones(32, np.float32), np.zeros(32, np.float32)
    y = graph.node(
      'InstanceNormalization', [y, ones, zeros], y.shape, epsilon=epsilon
    )
    y = graph.reshape(y, x.shape)
    y = graph.elementwise('Mul', y, scale.reshape(1, C, 1, 1))
    y = graph.elementwise('Add', y, bias.reshape(1, C, 1, 1))
    return graph.transpose(graph.cast(y, dtype), NHWC)

  return Pattern(
    function, 2, emit, lambda shape: len(shape) == 4 and shape[3] % 32 == 0
  )


def max_pool() -> Pattern:
  """BiT's max-pooling, which pads with zeros.

  Needs a pattern, because onnxruntime 1.31 fuses separate padding and pooling
  nodes and then pads with -inf.
  """

  def function(x: Any) -> jax.Array:
    x = jax.numpy.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return nn.max_pool(x, (3, 3), (2, 2))

  def emit(graph: Graph, x: Value) -> Value:
    x = graph.transpose(x, NCHW)
    least = np.finfo(x.dtype).min
    border = np.asarray(function(np.full((1, *x.shape[2:], 1), least, x.dtype)))
    border = border.transpose(NCHW)
    y = graph.node(
      'MaxPool',
      [x],
      (*x.shape[:2], *border.shape[2:]),
      kernel_shape=(3, 3),
      strides=(2, 2),
      pads=(1, 1, 1, 1),
    )
    return graph.transpose(graph.elementwise('Max', y, border), NHWC)

  return Pattern(function, 0, emit, lambda shape: len(shape) == 4)
