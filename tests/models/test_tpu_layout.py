"""Reshaped arrays have the same numbers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import layers as layers_lib
from vit_jax.models import tpu_layout


def tree(layers=()):
  """Returns parameters of heads 3 x 4 at width 5, maybe of stacked layers."""
  shapes = {
    'query': {'kernel': (5, 3, 4), 'bias': (3, 4)},
    'value': {'kernel': (5, 3, 4)},
    'out': {'kernel': (3, 4, 5), 'bias': (5,)},
    'Dense_0': {'kernel': (5, 7)},
  }
  rng = np.random.default_rng(0)
  return {
    'block': {
      name: {k: rng.standard_normal((*layers, *s)) for k, s in x.items()}
      for name, x in shapes.items()
    }
  }


@pytest.mark.parametrize('layers', [(), (2,)])
def test_kernels_of_heads_are_matrices_and_back(layers):
  params = tree(layers)
  matrices = tpu_layout.as_matrices(params)
  n = len(layers)
  shapes = {
    name: {k: x.shape[n:] for k, x in part.items()}
    for name, part in matrices['block'].items()
  }
  assert shapes == {
    'query': {'kernel': (5, 12), 'bias': (3, 4)},
    'value': {'kernel': (5, 12)},
    'out': {'kernel': (12, 5), 'bias': (5,)},
    'Dense_0': {'kernel': (5, 7)},
  }
  back = tpu_layout.of_heads(matrices, heads=3)
  jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.parametrize('shape', [(3, 4), (7,)])
def test_a_bias_is_added_in_its_own_shape(shape):
  rng = np.random.default_rng(0)
  bias = np.float32(rng.standard_normal(shape))
  y = np.float32(rng.standard_normal((2, 6, bias.size)))
  got = tpu_layout.add_bias(jnp.asarray(y), jnp.asarray(bias))
  np.testing.assert_array_equal(got, y.reshape(2, 6, *shape) + bias)
  # Before the reshape to heads, unless the last axis divides 128.
  jaxpr = jax.make_jaxpr(tpu_layout.add_bias)(y, bias)
  (add,) = (e for e in jaxpr.eqns if e.primitive.name in ('add', 'add_any'))
  fits = shape in ((3, 4), (128,))
  assert add.outvars[0].aval.shape == (2, 6, *(shape if fits else [bias.size]))


@pytest.mark.parametrize(
  ('shape', 'spec', 'matrix', 'split'),
  [
    ((5, 3, 4), ('fsdp', 'tensor', None), (5, 12), ('fsdp', 'tensor')),
    ((2, 5, 3, 4), ('fsdp', 'tensor', None), (2, 5, 12), ('fsdp', 'tensor')),
    ((2, 3, 4, 5), ('tensor', None, 'fsdp'), (2, 12, 5), ('tensor', 'fsdp')),
    ((7, 5), ('x', 'y', None), (7, 5), ('x', 'y', None)),
  ],
)
def test_what_is_gathered_is_a_matrix_on_the_way(shape, spec, matrix, split):
  x = np.arange(np.prod(shape)).reshape(shape)
  got, found = tpu_layout.as_matrix(jnp.asarray(x), spec)
  np.testing.assert_array_equal(got, x.reshape(matrix))
  assert found == split
  # Without the barrier, the compiler would reshape the gathered array.
  jaxpr = jax.make_jaxpr(lambda x: tpu_layout.as_matrix(x, spec)[0])(x)
  is_held = 'optimization_barrier' in str(jaxpr)
  assert is_held == (len(spec) == 3 and len(shape) > 2)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_dropout_is_flaxs_and_draws_once(dtype):
  """Results and gradients are equal bit for bit; one barrier holds the mask."""
  key, x = jax.random.key(1), jnp.linspace(-2, 2, 60, dtype=dtype)
  x = x.reshape(3, 4, 5)

  def ours(x):
    return layers_lib.dropout(x, 0.3, key)

  def flaxs(x):
    return nn.Dropout(0.3, deterministic=False).apply({}, x, rng=key)

  for got, want in zip(
    (*jax.vjp(ours, x)[1](x), ours(x)),
    (*jax.vjp(flaxs, x)[1](x), flaxs(x)),
    strict=True,
  ):
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)
  assert 0 < np.sum(np.asarray(ours(x)) == 0) < x.size
  step = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(ours(x) ** 2)))(x)
  names = [equation.primitive.name for equation in step.eqns]
  assert names.count('optimization_barrier') == 1
