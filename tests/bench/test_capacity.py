"""The largest batch that fits, of costs that are known and of programs."""

import csv
import importlib.util
import math
import os
import re
import subprocess
import sys
import types

import jax
import pytest

from tests.conftest import ROOT
from vit_jax.bench import capacity, step
from vit_jax.plan import aot


def linear(batch):
  return 1000.0 + 7 * batch, None


def padded(batch):
  """Grows by whole tiles, faster from some size on."""
  return 1000.0 + 7 * 128 * math.ceil(batch / 128) + 2 * max(0, batch - 900), 1


def unknown(batch):
  """Nobody knows what a batch takes that does not fit."""
  size = linear(batch)[0]
  return (size if size <= 10_000 else math.inf), None


@pytest.mark.parametrize(
  ('cost', 'limit', 'most_tries'),
  [
    *((linear, limit, 6) for limit in (1008, 1100, 1690, 9_000, 300_000)),
    (linear, 1000 + 7 * 8, 3),  # just what the first one tried takes
    *((padded, limit, 12) for limit in (1_900, 10_000, 77_777)),
    (unknown, 10_000, 12),
  ],
)
def test_search_brackets_the_limit(cost, limit, most_tries):
  tried = capacity.search(cost, limit)
  largest = max(b for b, (size, _) in tried.items() if size <= limit)
  above = min(b for b, (size, _) in tried.items() if size > limit)
  assert above - largest <= max(1, largest / 32)
  assert len(tried) <= most_tries


@pytest.mark.parametrize(
  ('tried', 'limit', 'fits', 'too_large', 'size'),
  [
    # From two sizes along the line through them.
    ({8: 80, 60: 600}, 300, 8, 60, 30),
    # Of more, those nearest to the limit: 37.5 for an image.
    ({8: 100, 16: 200, 64: 2000, 128: 9000}, 3000, 64, 128, 90),
    # Where that is beside what is known, one step of 1/32 beyond the one.
    ({100: 1000, 200: 2000}, 1010, 100, 200, 103),
    ({100: 1000, 200: 2000}, 1990, 100, 200, 197),
    # Every third time the middle.
    ({8: 80, 16: 160, 60: 600}, 300, 16, 60, 38),
    # What is not known is on no line, nor is what stays the same.
    ({8: 80, 32: math.inf}, 100, 8, 32, 20),
    ({8: 100, 16: 100}, 500, 16, 2**16 + 1, 64),
    ({8: 80}, 10, 0, 8, 4),
    ({2**15: 100}, 500, 2**15, 2**16 + 1, 2**16),
  ],
)
def test_the_next_size_by_hand(tried, limit, fits, too_large, size):
  costs = {batch: (float(bytes_), None) for batch, bytes_ in tried.items()}
  assert capacity._next(costs, limit, fits, too_large) == size


def test_search_where_none_or_all_fit():
  assert min(capacity.search(linear, 1006)) == 1
  assert max(capacity.search(linear, math.inf)) == capacity.MAX_BATCH


@pytest.mark.parametrize(
  ('message', 'expected'),
  [
    ('HLO temporaries (20.50G) exceeds available HBM (15.48G)', 20.5 * 2**30),
    ('memory (512.0M) exceeds available', 2**29),
    ('memory (1.5T) exceeds available', 3 * 2**39),
    ('RESOURCE_EXHAUSTED: Out of memory', math.inf),
  ],
)
def test_what_the_compiler_says(message, expected):
  assert capacity.needed_bytes(message) == expected


