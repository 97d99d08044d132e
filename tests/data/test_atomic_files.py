"""Outputs appear whole or not at all, whatever happens meanwhile."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, WITHOUT_ROOTS_RIGHTS
from vit_jax.data import atomic_files


def fill(path, text):
  """Writes a text to a new file, or to a file in the new folder."""
  (path / 'inside' if path.is_dir() else path).write_text(text)


@pytest.mark.parametrize(
  'new', [atomic_files.new_file, atomic_files.new_folder]
)
def test_an_output_appears_at_the_end(tmp_path, new):
  target = tmp_path / 'target'
  with new(str(target)) as path:
    fill(path, 'all')
    assert not target.exists()
    assert path.parent == tmp_path  # a rename works within a file system only
  assert list(tmp_path.iterdir()) == [target]
  inside = target / 'inside' if target.is_dir() else target
  assert inside.read_text() == 'all'


@pytest.mark.parametrize(
  'new', [atomic_files.new_file, atomic_files.new_folder]
)
def test_after_an_exception_nothing_is_there(tmp_path, new):
  with pytest.raises(KeyboardInterrupt):
    with new(str(tmp_path / 'target')) as path:
      fill(path, 'half')
      raise KeyboardInterrupt
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('kind', ['file', 'folder', 'dangling link'])
def test_what_is_there_is_refused_untouched(tmp_path, kind):
  target = tmp_path / 'target'
  if kind == 'file':
    target.write_text('mine')
  elif kind == 'folder':
    target.mkdir()
  else:
    target.symlink_to(tmp_path / 'nowhere')
  before = target.lstat()
  with pytest.raises(FileExistsError, match='target exists already: remove it'):
    with atomic_files.new_file(str(target)):
      raise AssertionError('this should not run')
  assert list(tmp_path.iterdir()) == [target]
  assert target.lstat() == before


def test_a_folder_of_somebody_else_is_refused_before_the_work(tmp_path):
  if WITHOUT_ROOTS_RIGHTS is None:
    pytest.skip('root may write everywhere, and there is no setpriv')
  tmp_path.chmod(0o555)
  code = (
    'import sys, vit_jax.data.atomic_files as x; x.refuse_existing(sys.argv[1])'
  )
  target = str(tmp_path / 'x')
  done = subprocess.run(
    [*WITHOUT_ROOTS_RIGHTS, sys.executable, '-c', code, target],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert f'x cannot be written: {tmp_path} is not writable' in done.stderr


def test_what_appears_meanwhile_is_not_replaced(tmp_path):
  target = tmp_path / 'target'
  with pytest.raises(FileExistsError, match='target exists already'):
    with atomic_files.new_file(str(target)) as path:
      path.write_text('all')
      target.write_text('of another')
  assert list(tmp_path.iterdir()) == [target]
  assert target.read_text() == 'of another'


def test_a_file_is_replaced_or_left(tmp_path, monkeypatch):
  target = tmp_path / 'target'
  for text in (b'first', b'second'):
    atomic_files.replace(target, text)
    assert target.read_bytes() == text

  def fail(*args):
    raise OSError('no space left')

  monkeypatch.setattr(os, 'replace', fail)
  with pytest.raises(OSError, match='no space'):
    atomic_files.replace(target, b'third')
  assert list(tmp_path.iterdir()) == [target]
  assert target.read_bytes() == b'second'


WRITER = """
import sys, time
from vit_jax.data import atomic_files
with atomic_files.new_file(sys.argv[1]) as path:
  path.write_text('half')
  print('half', flush=True)
  time.sleep(60)
"""


def test_a_killed_writer_leaves_no_output(tmp_path):
  target = tmp_path / 'target'
  writer = subprocess.Popen(
    [sys.executable, '-c', WRITER, str(target)],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    cwd=ROOT,
  )
  with writer:
    assert writer.stdout.readline() == b'half\n'
    writer.kill()
  (left,) = tmp_path.iterdir()
  assert re.fullmatch(r'\.target\.\w+\.partial', left.name)


def test_two_writers_of_one_process_number_do_not_meet(tmp_path):
  """As in two containers with one cache."""
  target = tmp_path / 'target'
  with atomic_files.new_file(str(target)) as first:
    first.write_text('one')
    with pytest.raises(FileExistsError):
      with atomic_files.new_file(str(target)) as other:
        other.write_text('two')
        target.touch()
    assert first.read_text() == 'one' and not other.exists()
    target.unlink()
  assert list(tmp_path.iterdir()) == [target]


def test_a_file_in_a_bucket_is_written_there(monkeypatch):
  """Where objects appear whole, and there is nothing to rename."""
  written = {}

  class Bucket:
    def __init__(self, path):
      self.path = path

    def write_bytes(self, data):
      written[self.path] = data

  monkeypatch.setattr(atomic_files.epath, 'Path', Bucket)
  atomic_files.replace('gs://bucket/x', b'data')
  assert written == {'gs://bucket/x': b'data'}
