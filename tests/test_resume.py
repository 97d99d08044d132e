"""Runs that are killed or preempted resume and end like undisturbed runs.

All through the command, in processes of their own, with every kind of state in
use: optimizer, Polyak average, dropout, mixup, data position, metrics.csv.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from PIL import Image

from tests.conftest import ROOT, XLA_FLAGS_GIVEN

pytestmark = pytest.mark.slow

ARGS = (
  '--config.model.width=48',
  '--config.model.depth=2',
  '--config.model.mlp_dim=96',
  '--config.model.heads=3',
  '--config.model.dropout=0.1',
  '--config.loss.mixup=0.2',
  '--config.optimizer.polyak=0.9',
  '--config.optimizer.warmup=2 steps',
  '--config.data.flip=True',
  '--config.batch_size=64',
  '--config.total=100 steps',
  '--config.log_every=1 step',
  '--config.eval_every=25 steps',
  '--config.checkpoint_every=20 steps',
)
# For runs that a test ends long before their last step.
LONG_WITH_A_WORKER = (
  '--config.model.width=32',
  '--config.model.depth=1',
  '--config.model.mlp_dim=32',
  '--config.model.heads=2',
  '--config.data.workers=1',
  '--config.batch_size=16',
  '--config.total=9000 steps',
  '--config.log_every=1 step',
  '--config.eval_every=50%',
  '--config.checkpoint_every=50%',
)


def changed(code):
  """Returns a `program` that runs some code before the command."""
  return (
    '-c',
    f'{code}\nfrom absl import app\nfrom vit_jax import main\n'
    'app.run(main.main, flags_parser=main.parse_flags)',
  )


# So that there is always something to kill, however late.
WAITING_AT_THE_END = """
import signal
from vit_jax import main
run = main.main
def run_and_wait(argv):
  run(argv)
  signal.pause()
main.main = run_and_wait
"""
# So that no run is over before it is told to end, nor what is left of it before
# that is.
WAITING_TO_BE_TOLD = """
import time
from vit_jax.training import preemption, run
take = run.Run.add_metrics
def take_and_wait(self, step, metrics):
  take(self, step, metrics)
  while step == self.start_step + 45 and not preemption._open():
    time.sleep(0.01)
