"""Files that claim absurd sizes, or contain code.

Mutations as in `mutations`, of the inside of one kind of file each.
"""

import io
import json
import os
import pickle
import struct
import zipfile

import numpy as np

HUGE = 10**12


def payload(mark):
  """Returns an object that creates a file when it is unpickled."""

  class Payload:
    def __reduce__(self):
      return os.system, (f'touch {mark}',)

  return Payload()


def _of_member(change):
  """Returns a mutation of one member of an .npz archive."""

  def mutate(path, rng):
    with zipfile.ZipFile(path) as archive:
      members = {name: archive.read(name) for name in archive.namelist()}
    name = str(rng.choice(sorted(members)))
    members[name] = change(members[name], path.parent / 'mark')
    with zipfile.ZipFile(path, 'w') as archive:
      for key, data in members.items():
        archive.writestr(key, data)
    return [name.removesuffix('.npy')]

  return mutate


def _saved(value):
  file = io.BytesIO()
  np.save(file, value, allow_pickle=True)
  return file.getvalue()


def _as_type(data, dtype):
  return _saved(np.load(io.BytesIO(data)).astype(dtype))


def _claim(header):
  """Returns the file of an array with a given header."""
  text = repr(header).encode().ljust(117) + b'\n'
  return b'\x93NUMPY\x01\x00' + struct.pack('<H', len(text)) + text + bytes(64)


def _header(**changes):
  header = {'descr': '<f4', 'fortran_order': False, 'shape': (16,)} | changes
  return _of_member(lambda data, mark: _claim(header))


def _claimed_member(path, rng):
  """Makes the directory of an archive claim an absurd size for a member."""
  data = bytearray(path.read_bytes())
  at = data.index(b'PK\x01\x02')
  data[at + 20 : at + 28] = struct.pack('<2L', 2**32 - 2, 2**32 - 2)
  path.write_bytes(data)


NPZ = {
  'array of objects': _of_member(
    lambda data, mark: _saved(np.array([payload(mark)], object))
  ),
  'pickle for an array': _of_member(
    lambda data, mark: pickle.dumps(payload(mark))
  ),
  'array of text': _of_member(lambda data, mark: _as_type(data, 'U9')),
  'complex array': _of_member(lambda data, mark: _as_type(data, complex)),
  'terabytes claimed': _header(shape=(HUGE, HUGE)),
  'unknown type': _header(descr='<f99'),
  'huge member': _claimed_member,
}


def _of_tensors_header(change):
  """Returns a mutation of the header of a .safetensors file."""

  def mutate(path, rng):
    place = path / 'model.safetensors' if path.is_dir() else path
    data = place.read_bytes()
    (length,) = struct.unpack('<Q', data[:8])
    header = json.loads(data[8 : 8 + length])
    key = str(rng.choice(sorted(header.keys() - {'__metadata__'})))
    change(header[key], header)
    text = json.dumps(header).encode()
    place.write_bytes(struct.pack('<Q', len(text)) + text + data[8 + length :])

  return mutate


def _length(length):
  def mutate(path, rng):
    place = path / 'model.safetensors' if path.is_dir() else path
    place.write_bytes(struct.pack('<Q', length) + place.read_bytes()[8:])

  return mutate


TENSORS = {
  'terabytes claimed': _of_tensors_header(
    lambda x, header: x.update(shape=[HUGE, HUGE])
  ),
  'offset outside': _of_tensors_header(
    lambda x, header: x.update(data_offsets=[0, HUGE])
  ),
  'type of eight bits': _of_tensors_header(
    lambda x, header: x.update(dtype='F8_E4M3')
  ),
  'type unknown': _of_tensors_header(lambda x, header: x.update(dtype='F99')),
  'header of exabytes': _length(2**62),
}


def _of_torch(make):
  """Returns a mutation that saves another object with torch."""

  def mutate(path, rng):
    import torch

    state = torch.load(path)
    key = str(rng.choice(sorted(state)))
    saved, options = make(torch, state, key, path.parent / 'mark')
    torch.save(saved, path, **options)
    return [key, 'cannot be read']

  return mutate


def _pickled(path, rng):
  path.write_bytes(pickle.dumps(payload(path.parent / 'mark')))


def _pickled_in_zip(path, rng):
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr(
      'archive/data.pkl', pickle.dumps(payload(path.parent / 'mark'), 2)
    )
    archive.writestr('archive/version', '3\n')


TORCH = {
  'code beside weights': _of_torch(
    lambda torch, state, key, mark: (state | {'code': payload(mark)}, {})
  ),
  'code for a weight': _of_torch(
    lambda torch, state, key, mark: (state | {key: payload(mark)}, {})
  ),
  'code in the old format': _of_torch(
    lambda torch, state, key, mark: (
      state | {'code': payload(mark)},
      {'_use_new_zipfile_serialization': False},
    )
  ),
  'code alone': _pickled,
  'code in an archive': _pickled_in_zip,
  'terabytes claimed': _of_torch(
    lambda torch, state, key, mark: (
      state | {key: torch.zeros(1).expand(HUGE)},
      {},
    )
  ),
  'sparse': _of_torch(
    lambda torch, state, key, mark: (
      state | {key: state[key].reshape(-1).to_sparse()},
      {},
    )
  ),
  'complex': _of_torch(
    lambda torch, state, key, mark: (
      state | {key: state[key].to(torch.complex64)},
      {},
    )
  ),
  'a number for a weight': _of_torch(
    lambda torch, state, key, mark: (state | {key: 1.0}, {})
  ),
  'a list': _of_torch(
    lambda torch, state, key, mark: (list(state.values()), {})
  ),
}
