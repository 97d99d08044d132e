"""Several processes that train together, and what they do without one.

All through the training, on the CPU of this machine: 8 devices in all, and gloo
between the processes.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from tests.conftest import COMPILE_QUICKLY
from tests.test_resume import (
  ROOT,
  Command,
  changed,
  final_arrays,
  is_saving,
  last_row,
  saved_steps,
  wait_until,
)
from vit_jax.training import processes, workdir_lock

pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')

# It is shared out as several are.
ONE_LAYER = '--config.model.depth=1'
# Adam would blow up rounding errors where a true gradient is zero, as that of
# the keys' biases is.
SGD = (
  ONE_LAYER,
  '--config.optimizer.name=sgd',
  '--config.optimizer.lr=0.1',
  '--config.total=40 steps',
)
FSDP = ('--config.mesh.fsdp=-1', '--config.mesh.data=1')
# Over two processes each, which have the same images then.
TENSOR = ('--config.mesh.tensor=4',)
# Four processes, two to a slice.
SLICES = ('--config.mesh.slice=2', '--config.mesh.fsdp=4')
# So that none is done before it is disturbed.
LONG = ('--config.total=9000 steps',)
# Compiles in seconds, and is not saved before it is disturbed.
TINY = (
  '--config.model.width=16',
  '--config.model.depth=1',
  '--config.model.mlp_dim=16',
  '--config.model.heads=2',
  '--config.data.image_size=8',
  '--config.eval_every=100%',
  '--config.checkpoint_every=100%',
)


@pytest.fixture(scope='module')
def training(tmp_path_factory):
  # Of several processes only the first writes programs to the cache, and the
  # others find none of theirs in it.
  return Command(tmp_path_factory.mktemp('cache'), COMPILE_QUICKLY)


@pytest.fixture(scope='module')
def alone(tmp_path_factory, training):
  """The workdir of one process that trained with all devices."""
  workdir = tmp_path_factory.mktemp('alone')
  training.finish(workdir, 8, *SGD)
  return workdir


# Ctrl-C is ignored where a shell runs the tests in the background.
UNIGNORED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
# What would only be waited for where a process fails by itself.
IMPATIENT = """
from vit_jax.training import processes
processes.MEET_S = 5
processes.HEARTBEAT_S = 10
"""
# For where all fail, however late on a busy machine.
PATIENT = """
from vit_jax.training import processes
processes.MEET_S = 600
"""


@contextlib.contextmanager
def started(training, workdir, count, *args, instead=None, **command):
  """Gives this many processes.

  `instead` has Python code by process, which runs there before the command and
  changes it; `command` is of `Command.start`.
  """
  with socket.socket() as s:
    s.bind(('localhost', 0))
    port = s.getsockname()[1]
  programs = {i: changed(code) for i, code in (instead or {}).items()}
  all_processes = [
    training.start(
      workdir,
      8 // count,
      *args,
      '--distributed',
      program=programs.get(i, ('-m', 'vit_jax.main')),
      JAX_COORDINATOR_ADDRESS=f'localhost:{port}',
      JAX_NUM_PROCESSES=str(count),
      JAX_PROCESS_ID=str(i),
      JAX_CPU_COLLECTIVES_IMPLEMENTATION='gloo',
      **command,
    )
    for i in range(count)
  ]
  try:
    yield all_processes
  finally:
    for p in all_processes:
      p.kill()
    for p in all_processes:
      p.wait()
      p.stderr.close()


def results_of(all_processes):
  """Returns each one's exit status and what it wrote on standard error."""
  pairs = [(p.communicate()[1], p) for p in all_processes]
  return [(p.returncode, err) for err, p in pairs]


def finish(training, workdir, count, *args, **command):
  with started(training, workdir, count, *args, **command) as all_processes:
    results = results_of(all_processes)
  assert [status for status, _ in results] == [0] * count, results


def wait_for_row(workdir, step, process, since_ns=0):
  assert wait_until(lambda: last_row(workdir, since_ns) >= step, process), (
    process.communicate()
  )


def read_metrics(workdir):
  header, *lines = (workdir / 'metrics.csv').read_text().splitlines()
  return [
    dict(zip(header.split(','), line.split(','), strict=True)) for line in lines
  ]


def assert_close_arrays(workdir, reference):
  """Sums over several processes round otherwise than those within one."""
  got, want = final_arrays(workdir), final_arrays(reference)
  assert got.keys() == want.keys()
  for name in want:
    np.testing.assert_allclose(
      got[name], want[name], rtol=1e-4, atol=1e-5, err_msg=name
    )


