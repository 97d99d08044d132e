"""big_vision's .npz files: timm's outputs, spellings of keys, refusals."""

import re

import jax
import numpy as np
import pytest

from tests.checkpoints import npz_peer
from tests.checkpoints.random_weights import (
  logits_of,
  random_checkpoint,
  random_images,
  relative_difference,
)
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import bigvision
from vit_jax.checkpoints.formats.table import (
  Preprocessing,
)

VIT = {'patch_size': 4, 'width': 48, 'depth': 2, 'mlp_dim': 80, 'heads': 3}
SIZE = (32, 32)
TABLE = 'Transformer/posembed_input/pos_embedding'
POOLS = {
  'cls': {'pool': 'cls'},
  'gap': {'pool': 'gap', 'representation_size': 20},
  'map': {'pool': 'map'},
}

load_module = pytest.mark.filterwarnings('ignore:the load_module:')


def checkpoint_of(size=SIZE, **fields):
  return random_checkpoint(None, size, **{'names': False} | VIT | fields)


def written(tmp_path, checkpoint, dtype='float32', name='written.npz'):
  """Returns the path of a checkpoint as a big_vision file, and its arrays."""
  path = str(tmp_path / name)
  bigvision.write(checkpoint.weights(), path, dtype)
  with np.load(path) as file:
    return path, dict(file)


def saved(tmp_path, arrays):
  """Saves arrays and opens the file."""
  np.savez(tmp_path / 'saved.npz', **arrays)
  return opening.open_checkpoint(str(tmp_path / 'saved.npz'))


def respelt(arrays, prefix):
  return {prefix + k.removeprefix('params/'): x for k, x in arrays.items()}


def stacked(arrays):
  """Stacks the layers along a first axis."""
  layer = re.compile(r'(.*/encoderblock)_0(/.*)')
  depth = sum(key.endswith('/LayerNorm_1/bias') for key in arrays)
  rest = {k: x for k, x in arrays.items() if '/encoderblock_' not in k}
  for match in filter(None, map(layer.fullmatch, arrays)):
    rest[match[1] + match[2]] = np.stack(
      [arrays[f'{match[1]}_{i}{match[2]}'] for i in range(depth)]
    )
  return rest


def assert_same_numbers(got, checkpoint):
  assert got.model == checkpoint.model
  assert got.image_size == checkpoint.image_size
  images = random_images(checkpoint.image_size)
  np.testing.assert_array_equal(
    logits_of(got, images), logits_of(checkpoint, images)
  )


@load_module
@pytest.mark.parametrize('pool', ['cls', 'map'])
def test_timm_gives_our_logits(timm, tmp_path, pool):
  checkpoint = checkpoint_of(pool=pool, depth=3)
  path, arrays = written(tmp_path, checkpoint)
  if pool == 'map':  # as timm reads stacked layers too
    np.savez(path, **stacked(arrays))
  peer = npz_peer.open_peer(path)
  assert peer.framework == f'timm {timm.__version__}'
  assert peer.image_size == SIZE
  images = random_images(SIZE)
  want = logits_of(checkpoint, images)
  # float32 rounding.
  assert relative_difference(peer.run(images), want) < 3e-6


@load_module
def test_timm_rounds_bfloat16_as_we_do(timm, tmp_path):
  checkpoint = checkpoint_of(pool='map')
  path, _ = written(tmp_path, checkpoint, 'bfloat16')
  images = random_images(SIZE)
  ours = logits_of(opening.open_checkpoint(path), images)
  assert relative_difference(npz_peer.open_peer(path).run(images), ours) < 5e-6
  # Eight bits of the 24.
  assert 1e-4 < relative_difference(ours, logits_of(checkpoint, images)) < 0.03


@load_module
def test_fixed_positions_are_those_of_big_vision(timm, tmp_path):
  """timm agrees if the original formula is stored as learned positions."""
  checkpoint = checkpoint_of(
    (224, 224), patch_size=32, posemb='sincos2d', depth=1
  )
  path, arrays = written(tmp_path, checkpoint)
  assert 'params/pos_embedding' not in arrays
  y, x = (axis.ravel()[:, None] for axis in np.mgrid[:7, :7])
  frequencies = 10_000.0 ** (-np.arange(12) / 11)
  waves = [f(axis * frequencies) for axis in (x, y) for f in (np.sin, np.cos)]
  table = np.concatenate(waves, axis=1)[None].astype(np.float32)
  learned = str(tmp_path / 'learned.npz')
  np.savez(learned, **arrays | {'params/pos_embedding': table})
  images = random_images((224, 224))
  ours = logits_of(opening.open_checkpoint(path), images)
  assert relative_difference(npz_peer.open_peer(learned).run(images), ours) < (
    5e-6
  )


