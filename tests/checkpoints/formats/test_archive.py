"""Archives of arrays: what is written, and files made to do harm."""

import io
import os
import pathlib
import re
import struct
import sys
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest

from vit_jax.checkpoints.formats import archive
from vit_jax.checkpoints.formats.table import Preprocessing, Weights

ARRAYS = {
  'a/kernel': np.arange(12, dtype=np.float32).reshape(3, 4),
  'a/bias': np.float32([0.5, -0.0, 3e38]),
  'scalar': np.float32(7),
  'nothing': np.zeros((3, 0), np.float32),
}


def npy(x, **options):
  file = io.BytesIO()
  np.lib.format.write_array(file, x, **options)
  return file.getvalue()


def header(text, version=(1, 0)):
  size = struct.pack('<H' if version == (1, 0) else '<I', len(text) + 1)
  return b'\x93NUMPY' + bytes(version) + size + text.encode() + b'\n'


def claim(shape, descr="'<f4'", fortran='False'):
  return header(
    f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"
  )


def zip_of(path, entries, compression=zipfile.ZIP_STORED):
  """Writes entries as they are, given as pairs of name and bytes."""
  with zipfile.ZipFile(path, 'w', compression) as file:
    for name, data in entries:
      file.writestr(name, data)
  return str(path)


def same(got, want):
  assert (got.dtype, got.shape) == (want.dtype, want.shape)
  assert got.tobytes() == want.tobytes()


def test_what_is_saved_is_loaded_by_numpy_too(tmp_path):
  path = str(tmp_path / 'x.npz')
  archive.save(path, ARRAYS, 'float32')
  assert archive.is_archive(path)
  got = archive.load(path)
  with np.load(path) as numpy_got:
    assert list(got) == list(numpy_got) == list(ARRAYS)
    for key, x in ARRAYS.items():
      same(got[key], x)
      same(numpy_got[key], x)


def test_bfloat16_is_two_bytes_of_void_to_numpy(tmp_path):
  path = str(tmp_path / 'x.npz')
  archive.save(path, ARRAYS, 'bfloat16')
  got = archive.load(path)
  with np.load(path) as numpy_got:
    for key, x in ARRAYS.items():
      want = x.astype(ml_dtypes.bfloat16)
      same(got[key], want)
      same(numpy_got[key].view(ml_dtypes.bfloat16), want)


def test_an_archive_of_nothing_is_one(tmp_path):
  np.savez(tmp_path / 'x.npz')
  assert archive.is_archive(str(tmp_path / 'x.npz'))
  assert archive.load(str(tmp_path / 'x.npz')) == {}


@pytest.mark.parametrize('version', [(1, 0), (2, 0)])
def test_both_versions_of_headers_are_read(tmp_path, version):
  x = np.arange(6, dtype=np.float32).reshape(2, 3)
  path = zip_of(tmp_path / 'x.npz', [('x.npy', npy(x, version=version))])
  same(archive.load(path)['x'], x)


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
@pytest.mark.parametrize(
  'x',
  [
    np.float32(3),
    np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    np.arange(6, dtype='>f4').reshape(2, 3),
    np.zeros((0, 5), np.uint64),
  ],
  ids=['scalar', 'fortran', 'big-endian', 'empty'],
)
def test_arrays_of_every_kind_are_loaded(tmp_path, save, x):
  save(tmp_path / 'x.npz', x=x)
  same(archive.load(str(tmp_path / 'x.npz'))['x'], np.asarray(x))


def test_views_are_saved_as_what_they_show(tmp_path):
  x = np.arange(9, dtype=np.float32)[::-2]
  archive.save(str(tmp_path / 'x.npz'), {'x': x}, 'float32')
  same(archive.load(str(tmp_path / 'x.npz'))['x'], np.ascontiguousarray(x))
  with zipfile.ZipFile(tmp_path / 'x.npz') as file:
    assert b"'fortran_order': False" in file.read('x.npy')


