"""Outputs appear whole or not at all, whatever happens meanwhile."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT, WITHOUT_ROOTS_RIGHTS
from vit_jax.data import atomic_files

KINDS = {'file': atomic_files.new_file, 'folder': atomic_files.new_folder}


def fill(path, text):
  """Writes a text to a new file, or to a file in the new folder."""
  (path / 'inside' if path.is_dir() else path).write_text(text)


@pytest.fixture(params=KINDS)
def new(request):
  return KINDS[request.param]


def test_an_output_appears_at_the_end(tmp_path, new):
  target = tmp_path / 'target'
  with new(str(target)) as path:
    fill(path, 'all')
    assert not target.exists()
    assert path.parent == tmp_path  # a rename works within a file system only
  assert list(tmp_path.iterdir()) == [target]
  inside = target / 'inside' if target.is_dir() else target
  assert inside.read_text() == 'all'


def test_after_an_exception_nothing_is_there(tmp_path, new):
  error = KeyboardInterrupt
  with pytest.raises(error):
    with new(str(tmp_path / 'target')) as path:
      fill(path, 'half')
      raise error
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('is_folder', [False, True])
def test_what_is_there_is_refused_untouched(tmp_path, new, is_folder):
  target = tmp_path / 'target'
  if is_folder:
    target.mkdir()
  target_text = target / 'x' if is_folder else target
  target_text.write_text('mine')
  with pytest.raises(FileExistsError, match='target exists already: remove it'):
    with new(str(target)):
      raise AssertionError('this should not run')
  assert list(tmp_path.iterdir()) == [target]
  assert target_text.read_text() == 'mine'


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


def test_a_dangling_link_is_refused(tmp_path, new):
  (tmp_path / 'link').symlink_to(tmp_path / 'nowhere')
  with pytest.raises(FileExistsError, match='link exists already'):
    with new(str(tmp_path / 'link')):
      raise AssertionError('this should not run')


def test_what_appears_meanwhile_is_not_replaced(tmp_path, new):
  target = tmp_path / 'target'
  with pytest.raises(FileExistsError, match='target exists already'):
    with new(str(target)) as path:
      fill(path, 'all')
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
import signal, sys, time
from vit_jax.data import atomic_files
# In the background of a shell it would be ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
with getattr(atomic_files, sys.argv[1])(sys.argv[2]) as path:
  (path / 'inside' if path.is_dir() else path).write_text('half')
  print('half', flush=True)
  time.sleep(60)
"""


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL])
def test_a_killed_writer_leaves_no_output(tmp_path, number):
  target = tmp_path / 'target'
  writer = subprocess.Popen(
    [sys.executable, '-c', WRITER, 'new_file', str(target)],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    cwd=ROOT,
  )
  with writer:
    assert writer.stdout.readline() == b'half\n'
    writer.send_signal(number)
  left = [path.name for path in tmp_path.iterdir()]
  # Nobody is left to remove it, and its name says what it is.
  assert len(left) == (number == signal.SIGKILL)
  assert all(re.fullmatch(r'\.target\.\w+\.partial', name) for name in left)
  with atomic_files.new_file(str(target)) as path:
    fill(path, 'all')
  assert target.exists()


def test_two_writers_of_one_process_number_do_not_meet(tmp_path, new):
  """As in two containers with one cache."""
  with new(str(tmp_path / 'target')) as first:
    fill(first, 'one')
    with pytest.raises(FileExistsError), new(str(tmp_path / 'target')) as other:
      assert other != first
      fill(other, 'two')
      (tmp_path / 'target').touch()
    assert first.exists() and not other.exists()
    (tmp_path / 'target').unlink()
  assert [x.name for x in tmp_path.iterdir()] == ['target']


def test_a_file_in_a_bucket_is_written_there(monkeypatch):
  """Where objects appear whole, and there is nothing to rename."""
  scheme = 'gs'
  written = {}

  class Bucket:
    def __init__(self, path):
      self.path = path

    def write_bytes(self, data):
      written[self.path] = data

  monkeypatch.setattr(atomic_files.epath, 'Path', Bucket)
  atomic_files.replace(f'{scheme}://bucket/x', b'data')
  assert written == {f'{scheme}://bucket/x': b'data'}
