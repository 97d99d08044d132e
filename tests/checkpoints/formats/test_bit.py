"""BiT's .npz files: timm's outputs, the published keys, refusals."""

import re

import numpy as np
import pytest

from tests.checkpoints.random_weights import (
  logits_of,
  random_checkpoint,
  random_images,
  relative_difference,
)
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import bit, npz

RESNET = {'name': 'resnet', 'layers': (1, 2), 'width': 32}
SIZE = (224, 224)

load_module = pytest.mark.filterwarnings('ignore:the load_module:')


def checkpoint_of(size=SIZE, **fields):
  return random_checkpoint(None, size, **{'names': False} | RESNET | fields)


def written(tmp_path, checkpoint, name='written.npz'):
  """Returns the path of a checkpoint as a BiT file, and its arrays."""
  path = str(tmp_path / name)
  npz.write(checkpoint.weights(), path, 'float32')
  with np.load(path) as file:
    return path, dict(file)


def saved(tmp_path, arrays):
  """Saves arrays and opens the file."""
  np.savez(tmp_path / 'saved.npz', **arrays)
  return opening.open_checkpoint(str(tmp_path / 'saved.npz'))


@pytest.mark.slow
@load_module
def test_timm_gives_our_logits(timm, torch, tmp_path):
  checkpoint = random_checkpoint('r50x1', names=False)
  path, _ = written(tmp_path, checkpoint)
  model = timm.create_model('resnetv2_50x1_bit', num_classes=7).eval()
  images = random_images(SIZE)
  with torch.no_grad():
    model.load_pretrained(path)
    # In float32, timm is 2e-5 away from itself in float64, and we are 4e-6.
    scaled = torch.from_numpy(images).double().permute(0, 3, 1, 2) / 127.5 - 1
    got = model.double()(scaled).numpy()
  assert relative_difference(got, logits_of(checkpoint, images)) < 1e-5


def test_keys_and_shapes_are_the_published_ones(tmp_path):
  _, arrays = written(tmp_path, checkpoint_of())
  want = {
    'root_block/standardized_conv2d/kernel': (7, 7, 3, 32),
    'group_norm/gamma': (256,),
    'group_norm/beta': (256,),
    'head/conv2d/kernel': (1, 1, 256, 7),
    'head/conv2d/bias': (7,),
    'block1/unit01/a/proj/standardized_conv2d/kernel': (1, 1, 32, 128),
    'block2/unit01/a/proj/standardized_conv2d/kernel': (1, 1, 128, 256),
  }
  for unit, inputs, width in [
    ('block1/unit01', 32, 32),
    ('block2/unit01', 128, 64),
    ('block2/unit02', 256, 64),
  ]:
    convs = {
      'a': (1, 1, inputs, width),
      'b': (3, 3, width, width),
      'c': (1, 1, width, 4 * width),
    }
    for letter, shape in convs.items():
      want[f'{unit}/{letter}/standardized_conv2d/kernel'] = shape
      want[f'{unit}/{letter}/group_norm/gamma'] = shape[2:3]
      want[f'{unit}/{letter}/group_norm/beta'] = shape[2:3]
  assert {k: x.shape for k, x in arrays.items()} == {
    f'resnet/{k}': shape for k, shape in want.items()
  }
  assert all(x.dtype == np.float32 for x in arrays.values())


def test_a_file_comes_back_key_for_key(tmp_path):
  checkpoint = checkpoint_of(num_classes=7, layers=(1, 11))
  path, want = written(tmp_path, checkpoint)
  assert 'resnet/block2/unit11/a/group_norm/gamma' in want
  again = opening.open_checkpoint(path)
  assert again.model == checkpoint.model
  _, got = written(tmp_path, again, 'again.npz')
  assert got.keys() == want.keys()
  for key, x in want.items():
    np.testing.assert_array_equal(got[key], x, err_msg=key)


def test_numbers_that_tensorflow_gave_are_overlooked(tmp_path):
  """The distilled models have such names, and other arrays."""
  checkpoint = checkpoint_of()
  _, arrays = written(tmp_path, checkpoint)
  spelt = {
    re.sub('(unit02/[bc]/standardized_conv2d)', r'\1_1', key): x
    for key, x in arrays.items()
  }
  assert len(spelt.keys() - arrays.keys()) == 2
  got = saved(tmp_path, spelt | {'global_step': np.int64(5)})
  images = random_images((32, 32))
  np.testing.assert_array_equal(
    logits_of(got, images), logits_of(checkpoint, images)
  )


def test_the_size_of_the_images_is_unknown_and_said(tmp_path, caplog):
  checkpoint = checkpoint_of((96, 64))
  path = str(tmp_path / 'x.npz')
  (line,) = npz.write(checkpoint.weights(), path, 'float32')
  assert 'size is 96x64. ' in line and 'vit_jax assumes 224x224' in line
  assert opening.open_checkpoint(path).image_size == SIZE
  assert f'{path} does not store the image size' in caplog.text
  lines = bit.write(
    checkpoint_of(names=True).weights(), str(tmp_path / 'y.npz'), 'float32'
  )
  assert len(lines) == 1 and 'class names' in lines[0]


@pytest.mark.edge
def test_what_bit_has_not_is_refused(tmp_path):
  checkpoint = checkpoint_of((64, 64), version=1)
  with pytest.raises(ValueError, match='version 1, only 2. Choose another'):
    npz.write(checkpoint.weights(), str(tmp_path / 'x.npz'), 'float32')
  assert list(tmp_path.iterdir()) == []


KERNEL = 'resnet/block2/unit02/b/standardized_conv2d/kernel'
HEAD = 'resnet/head/conv2d/kernel'


REFUSED = {
  'no units': (
    lambda a: {k: x for k, x in a.items() if 'unit' not in k},
    'layers is empty',
  ),
  'a dense head': (
    lambda a: a | {HEAD: a[HEAD][0, 0]},
    f'{HEAD}.*4 non-empty dimensions',
  ),
  'a kernel twice': (
    lambda a: a | {KERNEL.replace('conv2d', 'conv2d_1'): a[KERNEL]},
    f'{KERNEL.removesuffix("/kernel")}.*the other arrays lacks',
  ),
}


@pytest.mark.edge
@pytest.mark.parametrize(('change', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_is_no_bit_file_is_refused(tmp_path, change, message):
  _, arrays = written(tmp_path, checkpoint_of())
  with pytest.raises(ValueError, match=f'saved.npz.*{message}'):
    saved(tmp_path, change(arrays))
