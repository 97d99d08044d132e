"""Patterns: functions of our models that become one ONNX node or a few.

The exporter searches the program for the operations of each function. Without a
match, for example in another version of JAX or Flax, it translates the
operations one by one. The file is then slower but computes the same numbers.
"""

import functools
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from vit_jax.convert.onnx_graph import NCHW, NHWC, Graph, Value
from vit_jax.convert.onnx_trace import Pattern
from vit_jax.models import layers
from vit_jax.models.model import Model

# Epsilons: 1e-6 of GroupNorm in hybrids; 1e-5 of GroupNorm in BiT and of
# LayerNorm in DETR.
_EPSILONS = (1e-6, 1e-5)


def of(model: Model) -> list[Pattern]:
  found = [*map(group_norm, _EPSILONS)]
  if model.attention in ('all', 'axial'):
    found += [gelu(model.gelu), layer_norm(model.layer_norm_epsilon)]
  else:
    found += map(layer_norm, _EPSILONS)
  softmax = Pattern(
    jax.nn.softmax,
    0,
    lambda graph, x: graph.node('Softmax', [x], x.shape, axis=-1),
  )
  return [*found, softmax]


def gelu(kind: str) -> Pattern:
  """Returns the pattern of the exact GELU; of the tanh GELU if kind='tanh'."""
  approximate = kind == 'tanh'
  return Pattern(
    functools.partial(nn.gelu, approximate=approximate),
    0,
    lambda graph, x: graph.elementwise(
      'Gelu', x, approximate='tanh' if approximate else 'none'
    ),
  )


def layer_norm(epsilon: float) -> Pattern:
  """Returns the pattern of LayerNorm over the last axis."""

  def function(x: jax.Array, bias: jax.Array, scale: jax.Array) -> Any:
    params = {'bias': bias, 'scale': scale}
    layer = nn.LayerNorm(epsilon=epsilon, dtype=x.dtype)
    return layer.apply({'params': params}, x)

  def emit(graph: Graph, x: Value, bias: Value, scale: Value) -> Value:
    # ONNX needs inputs of one dtype. It computes mean and variance in float32.
    inputs = [graph.cast(value, x.dtype) for value in (x, scale, bias)]
    return graph.node('LayerNormalization', inputs, x.shape, epsilon=epsilon)

  return Pattern(function, 2, emit)


def group_norm(epsilon: float) -> Pattern:
  """Returns the pattern of GroupNorm with 32 groups, for images.

  It becomes InstanceNormalization, for which onnxruntime has a fast kernel;
  onnxruntime would decompose GroupNormalization.
  """

  def function(x: jax.Array, bias: jax.Array, scale: jax.Array) -> Any:
    params = {'bias': bias, 'scale': scale}
    return layers.GroupNorm(epsilon).apply({'params': params}, x)

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
