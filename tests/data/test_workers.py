"""Workers that are killed."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT

# Reads batches of a source that no pipe holds.
PROGRAM = """
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
    Zeros(), transform, batch_size=16, seed=0, workers=1
  )
  for _ in range(BATCHES):
    next(batches)
  batches.close()

if __name__ == '__main__':
  main()
"""


def start(tmp_path, batches):
  text = PROGRAM.replace('BATCHES', batches)
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
  process = start(tmp_path, '99')
  while not (found := children(process.pid)):
    assert process.poll() is None, process.stderr.read()
    time.sleep(0.001)
  for pid in found:
    os.kill(pid, signal.SIGKILL)
  _, error = process.communicate(timeout=60)
  assert 'Worker process was terminated' in error


@pytest.mark.slow
def test_a_run_that_ends_early_says_nothing(tmp_path):
  process = start(tmp_path, '9')
  assert process.communicate(timeout=60)[1] == '' and process.returncode == 0