run.Run.add_metrics = take_and_wait
"""


class Command:
  """Starts the training command on a number of devices."""

  def __init__(self, cache, xla_flags=''):
    self._cache = cache
    self._xla_flags = xla_flags

  def start(
    self,
    workdir,
    devices,
    *args,
    program=('-m', 'vit_jax.main'),
    config='configs/digits.py',
    settings=ARGS,
    **variables,
  ):
    environment = {
      k: v for k, v in os.environ.items() if not k.startswith('JAX_')
    }
    environment |= {
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': f'{XLA_FLAGS_GIVEN} {self._xla_flags} '
      f'--xla_force_host_platform_device_count={devices}',
      # Programs compiled once serve all runs, which are mostly start-up.
      'JAX_COMPILATION_CACHE_DIR': str(self._cache),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
    return subprocess.Popen(
      [
        sys.executable,
        *program,
        f'--config={config}',
        *settings,
        f'--workdir={workdir}',
        *args,
      ],
      cwd=ROOT,
      env=environment | variables,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      start_new_session=True,
    )

  def finish(self, workdir, devices, *args, **variables):
    """Runs the command to its end, which must be a good one."""
    process = self.start(workdir, devices, *args, **variables)
    _, err = process.communicate()
    assert process.returncode == 0, err
    return err


@pytest.fixture(scope='module')
def command(tmp_path_factory):
  return Command(tmp_path_factory.mktemp('cache'))


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory, command):
  """The workdir of an undisturbed run on two devices."""
  workdir = tmp_path_factory.mktemp('undisturbed')
  command.finish(workdir, 2)
  return workdir


def final_arrays(workdir):
  """Returns every array of the last checkpoint by its path."""
  step_dir = workdir / 'checkpoints' / str(saved_steps(workdir)[-1])
  arrays = {}
  for item in ('params', 'opt_state', 'average', 'objective_state'):
    if not (step_dir / item).exists():
      continue
    checkpointer = ocp.PyTreeCheckpointer()
    like = checkpointer.metadata(step_dir / item).item_metadata.tree
    tree = checkpointer.restore(
      step_dir / item,
      restore_args=jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like
      ),
    )
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
      arrays[item + jax.tree_util.keystr(path)] = np.asarray(x)
  return arrays


def assert_same_run(workdir, reference):
  """Every array bit for bit, and the table of metrics byte for byte."""
  got, want = final_arrays(workdir), final_arrays(reference)
  # Parameters and average or teacher, Adam's two moments, and its and the
  # schedule's count of steps. A teacher has a centre and a count too.
  n = sum(name.startswith('params') for name in want)
  taught = any(name.startswith('objective_state') for name in want)
  assert n >= 20 and len(want) == 4 * n + 2 + 2 * taught
  assert got.keys() == want.keys()
  for name in want:
    assert got[name].dtype == want[name].dtype, name
    assert got[name].tobytes() == want[name].tobytes(), name
  metrics = [w / 'metrics.csv' for w in (workdir, reference)]
  assert metrics[0].read_text() == metrics[1].read_text()


def saved_steps(workdir):
  folder = workdir / 'checkpoints'
  if not folder.exists():
    return []
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def last_row(workdir, since_ns):
  """Returns the last step in metrics.csv; 0 if it was not written since."""
  path = workdir / 'metrics.csv'
  try:
    if path.stat().st_mtime_ns < since_ns:
      return 0
    step = path.read_text().splitlines()[-1].split(',')[0]
  except FileNotFoundError:
    return 0
  return int(step) if step.isdigit() else 0


def wait_until(happened, process):
  """Returns whether it happened; False if the process ended before."""
  while not happened():
    if process.poll() is not None:
      return False
    time.sleep(0.01)
  return True


def is_saving(workdir):
  return any(workdir.glob('checkpoints/*.orbax-checkpoint-tmp*'))


def test_interrupted_runs_end_bit_for_bit_the_same(
  command, undisturbed, tmp_path
):
  """SIGTERM during training, then SIGKILL during a save.

  The undisturbed run compiles the programs; the others find them in the cache.
  """
  process = command.start(tmp_path, 2, program=changed(WAITING_TO_BE_TOLD))
  try:
    assert wait_until(lambda: last_row(tmp_path, 0), process)
    seen = last_row(tmp_path, 0)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
  finally:
    process.kill()
  assert process.returncode == 75, err
  step = saved_steps(tmp_path)[-1]
  # The step under way is finished, and those handed to the devices before.
  assert seen <= step < 100
  assert err.splitlines()[-1] == f'Preempted: saved step {step}.'
  assert last_row(tmp_path, 0) == step
  assert not is_saving(tmp_path)

  process = command.start(tmp_path, 2, program=changed(WAITING_AT_THE_END))
  try:
    assert wait_until(
      lambda: is_saving(tmp_path) or saved_steps(tmp_path)[-1] == 100, process
    )
  finally:
    process.kill()
  _, err = process.communicate()
  assert process.returncode == -signal.SIGKILL, err

  command.finish(tmp_path, 2)
  assert not is_saving(tmp_path)
  assert_same_run(tmp_path, undisturbed)


def wait_for_steps(process, workdir, count):
  """Waits until so many steps are in metrics.csv, each a line of it."""
  table = workdir / 'metrics.csv'
  while process.poll() is None and (
    not table.exists() or table.read_text().count('\n') <= count
  ):
    time.sleep(0.05)


def test_a_signal_to_all_of_its_processes_finds_the_worker_at_work(
  command, tmp_path
):
  """While the step waits for images, which are slow to decode."""
  rng = np.random.default_rng(0)
  for split in ('train', 'test'):
    for name in ('cat', 'dog'):
      folder = tmp_path / 'data' / split / name
      folder.mkdir(parents=True)
      for i in range(2):
        pixels = rng.integers(0, 256, (1000, 1000, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f'{i}.png', compress_level=1)
  process = command.start(
    tmp_path / 'run',
    1,
    config=f'configs/small.py:{tmp_path}/data',
    settings=LONG_WITH_A_WORKER,
  )
  wait_for_steps(process, tmp_path / 'run', 2)
  os.killpg(process.pid, signal.SIGTERM)
  _, err = process.communicate()
  assert process.returncode == 75, err
  assert saved_steps(tmp_path / 'run')[-1] >= 2


def test_no_worker_outlives_a_killed_run(command, tmp_path):
  process = command.start(tmp_path, 1, settings=LONG_WITH_A_WORKER)
  wait_for_steps(process, tmp_path, 2)
  assert len(members(process.pid)) > 1
  process.kill()
  process.wait()
  process.stderr.close()
  while members(process.pid):
    time.sleep(0.1)


def test_a_killed_worker_ends_the_run_in_one_message(command, tmp_path):
  process = command.start(tmp_path, 1, settings=LONG_WITH_A_WORKER)
  wait_for_steps(process, tmp_path, 2)
  for pid in map(int, members(process.pid)):
    command_line = pathlib.Path(f'/proc/{pid}/cmdline').read_text()
    if 'multiprocessing-fork' in command_line:
      os.kill(pid, signal.SIGKILL)
  _, err = process.communicate()
  assert process.returncode == 71
  assert 'error: Worker process was terminated' in err
  assert 'data.workers' in err and 'Traceback' not in err


def members(group):
  """Returns the processes of a group but those that wait to be reaped."""
  found = []
  for place in pathlib.Path('/proc').glob('[0-9]*/stat'):
    with contextlib.suppress(OSError):
      state, _, of = place.read_text().rpartition(')')[2].split()[:3]
      if int(of) == group and state != 'Z':
        found.append(place.parent.name)
  return found
