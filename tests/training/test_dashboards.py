"""What shows a run besides metrics.csv: complete, and never waited for."""

import io
import itertools
import os
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from vit_jax.training import dashboards, metric_log


@pytest.fixture
def warned(monkeypatch):
  lines = []
  monkeypatch.setattr(
    dashboards._log, 'warning', lambda text, *args: lines.append(text % args)
  )
  return lines


def read(folder):
  """Returns what TensorBoard shows: values by name and step, and pictures."""
  from tensorboard.backend.event_processing import event_accumulator

  found = event_accumulator.EventAccumulator(str(folder)).Reload()
  tags = found.Tags()
  scalars = {
    name: {event.step: event.value for event in found.Scalars(name)}
    for name in tags['scalars']
  }
  for name, values in scalars.items():
    assert len(found.Scalars(name)) == len(values), f'{name} is there twice'
  return scalars, {name: found.Images(name) for name in tags['images']}


def raw_events(folder):
  """Returns what the only file has in it, in order."""
  from tensorboard.backend.event_processing import event_file_loader
  from tensorboard.compat.proto import event_pb2

  (path,) = folder.glob('events.out.tfevents.*')
  loader = event_file_loader.RawEventFileLoader(str(path))
  return [event_pb2.Event.FromString(data) for data in loader.Load()]


@pytest.fixture
def no_tensorboard(monkeypatch):
  monkeypatch.setattr(metric_log.importlib.util, 'find_spec', lambda name: None)


@pytest.fixture
def tensorboard():
  return pytest.importorskip('tensorboard', reason='needs the extra')


def log_of(workdir, resume_step=None, **kwargs):
  return metric_log.MetricLog(str(workdir), resume_step, **kwargs)


def test_tensorboard_reads_what_was_written(tmp_path, tensorboard):
  picture = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
  began_s = time.time()
  log = log_of(tmp_path)
  log.write(1, {'train/loss': np.float32(0.1), 'lr': 3})
  log.write(2, {'train/loss': float('inf')})
  log.write(2, {'seen': picture})
  log.close()
  scalars, pictures = read(tmp_path)
  assert scalars == {
    'train/loss': {1: np.float32(0.1), 2: float('inf')},
    'lr': {1: 3},
  }
  (event,) = pictures['seen']
  assert (event.step, event.height, event.width) == (2, 4, 6)
  assert began_s <= event.wall_time <= time.time()
  with Image.open(io.BytesIO(event.encoded_image_string)) as png:
    np.testing.assert_array_equal(np.asarray(png), picture)
  # As its format has it: the version first, the start of a run, and RGB as 3.
  version, start, *events = raw_events(tmp_path)
  assert version.file_version == 'brain.Event:2'
  assert start.session_log.status == start.session_log.START
  assert events[-1].summary.value[0].image.colorspace == 3
  assert (tmp_path / 'metrics.csv').read_text().count('\n') == 3


def test_what_a_resumed_run_writes_again_is_there_once(tmp_path, tensorboard):
  killed = log_of(tmp_path)
  for step in (1, 2, 3, 4):
    killed.write(step, {'loss': step})
  killed.close()
  resumed = log_of(tmp_path, 2)
  for step in (3, 4, 5):
    resumed.write(step, {'loss': 10 * step})
  resumed.close()
  assert read(tmp_path)[0]['loss'] == {1: 1, 2: 2, 3: 30, 4: 40, 5: 50}
  anew = log_of(tmp_path)
  anew.write(1, {'loss': 100})
  anew.close()
  assert read(tmp_path)[0]['loss'] == {1: 100}


def test_tensorflow_is_never_imported(tmp_path, tensorboard):
  (tmp_path / 'tensorflow.py').write_text('raise AssertionError("imported")')
  code = (
    'import sys; from vit_jax.training import metric_log; '
    'log = metric_log.MetricLog(sys.argv[1], None); '
    'log.write(1, {"loss": 2.0}); log.close()'
  )
  path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
  done = subprocess.run(
    [sys.executable, '-c', code, str(tmp_path / 'run')],
    env=os.environ | {'PYTHONPATH': path},
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stderr) == (0, '')
  assert read(tmp_path / 'run')[0] == {'loss': {1: 2}}


def test_a_bucket_gets_the_file_once_a_minute(
  tmp_path, tensorboard, monkeypatch
):
  objects = []
  monkeypatch.setattr(
    dashboards.atomic_files,
    'replace',
    lambda path, data: objects.append((path, data)),
  )
  now_s = [1000.0]
  clock = types.SimpleNamespace(
    monotonic=lambda: now_s[0], time=time.time, time_ns=time.time_ns
  )
  monkeypatch.setattr(dashboards, 'time', clock)
  file = dashboards.EventFile('gs://bucket/run', 0)
  for step in (1, 2, 3):
    file.write(step, {'loss': step})
    now_s[0] += 40
  file.close()
  paths, contents = zip(*objects, strict=True)
  assert len(set(paths)) == 1
  assert os.fspath(paths[0]).startswith('gs://bucket/run/events.out.tfevents.')
  # After 0 and 80 seconds, and at the end; each has all of the one before.
  assert len(contents) == 3
  assert all(b.startswith(a) for a, b in itertools.pairwise(contents))
  (tmp_path / 'events.out.tfevents.1').write_bytes(contents[-1])
  assert read(tmp_path)[0] == {'loss': {1: 1, 2: 2, 3: 3}}


