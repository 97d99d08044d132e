"""The benchmark of few-shot fits."""

import itertools
import types

import numpy as np
import pytest

from vit_jax.bench import output, solving
from vit_jax.evaluators import few_examples, ridge

SECONDS = [[2.0, 4.0, 1.0], [6.0, 8.0, 5.0]]


def test_seconds_and_their_ratio(monkeypatch, capsys, tmp_path):
  """Of three rounds, whose ratios are 3, 2 and 5."""
  asked = []
  monkeypatch.setattr(
    solving.race,
    'rounds',
    lambda turns, count: asked.append((len(turns), count)) or SECONDS,
  )
  files = output.Output(str(tmp_path / 'a.csv'), str(tmp_path / 'a.png'))
  solving.bench(None, files, classes=4, width=16, shots=(1, 5), seeds=2)
  out = capsys.readouterr().out
  assert '4 classes, 16 features, shots 1, 5, 2 seeds, 31 penalties' in out
  assert asked == [(2, 5)]
  for line in (
    'seconds, median of 5 rounds (fastest to slowest):',
    '  ours                   2.000  (1.000 to 4.000)',
    '  numpy.linalg.solve     6.000  (5.000 to 8.000)',
    'numpy.linalg.solve / ours: 3.0',
  ):
    assert line in out.splitlines()
  assert (tmp_path / 'a.csv').read_text().splitlines() == [
    'contender,seconds,fastest,slowest',
    'ours,2.0,1.0,4.0',
    'numpy.linalg.solve,6.0,5.0,8.0',
  ]
  assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG')


def test_features_are_correlated_and_of_falling_variances():
  """Of the i-th direction 1 / i, but for what 8,000 examples leave open."""
  features_ND, labels_N = solving._features(4, 12, 1000)
  np.testing.assert_array_equal(np.bincount(labels_N), [2000] * 4)
  within_ND = features_ND.astype(np.float64)
  # Of the centres .15 squared as much: 1 + 1/2 + ... + 1/12 are 3.10.
  centre_CD = [within_ND[labels_N == c].mean(axis=0) for c in range(4)]
  power = np.square(centre_CD).sum(axis=1).mean()
  assert 0.5 < power / (0.15**2 * 3.10) < 2
  for c in range(4):
    within_ND[labels_N == c] -= within_ND[labels_N == c].mean(axis=0)
  covariance_DD = within_ND.T @ within_ND / len(labels_N)
  np.testing.assert_allclose(
    np.linalg.eigvalsh(covariance_DD)[::-1], 1 / np.arange(1, 13), rtol=0.1
  )
  deviations_D = np.sqrt(np.diag(covariance_DD))
  correlations_DD = covariance_DD / np.outer(deviations_D, deviations_D)
  assert np.abs(correlations_DD - np.eye(12)).max() > 0.3


def test_all_penalties_of_all_draws_are_solved(monkeypatch, capsys):
  solved = []
  solve = np.linalg.solve

  def noting(matrix_DD, target_DC):
    solved.append((float(np.trace(matrix_DD)), target_DC.shape))
    return solve(matrix_DD, target_DC)

  fitted, fit = [], few_examples.FITS['choose']

  def noting_fits(features_ND, labels_N, classes):
    fitted.append((len(features_ND), *np.bincount(labels_N), classes))
    return fit(features_ND, labels_N, classes)

  # A tick for each time that the clock is looked at.
  clock = types.SimpleNamespace(perf_counter=itertools.count(0.0).__next__)
  monkeypatch.setattr(solving, 'time', clock)
  monkeypatch.setattr(solving, '_ROUNDS', 1)
  monkeypatch.setattr(np.linalg, 'solve', noting)
  monkeypatch.setitem(few_examples.FITS, 'choose', noting_fits)
  solving.bench(None, output.Output(None, None), 4, 16, (2, 5), 3)
  # Once to warm up, and once for a round; the time is that of all together.
  assert sorted(fitted) == 6 * [(8, 2, 2, 2, 2, 4)] + 6 * [(20, 5, 5, 5, 5, 4)]
  said = capsys.readouterr().out
  assert f'numpy.linalg.solve / ours: {6 * len(ridge.L2_GRID)}.0' in said
  # Of K standardised rows each of the D features has the square K.
  expected = [
    (pytest.approx(16 * (4 * shots + l2)), (16, 4))
    for _ in range(3)
    for shots in (2, 5)
    for l2 in ridge.L2_GRID
  ]
  assert solved == expected
