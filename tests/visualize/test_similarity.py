"""Cosines of position embeddings."""

import numpy as np
import pytest

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
  with pytest.raises(ValueError, match='not a ViT that adds position'):
    similarity.tables(Checkpoint('c', model, params, SIZE))
