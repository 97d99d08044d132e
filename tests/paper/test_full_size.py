"""The commands of full size are configs that there are."""

import re
import types

import pytest

from tests.conftest import ROOT
from vit_jax import flags
from vit_jax.paper import claims, full_size
from vit_jax.plan.search import TooLarge

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


def test_fields_of_a_command_are_those_of_its_config(monkeypatch):
  monkeypatch.chdir(ROOT)
  text = '--config=configs/vit.py:b16,imagenet2012,seed=3 --sweep=seed=0,1'
  config = full_size.config_of_flags(
    f'{text} --config.model.depth=24', flags.config_named
  )
  assert (config.seed, config.model.depth) == (3, 24)
  with pytest.raises(ValueError, match='seed'):
    full_size.config_of_flags(
      '--config=configs/reproduce.py:posemb --config.seed=1', flags.config_named
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
  assert lines[-1] == '# in all 1 to 2 core-days'
  assert any('not counted below: No checkpoint at' in line for line in lines)


@pytest.fixture
def priced(monkeypatch):
  """Gives what each config compiled costs: a second, or two, a step."""
  compiled = []

  def costs_of(experiment, step, devices, chip):
    assert (step, devices, chip) == ('a step', 'devices', 'a chip')
    compiled.append(experiment)
    return types.SimpleNamespace(cores=32, least_s=1.0, most_s=2.0)

  costs = full_size.costs
  monkeypatch.setattr(costs, 'devices_of', lambda _: ('devices', 'a chip'))
  monkeypatch.setattr(
    costs, 'facts_given', lambda config, *given: (config.seed, *given)
  )
  monkeypatch.setattr(costs, 'compile_step', lambda _: 'a step')
  monkeypatch.setattr(costs, 'costs', costs_of)
  monkeypatch.setattr(costs, 'share_of_largest', lambda _: 0.5)
  monkeypatch.setattr(
    full_size,
    'Experiment',
    lambda config, facts, devices: types.SimpleNamespace(
      facts=facts, durations=types.SimpleNamespace(total=5400)
    ),
  )
  return compiled


def test_core_days_are_those_of_all_runs(priced, monkeypatch):
  """5,400 steps of a second on 32 cores are 2 core-days, 1 of half the size."""
  monkeypatch.chdir(ROOT)
  full = claims.FullSize(
    '--config=configs/digits.py --sweep=seed=0,1,2', 10, 70
  )
  assert full_size.core_days(full, 'v3:4x4', flags.config_named) == (3, 6)
  assert [made.facts for made in priced] == [(0, 10, 70)]


def test_of_a_sweep_each_model_is_compiled(priced, monkeypatch):
  """And counts once."""
  monkeypatch.chdir(ROOT)
  full = claims.FullSize('--config=configs/ablation.py:head')
  days = full_size.core_days(full, 'v3:4x4', flags.config_named)
  assert days == (36, 72) and len(priced) == 36


def test_commands_are_numbered_and_what_does_not_fit_is_left_out(monkeypatch):
  names, asked = ['width', 'depth', 'posemb'], []

  def core_days(full, topology, config_of):
    asked.append(full)
    if len(asked) == 3:
      raise TooLarge('it takes 9 GiB')
    return 1.0, 2.5

  monkeypatch.setattr(full_size, 'core_days', core_days)
  lines = list(full_size.commands(names, 'v3:2x2', None))
  # In the order of the studies; claims share one.
  assert [line for line in lines if re.match(r'# \S', line)] == [
    '# posemb',
    '# width, depth',
    '# in all 5 to 12.5 core-days',
  ]
  commands = [line for line in lines if line.startswith('python')]
  assert [line.rpartition('/')[2] for line in commands] == [
    'posemb_1',
    *(f'shape_{i}' for i in range(1, 6)),
  ]
  assert lines[2] == '#   1 to 2.5 core-days on v3:2x2, by `plan`'
  assert lines.count('#   does not fit v3:2x2: it takes 9 GiB') == 1
