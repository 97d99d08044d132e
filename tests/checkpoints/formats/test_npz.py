"""Names and prefixes of official .npz files, and other files."""

import dataclasses
import re
import zipfile

import jax
import numpy as np
import pytest

from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import ROOT
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import archive, npz
from vit_jax.checkpoints.formats.table import Preprocessing

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
  """Converts the module numbers of a key to Flax Linen's."""
  for old, new in (
    ('LayerNorm_2', 'LayerNorm_1'),
    ('MultiHeadDotProductAttention_1', 'MultiHeadDotProductAttention_0'),
    ('MlpBlock_3', 'MlpBlock_0'),
  ):
    key = key.replace(f'/{old}/', f'/{new}/')
  return key


@pytest.mark.parametrize(
  ('linen', 'prefix'), [(True, ''), (False, 'opt/target/')]
)
def test_all_spellings_give_the_same_parameters(tmp_path, linen, prefix):
  want = arrays(REP)
  spelt = {
    prefix + (to_linen(key) if linen else key): x for key, x in want.items()
  }
  assert len(spelt) == len(want)
  if prefix:  # beside other arrays of a training state
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


def test_group_norm_may_have_one_dimension_instead_of_four(tmp_path):
  stored = arrays(GOLDEN / 'tiny-stem_s7.npz')
  assert stored['gn_root/scale'].shape == (1, 1, 1, 64)
  path = tmp_path / 'stem.npz'
  flattened = {
    key: x.ravel() for key, x in stored.items() if key.startswith('gn')
  }
  np.savez(path, **stored | flattened)
  params = opening.open_checkpoint(str(path)).params
  np.testing.assert_array_equal(
    params['gn_root']['scale'], stored['gn_root/scale'].ravel()
  )


# Changes of arrays, and the error. None removes an array.
REFUSED = {
  'no layer 0': ({MLP: None}, MLP),
  'half of layer 1': ({QUERY: None}, QUERY),
  'no class token': ({'cls': None}, '17 patches'),
  'another array': ({'tail/kernel': np.zeros(3)}, 'tail/kernel'),
  'transposed': ({QUERY: np.zeros((16, 3, 48))}, QUERY),
  'heads that do not divide': (
    {QUERY.replace('block_1', 'block_0'): np.zeros((48, 5, 16))},
    'heads',
  ),
  'scalar root': ({'conv_root/kernel': np.float32(0)}, 'conv_root'),
  'a width without numbers': (
    {'embedding/kernel': np.zeros((8, 8, 0, 10**12))},
    "'embedding/kernel' must have 4 non-empty dimensions",
  ),
  'too many layers': (
    {f'Transformer/encoderblock_{i}/x': np.zeros(1) for i in range(1001)},
    'depth is 1001',
  ),
  'not a number': ({'cls': np.full((1, 1, 48), np.nan)}, "'cls' has 48"),
  'no square': (
    {'Transformer/posembed_input/pos_embedding': np.zeros((1, 8, 48))},
    '7 patches',
  ),
}


@pytest.mark.edge
@pytest.mark.parametrize(('changes', 'message'), REFUSED.values(), ids=REFUSED)
def test_what_is_no_vit_is_refused_by_file_and_key(tmp_path, changes, message):
  changed = arrays() | changes
  path = tmp_path / 'changed.npz'
  np.savez(path, **{k: x for k, x in changed.items() if x is not None})
  with pytest.raises(ValueError, match=f'changed.npz.*{message}'):
    opening.open_checkpoint(str(path))


@pytest.mark.edge
@pytest.mark.parametrize('is_zip', [False, True])
def test_what_is_no_npz_file_is_refused(tmp_path, is_zip):
  path = tmp_path / 'damaged.npz'
  path.write_text('text')
  if is_zip:
    with zipfile.ZipFile(path, 'w') as file:
      file.writestr('cls', 'text')
  with pytest.raises(ValueError, match='damaged.npz'):
    opening.open_checkpoint(str(path))


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


def test_a_hybrid_comes_back(tmp_path):
  fields = VIT | {'patch_size': 1, 'stem_width': 32, 'stem_layers': (1, 2)}
  checkpoint = random_checkpoint(None, (64, 64), names=False, **fields)
  again = opening.open_checkpoint(written(tmp_path, checkpoint))
  assert again.model == checkpoint.model
  assert again.image_size == (64, 64)
  jax.tree.map(np.testing.assert_array_equal, again.params, checkpoint.params)


@pytest.mark.edge
@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'pool': 'map'}, "pool 'map', only 'cls' or 'gap'. Choose"),
    ({'size': (16, 64)}, 'image_size 16x64: .* square'),
  ],
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
  kernel = np.zeros_like(arrays()['head/kernel'])
  np.savez(tmp_path / 'zero.npz', **arrays() | {'head/kernel': kernel})
  opening.open_checkpoint(str(tmp_path / 'zero.npz'))
  assert 'the kernel of the head is all zeros' in caplog.text