def assert_close_run(workdir, reference):
  assert_close_arrays(workdir, reference)
  rows, wanted = read_metrics(workdir), read_metrics(reference)
  assert len(rows) == len(wanted) == 40
  for row, other in zip(rows, wanted, strict=True):
    assert row.keys() == other.keys()
    for name, text in row.items():
      assert bool(text) == bool(other[name])
      if text and not name.endswith('accuracy'):
        assert float(text) == pytest.approx(float(other[name]), rel=1e-4)
  evaluated = [row for row in rows if row['test/examples']]
  assert [int(row['step']) for row in evaluated] == [25, 40]
  assert {float(row['test/examples']) for row in evaluated} == {360.0}


def assert_lost(result, what='(coordination|distributed) service'):
  """JAX's own lines say so, or ours if nothing moves."""
  status, err = result
  assert status == processes.EXIT_LOST == 69, err
  assert re.search(what, err), err


@pytest.mark.slow
def test_all_agree_on_the_step_to_save(training, alone, tmp_path):
  """One of them is told, by Ctrl-C; both save the same step: status 75.

  Each is a slice, and the run goes on with two processes to a slice.
  """
  since_ns = time.time_ns()
  instead = {0: SLOW_STEPS.format(first=1), 1: UNIGNORED}
  args = (*SGD, '--config.mesh.slice=2')
  with started(training, tmp_path, 2, *args, instead=instead) as both:
    wait_for_row(tmp_path, 1, both[0], since_ns)
    both[1].send_signal(signal.SIGINT)
    results = results_of(both)
  assert [status for status, _ in results] == [75, 75], results
  step = saved_steps(tmp_path)[-1]
  for _, err in results:
    assert f'Preempted: saved step {step}.' in err
  finish(training, tmp_path, 4, *SGD, *SLICES)
  assert_close_run(tmp_path, alone)


LACKS_SPACE = """
import errno
from orbax.checkpoint._src.checkpointers import async_checkpointer
def fail(*args, **kwargs):
  raise OSError(errno.ENOSPC, 'No space left on device')
async_checkpointer.atomicity.on_commit_callback = fail
"""


@pytest.mark.slow
def test_a_full_disk_of_one_is_said_at_once(training, tmp_path):
  """Orbax would have all wait for one another for 20 minutes."""
  instead = {0: IMPATIENT + LACKS_SPACE, 1: IMPATIENT}
  with started(
    training, tmp_path, 2, *TINY, '--config.total=5 steps', instead=instead
  ) as both:
    results = results_of(both)
  assert [status for status, _ in results] == [71, 69], results
  assert 'No space left on device' in results[0][1]


@pytest.mark.slow
def test_several_fine_tune_a_checkpoint_like_one(training, alone, tmp_path):
  """JAX joins the processes before the config opens the checkpoint.

  Each process holds a part of the new head.
  """
  args = (*FSDP, '--config.total=3 steps', '--config.data.image_size=16')
  args += (ONE_LAYER,)
  config = f'configs/finetune.py:{alone},digits'
  finish(training, tmp_path / 'two', 2, *args, config=config)
  training.finish(tmp_path / 'one', 8, *args, config=config)
  assert saved_steps(tmp_path / 'two') == [3]
  assert_close_arrays(tmp_path / 'two', tmp_path / 'one')


LOSES_A_FILE = """
from vit_jax.checkpoints import saving
saving.steps_in = lambda workdir: []
"""


@pytest.mark.slow
def test_a_workdir_that_is_not_shared_is_refused(training, alone, tmp_path):
  """One would start what the other goes on with, and both wait for ever."""
  shutil.copytree(alone, tmp_path / 'run')
  at_once = PATIENT + 'processes.SEEN_S = 1'
  instead = {0: at_once, 1: at_once + LOSES_A_FILE}
  with started(training, tmp_path / 'run', 2, *SGD, instead=instead) as both:
    results = results_of(both)
  for status, err in results:
    assert status == 2
    assert 'error: The processes see different checkpoints in ' in err


SLOW_STEPS = """
import time
from vit_jax.training.run import Run
take = Run.add_metrics
def slow_take(self, step, metrics):
  time.sleep(0.5 * (step >= {first}))
  take(self, step, metrics)
Run.add_metrics = slow_take
"""


