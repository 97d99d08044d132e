"""Principal components beside scikit-learn's."""

import types

import numpy as np
import pytest

from vit_jax.visualize import filters, sections
from vit_jax.visualize.photos import Subject


def test_components_are_scikit_learns():
  decomposition = pytest.importorskip('sklearn.decomposition')
  rng = np.random.default_rng(0)
  kernel = rng.standard_normal((4, 4, 3, 200))
  kernel *= np.linspace(0.1, 3, 48).reshape(4, 4, 3, 1)
  got = filters.principal_components(kernel, 8)
  assert got.shape == (8, 4, 4, 3)
  pca = decomposition.PCA(8, svd_solver='full').fit(kernel.reshape(48, -1).T)
  for ours, theirs in zip(got.reshape(8, -1), pca.components_, strict=True):
    np.testing.assert_allclose(ours * np.sign(ours @ theirs), theirs, atol=1e-6)
    assert ours[np.abs(ours).argmax()] > 0


def test_there_are_no_more_than_filters():
  kernel = np.random.default_rng(0).standard_normal((4, 4, 3, 5))
  assert filters.principal_components(kernel, 28).shape == (5, 4, 4, 3)


def test_filters_are_the_leading_28():
  kernel = np.random.default_rng(0).standard_normal((4, 5, 3, 40))
  checkpoint = types.SimpleNamespace(params={'embedding': {'kernel': kernel}})
  section = sections.first_filters(Subject(checkpoint, []))
  want = filters.principal_components(kernel, 28)
  np.testing.assert_array_equal(section.arrays['components'], want)
  assert section.text.startswith('The leading 28 principal components of the')
  assert '40 filters of the patch embedding (4x5 pixels)' in section.text


def test_filters_of_a_hybrid_are_those_that_see_the_image():
  params = {'embedding': {'kernel': np.zeros((1, 1, 64, 8))}}
  params['conv_root'] = {'kernel': np.ones((7, 7, 3, 8))}
  name, kernel = filters.first_kernel(params)
  assert (name, kernel.shape) == ('conv_root', (7, 7, 3, 8))


def test_a_model_without_filters_is_refused():
  with pytest.raises(ValueError, match='neither a ViT'):
    filters.first_kernel({'pixel_embedding': 0})
