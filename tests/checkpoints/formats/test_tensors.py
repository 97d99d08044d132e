"""Files of tensors, read and written."""

import json
import pathlib
import pickle
import re
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vit_jax.checkpoints.formats import tensors

ARRAYS = {
  'b.weight': np.arange(6, dtype=np.float32).reshape(2, 3),
  'a': np.array(3, np.float32),
  'half': np.array([1, -2], np.float16),
  'brain': np.array([1.5, -2], ml_dtypes.bfloat16),
  'count': np.array([7], np.int64),
  'byte': np.array([200], np.uint8),
  'double': np.array([0.1]),
  'empty': np.zeros((0, 3), np.float32),
}


def assert_same(got, want):
  assert got.keys() == want.keys()
  for key, x in want.items():
    assert got[key].dtype == x.dtype
    np.testing.assert_array_equal(got[key], x)


def test_safetensors_are_read_as_stored(tmp_path):
  save_file(ARRAYS, tmp_path / 'any.name')
  path = str(tmp_path / 'any.name')
  assert tensors.is_tensors(path)
  assert_same(tensors.read(path), ARRAYS)


@pytest.mark.parametrize(
  ('under', 'legacy'), [(None, False), ('state_dict', True)]
)
def test_pytorch_files_are_read_as_stored(torch, tmp_path, under, legacy):
  state = {
    key: torch.tensor(x.astype(np.float32)).to(torch.bfloat16)
    if x.dtype == ml_dtypes.bfloat16
    else torch.tensor(x)
    for key, x in ARRAYS.items()
  }
  state['b.weight'] = torch.nn.Parameter(state['b.weight'].T).T
  saved = {under: state, 'epoch': 3} if under else state
  path = str(tmp_path / 'any.name')
  torch.save(saved, path, _use_new_zipfile_serialization=not legacy)
  assert tensors.is_tensors(path)
  start = f'{under}.' if under else ''
  want = {f'{start}{key}': x for key, x in ARRAYS.items()}
  assert_same(tensors.read(path), want)


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc')
def test_arrays_of_pytorch_stay_in_their_file(torch, tmp_path):
  """They take no memory before they are read."""
  path = tmp_path / 'x.pth'
  torch.save({'x': torch.ones(9)}, path)
  found = tensors.read(str(path))
  assert str(path) in pathlib.Path('/proc/self/maps').read_text()
  assert found['x'].sum() == 9


def test_other_files_are_none(tmp_path):
  path = tmp_path / 'x'
  with zipfile.ZipFile(path, 'w') as file:
    file.writestr('é', b'')
  packed = path.read_bytes()
  start = packed.index(b'PK\1\2')
  contents = [
    # A name that is no UTF-8, and what only version 9.9 can unpack.
    packed.replace('é'.encode(), b'\xff\xff'),
    packed[: start + 6] + b'\x63' + packed[start + 7 :],
  ]
  contents += [b'', b'{', b'x' * 20, pickle.dumps({'x': 1})]
  for content in contents:
    path.write_bytes(content)
    assert not tensors.is_tensors(str(path))
  np.savez(tmp_path / 'x.npz', x=np.ones(1))
  assert not tensors.is_tensors(str(tmp_path / 'x.npz'))
  with pytest.raises(ValueError, match='x is neither a .safetensors file nor'):
    tensors.read(str(path))


@pytest.mark.edge
def test_damaged_safetensors_are_refused(tmp_path):
  path = tmp_path / 'x.safetensors'
  save_file(ARRAYS, path)
  path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(ValueError, match=r'x.safetensors: .* cannot be read: '):
    tensors.read(str(path))


