"""A fine-tuning grid killed in a trial, or spread over two processes.

Through the command, in processes of their own: a small model trained on the
digits is fine-tuned on larger ones, the learning rate chosen first.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.conftest import COMPILE_QUICKLY, ROOT, XLA_FLAGS_GIVEN, run_here
from tests.sweeps.small_sweep import table
from tests.test_resume import WAITING_AT_THE_END, changed

pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings('ignore:the load_module:'),
]

STEPS = 40
RATES = ('0.001', '0.1')

ARGS = (
  '--config=configs/digits.py',
  '--config.model.width=32',
  '--config.model.depth=2',
  '--config.model.mlp_dim=64',
  '--config.model.heads=2',
  '--config.batch_size=64',
  f'--config.total={STEPS} steps',
  '--config.log_every=1 step',
  '--config.eval_every=20 steps',
  '--config.checkpoint_every=10 steps',
)
GRID = (
  '--config.data.image_size=24',
  '--config.optimizer.name=sgd',
  '--config.optimizer.weight_decay=0.0',
)
AXES = (f'--tune=optimizer.lr={",".join(RATES)}', '--sweep=seed=0')


class Command:
  """Pre-trains in this process, then starts the command that fine-tunes."""

  def __init__(self, folder):
    self._folder = folder
    workdir = f'--workdir={folder}/pre-trained'
    assert run_here(*ARGS, '--config.data.image_size=16', workdir) == 0

  def grid(self, workdir, *args, program=('-m', 'vit_jax.main'), **variables):
    environment = {
      k: v for k, v in os.environ.items() if not k.startswith('JAX_')
    }
    environment |= {
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': f'{XLA_FLAGS_GIVEN} {COMPILE_QUICKLY} '
      '--xla_force_host_platform_device_count=1',
      # Programs compiled once serve all runs, which are mostly start-up.
      'JAX_COMPILATION_CACHE_DIR': str(self._folder / 'cache'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
    init = f'--config.init={self._folder}/pre-trained'
    command = [sys.executable, *program, *ARGS, *GRID, init, *args]
    return subprocess.Popen(
      [*command, f'--workdir={workdir}'],
      cwd=ROOT,
      env=environment | variables,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )


def finish(*processes):
  """Waits for the end, which must be a good one; returns what was printed."""
  try:
    ends = [process.communicate() for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (_, err) in zip(processes, ends, strict=True):
    assert process.returncode == 0, err
  return [out for out, _ in ends]


@pytest.fixture(scope='module')
def command(tmp_path_factory):
  return Command(tmp_path_factory.mktemp('command'))


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory, command):
  workdir = tmp_path_factory.mktemp('undisturbed')
  finish(command.grid(workdir, *AXES))
  return workdir


def rows_written(workdir):
  """Returns how many steps are logged, over all runs."""
  return sum(
    path.read_text().count('\n') - 1 for path in workdir.glob('*/*/metrics.csv')
  )


def without_times(rows):
  return [{k: v for k, v in row.items() if k != 'elapsed_s'} for row in rows]


def results(workdir):
  """Returns every result.json by its folder, times aside."""
  found = {}
  for path in sorted(workdir.glob('*/*/result.json')):
    saved = json.loads(path.read_text())
    assert saved.pop('elapsed_s') > 0
    found[os.fspath(path.parent.relative_to(workdir))] = saved
  return found


def test_the_undisturbed_grid_is_what_it_should_be(undisturbed):
  rows = table(undisturbed / 'tune.csv')
  accuracies = [float(row['val/accuracy']) for row in rows]
  # The grid has something to choose.
  assert max(accuracies) > min(accuracies) + 0.1
  assert accuracies.index(max(accuracies)) > 0
  best = RATES[accuracies.index(max(accuracies))]
  assert [row['chosen'] for row in rows] == [
    'yes' if lr == best else 'no' for lr in RATES
  ]
  run = f'runs/seed=0_lr={best}'
  assert [r['folder'] for r in table(undisturbed / 'results.csv')] == [run]
  trials = [f'tune/lr={lr}' for lr in RATES]
  assert list(results(undisturbed)) == sorted([*trials, run])


def test_a_grid_killed_in_its_second_trial_ends_the_same(
  command, undisturbed, tmp_path
):
  """It chooses between a result from before and a trial that it resumes."""
  process = command.grid(tmp_path, *AXES, program=changed(WAITING_AT_THE_END))
  try:
    while rows_written(tmp_path) < 1.5 * STEPS and process.poll() is None:
      time.sleep(0.01)
  finally:
    process.kill()
  _, err = process.communicate()
  assert process.returncode == -signal.SIGKILL, err
  (out,) = finish(command.grid(tmp_path, *AXES))
  for name in ('tune.csv', 'results.csv'):
    assert without_times(table(tmp_path / name)) == without_times(
      table(undisturbed / name)
    )
  assert (tmp_path / 'table.md').read_bytes() == (
    (undisturbed / 'table.md').read_bytes()
  )
  assert results(tmp_path) == results(undisturbed)
  for folder in results(undisturbed):
    metrics = [w / folder / 'metrics.csv' for w in (tmp_path, undisturbed)]
    assert metrics[0].read_bytes() == metrics[1].read_bytes()
  assert out.endswith(f'written  {tmp_path}/tune.csv\n')


def test_two_processes_choose_and_run_the_same(command, tmp_path):
  """Where they disagreed they would wait for each other, or fail."""
  with socket.socket() as s:
    s.bind(('localhost', 0))
    port = s.getsockname()[1]
  processes = [
    command.grid(
      tmp_path,
      *AXES,
      '--distributed',
      JAX_COORDINATOR_ADDRESS=f'localhost:{port}',
      JAX_NUM_PROCESSES='2',
      JAX_PROCESS_ID=str(i),
      JAX_CPU_COLLECTIVES_IMPLEMENTATION='gloo',
    )
    for i in range(2)
  ]
  outs = finish(*processes)
  assert 'chosen for all runs' in outs[0] and 'chosen' not in outs[1]
  assert 'on 2 x cpu' in outs[0]
  low, high = table(tmp_path / 'tune.csv')
  assert float(low['val/accuracy']) < float(high['val/accuracy'])
  assert (low['chosen'], high['chosen']) == ('no', 'yes')
  (row,) = table(tmp_path / 'results.csv')
  assert row['folder'] == 'runs/seed=0_lr=0.1'
  assert (tmp_path / row['folder'] / 'metrics.csv').exists()
  assert row['test/examples'] == '360.0'
