"""Ways to damage checkpoints.

A mutation is a function of the checkpoint's path and a random generator. It
returns words, one of which the error must have besides the path. It returns
None if it does not know what it damaged.
"""

import hashlib
import json
import re

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.checkpoints.formats.hostile_payloads import NPZ, TENSORS, TORCH

# Any bytes of any file.


def _some_file(path, rng):
  if path.is_file():
    return path
  files = [p for p in path.rglob('*') if p.is_file()]
  # Orbax gives random names to some.
  return rng.choice(
    sorted(files, key=lambda p: (p.parent, p.stat().st_size, p.name))
  )


def _edit(path, rng, change):
  place = _some_file(path, rng)
  data = bytearray(place.read_bytes())
  at = int(rng.integers(max(len(data), 1)))
  place.write_bytes(change(data, at, rng))


def _flip(data, at, rng):
  if data:
    data[at] ^= 1 << rng.integers(8)
  return data


def _of_bytes(change):
  return lambda path, rng: _edit(path, rng, change)


def _remove_file(path, rng):
  _some_file(path, rng).unlink()


BYTES = {
  'empty': _of_bytes(lambda data, at, rng: b''),
  'truncated': _of_bytes(lambda data, at, rng: data[:at]),
  'bit flipped': _of_bytes(_flip),
  'early bit flipped': _of_bytes(
    lambda data, at, rng: _flip(data, at % 99, rng)
  ),
  'block overwritten': _of_bytes(
    lambda data, at, rng: data[:at] + rng.bytes(64) + data[at + 64 :]
  ),
  'bytes inserted': _of_bytes(
    lambda data, at, rng: data[:at] + rng.bytes(9) + data[at:]
  ),
  'bytes missing': _of_bytes(lambda data, at, rng: data[:at] + data[at + 9 :]),
  'garbage after': _of_bytes(lambda data, at, rng: data + rng.bytes(99)),
  'all garbage': _of_bytes(lambda data, at, rng: rng.bytes(at)),
}


# Arrays that are whole, and not those of a model.

# For what is inferred from them.
_IN_OTHER_WORDS = {'position embeddings', 'layers', 'config.json'}


def _load(path):
  """Returns arrays and a function that writes them back."""
  if path.suffix == '.npz':
    return dict(np.load(path)), lambda arrays: np.savez(path, **arrays)
  if path.suffix == '.pth':
    import torch

    arrays = {k: x.numpy() for k, x in torch.load(path).items()}
    return arrays, lambda arrays: torch.save(
      {k: torch.from_numpy(x) for k, x in arrays.items()}, path
    )
  place = path / 'model.safetensors' if path.is_dir() else path
  return load_file(place), lambda arrays: save_file(arrays, place)


def _of_array(change, names_it=True):
  """Returns a mutation of one array, which the error must name."""

  def mutate(path, rng):
    arrays, save = _load(path)
    key = str(rng.choice(sorted(arrays)))
    words = _IN_OTHER_WORDS | arrays.keys()
    change(arrays, key, rng)
    words = [key] if names_it else words | arrays.keys()
    save({k: np.ascontiguousarray(x) for k, x in arrays.items()})
    return words

  return mutate


def _put(value):
  def change(arrays, key, rng):
    x = arrays[key] = arrays[key].copy()
    x.flat[rng.integers(x.size)] = value

  return change


def _wide(arrays, key, rng):
  arrays[key] = arrays[key].astype(np.float64)
  _put(1e300)(arrays, key, rng)


def _many_layers(arrays, key, rng):
  numbered = [key for key in sorted(arrays) if re.search(r'\d+', key)]
  key = str(rng.choice(numbered))
  for i in range(1500):
    arrays[re.sub(r'\d+', str(i), key, count=1)] = arrays[key][:1]


def _reshaped(reshape):
  def change(arrays, key, rng):
    arrays[key] = reshape(arrays[key], int(rng.integers(arrays[key].ndim)))

  return change


ARRAYS = {
  'array missing': _of_array(lambda a, key, rng: a.pop(key), names_it=False),
  'array renamed': _of_array(
    lambda a, key, rng: a.update({f'{key}x': a.pop(key)}), names_it=False
  ),
  'array left over': _of_array(
    lambda a, key, rng: a.update({f'{key}_more': a[key]})
  ),
  'not a number': _of_array(_put(np.nan)),
  'infinite': _of_array(_put(-np.inf)),
  'above float32': _of_array(_wide),
  # What decides a size is believed, and then it is the others that differ.
  'longer': _of_array(
    _reshaped(lambda x, axis: np.concatenate([x, x], axis)), names_it=False
  ),
  'one axis more': _of_array(
    _reshaped(lambda x, axis: np.expand_dims(x, axis)), names_it=False
  ),
  'many layers': _of_array(_many_layers, names_it=False),
  'no elements': _of_array(
    _reshaped(lambda x, axis: np.take(x, [], axis)), names_it=False
  ),
}


