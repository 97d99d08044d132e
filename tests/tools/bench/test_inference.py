"""Inference beside other frameworks."""

import re

import jax
import numpy as np
import pytest

from tests.tools.bench.conftest import assert_mfu
from vit_jax.data import device_augmentation
from vit_jax.tools.bench import step
from vit_jax.tools.plan import aot
from vit_jax.training import hardware


@pytest.mark.slow
def test_ours_alone(run, monkeypatch):
  monkeypatch.setitem(hardware._PEAK_FLOPS, 'cpu', 1e9)
  status, out, _ = run('inference', '--variants=ti16', '--batch_sizes=1,3')
  assert status == 0
  assert ', inference, float32' in out
  assert re.findall(r' batch (\d+)$', out, re.M) == ['1', '3']
  assert len(re.findall(r'^  ours +[\d.]+  \([\d.]+ to ', out, re.M)) == 2
  assert ' / ' not in out
  assert_mfu(out, passes=1)


@pytest.mark.slow
@pytest.mark.fast('onnx')
@pytest.mark.parametrize('name', ['onnx', 'timm-eager'])
def test_beside_another_framework(run, request, name):
  if name == 'onnx':
    pytest.importorskip('onnx', reason='needs the extra `onnx`')
    pytest.importorskip('onnxruntime', reason='needs the extra `onnx`')
  else:
    request.getfixturevalue('timm')
  # Twice, because each point has a file of its own.
  status, out, _ = run(
    'inference', f'--vs={name}', '--variants=ti16', '--batch_sizes=1,2'
  )
  assert status == 0
  framework = {'onnx': 'onnxruntime', 'timm-eager': 'timm'}[name]
  assert len(re.findall(rf'^  {framework} [\d.]+.* [\d.]+  \(', out, re.M)) == 2
  assert len(re.findall(rf'^ours / {framework} .*: [\d.]+$', out, re.M)) == 2


def test_what_is_timed_gives_logits():
  config = step.config_of('ti16', 32, 2, 'float32', ['model.depth=1'])
  device = jax.devices()[0]
  experiment = step.experiment_of(config, [device])
  model = experiment.objective.model
  program = aot.inference(experiment, device)
  images = step.random_batch(experiment)['image']
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(0, 0.1, x.shape).astype(x.dtype), program.shapes[0]
  )
  logits, _ = model.apply(
    {'params': params}, device_augmentation.normalize(images)
  )
  np.testing.assert_allclose(
    program.lower().compile()(params, images), logits, rtol=1e-4, atol=1e-4
  )
