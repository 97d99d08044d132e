"""Cosines of position embeddings."""

import numpy as np
import pytest
from flax import traverse_util

from tests.visualize.test_attention_maps import SIZE, tiny
from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.visualize import similarity


def test_cosines_are_those_of_pairs():
  rng = np.random.default_rng(0)
  table = rng.standard_normal((7, 5))
  got = similarity.cosine(table, (2, 3))
  for a in range(6):
    for b in range(6):
      x, y = table[1 + a], table[1 + b]
      want = x @ y / np.sqrt(x @ x) / np.sqrt(y @ y)
      here = got[divmod(a, 3)][divmod(b, 3)]
      np.testing.assert_allclose(here, want, rtol=1e-12)


@pytest.mark.parametrize(('kind', 'X'), [('cls', 1), ('gap', 3), ('map', 1)])
def test_tables_are_what_is_added(kind, X):
  """A model that does nothing but add them shows them in its tokens."""
  model, params, images = tiny(kind)
  got = similarity.tables(Checkpoint('c', model, params, SIZE))
  extra = int(model.pool == 'cls')
  assert got.shape == (X, extra + 6, model.width)
  if kind == 'cls':
    want = params['Transformer']['posembed_input']['pos_embedding']
    np.testing.assert_array_equal(got, want)
  if kind == 'gap':  # a row and a column of its own for each layer
    parts = params['Transformer']['posembed_input']
    for x in range(3):
      for y, column in np.ndindex(2, 3):
        np.testing.assert_array_equal(
          got[x, y * 3 + column],
          np.concatenate(
            [parts['x_embedding'][x, column], parts['y_embedding'][x, y]]
          ),
        )
  if kind == 'map':  # fixed: the middle frequency of the first patch is 0
    np.testing.assert_allclose(got[0, 0], np.tile([0, 0, 1, 1], 2), atol=1e-7)


def test_a_model_that_adds_none_says_so():
  model, params, _ = tiny('relative')
  with pytest.raises(ValueError, match="no position embeddings.*'relative'"):
    similarity.tables(Checkpoint('c', model, params, SIZE))


@pytest.mark.parametrize('kind', ['relative', 'axial'])
def test_offsets_are_compared_within_their_layer_and_axis(kind):
  model, params, _ = tiny(kind)
  found = similarity.of_offsets(Checkpoint('c', model, params, SIZE))
  axes = ['row', 'column'] if kind == 'axial' else ['']
  assert [*found] == [f'layer {i} {a}'.strip() for i in (1, 2, 3) for a in axes]
  flat = traverse_util.flatten_dict(params['Transformer'], sep='/')
  for name, cosines in found.items():
    _, number, *axis = name.split()
    start = '/'.join([f'encoderblock_{int(number) - 1}', *axis]) + '/'
    (r_ONK,) = (
      x
      for path, x in flat.items()
      if path.startswith(start) and path.endswith('relative_embedding')
    )
    r_OD = r_ONK.reshape(len(r_ONK), -1).astype(np.float64)
    r_OD /= np.linalg.norm(r_OD, axis=1, keepdims=True)
    np.testing.assert_allclose(cosines, r_OD @ r_OD.T, rtol=1e-6, atol=1e-9)
