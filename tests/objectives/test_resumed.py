"""Every objective's run, killed while saving, ends as if nothing had been.

As `tests/test_resume.py` has it for classification, through the command.
"""

import random
import signal
import time

import pytest

from tests.conftest import COMPILE_QUICKLY
from tests.objectives.test_every import teacher
from tests.test_resume import (
  Command,
  assert_same_run,
  saved_steps,
  wait_for_moment,
  wait_for_step,
)
from vit_jax.objectives import OBJECTIVES

pytestmark = pytest.mark.slow

DEVICES = 2
SETTINGS = (
  '--config.optimizer.polyak=0.9',
  '--config.optimizer.warmup=2 steps',
  '--config.data.flip=True',
  '--config.batch_size=32',
  '--config.total=40 steps',
  '--config.log_every=1 step',
  '--config.eval_every=20 steps',
  '--config.checkpoint_every=10 steps',
)


@pytest.fixture(scope='module')
def command(tmp_path_factory):
  return Command(tmp_path_factory.mktemp('cache'), COMPILE_QUICKLY)


@pytest.mark.parametrize('name', sorted({*OBJECTIVES} - {'classification'}))
def test_every_objective_resumes_bit_for_bit(command, tmp_path, name):
  config = tmp_path / 'config.py'
  fields = {'optimizer.name': 'adam'}
  if name in ('distillation', 'pseudo_labels'):
    fields['teacher'] = teacher()
  if name == 'pseudo_labels':
    fields['objective.labels'] = f'{tmp_path}/labels.npz'
  config.write_text(
    'from tests.objectives.test_every import config_of\n\n\n'
    f'def get_config():\n  return config_of({name!r}, **{fields!r})\n'
  )
  given = {'config': config, 'settings': SETTINGS}
  command.finish(tmp_path / 'whole', DEVICES, **given)
  parts = tmp_path / 'parts'
  process = command.start(parts, DEVICES, **given)
  try:
    assert wait_for_step(parts, process, time.time_ns())
    wait_for_moment('saving', parts, process, random.Random(0))
  finally:
    process.kill()
  _, err = process.communicate(timeout=60)
  assert process.returncode == -signal.SIGKILL, err
  assert saved_steps(parts)[-1:] != [40]
  command.finish(parts, DEVICES, **given)
  assert_same_run(parts, tmp_path / 'whole')
