"""Inference beside other frameworks, at a size that takes no time."""

import re
import sys

import pytest

from vit_jax import bench

pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')


@pytest.fixture
def run(monkeypatch, capsys):
  """Gives a function that runs the command: its status, output and errors."""
  monkeypatch.setattr(bench, '_IMAGE_SIZE', (32, 32))
  monkeypatch.setattr(bench, '_ROUNDS', 2)

  def run(*args):
    monkeypatch.setattr(sys, 'argv', ['bench', *args])
    try:
      bench.main()
      status = 0
    except SystemExit as e:
      status = e.code
    return status, *capsys.readouterr()

  return run


def test_inference_of_ours_alone(run):
  status, out, _ = run('inference', '--variant=ti16', '--batch_sizes=1,3')
  assert status == 0
  assert 'ti16 at (32, 32), float32' in out
  assert re.findall(r'^batch (\d+)$', out, re.M) == ['1', '3']
  assert len(re.findall(r'^  ours +[\d.]+  \([\d.]+ to ', out, re.M)) == 2
  assert ' / ' not in out


@pytest.mark.parametrize('name', ['onnx', 'torch'])
def test_inference_beside_another_framework(run, request, name):
  if name == 'onnx':
    pytest.importorskip('onnx', reason='needs the extra `peers`')
    pytest.importorskip('onnxruntime', reason='needs the extra `peers`')
  else:
    request.getfixturevalue('timm')
  status, out, _ = run(
    'inference', f'--vs={name}', '--variant=ti16', '--batch_sizes=2'
  )
  assert status == 0
  framework = {'onnx': 'onnxruntime', 'torch': 'timm'}[name]
  assert re.search(rf'^  {framework} [\d.]+.* [\d.]+  \(', out, re.M)
  assert re.search(rf'^ours / {framework} .*: [\d.]+$', out, re.M)


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (('--vs=keras',), '--vs=keras is none of onnx, torch'),
    (('--batch_sizes=0',), '--batch_sizes has 0: at least 1 image'),
    (('--batch_sizes=x',), '--batch_sizes'),
    (('--variant=q16',), 'q16'),
  ],
)
def test_flags_that_make_no_sense(run, args, message):
  status, _, err = run('inference', *args)
  assert status == 2
  assert message in err