# Configurations.

_VALUES = [
  10**9,
  2**70,
  1e308,
  -1,
  0,
  1,
  0.5,
  float('nan'),
  float('inf'),
  True,
  False,
  None,
  '',
  'gelu',
  '../../etc/passwd',
  'x' * 99,
  [],
  [10**9] * 4,
  [[]],
  {},
  {'a': {'b': []}},
]


def _json_file(path, rng):
  return rng.choice(sorted(path.glob('*.json')))


def _of_json(change):
  def mutate(path, rng):
    place = _json_file(path, rng)
    value = json.loads(place.read_text())
    field = change(value, rng)
    place.write_text(json.dumps(value))
    return [str(field), place.name, 'model.']

  return mutate


def _branch(value, rng):
  """Returns a container in a JSON value, and one of its keys."""
  while True:
    keys = sorted(value) if isinstance(value, dict) else range(len(value))
    key = keys[rng.integers(len(keys))]
    inner = value[key]
    if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
      return value, key
    value = inner


def _replace(value, rng):
  container, key = _branch(value, rng)
  container[key] = _VALUES[rng.integers(len(_VALUES))]
  return key


def _multiply(value, rng):
  """Makes a number of a configuration contradict the arrays."""
  for _ in range(1000):
    container, key = _branch(value, rng)
    x = container[key]
    if type(x) in (int, float):
      container[key] = x * 2 + 1
      return key


def _absurd(value, rng):
  """Makes all numbers of a configuration absurd."""

  def replaced(x):
    if isinstance(x, dict):
      return {key: replaced(inner) for key, inner in x.items()}
    if isinstance(x, list):
      return [replaced(inner) for inner in x]
    return 10**9 if type(x) in (int, float) else x

  value.update(replaced(value))


def _drop(value, rng):
  container, key = _branch(value, rng)
  del container[key]
  return key


def _of_text(change):
  def mutate(path, rng):
    place = _json_file(path, rng)
    place.write_bytes(change(place.read_bytes(), rng))
    return [place.name]

  return mutate


JSON = {
  'value replaced': _of_json(_replace),
  'another value replaced': _of_json(_replace),
  'number changed': _of_json(_multiply),
  'numbers absurd': _of_json(_absurd),
  'field missing': _of_json(_drop),
  'JSON cut': _of_text(lambda data, rng: data[: rng.integers(len(data) - 2)]),
  'JSON flipped': _of_text(
    lambda data, rng: _flip(bytearray(data), rng.integers(len(data)), rng)
  ),
  'JSON nested': _of_text(lambda data, rng: b'{"a":' * 10**5),
  'no object': _of_text(lambda data, rng: b'[1, 2]'),
  'no UTF-8': _of_text(lambda data, rng: b'\xff' + data),
}


def _forged(change):
  """Returns a mutation of a workdir's `meta` that corrects the checksum."""

  def mutate(path, rng):
    place = path / 'checkpoints/0/meta/metadata'
    meta = json.loads(place.read_text())['meta']
    change(meta, rng)
    text = json.dumps(meta, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    place.write_text(json.dumps({'meta': meta, 'sha256': digest}))

  return mutate


def _unsigned(path, rng):
  """Changes `meta` without its checksum."""
  place = path / 'checkpoints/0/meta/metadata'
  saved = json.loads(place.read_text())
  names = saved['meta']['class_names']
  names[rng.integers(len(names))] = 'changed'
  place.write_text(json.dumps(saved))
  return ['metadata differ from their checksum']


FORGED = {
  'class name changed': _unsigned,
  'value forged': _forged(_replace),
  'number forged': _forged(_multiply),
  'field forged away': _forged(_drop),
  'numbers forged absurd': _forged(_absurd),
  'size forged': _forged(
    lambda meta, rng: _multiply(meta['config']['model'], rng)
  ),
  'depth forged': _forged(
    lambda meta, rng: meta['config']['model'].update(depth=10**9)
  ),
  'images forged': _forged(
    lambda meta, rng: meta.update(image_size=[10**9, 10**9])
  ),
}


def mutations(name):
  """Returns the mutations of a format by name."""
  found = dict(BYTES)
  if '.' not in name:
    found['file missing'] = _remove_file
  if name not in ('workdir', 'hf_sharded'):
    found |= ARRAYS
  if name.endswith('.npz'):
    found |= NPZ
  elif name.endswith('.pth'):
    found |= TORCH
  elif name != 'workdir' and name != 'hf_sharded':
    found |= TENSORS
  if name.startswith(('timm', 'hf')):
    found |= JSON
  if name == 'workdir':
    found |= FORGED
  return found
