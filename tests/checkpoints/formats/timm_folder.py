"""A written directory of timm whose files can be changed."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.checkpoints.random_weights import random_checkpoint
from vit_jax.checkpoints.formats import timm as convert

TINY = {
  'patch_size': 8,
  'width': 48,
  'depth': 2,
  'mlp_dim': 100,
  'heads': 4,
}
TINY_BIT = {'name': 'resnet', 'layers': (3, 4, 6, 3), 'width': 32}
HYBRID = {'stem_width': 64, 'patch_size': 1}


class Folder:
  def __init__(self, path, size=(32, 32), **fields):
    self.path = path
    checkpoint = random_checkpoint(None, size, **fields or TINY)
    convert.write(checkpoint.weights(), str(path), 'float32')

  def __str__(self):
    return str(self.path)

  def config(self):
    return json.loads((self.path / 'config.json').read_text())

  def change_config(self, **changes):
    """Sets values of config.json; a__b=x sets b in the object a."""
    config = self.config()
    for key, value in changes.items():
      place = config
      *above, last = key.split('__')
      for name in above:
        place = place[name]
      place[last] = value
    self.put_config(config)

  def put_config(self, config):
    (self.path / 'config.json').write_text(json.dumps(config))

  def arrays(self):
    return load_file(self.path / 'model.safetensors')

  def change_arrays(self, **changes):
    """Replaces arrays; None removes an array."""
    arrays = self.arrays() | changes
    save_file(
      {key: x for key, x in arrays.items() if x is not None},
      self.path / 'model.safetensors',
    )


def assert_arrays_equal(got, want):
  assert got.keys() == want.keys()
  for key in want:
    np.testing.assert_array_equal(got[key], want[key], err_msg=key)
