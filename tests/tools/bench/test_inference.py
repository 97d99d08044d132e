"""Inference beside other frameworks."""

import re

import pytest

from tests.tools.bench.conftest import assert_mfu
from vit_jax.training import hardware


@pytest.mark.slow
def test_ours_alone(run, monkeypatch):
  monkeypatch.setitem(hardware._PEAK_FLOPS, 'cpu', 1e9)
  status, out, _ = run('inference', '--variants=ti16', '--batch_sizes=1,3')
  assert status == 0
  assert ', inference, float32' in out
  titles = re.findall(r'^\[(\d) of 2\] (.*)$', out, re.M)
  assert titles == [('1', 'ti16 at 32, batch 1'), ('2', 'ti16 at 32, batch 3')]
  line = r'^  ours +[\d.]+  \([\d.]+ to [\d.]+\), compiled in [\d.]+ s, '
  assert len(re.findall(line, out, re.M)) == 2
  assert ' / ' not in out
  assert_mfu(out, passes=1)


@pytest.mark.slow
def test_beside_onnxruntime(run):
  pytest.importorskip('onnx', reason='needs the extra `onnx`')
  pytest.importorskip('onnxruntime', reason='needs the extra `onnx`')
  # Twice, because each point has a file of its own.
  status, out, _ = run(
    'inference', '--vs=onnx', '--variants=ti16', '--batch_sizes=1,2'
  )
  assert status == 0
  assert len(re.findall(r'^  onnxruntime [\d.]+.* [\d.]+  \(', out, re.M)) == 2
  assert len(re.findall(r'^ours / onnxruntime .*: [\d.]+$', out, re.M)) == 2