@pytest.mark.slow
def test_more_and_then_fewer_go_on(training, alone, tmp_path):
  """A run continues with another number of processes after each stop.

  The first run has two processes, one of which is killed. Of the next four, one
  gets SIGTERM; the four share images and evaluate at step 25. One process ends
  the run.
  """
  slowly = {0: SLOW_STEPS.format(first=20)}
  with started(training, tmp_path, 2, *SGD, *FSDP, instead=slowly) as both:
    wait_for_row(tmp_path, 22, both[0])
    both[1].kill()
    survivor = results_of(both)[0]
  assert_lost(survivor)
  assert 20 <= saved_steps(tmp_path)[-1] < 30
  since_ns = time.time_ns()
  with started(training, tmp_path, 4, *SGD, *TENSOR, instead=slowly) as four:
    wait_for_row(tmp_path, 27, four[0], since_ns)
    four[2].send_signal(signal.SIGTERM)
    results = results_of(four)
  assert [status for status, _ in results] == [75] * 4, results
  assert 27 <= saved_steps(tmp_path)[-1] < 40
  training.finish(tmp_path, 8, *SGD, *FSDP)
  assert_close_run(tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('number', 'moment', 'victim'),
  [
    (signal.SIGKILL, 'saving', 0),
    # As of a machine that does not answer any more.
    (signal.SIGSTOP, 'any', 1),
  ],
)
def test_one_of_two_is_lost(number, moment, victim, training, tmp_path):
  args = (*LONG, *TINY, *FSDP, '--config.checkpoint_every=20 steps')
  instead = {0: IMPATIENT, 1: IMPATIENT}
  with started(training, tmp_path, 2, *args, instead=instead) as both:
    wait_for_row(tmp_path, 22, both[0])
    if moment == 'saving':
      wait_until(lambda: is_saving(tmp_path), both[0])
    both[victim].send_signal(number)
    (survivor,) = results_of([both[1 - victim]])
  assert_lost(survivor)


FAIL_IN_STEP_5 = """
from vit_jax.training.run import Run
take = Run.add_metrics
def failing_take(self, step, metrics):
  if step == 5:
    raise RuntimeError('the disk is gone')
  take(self, step, metrics)
Run.add_metrics = failing_take
"""
NO_DATA = """
from vit_jax.data import bad_images
def no_data(*args):
  raise FileNotFoundError('no such folder: /data')
bad_images.open_checked = no_data
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ('failing', 'code', 'status', 'last'),
  [
    (1, FAIL_IN_STEP_5, 1, 'RuntimeError: the disk is gone'),
    (1, NO_DATA, 2, 'error: no such folder: /data'),
  ],
)
def test_one_alone_fails(failing, code, status, last, training, tmp_path):
  other = 1 - failing
  instead = {failing: IMPATIENT + code, other: IMPATIENT}
  with started(training, tmp_path, 2, *LONG, *TINY, instead=instead) as both:
    results = results_of(both)
  assert results[failing][0] == status, results
  assert last in results[failing][1].splitlines()  # JAX may say more
  assert_lost(results[other])


READING_STEP_40 = """
import orbax.checkpoint as ocp
restore = ocp.CompositeCheckpointHandler.restore
def failing_restore(self, folder, args):
  if folder.name == '40':
    raise {error}
  return restore(self, folder, args)
ocp.CompositeCheckpointHandler.restore = failing_restore
"""


@pytest.mark.slow
def test_all_step_over_what_one_finds_damaged(training, alone, tmp_path):
  """As where one alone reads a certain file, since it holds its arrays."""
  failing = 1  # and 0 in the next test: what each found is gathered alike
  workdir = tmp_path / 'run'
  shutil.copytree(alone, workdir)
  code = READING_STEP_40.format(error="ValueError('DATA_LOSS: a bad checksum')")
  with started(
    training, workdir, 2, *SGD, *FSDP, instead={failing: code}
  ) as both:
    results = results_of(both)
  for i, (status, err) in enumerate(results):
    assert status == 0, results
    reason = 'DATA_LOSS' if i == failing else 'another process found it'
    assert f'40 is damaged ({reason}' in err.replace('ValueError: ', '')
  assert (workdir / 'checkpoints' / '40.damaged').exists()
  assert_close_run(workdir, alone)


@pytest.mark.slow
def test_all_end_where_one_cannot_read(training, alone, tmp_path):
  failing = 0
  workdir = tmp_path / 'run'
  shutil.copytree(alone, workdir)
  before = sorted(workdir.rglob('*'))
  code = READING_STEP_40.format(error="OSError(5, 'Input/output error')")
  instead = {failing: PATIENT + code, 1 - failing: PATIENT}
  with started(training, workdir, 2, *SGD, *FSDP, instead=instead) as both:
    results = results_of(both)
  for i, (status, err) in enumerate(results):
    assert status == 71, results
    reason = (
      r'OSError: \[Errno 5\] Input/output error'
      if i == failing
      else 'another process prints the reason'
    )
    assert re.search(f'error: .*/40 cannot be read now: {reason}', err), err
    assert 'Traceback' not in err
  assert sorted(workdir.rglob('*')) == before


@pytest.mark.slow
def test_all_are_refused_a_workdir_in_use(training, tmp_path):
  instead = {0: PATIENT, 1: PATIENT}
  with workdir_lock.held(str(tmp_path)):
    with started(training, tmp_path, 2, instead=instead) as both:
      results = results_of(both)
    for status, err in results:
      assert status == 2
      message = err.splitlines()[-1]
      assert message.startswith(
        f'error: Another run is in the workdir {tmp_path}'
      )
      assert f'process {os.getpid()} on ' in message
    assert [p.name for p in tmp_path.iterdir()] == ['lock']


@pytest.mark.slow
def test_one_never_comes(training, tmp_path):
  code = """
