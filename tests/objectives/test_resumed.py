"""Every objective's run, ended between two saves, goes on as if nothing was.

As `tests/test_resume.py` has it for classification, with processes killed.
"""

import pytest

from tests.objectives.test_every import config_of
from tests.test_resume import assert_same_run, saved_steps
from vit_jax import train
from vit_jax.objectives import OBJECTIVES
from vit_jax.training.run import Run


@pytest.mark.slow
@pytest.mark.parametrize('name', sorted({*OBJECTIVES} - {'classification'}))
def test_every_objective_resumes_bit_for_bit(name, tmp_path, monkeypatch):
  config = config_of(name)
  config.optimizer.update(name='adam', polyak=0.9, warmup='2 steps')
  config.data.flip = True
  config.update(
    {
      'total': '8 steps',
      'log_every': '1 step',
      'eval_every': '4 steps',
      'checkpoint_every': '4 steps',
    }
  )
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  train.train(config, str(whole))
  take = Run.take

  def fail(self, step, metrics):
    if step == 6:
      raise RuntimeError('the disk is gone')
    take(self, step, metrics)

  with monkeypatch.context() as patch:
    patch.setattr(Run, 'take', fail)
    with pytest.raises(RuntimeError, match='the disk is gone'):
      train.train(config, str(parts))
  assert saved_steps(parts)[-1:] == [4]
  train.train(config, str(parts))
  assert_same_run(parts, whole)
