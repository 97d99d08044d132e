"""metrics.csv over writes, resumes and kills."""

import os

import numpy as np
import pytest
from etils import epath

from vit_jax.training import metric_log


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch):
  """The CSV tests are the same with and without TensorBoard installed."""
  monkeypatch.setattr(metric_log.importlib.util, 'find_spec', lambda name: None)


def _log(workdir, resume_step=None, **kwargs):
  return metric_log.MetricLog(str(workdir), resume_step, **kwargs)


def _text(workdir):
  return (workdir / 'metrics.csv').read_text()


def _rows_of(workdir):
  return metric_log.read_table(epath.Path(workdir / 'metrics.csv'))[1]


def test_rows_are_in_the_file_after_every_write(tmp_path):
  log = _log(tmp_path / 'new' / 'run')
  path = tmp_path / 'new' / 'run' / 'metrics.csv'
  assert os.fspath(log.path) == os.fspath(path)
  assert path.read_text() == 'step\n'
  log.write(1, {'train/loss': 2.5})
  assert path.read_text() == 'step,train/loss\n1,2.5\n'
  # A row more is no file written anew.
  file = path.stat().st_ino
  log.write(2, {'train/loss': 2.25})
  assert path.read_text() == 'step,train/loss\n1,2.5\n2,2.25\n'
  assert path.stat().st_ino == file


def test_writes_for_one_step_share_a_row(tmp_path):
  log = _log(tmp_path)
  log.write(1, {'loss': 2.0, 'test/accuracy': 0.25})
  log.write(2, {'loss': 1.0})
  log.write(2, {'test/accuracy': 0.5})
  log.write(3, {'loss': 0.5})
  expected = 'step,loss,test/accuracy\n1,2.0,0.25\n2,1.0,0.5\n3,0.5,\n'
  assert _text(tmp_path) == expected


def test_a_new_metric_adds_a_column_to_all_rows(tmp_path):
  log = _log(tmp_path)
  log.write(1, {'loss': 2.0})
  log.write(2, {'loss': 1.0, 'lr': 0.1})
  log.write(2, {'loss': 1.5})
  log.write(3, {'loss': 0.5, 'lr': 0.2})
  assert _text(tmp_path) == 'step,loss,lr\n1,2.0,\n2,1.5,0.1\n3,0.5,0.2\n'
  assert os.listdir(tmp_path) == ['metrics.csv']


def test_an_earlier_step_goes_to_its_place(tmp_path):
  log = _log(tmp_path)
  for step in (10, 30, 20, 10):
    log.write(step, {'loss': step / 10})
  log.write(40, {'loss': 4.0})
  assert _text(tmp_path) == 'step,loss\n10,1.0\n20,2.0\n30,3.0\n40,4.0\n'


def test_a_removed_file_comes_back_whole(tmp_path):
  log = _log(tmp_path)
  log.write(1, {'loss': 2.0})
  log.path.unlink()
  log.write(2, {'loss': 1.0})
  assert _text(tmp_path) == 'step,loss\n1,2.0\n2,1.0\n'


def _write_run(log, steps):
  for step in steps:
    log.write(step, {'train/loss': np.float32(1 / step)})
    if step % 3 == 0:
      log.write(step, {'test/accuracy': step / 7})


@pytest.mark.parametrize(
  ('resume_step', 'torn'), [(0, ''), (3, '8,0.1'), (7, '8,\0\0\0')]
)
def test_resumed_equals_uninterrupted(tmp_path, resume_step, torn):
  whole, resumed = tmp_path / 'whole', tmp_path / 'resumed'
  _write_run(_log(whole), range(1, 11))
  _write_run(_log(resumed), range(1, 8))
  with open(resumed / 'metrics.csv', 'a') as f:
    f.write(torn)
  log = _log(resumed, resume_step)
  # What a kill right after the resume leaves behind, is complete already.
  assert max(_rows_of(resumed), default=0) == resume_step
  _write_run(log, range(resume_step + 1, 11))
  assert _text(resumed) == _text(whole)


def test_a_resume_without_a_table_starts_one(tmp_path):
  _log(tmp_path, 5).write(6, {'loss': 1.0})
  assert _text(tmp_path) == 'step,loss\n6,1.0\n'


def test_a_run_from_the_start_replaces_the_table(tmp_path):
  _log(tmp_path).write(5, {'loss': 2.0})
  _log(tmp_path)
  assert _text(tmp_path) == 'step\n'


def test_a_file_killed_at_birth_is_an_empty_table(tmp_path):
  (tmp_path / 'metrics.csv').write_text('st')
  _log(tmp_path, 5).write(6, {'loss': 1.0})
  assert _text(tmp_path) == 'step,loss\n6,1.0\n'


@pytest.mark.parametrize(
  'text, message',
  [
    ('epoch,loss\n1,2\n', "line 1 is 'epoch,loss'"),
    ('step,loss\n1,2\n2\n3,4\n', "line 3 is '2' "),
    ('step,loss\n1,2\n2,x\n', "line 3 is '2,x' "),
    ('step,loss,loss\n1,2,3\n', "line 1 is 'step,loss,loss'"),
  ],
)
def test_a_foreign_table_is_refused_and_kept(tmp_path, text, message):
  (tmp_path / 'metrics.csv').write_text(text)
  with pytest.raises(ValueError, match=message):
    _log(tmp_path, 5)
  assert _text(tmp_path) == text


def test_disabled_touches_nothing(tmp_path):
  log = _log(tmp_path / 'run', enabled=False)
  log.write(1, {'loss': 1.0})
  log.close()
  assert not (tmp_path / 'run').exists()


def test_a_bucket_gets_whole_objects(tmp_path, monkeypatch):
  """Objects cannot be appended to or renamed: only whole writes may happen."""
  objects = {}

  class Bucket(type(epath.Path('gs://bucket'))):
    def mkdir(self, **kwargs):
      pass

    def exists(self):
      return os.fspath(self) in objects

    def read_bytes(self):
      return objects[os.fspath(self)]

    def write_bytes(self, data):
      objects[os.fspath(self)] = data

  monkeypatch.setattr(metric_log.epath, 'Path', Bucket)
  monkeypatch.chdir(tmp_path)
  log = _log('gs://bucket/run')
  log.write(1, {'loss': 2.0})
  log.write(2, {'loss': 1.0})
  log.write(2, {'loss': 1.5})
  _log('gs://bucket/run', 1).write(2, {'loss': 0.5})
  assert objects == {
    'gs://bucket/run/metrics.csv': b'step,loss\n1,2.0\n2,0.5\n'
  }
  assert not os.listdir(tmp_path)


def test_numbers_are_told_from_pictures():
  picture = np.zeros((2, 3, 3), np.uint8)
  values = metric_log.numbers(
    {'test/loss': np.float32(0.5), 'test/seen': picture, 'test/examples': 3}
  )
  assert values == {'test/loss': 0.5, 'test/examples': 3.0}
  assert {type(value) for value in values.values()} == {float}
