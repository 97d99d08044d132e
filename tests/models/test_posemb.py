"""Resizing position embeddings."""

import pathlib

import numpy as np
import pytest
import scipy.ndimage

from vit_jax.models import posemb

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'


def table(grid, extra=1, D=4):
  rng = np.random.default_rng(0)
  L = extra + grid[0] * grid[1]
  return rng.standard_normal((1, L, D)).astype(np.float32)


def test_equals_the_original():
  checkpoint = np.load(GOLDEN / 'tiny_s7.npz')
  want = np.load(GOLDEN / 'tiny_s7_golden.npz')['resized_posemb']
  old = checkpoint['Transformer/posembed_input/pos_embedding']
  got = posemb.resize(old, (4, 4), (6, 6))
  np.testing.assert_allclose(got, want, atol=1e-6)
  assert got.dtype == np.float32


@pytest.mark.parametrize('extra', [0, 1])
def test_same_size_is_the_identity(extra):
  old = table((3, 5), extra)
  np.testing.assert_array_equal(posemb.resize(old, (3, 5), (3, 5)), old)


@pytest.mark.parametrize(
  ('old', 'new'),
  [
    ((16, 16), (30, 30)),
    ((28, 28), (24, 24)),
    ((3, 5), (7, 4)),
    ((2, 2), (1, 3)),
  ],
)
def test_is_bilinear_with_aligned_corners(old, new):
  """Against SciPy's interpolation at the coordinates of the definition."""
  old_table = table(old)
  got = posemb.resize(old_table, old, new)
  np.testing.assert_array_equal(got[:, 0], old_table[:, 0])
  rows, columns = (
    np.arange(n) * (o - 1) / max(n - 1, 1)
    for o, n in zip(old, new, strict=True)
  )
  coordinates = np.meshgrid(rows, columns, indexing='ij')
  for d in range(old_table.shape[2]):
    want = scipy.ndimage.map_coordinates(
      old_table[0, 1:, d].reshape(old), coordinates, order=1, mode='nearest'
    )
    np.testing.assert_allclose(
      got[0, 1:, d].reshape(new), want, rtol=1e-5, atol=1e-6
    )


def test_the_last_row_and_column_survive_where_the_original_zeroes_them():
  got = posemb.resize(np.ones((1, 16 * 16, 2), np.float32), (16, 16), (30, 30))
  np.testing.assert_allclose(got, 1, rtol=1e-6)


def test_embeddings_of_another_grid_are_refused():
  with pytest.raises(ValueError, match='17 position embeddings do not fit'):
    posemb.resize(table((4, 4)), (5, 5), (6, 6))