import functools
import jax
initialize = jax.distributed.initialize
jax.distributed.initialize = functools.partial(
  initialize, initialization_timeout=5)
"""
  with started(training, tmp_path, 2, instead={0: code, 1: code}) as both:
    both[0].kill()
    (result,) = results_of([both[1]])
  assert_lost(result)


HANG = """
import time
from vit_jax.training.run import Run
Run.wait_for = lambda *args: time.sleep(1000)
"""


@pytest.mark.slow
def test_hanging_alone_ends_by_timeout(training, tmp_path):
  process = training.start(
    tmp_path,
    8,
    *TINY,
    '--timeout_s=1',
    program=changed(HANG),
  )
  (result,) = results_of([process])
  assert_lost(
    result, 'error: Process 0 has finished no step, evaluation or save'
  )
  assert re.search(r'train\.py", line \d+ in _train', result[1])


WATCHED = """
import time
from vit_jax.training.processes import Watch
Watch.timeout_s = 3
watch = Watch()
for _ in range({moves}):
  print('moves', flush=True)
  time.sleep(1)
  watch.progress()
{then}
time.sleep({sleep_s})
"""


def watched(moves, sleep_s, then=''):
  code = WATCHED.format(moves=moves, sleep_s=sleep_s, then=then)
  return subprocess.Popen(
    [sys.executable, '-c', code],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.mark.slow
def test_what_moves_or_is_over_is_not_hanging():
  moving = watched(5, 1000)
  over = watched(0, 5, 'watch.stop()')
  out, err = moving.communicate()
  assert out == 5 * 'moves\n'
  assert_lost((moving.returncode, err), 'error: Process 0 has finished no step')
  _, err = over.communicate()
  assert (over.returncode, err) == (0, '')


class Ended(BaseException):
  """Stands for the end of the process."""


@pytest.fixture
def ended(monkeypatch):
  """Gives what is done about time, with no process ended by it."""
  calls = []

  def end(status):
    raise Ended(status)

  now = [100.0]

  def sleep(seconds):
    calls.append(('sleep', seconds))
    now[0] += seconds

  clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
  monkeypatch.setattr(processes, 'time', clock)
  monkeypatch.setattr(processes.os, '_exit', end)
  return calls


@pytest.mark.parametrize(
  ('patience_s', 'alike_after', 'looks'),
  [(0, 1, None), (3, 3, 4), (3, 4, None)],
)
def test_all_look_again_for_as_long_as_a_file_may_be_late(
  monkeypatch, ended, patience_s, alike_after, looks
):
  """Of two numbers the second differs in the third process until then."""
  seen = []

  def gathered(numbers):
    assert numbers.tolist() == [7, 8]
    seen.append(numbers)
    return np.array([[7, 8], [7, 8], [7, 8 + (len(seen) <= alike_after)]])

  monkeypatch.setattr(processes.multihost_utils, 'process_allgather', gathered)
  monkeypatch.setattr(jax, 'process_count', lambda: 3)
  refused = contextlib.nullcontext()
  if looks is None:
    refused = pytest.raises(ValueError, match='^they differ$')
  with refused:
    # Unless it is said, nothing is waited for.
    patience = [patience_s] if patience_s else []
    processes.refuse_unlike(lambda: [7, 8], 'they differ', *patience)
  assert len(seen) == (looks or patience_s + 1)
  assert ended == (len(seen) - 1) * [('sleep', 1)]
