"""What becomes of nodes before they are written."""

import numpy as np
import pytest
from jax import export

from tests.conftest import PEERS

pytest.importorskip('onnx', reason=PEERS)
onnx_graph = pytest.importorskip('vit_jax.convert.onnx_graph')
Graph, Tensor = onnx_graph.Graph, onnx_graph.Tensor
ReferenceEvaluator = pytest.importorskip('onnx.reference').ReferenceEvaluator

(BATCH,) = export.symbolic_shape('batch')


def images(*shape, name='images'):
  return Tensor(name, (BATCH, *shape), np.dtype(np.float32))


def test_what_has_the_shape_already_stays():
  x = images(4, 5)
  graph = Graph([x])
  assert graph.reshape(x, [BATCH, 4, 5]) is x
  assert graph.expand(x, [BATCH, 4, 5]) is x
  assert graph.transpose(x, (0, 1, 2)) is x
  assert graph.slice(x, {}) is x
  assert graph.reshape(x, [BATCH, 20]).shape == (BATCH, 20)
  part = graph.slice(x, {1: (1, 4, 2), 2: (0, 5, 3)})
  assert part.shape == (BATCH, 2, 2)
  assert graph.reshape(np.zeros((2, 3)), [6]).shape == (6,)
  assert graph.expand(np.zeros((1, 3)), [4, 3]).shape == (4, 3)


@pytest.mark.parametrize('times', [1, 3])
def test_the_batch_and_its_multiples_are_sizes(times):
  x = images(1)
  graph = Graph([x])
  shape = (times * BATCH, 7)
  small = np.full((1, 7), 2, np.float32)
  y = graph.expand(small, shape)
  # Once more are the same sizes.
  z = graph.expand(np.full((1, 7), 3, np.float32), shape)
  assert y.shape == z.shape == shape
  model = graph.to_model({'y': y, 'z': z}, {})
  found = ReferenceEvaluator(model).run(
    None, {'images': np.zeros((5, 1), np.float32)}
  )
  for got, value in zip(found, (2, 3), strict=True):
    np.testing.assert_array_equal(got, np.full((5 * times, 7), value))
  operators = [node.op_type for node in model.graph.node]
  multiplied = ['Mul'] if times > 1 else []
  sizes = ['Shape', *multiplied, 'Concat']
  assert operators == [*sizes, *['Expand'] * 2, *['Identity'] * 2]


@pytest.mark.parametrize('shape', [(7, BATCH), (BATCH, BATCH)])
def test_other_sizes_are_refused(shape):
  graph = Graph([images(1)])
  with pytest.raises(NotImplementedError, match='the shape '):
    graph.expand(np.ones((1, 1), np.float32), shape)


def test_equal_constants_are_written_once_if_they_are_small():
  x = images(256)
  graph = Graph([x])
  small, large = (np.ones(n, np.float32) for n in (256, 257))
  y = x
  for constant in (small, small.copy(), small.reshape(1, 256), -small):
    y = graph.elementwise('Add', y, constant)
  z = graph.node('Concat', [large, large.copy()], (514,))
  graph.node('Neg', [large], (257,))  # which nobody needs
  model = graph.to_model({'y': y, 'z': z}, {'key': 'said'})
  stored = {x.name: list(x.dims) for x in model.graph.initializer}
  assert sorted(stored.values()) == [[1, 256], [256], [256], [257], [257]]
  assert 'Neg' not in {node.op_type for node in model.graph.node}
  assert len({node.name for node in model.graph.node}) == 7
  assert [(p.key, p.value) for p in model.metadata_props] == [('key', 'said')]
  assert model.producer_name == 'vit_jax'
