"""Names and prefixes of published files, and files that are none."""

import dataclasses
import io
import pathlib
import re
import zipfile

import jax
import numpy as np
import pytest
from flax import traverse_util

from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import ROOT
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import archive, npz
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.models import variants

GOLDEN = ROOT / 'tests/golden'
TINY = GOLDEN / 'tiny_s7.npz'
REP = GOLDEN / 'tiny-rep_s7.npz'
QUERY = 'Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel'
MLP = 'Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel'


def arrays(path=TINY):
  with np.load(path) as file:
    return dict(file)


def flat(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def to_linen(key):
  """The table of formats: new numbers for the modules of a layer."""
  for old, new in (
    ('LayerNorm_2', 'LayerNorm_1'),
    ('MultiHeadDotProductAttention_1', 'MultiHeadDotProductAttention_0'),
    ('MlpBlock_3', 'MlpBlock_0'),
  ):
    key = key.replace(f'/{old}/', f'/{new}/')
  return key


@pytest.mark.parametrize('path', [TINY, REP], ids=['tiny', 'rep'])
@pytest.mark.parametrize('linen', [False, True], ids=['published', 'linen'])
@pytest.mark.parametrize('prefix', ['', 'opt/target/'])
def test_all_spellings_give_the_same_parameters(tmp_path, path, linen, prefix):
  want = arrays(path)
  spelt = {
    prefix + (to_linen(key) if linen else key): x for key, x in want.items()
  }
  assert len(spelt) == len(want)
  if prefix == 'opt/target/':  # what a training state holds besides
    spelt |= {'opt/state/step': np.int64(3), 'extra/seed': np.zeros(2)}
  np.savez(tmp_path / 'x.npz', **spelt)
  checkpoint = opening.open_checkpoint(str(tmp_path / 'x.npz'))
  got = flat(checkpoint.params)
  assert got.keys() == want.keys()
  for key in want:
    assert got[key].dtype == np.float32
    np.testing.assert_array_equal(got[key], want[key], err_msg=key)


def fields_of(path):
  return npz.read(str(path), archive.load(str(path))).fields


def test_fields_are_read_off_the_shapes():
  assert fields_of(GOLDEN / 'tiny-stem_s7.npz') == {
    'patch_size': 4,
    'width': 48,
    'depth': 2,
    'mlp_dim': 96,
    'heads': 3,
    'pool': 'cls',
    'stem_width': 64,
    'stem_layers': (),
    'representation_size': 0,
    'num_classes': 10,
    'image_size': (64, 64),
  }
  fields = fields_of(GOLDEN / 'tiny-gap_s7.npz')
  assert fields['pool'] == 'gap' and fields['image_size'] == (32, 32)
  assert fields_of(REP)['representation_size'] == 32


@pytest.mark.parametrize('shape', [(1, 1, 1, 64), (64,)])
def test_group_norm_may_have_one_dimension_or_four(tmp_path, shape):
  stored = arrays(GOLDEN / 'tiny-stem_s7.npz')
  assert stored['gn_root/scale'].shape == (1, 1, 1, 64)
  path = tmp_path / 'stem.npz'
  np.savez(
    path,
    **{
      key: x.reshape(shape) if key.startswith('gn') else x
      for key, x in stored.items()
    },
  )
  params = opening.open_checkpoint(str(path)).params
  np.testing.assert_array_equal(
    params['gn_root']['scale'], stored['gn_root/scale'].ravel()
  )


def without(key):
  return lambda a: {k: x for k, x in a.items() if k != key}


def replaced(key, x):
  return lambda a: a | {key: x}


def reshaped(key, shape):
  return lambda a: a | {key: a[key].reshape(shape)}


CHANGES = {
  'no embedding': (without('embedding/kernel'), 'embedding/kernel'),
  'no positions': (
    without('Transformer/posembed_input/pos_embedding'),
    'Transformer/posembed_input/pos_embedding',
  ),
  'no layer 0': (without(MLP), MLP),
  'half of layer 1': (without(QUERY), QUERY),
  'no class token': (without('cls'), '16|17|pos'),
  'another array': (replaced('tail/kernel', np.zeros(3)), 'tail/kernel'),
  'another layer': (
    replaced('Transformer/encoderblock_9/LayerNorm_0/bias', np.zeros(48)),
    'Transformer/encoderblock_',
  ),
  'a leaf under a leaf': (replaced('cls/deeper', np.zeros(3)), 'cls'),
  'no name': (replaced('', np.zeros(3)), "''"),
  'transposed': (reshaped(QUERY, (16, 3, 48)), QUERY),
  'heads that do not divide': (
    lambda a: (
      a
      | {
        QUERY.replace('block_1', 'block_0'): np.zeros((48, 5, 16)),
      }
    ),
    'heads|query',
  ),
  'scalar root': (replaced('conv_root/kernel', np.float32(0)), 'conv_root'),
  'a width that nothing holds': (
    replaced('embedding/kernel', np.zeros((8, 8, 0, 10**12))),
    "'embedding/kernel' must have 4 non-empty dimensions",
  ),
  'more layers than anyone has': (
    lambda a: (
      a | {f'Transformer/encoderblock_{i}/x': np.zeros(1) for i in range(1001)}
    ),
    'depth is 1001',
  ),
  'not a number': (
    replaced('cls', np.full((1, 1, 48), np.nan)),
    "'cls' has 48",
  ),
  'patch of none': (
    replaced('embedding/kernel', np.zeros((0, 0, 3, 48))),
    'embedding/kernel|patch_size',
  ),
  'no square': (
    replaced('Transformer/posembed_input/pos_embedding', np.zeros((1, 8, 48))),
    '7 patches',
  ),
  'text': (replaced('head/bias', np.array(['a'] * 10)), 'head/bias'),
}


@pytest.mark.edge
@pytest.mark.parametrize(('change', 'names'), CHANGES.values(), ids=CHANGES)
def test_what_is_no_vit_is_refused_by_file_and_key(tmp_path, change, names):
  path = tmp_path / 'changed.npz'
  np.savez(path, **change(arrays()))
  with pytest.raises(ValueError) as e:
    opening.open_checkpoint(str(path))
  assert str(path) in str(e.value)
  assert re.search(names, str(e.value))


class Hostile:
  """Leaves a mark if anything unpickles it."""

  def __init__(self, mark):
    self.mark = mark

  def __reduce__(self):
    return pathlib.Path.touch, (self.mark,)


def test_pickled_objects_are_not_loaded(tmp_path):
  path, mark = tmp_path / 'hostile.npz', tmp_path / 'mark'
  np.savez(path, **arrays() | {'head/bias': np.array([Hostile(mark)])})
  with pytest.raises(ValueError, match='(?s)hostile.npz.*head/bias'):
    opening.open_checkpoint(str(path))
  assert not mark.exists()


def npy_bytes():
  file = io.BytesIO()
  np.save(file, np.zeros(3))
  return file.getvalue()


def zip_of(name, data):
  file = io.BytesIO()
  with zipfile.ZipFile(file, 'w') as z:
    z.writestr(name, data)
  return file.getvalue()


def npy_with_header(text):
  header = text.encode().ljust(117) + b'\n'
  return b'\x93NUMPY\x01\x00' + len(header).to_bytes(2, 'little') + header


@pytest.mark.edge
@pytest.mark.parametrize(
  'data',
  {
    'empty': b'',
    'text': b'These are not the weights you are looking for.\n',
    'a single array': npy_bytes(),
    'a zip of text': zip_of('cls', b'hello'),
    'an array larger than any memory': zip_of(
      'cls.npy',
      npy_with_header(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 9, 1"
        + '0' * 15
        + '), }'
      ),
    ),
  }.items(),
  ids=lambda x: x[0],
)
def test_what_is_no_npz_file_is_refused(tmp_path, data):
  path = tmp_path / 'damaged.npz'
  path.write_bytes(data[1])
  with pytest.raises(ValueError, match='damaged.npz'):
    opening.open_checkpoint(str(path))


@pytest.mark.edge
def test_damage_anywhere_is_noticed_or_harmless(tmp_path):
  """Bytes changed or cut off: the same parameters, or one ValueError."""
  whole, path = tmp_path / 'whole.npz', tmp_path / 'damaged.npz'
  np.savez_compressed(whole, **arrays())
  want = flat(opening.open_checkpoint(str(whole)).params)
  data = whole.read_bytes()
  rng = np.random.default_rng(0)
  noticed = 0
  # Half of the damage hits the directory at the end, where formats are fragile.
  places = [*rng.integers(len(data), size=60)]
  places += [*rng.integers(len(data) - 5000, len(data), size=60)]
  for i, place in enumerate(places):
    if i % 4 == 0:
      damaged = data[:place]
    else:
      byte = (data[place] ^ int(rng.integers(1, 256))).to_bytes()
      damaged = data[:place] + byte + data[place + 1 :]
    path.write_bytes(damaged)
    try:
      got = flat(opening.open_checkpoint(str(path)).params)
    except ValueError as e:
      assert 'damaged.npz' in str(e)
      noticed += 1
    else:
      assert got.keys() == want.keys()
      for key in want:
        np.testing.assert_array_equal(got[key], want[key], err_msg=key)
  assert noticed > 60


@pytest.mark.parametrize('stem_layers', [(2,), (1, 2), (1, 1, 1)])
def test_images_of_a_hybrid_are_as_large_as_its_positions_say(stem_layers):
  size = (64, 64)
  sizes = {'patch_size': 1, 'width': 32, 'depth': 1, 'mlp_dim': 48, 'heads': 4}
  stem = {'stem_width': 32, 'stem_layers': stem_layers}
  model = variants.build(num_classes=3, image_size=size, **sizes, **stem)
  shapes = jax.eval_shape(lambda: variants.init(model, jax.random.key(0), size))
  arrays = {
    key: np.zeros(x.shape, x.dtype)
    for key, x in traverse_util.flatten_dict(shapes, sep='/').items()
  }
  fields = npz.read('hybrid.npz', arrays).fields
  assert fields['image_size'] == size
  assert fields['stem_layers'] == stem_layers


@pytest.mark.slow
def test_stages_of_a_hybrid_are_read_off_the_names(tmp_path):
  """With GroupNorm as (1, 1, 1, C), as some published files store it."""
  size = (32, 32)
  model = variants.build(
    num_classes=3,
    image_size=size,
    patch_size=1,
    width=32,
    depth=1,
    mlp_dim=48,
    heads=4,
    stem_width=32,
    stem_layers=(1, 2),
  )
  params = variants.init(model, jax.random.key(0), size)
  arrays = traverse_util.flatten_dict(params, sep='/')
  np.savez(
    tmp_path / 'hybrid.npz',
    **{
      key: x.reshape(1, 1, 1, -1) if '/gn' in key or key[:3] == 'gn_' else x
      for key, x in arrays.items()
    },
  )
  checkpoint = opening.open_checkpoint(str(tmp_path / 'hybrid.npz'))
  assert checkpoint.model == model
  assert checkpoint.image_size == size
  jax.tree.map(np.testing.assert_array_equal, checkpoint.params, params)


VIT = {'patch_size': 4, 'width': 48, 'depth': 2, 'mlp_dim': 80, 'heads': 3}
SIZE = (32, 32)


def written(tmp_path, checkpoint):
  """Returns the path of a checkpoint as an .npz file."""
  path = str(tmp_path / 'written.npz')
  assert npz.write(checkpoint.weights(), path, 'float32') == []
  return path


@pytest.mark.parametrize('name', ['tiny', 'tiny-rep', 'tiny-gap', 'tiny-stem'])
def test_an_official_file_comes_back_key_for_key(tmp_path, name):
  source = GOLDEN / f'{name}_s7.npz'
  want = arrays(source)
  got = arrays(written(tmp_path, opening.open_checkpoint(str(source))))
  assert got.keys() == want.keys()
  for key, x in want.items():
    assert got[key].dtype == np.float32 and got[key].shape == x.shape
    np.testing.assert_array_equal(got[key], x, err_msg=key)


def test_bfloat16_arrays_are_numbers(tmp_path):
  """Two bytes of void, as big_vision's code leaves them in any file."""
  want = arrays()
  halves = {
    key: (x.view(np.uint32) >> 16).astype(np.uint16).view('V2')
    for key, x in want.items()
  }
  np.savez(tmp_path / 'halves.npz', **halves)
  got = flat(opening.open_checkpoint(str(tmp_path / 'halves.npz')).params)
  for key, x in want.items():
    # The upper half of a float32 is that number with its last digits zero.
    truncated = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(got[key], truncated, err_msg=key)


@pytest.mark.edge
@pytest.mark.parametrize(
  ('fields', 'message'),
  {
    'map': (
      {'pool': 'map'},
      "pool 'map', only 'cls' or 'gap'. Choose",
    ),
    'relative': ({'posemb': 'relative'}, "posemb 'relative', only 'learned1d'"),
    'oblong': ({'size': (16, 64)}, 'image_size 16x64: .* square'),
  }.values(),
)
def test_what_the_originals_have_not_is_refused(tmp_path, fields, message):
  checkpoint = random_checkpoint(None, **{'size': SIZE} | VIT | fields)
  with pytest.raises(ValueError, match=f'^An official .npz file.*{message}'):
    npz.write(checkpoint.weights(), str(tmp_path / 'x.npz'), 'float32')
  assert list(tmp_path.iterdir()) == []


def test_what_a_file_cannot_hold_is_said(tmp_path):
  checkpoint = random_checkpoint(
    None, SIZE, **VIT, gelu='exact', layer_norm_epsilon=1e-12
  )
  checkpoint = dataclasses.replace(
    checkpoint,
    preprocessing=Preprocessing(40, (0.4, 0.5, 0.6), (0.2,) * 3, 'bicubic'),
  )
  lines = npz.write(checkpoint.weights(), str(tmp_path / 'x.npz'), 'float32')
  for line, words in zip(
    lines,
    [
      'class names',
      'shorter side to 40 pixels, .* assumes the whole image, bilinear',
      r'mean \(0.4, 0.5, 0.6\) and std \(0.2',
      'exact GELU. .* 1e-3',
      'epsilon is 1e-12.* use 1e-6',
    ],
    strict=True,
  ):
    assert re.search(words, line), line
    assert line.endswith('.')


def test_warnings_of_a_file_are_logged(tmp_path, caplog):
  arrays = dict(np.load(ROOT / 'tests/golden/tiny_s7.npz'))
  arrays['head/kernel'] = np.zeros_like(arrays['head/kernel'])
  np.savez(tmp_path / 'zero.npz', **arrays)
  opening.open_checkpoint(str(tmp_path / 'zero.npz'))
  assert 'the kernel of the head is all zeros' in caplog.text