@pytest.mark.slow
def test_of_this_device(run, tmp_path):
  files = tmp_path / 'a.csv', tmp_path / 'a.png'
  status, out, _ = run(
    'capacity',
    '--variants=ti16',
    '--memory_gib=0.0625',
    f'--csv={files[0]}',
    f'--plot={files[1]}',
  )
  assert status == 0
  with open(files[0], newline='') as f:
    rows = {row['mode']: row for row in csv.DictReader(f)}
  assert rows.keys() == {'inference', 'training'}
  assert files[1].read_bytes().startswith(b'\x89PNG')
  for mode, row in rows.items():
    batch = int(row['batch_size'])
    assert f'{batch:,} images, ' in out
    assert size(mode, batch) <= 2**26 < size(mode, batch + 1 + batch // 32)
  # What is kept for going back takes its room.
  assert 3 * int(rows['training']['batch_size']) < int(
    rows['inference']['batch_size']
  )


def size(mode, batch):
  fields = ['model.depth=1', 'model.mlp_dim=64']
  config = step.config_of('ti16', 32, batch, 'float32', fields)
  program = capacity.program_of(config, mode, jax.devices()[0])
  return aot.peak_bytes(program.lower().compile())


def test_a_batch_that_nobody_asks_for(run, monkeypatch):
  monkeypatch.setattr(capacity, 'MAX_BATCH', 16)
  _, out, _ = run('capacity', '--memory_gib=10', '--modes=inference')
  assert re.search(r'^  at least 16 images, [\d.]+ GiB \(2 comp', out, re.M)


def test_what_a_batch_takes_is_what_the_compiler_says(monkeypatch):
  """Of a step of 1,425 cycles, or of one that does not fit."""
  compiled = types.SimpleNamespace(
    as_text=(ROOT / 'tests/plan/step.hlo').read_text
  )

  def compile():
    if endings:
      raise jax.errors.JaxRuntimeError(endings.pop())
    return compiled

  lowered, asked, endings = types.SimpleNamespace(compile=compile), [], []
  monkeypatch.setattr(
    capacity,
    'program_of',
    lambda config, *args: (
      asked.append((config.batch_size, config.data.image_size, *args))
      or types.SimpleNamespace(lower=lambda: lowered)
    ),
  )
  monkeypatch.setattr(
    capacity.aot, 'peak_bytes', lambda x: 99 * (x is compiled)
  )
  chip = capacity.hardware.TPU_CHIPS['v3']
  args = types.SimpleNamespace(dtype='bfloat16', set=[])

  def cost(chip):
    machine = capacity.Machine('a device', 0, chip)
    return capacity._cost(args, machine, 'ti16', 32, 'training', 3)

  assert cost(chip) == (99, pytest.approx(3 * 940e6 / 1425))
  assert cost(None) == (99, None)
  assert asked == 2 * [(3, '32', 'training', 'a device')]
  endings.append('RESOURCE_EXHAUSTED: (3.00G) exceeds available HBM')
  assert cost(chip) == (3 * 2**30, None)
  endings.append('INTERNAL: a bug')
  with pytest.raises(jax.errors.JaxRuntimeError, match='a bug'):
    cost(chip)


@pytest.mark.parametrize(
  ('mode', 'arguments'), [('training', 4), ('inference', 2)]
)
def test_a_program_is_that_of_its_mode_and_device(mode, arguments):
  config = step.config_of('ti16', 32, 5, 'float32', ['model.depth=1'])
  program = capacity.program_of(config, mode, jax.devices()[3])
  assert len(program.shapes) == arguments
  placed = [x.sharding.device_set for x in jax.tree.leaves(program.shapes)]
  assert all(devices == {jax.devices()[3]} for devices in placed)


def test_a_config_is_as_its_row_says():
  config = step.config_of('ti16', 32, 5, 'bfloat16', ['model.depth=1'])
  assert (config.batch_size, config.data.image_size) == (5, '32')
  assert (config.model.dtype, config.model.depth) == ('bfloat16', 1)


def test_what_names_the_rows_is_not_overridden(run):
  for field in ('batch_size', 'data.image_size', 'model.dtype', 'model.name'):
    status, _, err = run('capacity', '--memory_gib=10', f'--set={field}=8')
    assert status == 2
    assert f'rows are named by {field}' in err


@pytest.mark.parametrize('gib', ['0', '-1', 'nan'])
def test_no_memory_at_all_is_refused(run, gib):
  status, _, err = run('capacity', f'--memory_gib={gib}')
  assert status == 2
  assert 'memory_gib is' in err
  assert 'must be above 0' in err


def test_memory_that_is_too_small_for_anything(run):
  status, out, _ = run('capacity', '--memory_gib=0.0001', '--modes=inference')
  assert status == 0
  assert 'not even one image fits' in out


@pytest.mark.slow
@pytest.mark.skipif(
  not (
    importlib.util.find_spec('libtpu') or os.environ.get('TPU_LIBRARY_PATH')
  ),
  reason='needs the extra `plan`',
)
def test_of_a_tpu_that_is_not_there(tmp_path):
  args = ['--variants=ti16', '--image_sizes=64', '--topology=v3:2x2']
  args += [f'--csv={tmp_path}/a.csv', f'--plot={tmp_path}/a.png']
  args += ['--dtype=bfloat16', '--set=model.scan=True']
  # libtpu does not know all the flags that the tests give to XLA.
  subprocess.run(
    [sys.executable, '-m', 'vit_jax.bench', 'capacity', *args],
    check=True,
    env={k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'},
  )
  with open(tmp_path / 'a.csv', newline='') as f:
    inference, training = csv.DictReader(f)
  assert inference['device'] == 'TPU v3'
  assert float(inference['limit_gib']) == 16
  assert 14 < float(training['memory_gib']) < 16
  for row in (inference, training):
    assert float(row['memory_gib']) < 16
    assert float(row['images_per_s']) > 1000
  assert int(inference['batch_size']) > int(training['batch_size']) > 500


@pytest.fixture
def estimated(monkeypatch):
  """Gives a machine of 100 bytes, whose images take a byte and are estimated.

  Eight at a time are fastest.
  """
  device = types.SimpleNamespace(device_kind='TPU v99')
  machine = capacity.Machine(device, 100.0, None)
  costs = {
    batch: (float(batch), 1000.0 - abs(batch - 8)) for batch in range(200)
  }
  monkeypatch.setattr(capacity, 'machine_of', lambda *_: machine)
  monkeypatch.setattr(
    capacity, '_cost', lambda *args: costs.get(args[-1], (math.inf, None))
  )
  monkeypatch.setattr(capacity, 'GIB', 10)
  return machine


def test_a_row_has_the_largest_batch_and_the_fastest(
  run, estimated, tmp_path, monkeypatch
):
  file = tmp_path / 'a.csv'
  now = iter([10.0, 12.5])
  clock = types.SimpleNamespace(monotonic=lambda: next(now))
  monkeypatch.setattr(capacity, 'time', clock)
  status, out, _ = run(
    'capacity', '--variants=ti16', '--modes=training', f'--csv={file}'
  )
  assert status == 0
  with open(file, newline='') as f:
    (row,) = csv.DictReader(f)
  batch, tries = int(row['batch_size']), int(row['compiled_times'])
  assert 97 <= batch <= 100
  assert float(row['memory_gib']) == batch / 10
  assert (row['limit_gib'], row['device']) == ('10.0', 'TPU v99')
  assert (row['images_per_s'], row['at_batch_size']) == ('1000.0', '8')
  assert (row['variant'], row['mode'], row['image_size']) == (
    *('ti16', 'training', '32'),
  )
  assert row['compile_s'] == '2.5'
  assert 'TPU v99, 10.00 GiB, float32\n' in out
  assert out.splitlines()[-2] == (
    f'  {batch} images, {batch / 10:.2f} GiB; 1,000 images/s at 8, as the '
    f'compiler estimates ({tries} compilations)'
  )


@pytest.mark.parametrize(
  ('given', 'stats', 'gib'),
  [
    (None, {'bytes_limit': 3 * 2**30}, 3),
    (0.5, {'bytes_limit': 3 * 2**30}, 0.5),
    (0.5, None, 0.5),
  ],
)
def test_memory_is_what_is_given_or_what_the_device_tells(
  monkeypatch, given, stats, gib
):
  device = types.SimpleNamespace(memory_stats=lambda: stats, device_kind='x')
  monkeypatch.setattr(capacity.jax, 'devices', lambda: [device])
  machine = capacity.machine_of('', given)
  assert machine == capacity.Machine(device, gib * 2**30, None)


@pytest.mark.parametrize(('given', 'gib'), [(None, 16), (5.0, 5)])
def test_one_core_of_a_topology_has_its_part_of_a_chip(monkeypatch, given, gib):
  cores = [types.SimpleNamespace(coords=[i // 2, 0, 0]) for i in range(8)]
  chip = capacity.hardware.TPU_CHIPS['v3']
  monkeypatch.setattr(capacity.costs, 'devices_of', lambda _: (cores, chip))
  machine = capacity.machine_of('v3:2x2', given)
  assert machine == capacity.Machine(cores[0], gib * 2**30, chip)
