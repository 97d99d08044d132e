"""Workers that are killed, and the memory that they leave behind."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT

# Prints a line for each batch, of a source that no pipe holds.
PROGRAM = """
import pathlib
import numpy as np
from vit_jax.data import loader, source

class Zeros(source.Source):
  held = np.zeros(10**6)
  def __init__(self):
    self.held = np.zeros(10**6)
  def __len__(self):
    return 64
  def __getitem__(self, index):
    return index

def transform(record, rng):
  return {'image': np.zeros((64, 64, 3), np.uint8)}

def main():
  batches = loader.train_batches(
    Zeros(), transform, batch_size=16, seed=0, workers=WORKERS
  )
  for _ in range(BATCHES):
    next(batches)
    pathlib.Path('batch').touch()
  batches.close()

if __name__ == '__main__':
  main()
"""


def start(tmp_path, workers, batches):
  text = PROGRAM.replace('WORKERS', workers).replace('BATCHES', batches)
  (tmp_path / 'program.py').write_text(text)
  return subprocess.Popen(
    [sys.executable, 'program.py'],
    cwd=tmp_path,
    env=os.environ | {'PYTHONPATH': f'{ROOT}:{":".join(sys.path)}'},
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )


def children(pid):
  """Returns the workers of a process."""
  places = pathlib.Path(f'/proc/{pid}/task').glob('*/children')
  found = ' '.join(place.read_text() for place in places).split()
  lines = {x: pathlib.Path(f'/proc/{x}/cmdline').read_text() for x in found}
  return [int(x) for x, line in lines.items() if 'spawn_main' in line]


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_starts_ends_the_run(tmp_path):
  process = start(tmp_path, '1', '99')
  while not (found := children(process.pid)):
    assert process.poll() is None, process.stderr.read()
    time.sleep(0.001)
  for pid in found:
    os.kill(pid, signal.SIGKILL)
  _, error = process.communicate(timeout=60)
  assert 'Worker process was terminated' in error


def segments():
  return {path.name for path in pathlib.Path('/dev/shm').glob('*vj*')}


@pytest.mark.slow
def test_memory_of_dead_runs_is_removed_and_of_living_ones_kept(tmp_path):
  before = segments()
  process = start(tmp_path, '2', '10**9')
  while not (tmp_path / 'batch').exists():
    assert process.poll() is None, process.stderr.read()
    time.sleep(0.01)
  own = segments() - before
  assert len(own) > 1
  other = start(tmp_path, '1', '9')
  assert other.communicate()[1] == '' and other.returncode == 0
  lock = {x for x in own if x.endswith('lock')}
  assert lock <= segments()
  os.killpg(process.pid, signal.SIGKILL)
  process.communicate()
  left = segments() - before
  assert lock < left and any(x.startswith('sem.') for x in left)
  other = start(tmp_path, '1', '1')
  assert other.communicate()[1] == '' and other.returncode == 0
  assert not segments() & left
  assert segments() <= before


# A worker may be killed after it made a file and before it registered it.
LEFT_BEHIND = """
import pathlib
from vit_jax.data import workers
prefix = workers._own_prefix()
pathlib.Path(f'/dev/shm/{prefix}batch').touch()
"""


@pytest.mark.slow
def test_an_unregistered_file_is_removed_without_a_traceback():
  before = segments()
  ended = subprocess.run(
    [sys.executable, '-c', LEFT_BEHIND],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert (ended.returncode, ended.stderr) == (0, '')
  assert segments() <= before
