"""Archives of arrays, and files made to do harm."""

import io
import pathlib
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


def zip_of(path, **entries):
  """Writes an archive of arrays that are given as the bytes of their files."""
  with zipfile.ZipFile(path, 'w') as file:
    for name, data in entries.items():
      file.writestr(f'{name}.npy', data)
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


def test_memory_holds_every_array_once(tmp_path):
  """Reading takes the arrays and one chunk, writing one array's copy."""
  path = str(tmp_path / 'x.npz')
  arrays = {f'x{i}': np.ones((1024, 4096), np.float32).T for i in range(6)}
  one = arrays['x0'].nbytes
  tracemalloc.start()
  try:
    archive.save(path, arrays, 'bfloat16')
    # NumPy writes an array by chunks of 16 MiB.
    assert tracemalloc.get_traced_memory()[1] < 2 * one + (1 << 25)
    tracemalloc.reset_peak()
    total = sum(x.nbytes for x in archive.load(path).values())
    assert total == 6 * one // 2
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
  path = zip_of(tmp_path / 'x.npz', a=npy(np.ones(2)), b=pickled)
  with pytest.raises(ValueError, match="x.npz: the array 'b' .* Object arrays"):
    archive.load(path)
  assert not mark.exists()


@pytest.mark.edge
@pytest.mark.parametrize(
  'data', [npy(np.ones(3))[:-1], npy(np.array(['abc']))], ids=['cut', 'text']
)
def test_an_entry_that_is_not_an_array_of_numbers_is_named(tmp_path, data):
  path = zip_of(tmp_path / 'x.npz', first=npy(np.ones(3)), k=data)
  with pytest.raises(ValueError, match="x.npz: the array 'k' cannot be read"):
    archive.load(path)


@pytest.mark.edge
def test_a_file_that_ends_early_is_refused(tmp_path):
  path = zip_of(tmp_path / 'x.npz', k=npy(np.ones(3)), l=npy(np.ones(3)))
  data = pathlib.Path(path).read_bytes()
  pathlib.Path(path).write_bytes(data[: len(data) // 2])
  assert archive.is_archive(path)
  with pytest.raises(ValueError, match='x.npz: the archive cannot be read'):
    archive.load(path)


def lookup_of(*keys, **shapes):
  """Returns a lookup whose names are in capitals, and keys in small letters."""
  arrays = {key: np.zeros(1) for key in keys}
  arrays |= {key: np.zeros(shape) for key, shape in shapes.items()}
  return archive.Lookup('x.npz', arrays, str.lower, 'X')


def test_layers_are_counted_by_stages_in_order():
  """There are more than ten stages, and the keys are not in order."""
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
  with pytest.raises(
    ValueError, match="'kernel' must have 2 non-empty dimensions"
  ):
    found.size('KERNEL', 2)
  with pytest.raises(ValueError, match="not a X .*'bias'.* is missing"):
    found.shape('BIAS', 1)


def test_a_mean_or_a_deviation_that_is_not_assumed_is_said():
  assert archive.notes(Weights({}, {})) == []
  other = Preprocessing(std=(0.5, 0.5, 0.4))
  (line,) = archive.notes(Weights({}, {}, other))
  assert line.startswith('Images are normalised with mean (0.5, 0.5, 0.5)')
  assert archive.notes(Weights({}, {}, other), other) == []
