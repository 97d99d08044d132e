"""A run of every objective that ended between two saves resumes bit for bit.

`tests/test_resume.py` kills the processes of classification.
"""

import shutil

import pytest

from tests.objectives.test_every import config_of
from tests.test_resume import assert_same_run, saved_steps
from vit_jax.objectives import OBJECTIVES
from vit_jax.train import train


@pytest.mark.slow
@pytest.mark.parametrize('name', sorted({*OBJECTIVES} - {'classification'}))
def test_every_objective_resumes_bit_for_bit(name, tmp_path):
  config = config_of(name)
  polyak = 0.0 if OBJECTIVES.load(name).result else 0.9
  config.optimizer.update(name='adam', polyak=polyak, warmup='2 steps')
  config.data.flip = True
  config.update(
    {
      'total': '4 steps',
      'log_every': '1 step',
      'eval_every': '2 steps',
      'checkpoint_every': '2 steps',
    }
  )
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  train(config, str(whole))
  # As if it had been killed before its last save, when its rows were written.
  shutil.copytree(whole, parts)
  shutil.rmtree(parts / 'checkpoints/4')
  assert saved_steps(parts) == [2]
  train(config, str(parts))
  assert_same_run(parts, whole)
