"""The commands of full size are configs that there are."""

import pytest

from tests.conftest import ROOT
from vit_jax import flags
from vit_jax.paper import claims, full_size

# The way in which config_flags loads a config file.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')


@pytest.mark.parametrize('study', claims.STUDIES)
def test_commands_are_configs(study, monkeypatch):
  monkeypatch.chdir(ROOT)
  for full in claims.STUDIES[study].full_size:
    config = full_size.config_of_flags(full.flags, flags.config_named)
    assert config.total.split()[1] in ('steps', 'epochs')
    # Of SGD it is an L2 penalty.
    assert (
      config.optimizer.name != 'sgd' or config.optimizer.weight_decay < 1e-3
    )


def test_stages_are_counted(monkeypatch):
  monkeypatch.chdir(ROOT)
  (full,) = claims.STUDIES['noisy_student'].full_size
  config = full_size.config_of_flags(full.flags, flags.config_named)
  assert config.evaluators.test.split == 'validation'
  found = full_size._stages(config)
  assert [x.objective.name for x in found] == ['classification'] + (
    3 * ['pseudo_labels']
  )
  assert [x.teacher for x in found][:2] == ['', 'stages/teacher']


def test_what_needs_a_teacher_is_said_and_the_others_are_counted(monkeypatch):
  def core_days(full, topology, config_of):
    if 'teacher' in full.flags:
      raise FileNotFoundError('No checkpoint at runs/teacher')
    return 1.0, 2.0

  monkeypatch.setattr(full_size, 'core_days', core_days)
  lines = list(full_size.commands(['deit', 'posemb'], 'v3:2x2', None))
  assert lines[-1] == f'# in all {full_size._days((1.0, 2.0))} core-days'
  assert any('not counted below: No checkpoint at' in line for line in lines)
