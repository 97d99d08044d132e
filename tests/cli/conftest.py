"""A small model that several commands open."""

import pytest

from configs import digits
from vit_jax.train import train


@pytest.fixture(scope='session')
def workdir(tmp_path_factory):
  """A model that has seen a few digits, on images of 8 x 8 pixels."""
  folder = tmp_path_factory.mktemp('run')
  config = digits.get_config()
  config.model.update(width=16, depth=1, mlp_dim=32, heads=2, patch_size=4)
  config.update(total='4 steps', batch_size=64)
  config.data.image_size = '8'
  config.optimizer.warmup = '1 step'
  train(config, str(folder))
  return folder
