"""Small checkpoints of every readable format."""

import json
import pathlib

from safetensors.numpy import load_file, save_file

from tests.checkpoints.random_weights import random_checkpoint
from vit_jax.checkpoints.formats import bigvision, bit, hf, npz, timm
from vit_jax.convert import orbax

SIZE = (32, 32)
VIT = {'patch_size': 8, 'width': 32, 'depth': 2, 'mlp_dim': 48, 'heads': 4}
# Of a width that timm has, because a file alone does not say the heads.
USUAL = VIT | {'width': 192, 'depth': 1, 'heads': 3, 'gelu': 'exact'}
BIT = {'name': 'resnet', 'layers': (1, 2), 'width': 32}


def _checkpoint(fields):
  return random_checkpoint(None, SIZE, **fields)


def _write_tensors(path):
  timm.write(_checkpoint(USUAL).weights(), f'{path}.timm', 'float32')
  folder = pathlib.Path(f'{path}.timm')
  (folder / 'model.safetensors').rename(path)
  (folder / 'config.json').unlink()
  folder.rmdir()


def _write_torch(path):
  import torch

  _write_tensors(path)
  arrays = load_file(path)
  torch.save({k: torch.from_numpy(x) for k, x in arrays.items()}, path)


def _weights(module, fields):
  return lambda path: module.write(
    _checkpoint(fields).weights(), str(path), 'float32'
  )


def _write_sharded(path):
  """A transformers directory whose tensors are in two files."""
  _weights(hf, VIT)(path)
  arrays = load_file(path / 'model.safetensors')
  (path / 'model.safetensors').unlink()
  places = {}
  for i, keys in enumerate((sorted(arrays)[::2], sorted(arrays)[1::2])):
    name = f'model-0000{i + 1}-of-00002.safetensors'
    save_file({key: arrays[key] for key in keys}, path / name)
    places |= dict.fromkeys(keys, name)
  index = path / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': places}))


# A function that writes each format to a path, by the path's name.
FORMATS = {
  'official.npz': _weights(npz, VIT),
  'hybrid.npz': _weights(
    npz, VIT | {'patch_size': 1, 'stem_width': 32, 'stem_layers': (1, 1)}
  ),
  'bigvision.npz': _weights(bigvision, VIT | {'pool': 'map'}),
  'bit.npz': _weights(bit, BIT),
  'timm': _weights(timm, VIT),
  'tensors.safetensors': _write_tensors,
  'tensors.pth': _write_torch,
  'hf': _weights(hf, VIT),
  'hf_bit': _weights(hf, BIT),
  'hf_sharded': _write_sharded,
  'workdir': lambda path: orbax.write(_checkpoint(VIT), str(path), 'float32'),
}

# Whose data could change without anybody being able to tell.
WITHOUT_CHECKSUMS = ('timm', 'tensors.safetensors', 'tensors.pth', 'hf')
