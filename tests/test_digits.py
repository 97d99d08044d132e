"""The embedded examples, run as a user runs them, learn what they promise."""

import csv
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import XLA_FLAGS_GIVEN


def final_metrics(workdir, config, *flags):
  """Trains by the command and returns the last row of metrics.csv."""
  subprocess.run(
    [
      sys.executable,
      '-m',
      'vit_jax.main',
      f'--config={config}',
      f'--workdir={workdir}',
      *flags,
    ],
    env=os.environ | {'XLA_FLAGS': XLA_FLAGS_GIVEN},
    check=True,
  )
  with open(workdir / 'metrics.csv') as file:
    rows = list(csv.DictReader(file))
  assert float(rows[-1]['test/examples']) == 360
  assert (workdir / 'curves.png').stat().st_size > 10_000
  return rows[-1]


@pytest.mark.slow
def test_digits_reach_97_percent(tmp_path):
  """One seed, or DIGITS_SEEDS of them; each holds out another fifth."""
  accuracies = []
  for seed in range(int(os.environ.get('DIGITS_SEEDS', '1'))):
    row = final_metrics(
      tmp_path / str(seed),
      'configs/digits.py',
      f'--config.seed={seed}',
      f'--config.data.split_seed={seed}',
    )
    accuracies.append(float(row['test/accuracy']))
  print(accuracies)
  assert np.mean(accuracies) >= 0.97
  assert min(accuracies) >= 0.96
