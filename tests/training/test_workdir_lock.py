"""Two runs in one workdir, as commands; and what is said of a bucket."""

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.test_main import (
  SMALL,
  assert_refused,
  saved_so_far,
  saved_steps,
  start,
)
from vit_jax.training import processes, workdir_lock

LONG = (*SMALL, '--config.total=100000 steps')


def wait_for(happened, process):
  while not happened():
    assert process.poll() is None, process.communicate()
    time.sleep(0.01)


def suspend(process):
  """Returns when all of its threads stand still."""
  process.send_signal(signal.SIGSTOP)
  os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def files_in(folder):
  """By path, with what changes when one is written."""
  stats = {p: p.stat() for p in folder.rglob('*')}
  return {p: (s.st_ino, s.st_size, s.st_mtime_ns) for p, s in stats.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:the load_module:')
def test_a_second_run_is_refused_until_the_first_is_killed(command, tmp_path):
  args = (*LONG, f'--workdir={tmp_path}')
  first = start(*args)
  try:
    wait_for(lambda: saved_so_far(tmp_path) >= 2, first)
    suspend(first)  # so that only the second can change files
    before = files_in(tmp_path)
    status, out, err = command(*args)
    assert files_in(tmp_path) == before
    messages = [
      f'Another run is in the workdir {tmp_path}: process {first.pid} on ',
      'since 2',
      'vit_jax/main.py',
      'another --workdir',
    ]
    assert_refused(status, err, messages)
    assert out == ''
    # Whoever only reads is not kept out.
    status, out, err = command(
      *args, f'--config.init={tmp_path}', '--config.eval_only=True'
    )
    assert status == 0, err
    assert 'test/accuracy' in out
  finally:
    first.kill()
    first.communicate()
  step = saved_so_far(tmp_path)
  second = start(*args)
  try:
    wait_for(lambda: saved_so_far(tmp_path) > step, second)
    second.send_signal(signal.SIGTERM)
    _, err = second.communicate()
  finally:
    second.kill()
  assert second.returncode == 75, err
  assert f'Resuming after step {step}.' in err
  assert saved_steps(tmp_path)[-1] > step


def test_after_a_run_of_the_same_process_another_can_start(tmp_path):
  for _ in range(2):
    with pytest.raises(RuntimeError, match='as it may'):
      with workdir_lock.held(str(tmp_path / 'new' / 'run')):
        raise RuntimeError('as it may')


def test_a_lock_that_cannot_be_written_is_one_message(tmp_path):
  (tmp_path / 'lock').mkdir()
  with pytest.raises(
    ValueError, match='cannot be locked .*directory.*writable'
  ):
    with workdir_lock.held(str(tmp_path)):
      pass


BUCKET = """
import fsspec
from fsspec.implementations.memory import MemoryFileSystem
class Bucket(MemoryFileSystem):
  protocol = ('gs', 'gcs')
  store, pseudo_dirs = {}, ['']
  @classmethod
  def _strip_protocol(cls, path):
    return '/' + path.removeprefix('gs://').strip('/')
for name in Bucket.protocol:
  fsspec.register_implementation(name, Bucket, clobber=True)
from vit_jax.training import workdir_lock
for ended in (False, True):
  with workdir_lock.held('gs://bucket/run'):
    assert list(Bucket.store) == ['/bucket/run/lock']
    if not ended:
      with workdir_lock.held('gs://bucket/run'):
        pass
  assert not Bucket.store
"""


@pytest.mark.skipif(
  importlib.util.find_spec('tensorflow') is not None,
  reason='etils reaches buckets through TensorFlow where it is installed',
)
def test_a_bucket_has_no_lock_and_says_who_was_there():
  """Through the libraries that reach real ones, to one in memory."""
  done = subprocess.run(
    [sys.executable, '-c', BUCKET], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert 'run in gs://bucket/run did not end normally: proc' in done.stderr
  assert done.stderr.count('stop one of the two') == 1


def test_the_file_says_who_is_there_and_nothing_of_who_was(
  tmp_path, monkeypatch
):
  looked = []
  monkeypatch.setattr(
    workdir_lock.processes,
    'refuse_unlike',
    lambda see, refusal, *patience: looked.append((see(), refusal, *patience)),
  )
  (tmp_path / 'lock').write_text(3 * 'process 7 on a machine of a long name\n')
  with workdir_lock.held(str(tmp_path)):
    text = (tmp_path / 'lock').read_text()
    # All processes see it, if their workdir is the same.
    ((there, refusal, patience_s),) = looked
    assert there == [True] and patience_s == processes.SEEN_S
    assert refusal.startswith(
      f'Not all processes see the lock file in {tmp_path}.'
    )
    assert text.count('\n') == 1 and text.endswith(')\n')
    assert text.startswith(f'process {os.getpid()} on ')


def test_where_nothing_can_be_locked_a_run_is_warned_and_goes_on(
  tmp_path, monkeypatch, caplog
):
  def lockf(file, how):
    raise OSError(95, 'Operation not supported')

  monkeypatch.setattr(workdir_lock.fcntl, 'lockf', lockf)
  with workdir_lock.held(str(tmp_path)):
    assert 'not supported). Do not start a second run' in caplog.text