def test_the_same_arrays_are_the_same_bytes_at_any_time(tmp_path, monkeypatch):
  archive.save(str(tmp_path / 'a.npz'), ARRAYS, 'float32')
  later = (2031, 5, 6, 7, 8, 9, 0, 0, 0)
  monkeypatch.setattr(zipfile.time, 'localtime', lambda *_: later)
  archive.save(str(tmp_path / 'b.npz'), ARRAYS, 'float32')
  first, second = ((tmp_path / f'{x}.npz').read_bytes() for x in 'ab')
  assert first == second


def test_a_failed_save_leaves_nothing_and_an_old_file_alone(tmp_path):
  path = str(tmp_path / 'x.npz')
  with pytest.raises(ValueError, match='convert'):
    archive.save(path, ARRAYS | {'z': np.array(['text'])}, 'float32')
  assert list(tmp_path.iterdir()) == []
  archive.save(path, ARRAYS, 'float32')
  before = pathlib.Path(path).read_bytes()
  with pytest.raises(FileExistsError, match='x.npz exists already'):
    archive.save(path, {}, 'float32')
  assert pathlib.Path(path).read_bytes() == before


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_memory_holds_every_array_once(tmp_path, dtype):
  """Reading takes the arrays and one chunk, writing one array's copy."""
  path = str(tmp_path / 'x.npz')
  arrays = {f'x{i}': np.ones((1024, 4096), np.float32).T for i in range(6)}
  one = arrays['x0'].nbytes
  tracemalloc.start()
  try:
    archive.save(path, arrays, dtype)
    # NumPy writes an array by chunks of 16 MiB.
    assert tracemalloc.get_traced_memory()[1] < 2 * one + (1 << 25)
    tracemalloc.reset_peak()
    total = sum(x.nbytes for x in archive.load(path).values())
    assert total == 6 * one // (1 if dtype == 'float32' else 2)
    assert tracemalloc.get_traced_memory()[1] < total + (1 << 26)
  finally:
    tracemalloc.stop()


class Hostile:
  """Leaves a mark if anything unpickles it."""

  def __init__(self, mark):
    self.mark = mark

  def __reduce__(self):
    return pathlib.Path.touch, (self.mark,)


def test_nothing_is_unpickled(tmp_path):
  mark = tmp_path / 'mark'
  pickled = npy(np.array([Hostile(mark)], object), allow_pickle=True)
  path = zip_of(
    tmp_path / 'x.npz', [('a.npy', npy(np.ones(2))), ('b.npy', pickled)]
  )
  with pytest.raises(ValueError, match="x.npz: the array 'b' .* object"):
    archive.load(path)
  assert not mark.exists()


F4 = npy(np.ones(3, np.float32))
# Name and bytes of an entry, what the message says of it.
ENTRIES = {
  'no array': ('k.npy', b'hello', "'k'.*magic"),
  'less data': ('k.npy', F4[:-1], "'k'.*12 bytes, and 11 follow"),
  'absurd shape': ('k.npy', claim((10**15, 10**15)), r"'k'.*claims the shape"),
  'negative': ('k.npy', claim((-1,)), "'k'"),
  'code': ('k.npy', header("__import__('os').getcwd()"), "'k'"),
  'header of 4 GB': (
    'k.npy',
    b'\x93NUMPY\x02\x00' + b'\xff' * 4 + b' ' * 99,
    "'k'",
  ),
  'version': ('k.npy', header('{}', (9, 0)), r"'k'.*version \(9, 0\)"),
  'text': ('k.npy', npy(np.array(['abc'])), "'k'.*<U3, no number"),
  'three bytes': ('k.npy', npy(np.zeros(2, 'V3')), "'k'.*V3, no number"),
  'path': ('../../etc/passwd', b'root', "'../../etc/passwd'"),
}