class Malice:
  """Would create a file if its pickle were executed."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return open, (str(self.path), 'w')


@pytest.mark.parametrize('legacy', [False, True], ids=['zip', 'legacy'])
def test_code_in_a_pickle_never_runs(torch, tmp_path, legacy):
  path, sign = tmp_path / 'x.pth', tmp_path / 'sign'
  torch.save(
    {'x': Malice(sign), 'y': torch.ones(1)},
    path,
    _use_new_zipfile_serialization=not legacy,
  )
  if legacy:  # PyTorch lists the classes in a zip file alone
    message = r'x.pth: the file cannot be read: .*Save only model.state_dict'
    with pytest.raises(ValueError, match=message) as e:
      tensors.read(str(path))
    # torch would tell over many lines how to run it.
    assert 'weights_only' not in str(e.value)
    assert '\n' not in str(e.value)
  else:
    assert tensors.read(str(path)).keys() == {'y'}
  assert not sign.exists()


@pytest.mark.edge
def test_what_is_not_a_state_dict_is_refused(torch, tmp_path):
  path = str(tmp_path / 'x.pth')
  for saved, message in (
    (torch.nn.Linear(2, 3), 'has no named tensors. Save model.state_dict'),
    ({'x': torch.ones(1).to(torch.complex64)}, "'x' cannot be .*complex64"),
  ):
    torch.save(saved, path)
    with pytest.raises(ValueError, match=f'x.pth: .*{message}'):
      tensors.read(path)


def write_parts(folder, places):
  save_file({'x': ARRAYS['a']}, folder / 'one.safetensors')
  save_file({'y': ARRAYS['b.weight']}, folder / 'two.safetensors')
  index = folder / 'model.safetensors.index.json'
  index.write_text(json.dumps(places))


def test_folders_are_read(torch, tmp_path):
  parts = {'x': 'one.safetensors', 'y': 'two.safetensors'}
  want = {'x': ARRAYS['a'], 'y': ARRAYS['b.weight']}
  with pytest.raises(FileNotFoundError, match=r'no weights. It must have'):
    tensors.read_folder(str(tmp_path))
  torch.save({'z': torch.ones(1)}, tmp_path / 'one.bin')
  index = tmp_path / 'pytorch_model.bin.index.json'
  index.write_text(json.dumps({'weight_map': {'z': 'one.bin'}}))
  assert tensors.read_folder(str(tmp_path)).keys() == {'z'}
  torch.save({'x': torch.ones(1)}, tmp_path / 'pytorch_model.bin')
  assert tensors.read_folder(str(tmp_path)).keys() == {'x'}
  write_parts(tmp_path, {'weight_map': parts})
  assert_same(tensors.read_folder(str(tmp_path)), want)
  assert tensors.read_folder(str(tmp_path), '^y$').keys() == {'x'}
  save_file(ARRAYS, tmp_path / 'model.safetensors')
  assert_same(tensors.read_folder(str(tmp_path)), ARRAYS)


@pytest.mark.edge
def test_an_index_without_parts_is_refused(tmp_path):
  write_parts(tmp_path, {})
  with pytest.raises(ValueError, match='weight_map must be an object'):
    tensors.read_folder(str(tmp_path))


def test_a_missing_part_is_named(tmp_path):
  parts = {f'{i}': f'{9 - i}.safetensors' for i in range(9)}
  write_parts(tmp_path, {'weight_map': parts})
  with pytest.raises(FileNotFoundError, match="names the file '1.safet"):
    tensors.read_folder(str(tmp_path))


@pytest.mark.edge
@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (b'{"x": ', r'x.json is not JSON: .*char 6'),
    (b'[]', r'x.json contains a list; it must'),
  ],
)
def test_broken_json_is_refused(tmp_path, content, message):
  (tmp_path / 'x.json').write_bytes(content)
  with pytest.raises(ValueError, match=message):
    tensors.read_json(str(tmp_path / 'x.json'))


def test_json_is_read(tmp_path):
  (tmp_path / 'x.json').write_text('{"ä": [1, null]}', 'utf-8')
  assert tensors.read_json(str(tmp_path / 'x.json')) == {'ä': [1, None]}


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_written_files_are_those_of_the_library(tmp_path, torch, dtype):
  arrays = {
    'b': np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32).T,
    'a': np.array(3, np.float32),
  }
  path = tmp_path / 'x.safetensors'
  tensors.write_safetensors(str(path), arrays, dtype)
  want = {key: x.astype(dtype) for key, x in arrays.items()}
  assert_same(load_file(path), want)
  assert_same(tensors.read(str(path)), want)
  from safetensors import safe_open

  with safe_open(path, 'pt') as file:
    assert file.metadata() == {'format': 'pt'}
    assert file.get_tensor('b').dtype == getattr(torch, dtype)


def test_the_same_arrays_give_the_same_bytes(tmp_path):
  arrays = {'b': np.ones(3, np.float32), 'a': np.zeros(2, np.float32)}
  backwards = dict(reversed(arrays.items()))
  tensors.write_safetensors(str(tmp_path / 'x'), arrays)
  tensors.write_safetensors(str(tmp_path / 'y'), backwards)
  assert (tmp_path / 'x').read_bytes() == (tmp_path / 'y').read_bytes()


def test_what_float16_cannot_hold_is_refused(tmp_path):
  arrays = {'x': np.array([1, -7e4], np.float32)}
  message = re.escape("'x' has values up to 70000; float16 ends at 65,504")
  with pytest.raises(ValueError, match=message):
    tensors.write_safetensors(str(tmp_path / 'x'), arrays, 'float16')
  assert list(tmp_path.iterdir()) == []


def test_existing_files_and_folders_are_kept(tmp_path):
  (tmp_path / 'x').write_text('mine')
  with pytest.raises(FileExistsError, match='x exists already'):
    tensors.write_safetensors(str(tmp_path / 'x'), {})
  with pytest.raises(FileExistsError, match='exists already'):
    tensors.write_folder(str(tmp_path), {}, {}, 'float32')
  assert [path.read_text() for path in tmp_path.iterdir()] == ['mine']