def test_keys_and_shapes_are_those_of_its_source(tmp_path):
  """The model has a representation layer, which timm lacks."""
  _, arrays = written(tmp_path, checkpoint_of(**POOLS['gap']))
  D, M, layer = 48, 80, 'Transformer/encoderblock_1'
  for name, shape in {
    'embedding/kernel': (4, 4, 3, D),
    'pos_embedding': (1, 64, D),
    f'{layer}/LayerNorm_1/bias': (D,),
    f'{layer}/MultiHeadDotProductAttention_0/query/kernel': (D, 3, 16),
    f'{layer}/MultiHeadDotProductAttention_0/out/kernel': (3, 16, D),
    f'{layer}/MlpBlock_0/Dense_0/kernel': (D, M),
    'Transformer/encoder_norm/scale': (D,),
    'pre_logits/kernel': (D, 20),
    'head/kernel': (20, 7),
  }.items():
    assert arrays[f'params/{name}'].shape == shape, name
  assert len(arrays) == 2 + 1 + 16 * 2 + 2 + 2 + 2
  assert all(x.dtype == np.float32 for x in arrays.values())


def test_the_class_token_takes_its_position_along(tmp_path):
  checkpoint = checkpoint_of()
  path, arrays = written(tmp_path, checkpoint)
  ours = checkpoint.weights().arrays
  np.testing.assert_array_equal(
    arrays['params/cls'], ours['cls'] + ours[TABLE][:, :1]
  )
  np.testing.assert_array_equal(
    arrays['params/pos_embedding'], ours[TABLE][:, 1:]
  )
  back = opening.open_checkpoint(path).weights().arrays
  assert not back[TABLE][:, 0].any()
  np.testing.assert_array_equal(back['cls'], arrays['params/cls'])


def test_every_spelling_is_the_same_model(tmp_path):
  checkpoint = checkpoint_of(**POOLS['gap'])
  path, arrays = written(tmp_path, checkpoint)
  plain = opening.open_checkpoint(path)
  assert_same_numbers(plain, checkpoint)
  for prefix in ('', 'params/', 'params/img/', 'opt/target/'):
    for spelt in (arrays, stacked(arrays)):
      got = saved(tmp_path, respelt(spelt, prefix))
      assert got.model == checkpoint.model
      jax.tree.map(np.testing.assert_array_equal, got.params, plain.params)


@pytest.mark.parametrize(
  ('pool', 'posemb', 'depth', 'dtype'),
  [
    # The name of layer 10 sorts before that of layer 2.
    ('cls', 'learned1d', 11, 'float32'),
    ('cls', 'sincos2d', 1, 'bfloat16'),
    ('map', 'learned1d', 1, 'bfloat16'),
  ],
)
def test_a_stack_comes_back_key_for_key(tmp_path, pool, posemb, depth, dtype):
  checkpoint = checkpoint_of(
    (224, 224), patch_size=32, posemb=posemb, depth=depth, **POOLS[pool]
  )
  path, want = written(tmp_path, checkpoint, dtype)
  stored = {'float32': np.dtype('float32'), 'bfloat16': np.dtype('V2')}[dtype]
  assert want['params/embedding/kernel'].dtype == stored
  np.savez(path, **stacked(want))
  again = opening.open_checkpoint(path)
  _, got = written(tmp_path, again, dtype, 'again.npz')
  assert got.keys() == want.keys()
  for key, x in want.items():
    assert (got[key].dtype, got[key].shape) == (x.dtype, x.shape)
    assert got[key].tobytes() == x.tobytes(), key


def test_a_file_of_two_towers_gives_its_image_tower(tmp_path, caplog):
  checkpoint = checkpoint_of(pool='map', num_classes=0)
  _, arrays = written(tmp_path, checkpoint)
  towers = respelt(arrays, 'params/img/') | {
    'params/txt/head/bias': np.zeros(3, np.float32),
    'params/t': np.zeros(1, np.float32),
  }
  got = saved(tmp_path, towers)
  assert_same_numbers(got, checkpoint)
  n = len(arrays)
  assert f'only the image tower is read, {n} of {n + 2} arrays' in caplog.text
  # Of a tower alone, and of what was trained beside its optimizer, it is all.
  caplog.clear()
  saved(tmp_path, respelt(arrays, 'params/img/'))
  step = {'opt/state/step': np.int64(3)}
  saved(tmp_path, respelt(arrays, 'opt/target/') | step)
  assert caplog.text == ''


