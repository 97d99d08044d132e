"""The benchmark of few-shot fits."""

import re

import numpy as np
import pytest

from vit_jax.bench import output, solving
from vit_jax.evaluators import ridge


def test_seconds_and_their_ratio(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(solving, '_ROUNDS', 2)
  files = output.Output(str(tmp_path / 'a.csv'), str(tmp_path / 'a.png'))
  solving.bench_fewshot(files, classes=4, width=16, shots=(1, 5), seeds=2)
  out = capsys.readouterr().out
  assert '4 classes, 16 features, shots 1, 5, 2 seeds, 31 penalties' in out
  for name in ('ours', 'numpy.linalg.solve'):
    assert re.search(rf'^  {name} +[\d.]+  \([\d.]+ to [\d.]+\)$', out, re.M)
  assert re.search(r'^numpy.linalg.solve / ours: [\d.]+$', out, re.M)
  assert (tmp_path / 'a.csv').read_text().startswith('contender,seconds,')
  assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG')


def test_all_penalties_of_all_draws_are_solved(monkeypatch):
  solved = []
  solve = np.linalg.solve

  def noting(matrix_DD, target_DC):
    solved.append((float(np.trace(matrix_DD)), target_DC.shape))
    return solve(matrix_DD, target_DC)

  monkeypatch.setattr(solving, '_ROUNDS', 1)
  monkeypatch.setattr(np.linalg, 'solve', noting)
  solving.bench_fewshot(output.Output(None, None), 4, 16, (2, 5), 3)
  # Of K standardised rows each of the D features has the square K.
  expected = [
    (pytest.approx(16 * (4 * shots + l2)), (16, 4))
    for _ in range(3)
    for shots in (2, 5)
    for l2 in ridge.L2_GRID
  ]
  assert solved == expected
