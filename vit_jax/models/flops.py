"""Counts parameters and floating-point operations from shapes alone."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.models import attention
from vit_jax.models.model import Model


def count_params(model: Model, image_size: tuple[int, int]) -> int:
  """Returns the number of parameters, without allocating them."""
  shapes = param_shapes(_looped(model), image_size)
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


@functools.lru_cache(maxsize=64)
def forward_flops(model: Model, image_size: tuple[int, int]) -> int:
  """Returns the FLOPs of one image's forward pass.

  Counts matrix products and convolutions. A multiply-add counts as two FLOPs.
  As in XLA's analysis, products with a convolution's padding do not count. They
  would add 4 % to the ResNets of the paper's table 6. The count includes the
  intermediates of `Model.flop_capture`.
  """
  model = _looped(model)
  captured: dict[str, Any] = {}
  if model.flop_capture:
    captured['capture'] = model.flop_capture
  apply: Any = functools.partial(model.apply, **captured)
  images_1HWC = jax.ShapeDtypeStruct((1, *image_size, 3), jnp.float32)
  return count(
    lambda params, images: apply({'params': params}, images)[0],
    param_shapes(model, image_size),
    images_1HWC,
  )


def count(function: Callable[..., Any], *shapes: Any) -> int:
  """Returns a function's FLOPs, counted as in `forward_flops`.

  `shapes` are its arguments, arrays or `jax.ShapeDtypeStruct`.
  """
  # On GPUs, attention calls kernels whose products a jaxpr does not contain.
  with attention.portable():
    return _count(jax.make_jaxpr(function)(*shapes).jaxpr)


def _looped(model: Model) -> Model:
  # A scan traces one layer instead of all, with the same counts.
  return model.clone(scan=True, remat='none')


def param_shapes(model: Model, image_size: tuple[int, int]) -> Any:
  """Returns a `jax.ShapeDtypeStruct` for each of a model's parameters."""
  # Copies the dicts, so that callers cannot change the cached dicts.
  return jax.tree.map(lambda x: x, _param_shapes(model, tuple(image_size)))


# Cached, because a command needs the shapes several times.
@functools.lru_cache(maxsize=64)
def _param_shapes(model: Model, image_size: tuple[int, int]) -> Any:
  images_1HWC = jax.ShapeDtypeStruct((1, *image_size, 3), jnp.float32)
  return jax.eval_shape(
    lambda key, images: model.init(key, images)['params'],
    jax.random.key(0),
    images_1HWC,
  )


def _count(jaxpr: Any) -> int:
  total = 0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'dot_general':
      (contract, _), _ = eqn.params['dimension_numbers']
      left = eqn.invars[0].aval.shape
      inner = math.prod(left[i] for i in contract)
      total += 2 * inner * math.prod(eqn.outvars[0].aval.shape)
    elif eqn.primitive.name == 'conv_general_dilated':
      total += 2 * _conv_multiply_adds(eqn)
    else:
      repeats = eqn.params.get('length', 1)
      total += repeats * sum(map(_count, _subjaxprs(eqn.params)))
  return total


def _conv_multiply_adds(eqn: Any) -> int:
  """Returns the multiply-adds of a convolution, except those with padding."""
  numbers = eqn.params['dimension_numbers']
  kernel = eqn.invars[1].aval.shape
  out = eqn.outvars[0].aval.shape
  total = out[numbers.out_spec[0]] * math.prod(kernel)
  for i, (before, _) in enumerate(eqn.params['padding']):
    size = eqn.invars[0].aval.shape[numbers.lhs_spec[2 + i]]
    taps = kernel[numbers.rhs_spec[2 + i]]
    stride = eqn.params['window_strides'][i]
    dilation = eqn.params['rhs_dilation'][i]
    # Counts pairs of an output and a kernel tap that falls inside the image.
    pairs = sum(
      0 <= o * stride - before + tap * dilation < size
      for o in range(out[numbers.out_spec[2 + i]])
      for tap in range(taps)
    )
    total = total // taps * pairs
  return total


def _subjaxprs(params: dict[str, Any]) -> list[Any]:
  return [
    item
    for value in params.values()
    for item in (value if isinstance(value, tuple) else [value])
    if hasattr(item, 'eqns')
  ]