@pytest.mark.edge
@pytest.mark.parametrize(
  ('name', 'data', 'words'), ENTRIES.values(), ids=ENTRIES
)
def test_what_is_no_array_is_refused_by_name(tmp_path, name, data, words):
  entries = [('first.npy', F4), (name, data)]
  path = zip_of(tmp_path / 'x.npz', entries, zipfile.ZIP_STORED)
  with pytest.raises(ValueError, match=f'(?s)x.npz: the array {words}'):
    archive.load(path)


@pytest.mark.filterwarnings('ignore:Duplicate name:UserWarning')
@pytest.mark.parametrize('names', [('k.npy', 'k.npy'), ('k.npy', 'k')])
def test_a_name_that_is_there_twice_is_refused(tmp_path, names):
  path = zip_of(tmp_path / 'x.npz', [(name, F4) for name in names])
  with pytest.raises(ValueError, match="x.npz: the array 'k'.*twice"):
    archive.load(path)


def directory_of(data):
  """Returns where the directory's entry of the first file begins."""
  return data.index(b'PK\x01\x02')


def patched(path, offset, value):
  """Changes the directory's entry and nothing else."""
  data = bytearray(pathlib.Path(path).read_bytes())
  place = directory_of(data) + offset
  data[place : place + len(value)] = value
  pathlib.Path(path).write_bytes(data)


