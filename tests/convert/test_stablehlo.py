"""Programs that JAX alone runs give the numbers of the models here."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoints.random_weights import (
  logits_of,
  random_checkpoint,
  random_images,
  relative_difference,
)
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.convert import stablehlo

SIZE = (32, 48)
VIT = {'patch_size': 8, 'width': 32, 'depth': 2, 'mlp_dim': 48, 'heads': 4}
RESNET = {'name': 'resnet', 'layers': (1, 2), 'width': 32}
SMALL = {
  'vit': VIT,
  'map': VIT | {'pool': 'map', 'gelu': 'exact'},
  'relative': VIT | {'posemb': 'relative'},
  'scan': VIT | {'scan': True, 'remat': 'dots_saveable'},
  'hybrid': VIT | {'patch_size': 1, 'stem_width': 32, 'stem_layers': (1, 1)},
  'axial resnet': RESNET | {'version': 1, 'axial': True},
}


def small_checkpoint(name='vit', **fields):
  checkpoint = random_checkpoint(None, SIZE, **SMALL[name] | fields)
  if not checkpoint.model.scan:
    return checkpoint
  stacked = checkpoint.model.stack_layers(checkpoint.params)
  return dataclasses.replace(
    checkpoint, params=jax.tree.map(np.asarray, stacked)
  )


@pytest.fixture(scope='module')
def written_once(tmp_path_factory):
  checkpoint, folder = small_checkpoint(), tmp_path_factory.mktemp('x') / 'vit'
  assert stablehlo.write(checkpoint, str(folder), 'float32') == []
  return checkpoint, folder


@pytest.fixture
def written(written_once, tmp_path):
  checkpoint, folder = written_once
  return checkpoint, shutil.copytree(folder, tmp_path / 'vit')


def check_logits(checkpoint, target):
  assert stablehlo.write(checkpoint, str(target), 'float32') == []
  peer = stablehlo.open_peer(str(target))
  assert peer.framework == f'jax.export of JAX {jax.__version__}'
  assert peer.image_size == checkpoint.image_size
  images = random_images(checkpoint.image_size, 3)
  want = logits_of(checkpoint, images)
  for batch in (1, 3):
    got = peer.run(images[:batch])
    assert got.dtype == np.float32
    # The same operations, fused differently.
    assert relative_difference(got, want[:batch]) < 1e-5


@pytest.mark.fast('vit', 'map', 'relative')
@pytest.mark.parametrize('name', SMALL)
def test_small_models_of_every_kind_give_our_logits(tmp_path, name):
  check_logits(small_checkpoint(name), tmp_path / 'x')


def test_a_model_without_a_head_gives_its_representation(tmp_path):
  check_logits(small_checkpoint(num_classes=0), tmp_path / 'x')


@pytest.mark.slow
def test_a_published_model_gives_our_logits(tmp_path):
  check_logits(random_checkpoint('r+ti16'), tmp_path / 'x')


def test_bfloat16_is_computed_in_bfloat16(tmp_path):
  checkpoint = small_checkpoint()
  half = dataclasses.replace(
    checkpoint, model=checkpoint.model.clone(dtype=jnp.bfloat16)
  )
  images = random_images(SIZE)
  want = logits_of(half, images).astype(np.float32)
  stablehlo.write(checkpoint, str(tmp_path / 'x'), 'bfloat16')
  got = stablehlo.open_peer(str(tmp_path / 'x')).run(images)
  assert got.dtype == np.float32
  # Rounded in other places, by 2 ** -8 each time.
  assert relative_difference(got, want) < 2e-2
  assert relative_difference(got, logits_of(checkpoint, images)) > 1e-4


def test_the_dtype_asked_for_is_that_of_the_program(tmp_path):
  half = small_checkpoint(dtype='bfloat16')
  single = dataclasses.replace(half, model=half.model.clone(dtype=jnp.float32))
  images = random_images(SIZE)
  (sentence,) = stablehlo.write(half, str(tmp_path / 'x'), 'float32')
  assert 'computes in bfloat16; the program computes in float32' in sentence
  got = stablehlo.open_peer(str(tmp_path / 'x')).run(images)
  assert relative_difference(got, logits_of(single, images)) < 1e-5


def test_images_are_scaled_as_the_file_says(tmp_path):
  checkpoint = dataclasses.replace(
    small_checkpoint(),
    preprocessing=Preprocessing(
      40, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 'bicubic'
    ),
  )
  check_logits(checkpoint, tmp_path / 'x')
  meta = json.loads((tmp_path / 'x' / 'model.json').read_text())
  assert meta == {
    'input': 'float32 (batch, 32, 48, 3), RGB, (x / 255 - mean) / std',
    'image_size': [32, 48],
    'resize_small': 40,
    'mean': [0.485, 0.456, 0.406],
    'std': [0.229, 0.224, 0.225],
    'interpolation': 'bicubic',
    'squash': False,
    'resize_like': 'vit_jax',
    'dtype': 'float32',
    'loss': 'softmax',
    'class_names': [f'class {i}' for i in range(7)],
  }


@pytest.mark.fast('vit')
@pytest.mark.parametrize('name', ['vit', 'axial resnet'])
def test_a_program_is_portable(tmp_path, name):
  """For every platform and batch size, of operations that keep their meaning.

  `jax.export` refuses to write others unless the check is disabled.
  """
  stablehlo.write(small_checkpoint(name), str(tmp_path / 'x'), 'float32')
  data = (tmp_path / 'x' / 'model.stablehlo').read_bytes()
  program = jax.export.deserialize(bytearray(data))
  assert program.platforms == ('cpu', 'cuda', 'tpu')
  assert program.nr_devices == 1
  assert program.disabled_safety_checks == ()
  images, logits = program.in_avals[-1], program.out_avals[0]
  assert (str(images.shape), str(images.dtype)) == (
    '(batch, 32, 48, 3)',
    'float32',
  )
  assert (str(logits.shape), str(logits.dtype)) == ('(batch, 7)', 'float32')
  text = program.mlir_module()
  assert set(re.findall(r'custom_call @([\w.]+)', text)) <= {'shape_assertion'}
  # Else a TPU or a newer GPU would round to less by default.
  products = re.findall(
    r'stablehlo\.(?:dot_general|convolution|dynamic_conv)\W.*', text
  )
  assert products
  assert all('HIGHEST' in product for product in products)


def test_the_parameters_are_plain_arrays(written):
  checkpoint, folder = written
  with np.load(folder / 'params.npz') as stored:
    params = dict(stored)
  weights = checkpoint.weights().arrays
  assert params.keys() == weights.keys()
  for name, x in params.items():
    np.testing.assert_array_equal(x, weights[name], err_msg=name)


# Three lines of plain JAX, as users are told.
CALLER = """
import sys
sys.modules['vit_jax'] = sys.modules['flax'] = None  # cannot be imported
import jax, numpy as np
folder, images = sys.argv[1], np.load(sys.argv[2])
program = jax.export.deserialize(open(f'{folder}/model.stablehlo', 'rb').read())
params = dict(np.load(f'{folder}/params.npz'))
logits = program.call(params, images)
np.save(sys.argv[3], logits)
"""


@pytest.mark.slow
def test_a_program_runs_without_this_package(written, tmp_path):
  checkpoint, folder = written
  images = random_images(SIZE)
  scaled = (images / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
  np.save(tmp_path / 'images.npy', scaled)
  done = subprocess.run(
    [sys.executable, '-c', CALLER, folder, 'images.npy', 'logits.npy'],
    cwd=tmp_path,
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stderr) == (0, '')
  got = np.load(tmp_path / 'logits.npy')
  assert relative_difference(got, logits_of(checkpoint, images)) < 1e-5


@pytest.mark.edge
def test_parameters_of_another_model_are_refused(written):
  _, folder = written
  with np.load(folder / 'params.npz') as stored:
    params = dict(stored)
  np.savez(folder / 'params.npz', **params | {'cls': params['cls'][..., :-1]})
  with pytest.raises(ValueError, match='the arrays of params.npz cannot be'):
    stablehlo.open_peer(str(folder))


@pytest.mark.edge
@pytest.mark.parametrize('name', ['model.json', 'model.stablehlo'])
def test_a_damaged_or_missing_file_is_refused(written, name):
  _, folder = written
  path = folder / name
  path.write_bytes(path.read_bytes()[:20])
  with pytest.raises(ValueError, match=f'vit: {name} cannot be read'):
    stablehlo.open_peer(str(folder))
  path.unlink()
  with pytest.raises(ValueError, match=f'{name} cannot .* FileNotFoundError'):
    stablehlo.open_peer(str(folder))
