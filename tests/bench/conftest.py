"""Benchmarks at sizes that take no time."""

import pytest

from vit_jax.bench import __main__ as command
from vit_jax.bench import race

SMALL = ('--image_sizes=32', '--set=model.depth=1', '--set=model.mlp_dim=64')


@pytest.fixture
def run(monkeypatch, capsys):
  """Gives a function that runs a command: its status, output and errors."""
  monkeypatch.setattr(race, 'ROUNDS', 2)
  monkeypatch.setattr(race, 'TURN_S', 0.0)
  # Set already, so that no command sets it for the tests that follow.
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '8')

  def run(name, *args, small=True):
    capsys.readouterr()
    try:
      status = command.main([name, *(SMALL if small else ()), *args])
    except SystemExit as e:
      status = e.code
    return status, *capsys.readouterr()

  return run