class Recorder:
  """A writer that keeps what it is told; opening it may stall."""

  def __init__(self):
    self.gate = threading.Event()
    self.fail_at_step = None
    self.calls = []

  def open(self):
    # Not an endless wait, should the loop's own thread ever come here.
    assert threading.current_thread() is not threading.main_thread()
    self.gate.wait()
    self.calls.append('open')
    return self

  def write(self, step, values):
    if step == self.fail_at_step:
      raise OSError('disk full')
    self.calls.append((step, values))

  def close(self):
    self.calls.append('close')


def test_the_loop_never_waits():
  recorder = Recorder()
  dashboard = dashboards.Dashboard('Board', recorder.open)
  dashboard.write(1, {'loss': 0.5})
  dashboard.write(2, {'loss': 0.25})
  # Here the writer is still being opened, and the loop has gone on.
  assert not recorder.calls
  recorder.gate.set()
  dashboard.close(dashboards.CLOSE_S)
  written = [(1, {'loss': 0.5}), (2, {'loss': 0.25})]
  assert recorder.calls == ['open', *written, 'close']


def test_a_file_on_a_disk_shows_every_write(tmp_path, tensorboard):
  file = dashboards.EventFile(str(tmp_path), 0)
  for step in (1, 2):
    file.write(step, {'loss': step})
    assert list(read(tmp_path)[0]['loss']) == list(range(1, step + 1))
  file.close()


def test_a_stuck_writer_does_not_hold_up_the_end(warned):
  recorder = Recorder()
  dashboard = dashboards.Dashboard('Board', recorder.open)
  # Nor does it, where nobody closes it, that of Python.
  assert dashboard._thread.daemon
  dashboard.close(0.1)
  assert len(warned) == 1 and 'did not write everything' in warned[0]
  recorder.gate.set()


def test_a_failing_writer_is_reported_once(warned):
  recorder = Recorder()
  recorder.gate.set()
  recorder.fail_at_step = 2
  dashboard = dashboards.Dashboard('Board', recorder.open)
  for step in (1, 2, 3, 4):
    dashboard.write(step, {'loss': step})
  dashboard.close(dashboards.CLOSE_S)
  left = dashboard._queue.qsize()
  dashboard.write(5, {'loss': 5})
  assert dashboard._queue.qsize() == left  # which nobody would empty
  assert warned == [
    'Board logs end here, but metrics.csv continues. OSError: disk full'
  ]
  assert (1, {'loss': 1}) in recorder.calls and 'close' not in recorder.calls


class FakeWandb(types.ModuleType):
  """The part of wandb that is used; runs by id, each step's values once."""

  class Error(Exception):
    pass

  def __init__(self):
    super().__init__('wandb')
    self.runs, self.inits, self.error = {}, [], None
    self.finished = []

  def Image(self, picture):  # noqa: N802
    return ('image', picture.shape)

  def init(self, **options):
    if self.error:
      raise self.error
    self.inits.append(options)
    history = self.runs.setdefault(options['id'], {})

    def log(values, step):
      assert step >= max(history, default=0)  # wandb drops what is earlier
      history.setdefault(step, {}).update(values)

    return types.SimpleNamespace(
      starting_step=max(history, default=-1) + 1,
      log=log,
      finish=lambda: self.finished.append(options['id']),
    )


@pytest.fixture
def wandb(monkeypatch, no_tensorboard):
  fake = FakeWandb()
  monkeypatch.setitem(sys.modules, 'wandb', fake)
  return fake


CONFIG = {'wandb': 'vit', 'seed': 1}


def test_wandb_gets_numbers_and_pictures(tmp_path, wandb):
  log = log_of(tmp_path / 'b16', config=CONFIG)
  log.write(1, {'loss': np.float32(0.5)})
  log.write(1, {'seen': np.zeros((4, 6, 3), np.uint8)})
  log.write(2, {'loss': 1})
  log.close()
  (options,) = wandb.inits
  assert options['project'] == 'vit' and options['name'] == 'b16'
  assert options['config'] == CONFIG
  assert options['dir'] == str(tmp_path / 'b16')
  assert list(wandb.runs.values()) == [
    {1: {'loss': 0.5, 'seen': ('image', (4, 6, 3))}, 2: {'loss': 1}}
  ]


def test_a_resumed_run_is_the_same_run(tmp_path, wandb):
  for resume_step, steps in [(None, (1, 2, 3)), (1, (2, 3, 4)), (4, (5,))]:
    log = log_of(tmp_path, resume_step, config=CONFIG)
    for step in steps:
      log.write(step, {'loss': step})
    log.close()
  assert list(wandb.runs.values()) == [{s: {'loss': s} for s in range(1, 6)}]
  assert wandb.finished == 3 * list(wandb.runs)
  assert {options['resume'] for options in wandb.inits} == {'allow'}
  # A run from the start is another one, and so is one of another workdir.
  log_of(tmp_path, config=CONFIG).close()
  log_of(tmp_path / 'other', 2, config=CONFIG).close()
  assert len(wandb.runs) == 3


def test_only_the_first_process_writes_and_only_where_asked(tmp_path, wandb):
  log_of(tmp_path, enabled=False, config=CONFIG).close()
  log_of(tmp_path, config=CONFIG | {'wandb': ''}).close()
  assert not wandb.inits and not (tmp_path / 'wandb_id').exists()
