"""Training steps, ours beside others."""

import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.conftest import COMPILE_QUICKLY, XLA_FLAGS_GIVEN
from tests.tools.bench.conftest import SMALL, assert_mfu
from vit_jax.data import cores
from vit_jax.models import flops
from vit_jax.tools.bench import race, speed, step
from vit_jax.training import hardware


def experiment(dtype='float32', devices=1, batch_size=4, **data):
  small = ['model.depth=1', 'model.mlp_dim=64']
  config = step.config_of('ti16', 32, batch_size, dtype, small)
  config.data.update(data)
  return step.experiment_of(config, jax.devices()[:devices])


@pytest.mark.slow
@pytest.mark.parametrize('variant', ['ti16', 'r26+s32', 'r50x1'])
def test_timm_has_the_same_architecture(timm, variant):
  from vit_jax.tools.bench import torch_peer

  config = step.config_of(variant, 64, 1, 'float32', [])
  chosen = step.experiment_of(config, jax.devices()[:1])
  model = timm.create_model(**torch_peer.arguments(chosen))
  theirs = sum(p.numel() for p in model.parameters())
  assert theirs == flops.count_params(chosen.objective.model, (64, 64))


def test_timm_learns_the_batch(timm, monkeypatch):
  """What is timed is training: its loss falls."""
  del timm
  import torch

  from vit_jax.tools.bench import torch_peer

  losses = []
  cross_entropy = torch.nn.functional.cross_entropy

  def noting(*args):
    losses.append(cross_entropy(*args))
    return losses[-1]

  monkeypatch.setattr(race, 'TURN_S', 0.0)
  monkeypatch.setattr(torch.nn.functional, 'cross_entropy', noting)
  contender = torch_peer.contender(experiment(), True, compiled=False)
  assert contender.name.endswith(', eager')
  contender.turn()
  contender.turn()
  values = [loss.item() for loss in losses]
  assert len(values) == 4
  assert values[0] == pytest.approx(np.log(1000), rel=0.1)
  assert values[3] < values[0] - 0.5


def test_torch_has_our_cores_and_precision(timm, torch, monkeypatch):
  from vit_jax.tools.bench import torch_peer

  before = torch.get_num_threads(), torch.get_float32_matmul_precision()
  try:
    torch.set_num_threads(cores.usable_cores() + 1)
    torch.set_float32_matmul_precision('highest')
    assert torch_peer.libraries() is torch
    assert torch.get_num_threads() == cores.usable_cores()
    assert torch.get_float32_matmul_precision() == 'high'
  finally:
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])
  monkeypatch.setitem(sys.modules, 'timm', None)
  with pytest.raises(ImportError, match='pip install timm torch torchvision'):
    torch_peer.libraries()


@pytest.mark.parametrize('training', [False, True])
def test_timm_is_given_images_as_ours_is(timm, monkeypatch, training):
  """Normalised, and in autocast where ours computes in bfloat16."""
  import torch

  from vit_jax.tools.bench import torch_peer

  seen = []

  class Noting(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.head = torch.nn.Linear(3, step.NUM_CLASSES)

    def forward(self, images_BCHW):
      logits_BC = self.head(images_BCHW.mean((2, 3)))
      seen.append((images_BCHW.numpy(), logits_BC.dtype, self.training))
      return logits_BC

  monkeypatch.setattr(race, 'TURN_S', 0.0)
  monkeypatch.setattr(timm, 'create_model', lambda **_: Noting())
  mean, std = (0.1, 0.2, 0.3), (0.7, 0.8, 0.9)
  chosen = experiment('bfloat16', mean=mean, std=std)
  assert torch_peer.contender(chosen, training, False).turn() > 0
  images_BHWC = (step.random_batch(chosen)['image'] / 255 - mean) / std
  assert len(seen) == 3
  for given_BCHW, logits_dtype, is_training in seen:
    np.testing.assert_allclose(
      given_BCHW.transpose(0, 2, 3, 1), images_BHWC, rtol=1e-4, atol=1e-5
    )
    assert (logits_dtype, is_training) == (torch.bfloat16, training)


@pytest.mark.parametrize('training', [True, False])
def test_contenders_of_timm_are_compiled_or_not(training):
  for name, compiled in (('timm', True), ('timm-eager', False)):
    made = speed.peers_of(training)[name].keywords
    assert made == {'training': training, 'compiled': compiled}


@pytest.mark.slow
def test_timm_beside_ours(timm, run, monkeypatch):
  del timm
  monkeypatch.setitem(hardware._PEAK_FLOPS, 'cpu', 1e9)
  status, out, _ = run('train', '--batch_sizes=2', '--vs=timm-eager')
  assert status == 0
  assert re.search(r'^ours / timm [\d.]+, torch .*, eager: [\d.]+$', out, re.M)
  assert_mfu(out, passes=3)


@pytest.mark.slow
def test_devices_share_the_batch():
  """In a process of its own, which has one device until it is told."""
  args = ('train', *SMALL, '--devices=2', '--batch_sizes=4')
  done = subprocess.run(
    [sys.executable, '-m', 'vit_jax.bench', *args],
    env=os.environ | {'XLA_FLAGS': f'{XLA_FLAGS_GIVEN} {COMPILE_QUICKLY}'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert '2 x cpu, training, float32' in done.stdout


@pytest.mark.slow
def test_devices_share_the_peak(monkeypatch):
  monkeypatch.setitem(hardware._PEAK_FLOPS, 'cpu', 1e12)
  monkeypatch.setattr(race, 'TURN_S', 0.0)
  chosen = experiment(devices=2)
  made = speed.ours(chosen, jax.devices()[:2], training=True)
  work = 3 * flops.forward_flops(chosen.objective.model, (32, 32))
  assert made.mfu_per_image_s == pytest.approx(work / 2e12)
  assert made.turn() > 0 and made.compile_s > 0
  assert made.memory_gib > 0


def test_a_batch_of_noise_has_all_values_there_are():
  batch = step.random_batch(experiment(batch_size=64))
  image, label = batch['image'], batch['label']
  assert (image.shape, image.dtype) == ((64, 32, 32, 3), np.uint8)
  assert np.unique(image).tolist() == [*range(256)]
  assert 0 <= label.min() < 100 and 900 < label.max() < step.NUM_CLASSES
