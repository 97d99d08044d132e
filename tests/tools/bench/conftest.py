"""Benchmarks at sizes that take no time."""

import pytest

from vit_jax.models import flops
from vit_jax.tools.bench import __main__ as command
from vit_jax.tools.bench import race, step

SMALL = ('--image_sizes=32', '--set=model.depth=1', '--set=model.mlp_dim=64')


@pytest.fixture
def run(monkeypatch, capsys):
  """Gives a function that runs a command: its status, output and errors.

  `run.rows` has the rows of all races.
  """
  monkeypatch.setattr(race, 'ROUNDS', 2)
  monkeypatch.setattr(race, 'TURN_S', 0.0)
  # Set already, so that no command sets it for the tests that follow.
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '8')

  race_of = race.race

  def racing(makers):
    rows = race_of(makers)
    run.rows += rows
    return rows

  monkeypatch.setattr(race, 'race', racing)

  def run(name, *args, small=True):
    capsys.readouterr()
    try:
      status = command.main([name, *(SMALL if small else ()), *args])
    except SystemExit as e:
      status = e.code
    return status, *capsys.readouterr()

  run.rows = []
  return run


def assert_mfu(rows, passes):
  """Checks the MFU of a small ti16 on a device of 1e12 FLOP/s.

  Nothing of timm's, which may compute something else.
  """
  fields = [x.removeprefix('--set=') for x in SMALL[1:]]
  config = step.config_of('ti16', 32, 1, 'float32', fields)
  work = passes * flops.forward_flops(step.objective_of(config).model, (32, 32))
  for row in rows:
    if row['contender'] == 'ours':
      assert row['mfu'] == pytest.approx(row['images_per_s'] * work / 1e12)
    else:
      assert 'mfu' not in row