def test_without_positions_224_pixels_are_assumed_and_said(tmp_path, caplog):
  for patch, pixels in [(32, 224), (30, 210), (300, 300)]:
    checkpoint = checkpoint_of(
      (pixels, pixels), patch_size=patch, posemb='sincos2d', pool='gap', depth=1
    )
    path = str(tmp_path / f'{patch}.npz')
    assert not any(
      'image size' in line
      for line in bigvision.write(checkpoint.weights(), path, 'float32')
    )
    caplog.clear()
    got = opening.open_checkpoint(path)
    assert got.image_size == (pixels, pixels)
    assert got.model == checkpoint.model
    assert f'(sincos2d) and images of {pixels}x{pixels} pixels' in caplog.text


def test_classifiers_at_224_pixels_are_cropped_from_256(tmp_path):
  def resize_small(pixels, prefix):
    checkpoint = checkpoint_of((pixels, pixels), patch_size=32, depth=1)
    _, arrays = written(tmp_path, checkpoint, name=f'{pixels}{len(prefix)}.npz')
    got = saved(tmp_path, respelt(arrays, prefix)).preprocessing
    assert got == Preprocessing(resize_small=got.resize_small)
    return got.resize_small

  assert resize_small(224, 'params/') == 256
  assert resize_small(256, 'params/') == 0
  # Image towers are given the whole image.
  assert resize_small(224, 'params/img/') == 0


@pytest.mark.edge
@pytest.mark.parametrize(
  ('fields', 'message'),
  {
    'pool': ({'pool': 'cls+gap'}, r"pool 'cls\+gap', only 'cls' or 'gap'"),
    'oblong': ({'size': (16, 64)}, 'image_size 16x64: .* square'),
  }.values(),
)
def test_what_big_vision_has_not_is_refused(tmp_path, fields, message):
  fields = {'size': (64, 64), 'depth': 1} | fields
  checkpoint = checkpoint_of(**fields)
  with pytest.raises(ValueError, match=f'^A big_vision .npz file.*{message}'):
    bigvision.write(checkpoint.weights(), str(tmp_path / 'x.npz'), 'float32')
  assert list(tmp_path.iterdir()) == []


def test_what_a_file_cannot_hold_is_said(tmp_path):
  """The notes name the resizing and the image size that readers assume."""
  checkpoint = checkpoint_of(
    (64, 64), posemb='sincos2d', pool='gap', depth=1, names=True
  )
  lines = bigvision.write(
    checkpoint.weights(), str(tmp_path / 'x.npz'), 'float32'
  )
  assert len(lines) == 2
  assert 'class names' in lines[0]
  assert 'size is 64x64' in lines[1] and 'assume 224x224' in lines[1]

  # Learned position embeddings are stored, and their number tells the size.
  checkpoint = checkpoint_of((64, 64), depth=1)
  path = str(tmp_path / 'learned.npz')
  assert bigvision.write(checkpoint.weights(), path, 'float32') == []

  checkpoint = checkpoint_of((224, 224), patch_size=32, depth=1)
  (line,) = bigvision.write(
    checkpoint.weights(), str(tmp_path / 'y.npz'), 'float32'
  )
  assert 'the shorter side to 256 pixels' in line.partition('assume')[2]


DENSE = 'params/Transformer/encoderblock/MlpBlock_0/Dense_0/kernel'
REFUSED = {
  'depths that differ': (
    lambda a: {k: x[:1] if k == DENSE else x for k, x in a.items()},
    r'shape \(2, .*\), but \(1, .*\) is expected',
  ),
  'both a stack and a layer': (
    lambda a: a | {DENSE.replace('block/', 'block_1/'): np.zeros((48, 80))},
    'encoderblock_1/.*the other arrays lacks',
  ),
  'positions for the class token': (
    lambda a: a | {'params/pos_embedding': np.zeros((1, 65, 48))},
    '65 patches',
  ),
}


@pytest.mark.edge
@pytest.mark.parametrize(('change', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_is_no_big_vision_file_is_refused(tmp_path, change, message):
  _, arrays = written(tmp_path, checkpoint_of())
  with pytest.raises(ValueError, match=f'saved.npz.*{message}'):
    saved(tmp_path, change(stacked(arrays)))
