"""Converting takes the memory of a few copies of the weights, not many."""

import importlib.util
import subprocess
import sys

import pytest

from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import ROOT
from vit_jax.checkpoints.formats import npz

# Converts in a process of its own and prints its peak. Not `ru_maxrss`: a child
# takes that over from the process that starts it, which other tests made large.
SCRIPT = """
import sys
from vit_jax.convert.__main__ import main
status = main(sys.argv[1:])
with open('/proc/self/status') as f:
  peak_kib = dict(line.split(':') for line in f)['VmHWM'].split()[0]
print(int(peak_kib) * 1024)
sys.exit(status)
"""


@pytest.fixture(scope='module')
def published(tmp_path_factory):
  """ViT-L/16 of 1,000 classes, 1.2 GB."""
  path = tmp_path_factory.mktemp('large') / 'ViT-L_16.npz'
  checkpoint = random_checkpoint('l16', num_classes=1000, names=False)
  npz.write(checkpoint.weights(), str(path), 'float32')
  return path


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc')
@pytest.mark.parametrize(
  ('to', 'library'),
  {
    # test_archive.py measures npz, and timm's files are written like these.
    'hf': None,
    'onnx': 'onnx',
    'stablehlo': None,
    'orbax': None,
  }.items(),
)
def test_l16_converts_in_a_few_times_its_size(published, tmp_path, to, library):
  if library and importlib.util.find_spec(library) is None:
    pytest.skip(f'{library} is not installed')
  target = tmp_path / f'target.{to}'
  done = subprocess.run(
    [sys.executable, '-c', SCRIPT, published, target, f'--to={to}'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  peak_bytes = int(done.stdout.split()[-1])
  share = peak_bytes / published.stat().st_size
  print(f'{to}: {peak_bytes / 1e9:.2f} GB, {share:.2f} times the file')
  # Protocol Buffers hold the weights three times more while they are written.
  assert share < (5 if to == 'onnx' else 3)
