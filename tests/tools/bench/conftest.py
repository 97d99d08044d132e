"""Benchmarks at sizes that take no time."""

import re

import jax
import pytest

from vit_jax.models import flops
from vit_jax.tools.bench import __main__ as command
from vit_jax.tools.bench import race, step

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


def assert_mfu(out, passes):
  """Checks the MFU of small ti16s on a device of 1e9 FLOP/s.

  Not that of timm's model, which may compute something else.
  """
  fields = [x.removeprefix('--set=') for x in SMALL[1:]]
  config = step.config_of('ti16', 32, 1, 'float32', fields)
  experiment = step.experiment_of(config, jax.devices()[:1])
  work = passes * flops.forward_flops(experiment.objective.model, (32, 32))
  found = re.findall(r'^  ours +([\d.]+) .* MFU ([\d,.]+)%$', out, re.M)
  assert found and out.count('MFU') == len(found)
  for rate, percent in found:
    want = pytest.approx(float(rate) * work / 1e9, rel=0.02)
    assert float(percent.replace(',', '')) / 100 == want
