"""Each operation alone, of shapes in which no axis is like another."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.conftest import PEERS

onnx = pytest.importorskip('onnx', reason=PEERS)
onnxruntime = pytest.importorskip('onnxruntime', reason=PEERS)
onnx_trace = pytest.importorskip('vit_jax.convert.onnx_trace')

SHAPE = (3, 4, 5, 6)


def random(*shape):
  rng = np.random.default_rng(shape)
  return rng.uniform(-2, 2, shape).astype(np.float32)


WEIGHTS = {
  'kernel': random(2, 2, 3, 4),
  'matrix': random(7, 6),
  'heads': random(4, 7, 6),
  'places': random(5, 6, 7),
  'like': random(1, 4, 5, 6),
  'one': np.float32([[[[1.5]]]]),
}

WEIGHTS['like'][0, 1, 1, 1] = 0


def model_of(function):
  graph, outputs = onnx_trace.trace(
    lambda w, *xs: {'y': function(w, *xs)},
    WEIGHTS,
    {name: (SHAPE[1:], np.float32) for name in ('x', 'y_in')},
    [],
  )
  model = graph.to_model(outputs, {})
  onnx.checker.check_model(model, full_check=True)
  return model


def pooled(x, start, by, **options):
  padding = [(0, 0), (1, 0), (0, 2), (0, 0)]
  return lax.reduce_window(
    x, start, by, (1, 2, 3, 1), (1, 1, 2, 1), padding, **options
  )


def convolved(x, kernel, **options):
  return lax.conv_general_dilated(
    x,
    kernel,
    window_strides=(2, 1),
    padding=[(1, 2), (0, 3)],
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    feature_group_count=2,
    **options,
  )


def dot(a, b, contract, batch=((), ())):
  return lax.dot_general(a, b, (contract, batch))


OPERATIONS = {
  'convolution': lambda w, x, y: convolved(x, w['kernel'], rhs_dilation=(1, 2)),
  'max pooling': lambda w, x, y: pooled(x, -np.inf, lax.max),
  'sum pooling': lambda w, x, y: pooled(x, 0.0, lax.add),
  'weights first': lambda w, x, y: dot(w['matrix'], x, ((1,), (3,))),
  'weights first, by heads': lambda w, x, y: dot(
    w['heads'], x, ((2,), (3,)), ((0,), (1,))
  ),
  'weights last': lambda w, x, y: dot(x, w['matrix'], ((3,), (1,))),
  'two axes contracted': lambda w, x, y: dot(x, w['places'], ((2, 3), (0, 1))),
  'of images': lambda w, x, y: dot(x, y, ((3,), (3,)), ((0, 1), (0, 1))),
  'slice': lambda w, x, y: lax.slice_in_dim(x, 1, 4, 2, axis=2),
  'first': lambda w, x, y: x[:, 0],
  'all but the first': lambda w, x, y: x[:, 1:],
  'places': lambda w, x, y: x[:, :, np.array([4, 0, 0, 2])],
  'padding': lambda w, x, y: lax.pad(
    x, 1.5, ((0, 0, 0), (1, 2, 0), (0, 3, 0), (4, 0, 0))
  ),
  'running sums': lambda w, x, y: lax.cumsum(x, 2),
  'running sums backwards': lambda w, x, y: lax.cumsum(x, 1, reverse=True),
  'stack': lambda w, x, y: jnp.stack([x, y], 2),
  'joined': lambda w, x, y: lax.concatenate([x, y], 3),
  'above 0': lambda w, x, y: jnp.maximum(x, 0),
  '0 before': lambda w, x, y: jnp.maximum(0, x),
  'above weights': lambda w, x, y: jnp.maximum(w['like'], x),
  'minimum': lambda w, x, y: lax.min(x, y),
  'largest': lambda w, x, y: x.max(2),
  'least place': lambda w, x, y: x.argmin(3).astype(np.float32),
  'sum': lambda w, x, y: x.sum((1, 3)),
  'difference': lambda w, x, y: x - y,
  'quotient': lambda w, x, y: x / (3 + y),
  'chosen': lambda w, x, y: jnp.where(x >= y, x, -y),
  'equal': lambda w, x, y: jnp.where(x == w['like'], x, y),
  'either': lambda w, x, y: ((x >= 1) | ~(x >= y)).astype(np.float32),
  'not negative': lambda w, x, y: (w['one'] >= x).astype(np.int32),
  'power': lambda w, x, y: lax.integer_pow(x, 3),
  'square': lambda w, x, y: lax.square(x),
  'roots': lambda w, x, y: lax.sqrt(3 + x) * lax.rsqrt(3 + y),
  'erfc': lambda w, x, y: lax.erfc(x),
  'functions': lambda w, x, y: (
    lax.exp(x) + lax.tanh(y) + lax.logistic(x) * lax.sin(x) + lax.cos(y)
  ),
  'turned twice': lambda w, x, y: lax.transpose(
    lax.transpose(x, (0, 3, 1, 2)) + 1, (0, 2, 1, 3)
  ),
  'turned beside weights': lambda w, x, y: (
    lax.transpose(x, (0, 3, 1, 2)) * jnp.transpose(w['like'], (0, 3, 1, 2))
  ),
  'turned beside another': lambda w, x, y: (
    lax.transpose(x, (0, 2, 1, 3))[:, :4] + y[:, :, :4]
  ),
  'flat': lambda w, x, y: x.reshape(-1, 20, 6),
  'with weights alone': lambda w, x, y: x * (w['one'] + w['like']),
  'repeated': lambda w, x, y: jnp.broadcast_to(w['like'], x.shape),
  'repeated inside': lambda w, x, y: jnp.broadcast_to(
    x[:, :, None], (x.shape[0], 4, 2, 5, 6)
  ),
}


@pytest.mark.fast(
  'padding',
  'flat',
  'above 0',
  '0 before',
  'above weights',
  'running sums',
  'sum',
  'power',
)
@pytest.mark.parametrize('name', OPERATIONS)
def test_an_operation_is_the_same_there(name):
  function = OPERATIONS[name]
  model = model_of(function)
  session = onnxruntime.InferenceSession(
    model.SerializeToString(), providers=['CPUExecutionProvider']
  )
  x, y = random(*SHAPE), random(*SHAPE[::-1]).transpose()
  # Some are equal, and of a row all.
  x[0, :, 0] = WEIGHTS['like'][0, :, 0]
  x[1], x[2, 3] = y[1], -3
  given = {'x': x, 'y_in': np.ascontiguousarray(y)}
  needed = {i.name for i in session.get_inputs()}
  assert needed == given.keys()
  (got,) = session.run(None, given)
  want = np.asarray(function(WEIGHTS, *map(jnp.asarray, given.values())))
  assert (got.shape, got.dtype) == (want.shape, want.dtype)
  # Rounded in another order.
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ('name', 'wanted'),
  [
    ('above 0', ['Relu']),
    ('above weights', ['Max']),
    ('weights last', ['MatMul']),
    ('of images', ['Transpose', 'MatMul']),
  ],
)
def test_there_are_no_more_nodes_than_it_takes(name, wanted):
  nodes = model_of(OPERATIONS[name]).graph.node
  assert [node.op_type for node in nodes] == [*wanted, 'Identity']


def gathered(x, **numbers):
  dimensions = lax.GatherDimensionNumbers(
    offset_dims=(0, 2, 3), collapsed_slice_dims=(1,), start_index_map=(1,)
  )
  return lax.gather(
    x,
    np.array(numbers['at'], np.int32)[:, None],
    dimensions,
    (x.shape[0], 1, 5, 6),
    mode='promise_in_bounds',
  )


REFUSED = {
  'transposed convolution': (
    lambda w, x, y: convolved(x, w['kernel'], lhs_dilation=(2, 1)),
    'a transposed convolution',
  ),
  'padded channels': (
    lambda w, x, y: lax.reduce_window(
      x,
      -np.inf,
      lax.max,
      (1, 2, 2, 1),
      (1, 1, 1, 1),
      [(0, 0), (0, 0), (0, 0), (0, 1)],
    ),
    'this pooling, with windows of',
  ),
  'padding between': (
    lambda w, x, y: lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 1), *[(0, 0, 0)] * 2)),
    'padding between elements',
  ),
  'behind the end': (
    lambda w, x, y: gathered(x, at=[1, 4]),
    'gathering out of bounds',
  ),
  'unknown': (lambda w, x, y: jnp.sort(x), 'the operation sort'),
}


@pytest.mark.edge
@pytest.mark.parametrize('name', REFUSED)
def test_what_no_model_here_does_is_refused(name):
  function, message = REFUSED[name]
  with pytest.raises(NotImplementedError, match=message):
    model_of(function)
