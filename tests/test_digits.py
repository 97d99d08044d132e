"""The embedded example, run as a user runs it, learns what it promises."""

import csv
import os
import subprocess
import sys

import numpy as np
import pytest


@pytest.mark.slow
def test_digits_reach_97_percent(tmp_path):
  """Seeds 0 to 4, another fifth held out each time."""
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  accuracies = []
  for seed in range(5):
    workdir = tmp_path / str(seed)
    subprocess.run(
      [
        sys.executable,
        '-m',
        'vit_jax.main',
        '--config=configs/digits.py',
        f'--workdir={workdir}',
        f'--config.seed={seed}',
        f'--config.data.split_seed={seed}',
      ],
      env=env,
      check=True,
    )
    with open(workdir / 'metrics.csv') as file:
      rows = list(csv.DictReader(file))
    assert float(rows[-1]['test/examples']) == 360
    accuracies.append(float(rows[-1]['test/accuracy']))
    assert (workdir / 'curves.png').stat().st_size > 10_000
  print(accuracies)
  assert np.mean(accuracies) >= 0.97
  assert min(accuracies) >= 0.96
