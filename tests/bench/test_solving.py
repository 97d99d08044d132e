"""The benchmark of few-shot fits."""

import re

import numpy as np
import pytest

from vit_jax.bench import output, solving
from vit_jax.evaluators import ridge


def test_seconds_and_their_ratio(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(solving, '_ROUNDS', 2)
  files = output.Output(str(tmp_path / 'a.csv'), str(tmp_path / 'a.png'))
  solving.bench(None, files, classes=4, width=16, shots=(1, 5), seeds=2)
  out = capsys.readouterr().out
  assert '4 classes, 16 features, shots 1, 5, 2 seeds, 31 penalties' in out
  for name in ('ours', 'numpy.linalg.solve'):
    assert re.search(rf'^  {name} +[\d.]+  \([\d.]+ to [\d.]+\)$', out, re.M)
  assert re.search(r'^numpy.linalg.solve / ours: [\d.]+$', out, re.M)
  assert (tmp_path / 'a.csv').read_text().startswith('contender,seconds,')
  assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG')


def test_features_are_correlated_and_of_falling_variances():
  """Of the i-th direction 1 / i, but for what 8,000 examples leave open."""
  features_ND, labels_N = solving._features(4, 12, 1000)
  np.testing.assert_array_equal(np.bincount(labels_N), [2000] * 4)
  within_ND = features_ND.astype(np.float64)
  for c in range(4):
    within_ND[labels_N == c] -= within_ND[labels_N == c].mean(axis=0)
  covariance_DD = within_ND.T @ within_ND / len(labels_N)
  np.testing.assert_allclose(
    np.linalg.eigvalsh(covariance_DD)[::-1], 1 / np.arange(1, 13), rtol=0.1
  )
  deviations_D = np.sqrt(np.diag(covariance_DD))
  correlations_DD = covariance_DD / np.outer(deviations_D, deviations_D)
  assert np.abs(correlations_DD - np.eye(12)).max() > 0.3


def test_all_penalties_of_all_draws_are_solved(monkeypatch):
  solved = []
  solve = np.linalg.solve

  def noting(matrix_DD, target_DC):
    solved.append((float(np.trace(matrix_DD)), target_DC.shape))
    return solve(matrix_DD, target_DC)

  monkeypatch.setattr(solving, '_ROUNDS', 1)
  monkeypatch.setattr(np.linalg, 'solve', noting)
  solving.bench(None, output.Output(None, None), 4, 16, (2, 5), 3)
  # Of K standardised rows each of the D features has the square K.
  expected = [
    (pytest.approx(16 * (4 * shots + l2)), (16, 4))
    for _ in range(3)
    for shots in (2, 5)
    for l2 in ridge.L2_GRID
  ]
  assert solved == expected
