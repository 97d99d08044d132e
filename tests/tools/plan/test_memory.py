"""What is said where a step does not fit into a device."""

import importlib
import re
import types

import jax
import pytest

from configs import digits
from tests.conftest import ROOT
from tests.objectives import test_every
from vit_jax.experiment import Experiment, facts_of
from vit_jax.tools.plan import aot, memory

train = importlib.import_module('vit_jax.train')

# The config loader of ml_collections loads modules the old way.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module')

LINE = 'RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.'
SMALL = {'model.depth': 1, 'batch_size': 1024}


@pytest.fixture
def said(monkeypatch, tmp_path, command):
  """Gives a function from a device's memory to what a run then ends with."""

  def fail(*_):
    raise jax.errors.JaxRuntimeError(f'{LINE}\nand a page of addresses')

  def run(limit, **fields):
    monkeypatch.setattr(memory, '_limit_bytes', lambda _: limit)
    monkeypatch.setattr(train, '_train', fail)
    status, _, err = command(
      f'--workdir={tmp_path / "run"}',
      f'--config={ROOT / "configs/digits.py"}:vit',
      *(f'--config.{name}={value}' for name, value in (SMALL | fields).items()),
    )
    assert status == 71
    (line,) = (s for s in err.splitlines() if s.startswith('error: '))
    return line.removeprefix('error: ')

  return run


def peak_bytes(**fields):
  config = digits.get_config('vit')
  config.update_from_flattened_dict(SMALL | fields)
  experiment = Experiment(config, facts_of(config, ('a',) * 10, 1437))
  return aot.peak_bytes(aot.training(experiment).lower().compile())


def test_flags_that_fit_are_found(said):
  """The first of all that take less, as the compiler sees them."""
  peaks = [peak_bytes(accum_steps=count) for count in (2, 4)]
  assert peaks[0] > peaks[1]
  text = said(peaks[0])
  assert text.startswith(f'{LINE} The training step fits with')
  assert '--config.accum_steps=2:' in text
  found = re.search(r'with (.*): ', said(peaks[0] - 1))
  assert found[1] != '--config.accum_steps=2'
  fields = dict(re.findall(r'--config\.(\S+)=(\S+)', found[1]))
  fields['accum_steps'] = int(fields['accum_steps'])
  assert peak_bytes(**fields) < peaks[0]


@pytest.mark.slow
def test_where_nothing_fits_that_is_said(said):
  assert 'neither parts of a batch nor remat' in said(1)
  # Eight devices have an example each: there are no smaller parts.
  assert 'neither parts of a batch nor remat' in said(1, batch_size=8)


def test_a_device_that_does_not_say_its_memory(said):
  assert said(0).startswith(f'{LINE} Take less at a time:')


def test_parts_that_the_objective_refuses_are_no_way_out():
  config = test_every.config_of('exemplar', **{'objective.group': 16})
  experiment = Experiment(config, facts_of(config, ('a',) * 10, 1437))
  assert memory._peak_bytes(experiment, {'accum_steps': 2}) is None
  assert experiment.config.accum_steps == 1


def test_what_is_tried_is_the_experiment_but_for_the_changes(monkeypatch):
  """On its own devices; what the compiler itself refuses does not fit."""
  config = digits.get_config('vit')
  config.update_from_flattened_dict(SMALL)
  facts = facts_of(config, ('a',) * 10, 1437)
  experiment = Experiment(config, facts, jax.devices()[2:4])
  tried, ending = [], LINE

  def training(changed):
    tried.append(changed)
    raise jax.errors.JaxRuntimeError(ending)

  monkeypatch.setattr(memory.aot, 'training', training)
  assert memory._peak_bytes(experiment, {'accum_steps': 2}) is None
  assert tried[0].config.accum_steps == 2 and tried[0].facts is facts
  assert [*tried[0].mesh.devices.flat] == jax.devices()[2:4]
  ending = 'INTERNAL: a bug'
  with pytest.raises(jax.errors.JaxRuntimeError, match='a bug'):
    memory._peak_bytes(experiment, {'accum_steps': 2})


def test_the_first_way_that_fits_is_told(monkeypatch):
  """Of ways that are none, take too much, and just enough."""
  gib = 2**30
  peaks = iter([None, 3 * gib + 1, 3 * gib, gib])
  monkeypatch.setattr(memory, '_limit_bytes', {'own': 3 * gib}.get)
  monkeypatch.setattr(memory, '_peak_bytes', lambda *_: next(peaks))
  mesh = types.SimpleNamespace(
    local_devices=['own', 'next'], shape={'data': 1, 'fsdp': 1}
  )
  config = types.SimpleNamespace(batch_size=4, accum_steps=1)
  experiment = types.SimpleNamespace(config=config, mesh=mesh)
  assert memory.advice(experiment) == (
    'The training step fits with --config.accum_steps=4: 3.00 of 3.00 GiB.'
  )
  peaks = iter(4 * [4 * gib])
  assert memory.advice(experiment) == (
    'The device has 3.00 GiB, and neither parts of a batch nor remat make the '
    'training step fit.'
  )


@pytest.mark.parametrize(
  ('stats', 'limit'), [(None, 0), ({}, 0), ({'bytes_limit': 5}, 5)]
)
def test_what_a_device_says_of_its_memory(stats, limit):
  device = types.SimpleNamespace(memory_stats=lambda: stats)
  assert memory._limit_bytes(device) == limit


def test_ways_take_more_and_more_parts_of_what_is_on_a_device():
  """Of 192 images on eight devices, in two parts so far: 4, 8 and no 16."""

  def ways(batch_size, accum_steps):
    mesh = types.SimpleNamespace(shape={'data': 2, 'fsdp': 4, 'tensor': 3})
    return memory._ways(
      types.SimpleNamespace(
        config=types.SimpleNamespace(
          batch_size=batch_size, accum_steps=accum_steps
        ),
        mesh=mesh,
      )
    )

  less = {'model.remat': 'nothing_saveable'}
  assert ways(192, 2) == [
    {'accum_steps': 4},
    {'accum_steps': 4} | less,
    {'accum_steps': 8},
    {'accum_steps': 8} | less,
  ]
  assert ways(2, 1) == [less]
