"""A written transformers directory whose files can be changed."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import hf

SIZE = (32, 32)
TINY = {
  'patch_size': 8,
  'width': 32,
  'depth': 2,
  'mlp_dim': 48,
  'heads': 4,
}
TINY_BIT = {'name': 'resnet', 'layers': (1, 2, 1), 'width': 32}


class Folder:
  def __init__(self, path, checkpoint):
    self.path, self.checkpoint = path, checkpoint
    hf.write(checkpoint.weights(), str(path), 'float32')

  def change_config(self, name='config.json', **changes):
    place = self.path / name
    config = json.loads(place.read_text()) | changes
    place.write_text(
      json.dumps({k: x for k, x in config.items() if x is not ...})
    )

  def change_arrays(self, change):
    place = self.path / 'model.safetensors'
    save_file(change(load_file(place)), place, {'format': 'pt'})

  def open(self):
    return opening.open_checkpoint(str(self.path))


def drop(key):
  return lambda arrays: {k: x for k, x in arrays.items() if k != key}


def put(key, shape):
  return lambda arrays: arrays | {key: np.zeros(shape, np.float32)}