def test_what_unpacks_to_more_than_the_memory_is_refused(tmp_path, monkeypatch):
  path = zip_of(tmp_path / 'x.npz', [('k.npy', F4)], zipfile.ZIP_DEFLATED)
  patched(path, 24, struct.pack('<I', 3 << 30))
  pages = {'SC_PAGE_SIZE': 4096, 'SC_PHYS_PAGES': (1 << 30) // 4096}
  monkeypatch.setattr(os, 'sysconf', pages.get)
  with pytest.raises(ValueError, match='x.npz.*unpacks to 3 GB.* has 1 GB'):
    archive.load(path)


# Where the directory has a field, its new bytes and the message.
FIELDS = {
  'encrypted': (8, b'\x01\x00', 'encrypted'),
  'wrong checksum': (16, b'abcd', 'CRC'),
  'larger than it is': (24, struct.pack('<I', 1 << 20), "'k'"),
  'a place behind the end': (42, struct.pack('<I', 1 << 30), 'archive|k'),
}


@pytest.mark.edge
@pytest.mark.parametrize(
  ('offset', 'value', 'words'), FIELDS.values(), ids=FIELDS
)
def test_a_directory_that_lies_is_refused(tmp_path, offset, value, words):
  path = zip_of(tmp_path / 'x.npz', [('k.npy', F4)], zipfile.ZIP_STORED)
  patched(path, offset, value)
  with pytest.raises(ValueError, match=f'(?s)x.npz.*{words}'):
    archive.load(path)


@pytest.mark.edge
def test_a_flipped_byte_of_data_is_found(tmp_path):
  x = np.random.default_rng(0).standard_normal(1000)
  path = zip_of(tmp_path / 'x.npz', [('k.npy', npy(x))], zipfile.ZIP_STORED)
  data = bytearray(pathlib.Path(path).read_bytes())
  data[4000] ^= 4
  pathlib.Path(path).write_bytes(data)
  with pytest.raises(ValueError, match="x.npz: the array 'k' cannot be read"):
    archive.load(path)


@pytest.mark.edge
def test_a_file_that_ends_early_is_refused(tmp_path):
  path = zip_of(tmp_path / 'x.npz', [('k.npy', F4), ('l.npy', F4)])
  data = pathlib.Path(path).read_bytes()
  pathlib.Path(path).write_bytes(data[: int(len(data) * 0.5)])
  assert archive.is_archive(path)
  with pytest.raises(ValueError, match='x.npz: the archive cannot be read'):
    archive.load(path)


@pytest.mark.edge
@pytest.mark.parametrize('data', [b'', b'\x93NUMPY'])
def test_other_files_are_no_archives(tmp_path, data):
  (tmp_path / 'x').write_bytes(data)
  assert not archive.is_archive(str(tmp_path / 'x'))


class Terminal(io.StringIO):
  """Takes what is printed, as somebody sees it or as a file."""

  def __init__(self, is_seen):
    super().__init__()
    self.is_seen = is_seen

  def isatty(self):
    return self.is_seen


def test_a_bar_is_there_after_two_seconds_and_gone_at_the_end(monkeypatch):
  now_s = [1e9]
  terminal = Terminal(True)
  monkeypatch.setattr('tqdm.std.time', lambda: now_s[0])
  monkeypatch.setattr(sys, 'stderr', terminal)
  with archive.progress('reading x', 4_000_000) as bar:
    now_s[0] += 1.75
    bar.update(500_000)
    assert terminal.getvalue() == ''
    now_s[0] += 0.25
    bar.update(500_000)
    shown = terminal.getvalue()
  wanted = r'\rreading x:  25%.* 1.00M/4.00M .*B/s'
  assert re.match(wanted, shown)
  assert not ''.join(terminal.getvalue().split('\r')[-2:]).strip()


def test_bars_count_the_bytes_of_arrays(tmp_path, bars):
  path = str(tmp_path / 'x.npz')
  archive.save(path, ARRAYS, 'float32')
  got = archive.load(path)
  writing, reading = bars
  with zipfile.ZipFile(path) as file:
    unpacked = sum(info.file_size for info in file.infolist())
  arrays_bytes = (12 + 3 + 1) * (4 if 'float32' == 'float32' else 2)
  assert sum(x.nbytes for x in got.values()) == arrays_bytes
  assert vars(writing) == {
    'what': f'writing {path}',
    'total': arrays_bytes,
    'done': arrays_bytes,
  }
  # Headers of arrays are not counted.
  assert vars(reading) == {
    'what': f'reading {path}',
    'total': unpacked,
    'done': arrays_bytes,
  }


def lookup_of(*keys, **shapes):
  """Looks for arrays by capitals, which files have in small letters."""
  arrays = {key: np.zeros(1) for key in keys}
  arrays |= {key: np.zeros(shape) for key, shape in shapes.items()}
  return archive.Lookup('x.npz', arrays, str.lower, 'X')


def test_layers_are_counted_by_stages_in_order():
  """Of which there are many, as the keys come in no order."""
  units = {stage: 1 + stage % 3 for stage in (12, *range(1, 12))}
  keys = [
    f's.{stage}.{unit + 9}.{leaf}'
    for stage, count in units.items()
    for unit in range(count)
    for leaf in 'ab'
  ]
  found = lookup_of(*keys, 's.2.x', 'other.s.2.31.a', 'sx2.32.a')
  counts = tuple(units[stage] for stage in range(1, 13))
  assert found.count('s.', r'(\d+)\.(\d+)\.') == counts
  assert found.count('s.2.', r'(\d+)\.') == (3,)
  assert found.count('s.13.', r'(\d+)\.') == ()


def test_sizes_are_those_of_an_axis_and_0_of_what_is_absent():
  found = lookup_of(kernel=(2, 3, 5))
  assert found.size('KERNEL', 3) == 2
  assert [found.size('KERNEL', 3, axis) for axis in (1, 2)] == [3, 5]
  assert found.size('BIAS', 1) == 0
  with pytest.raises(ValueError, match="'kernel' should have 2 dimensions"):
    found.size('KERNEL', 2)
  with pytest.raises(ValueError, match="x.npz is no X .*'bias'.* is absent"):
    found.shape('BIAS', 1)


@pytest.mark.parametrize('name', ['mean', 'std'])
def test_a_mean_or_a_deviation_that_is_not_assumed_is_said(name):
  assert archive.not_held(Weights({}, {})) == []
  other = Preprocessing(**{name: (0.5, 0.5, 0.4)})
  (line,) = archive.not_held(Weights({}, {}, other))
  assert line.startswith('The mean (0.5, 0.5, 0.')
  assert archive.not_held(Weights({}, {}, other), other) == []
