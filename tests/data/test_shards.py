"""Shards hold the images, classes and order of the folder they come from."""

import importlib.resources
import io
import os
import shutil
import struct
import sys
import tarfile

import fsspec
import google_crc32c
import numpy as np
import pytest
from tensorflow_datasets.proto import tf_example_pb2

from vit_jax.data import __main__ as data_command
from vit_jax.data import atomic_files, bad_images, loader, shards, sources

KINDS = ('arrayrecord', 'tfrecord', 'parquet', 'webdataset')


def write_tfrecord(path, rows, image='image', label='label'):
  def checksum(data):
    crc = google_crc32c.value(data)
    return struct.pack('<I', (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32)

  with fsspec.open(path, 'wb') as file:
    for data, value in rows:
      example = tf_example_pb2.Example()
      fields = example.features.feature
      fields[image].bytes_list.value.append(data)
      if isinstance(value, str):
        fields[label].bytes_list.value.append(value.encode())
      elif value is not None:
        fields[label].int64_list.value.extend(np.atleast_1d(value).tolist())
      record = example.SerializeToString()
      size = struct.pack('<Q', len(record))
      file.write(size + checksum(size) + record + checksum(record))


def write_parquet(path, rows):
  pa = pytest.importorskip('pyarrow')
  import pyarrow.parquet

  images = [{'bytes': data, 'path': None} for data, _ in rows]
  table = pa.table({'image': images, 'label': [label for _, label in rows]})
  pyarrow.parquet.write_table(table, path, row_group_size=4)


def write_tar(path, rows):
  with tarfile.open(path, 'w') as tar:
    for i, (data, label) in enumerate(rows):
      for ending, part in ('png', data), ('cls', str(label).encode()):
        member = tarfile.TarInfo(f'{i:06}.{ending}')
        member.size = len(part)
        tar.addfile(member, io.BytesIO(part))


def rows_of(path):
  """The rows of a folder with a folder for each class, as listed."""
  files = sorted(path.glob('*/*'))
  classes = sorted({file.parent.name for file in files})
  return [(x.read_bytes(), classes.index(x.parent.name)) for x in files]


@pytest.fixture
def photos(tmp_path, encode):
  """A folder of 26 images of three classes, with splits."""
  rng = np.random.default_rng(0)
  for i in range(26):
    split = 'train' if i < 20 else 'test'
    place = tmp_path / 'photos' / split / 'cat dog eel'.split()[i % 3]
    place.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 256, (9, 8, 3), np.uint8)
    (place / f'{i}.png').write_bytes(encode(pixels))
  return tmp_path / 'photos'


@pytest.fixture
def write(tmp_path, photos, monkeypatch, capsys):
  """write(kind) -> the data.name of shards of `photos`."""

  def write(kind):
    folder = tmp_path / kind
    if kind == 'arrayrecord':
      assert data_command.main([str(photos), f'--shards={folder}']) == 0
      used = capsys.readouterr().out.split('--config.data.name=')[1]
      return used.strip()
    folder.mkdir()
    (folder / 'classes.txt').write_text('cat\ndog\neel\n')
    train, test = rows_of(photos / 'train'), rows_of(photos / 'test')
    if kind == 'tfrecord':
      write_tfrecord(folder / 'x-train.tfrecord-00000-of-00002', train[:7])
      write_tfrecord(folder / 'x-train.tfrecord-00001-of-00002', train[7:])
      write_tfrecord(folder / 'x-test.tfrecord-00000-of-00001', test)
    else:
      datasets = pytest.importorskip('datasets')
      cache = tmp_path / 'datasets'
      monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', cache)
      ending, put = 'parquet', write_parquet
      if kind == 'webdataset':
        ending, put = 'tar', write_tar
      put(folder / f'train-00000-of-00002.{ending}', train[:7])
      put(folder / f'train-00001-of-00002.{ending}', train[7:])
      put(folder / f'test-00000-of-00001.{ending}', test)
    return f'{kind}:{folder}'

  return write


@pytest.mark.parametrize('kind', KINDS)
def test_images_labels_and_order_are_the_folders(write, photos, kind):
  name = write(kind)
  for split in ('test', 'val', 'train[:50%]+test[3:]', 'train'):
    want = sources.open_source(str(photos), split)
    got = sources.open_source(name, split)
    assert got.class_names == want.class_names == ('cat', 'dog', 'eel')
    np.testing.assert_array_equal(got.labels(), want.labels())
    assert len(got) == len(want)
    for i in range(len(want)):
      record, expected = got[i], want[i]
      assert record['image'] == expected['image']
      assert record['label'] == expected['label']
    assert bad_images.checked(got, 'error') is got
  if kind == 'tfrecord':
    folder = name.removeprefix('tfrecord:')
    assert {got[i]['name'] for i in range(20)} == {
      f'{folder}/x-train.tfrecord-0000{shard}-of-00002/{i}'
      for shard, size in enumerate((7, 13))
      for i in range(size)
    }
  if kind == 'arrayrecord':
    last_two = ['/'.join(x['name'].split('/')[-2:]) for x in (record, expected)]
    assert last_two[0] == last_two[1]


def transform(record, rng):
  del rng
  return {'first': np.frombuffer(record['image'], np.uint8)[40:60]}


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['arrayrecord', 'tfrecord', 'parquet'])
def test_resumed_in_an_epoch_equals_uninterrupted(write, photos, kind):
  source = sources.open_source(write(kind), 'train')
  folder = sources.open_source(str(photos), 'train')

  def batches(source, start, workers=0):
    made = loader.train_batches(
      source,
      transform,
      batch_size=6,
      seed=1,
      start_step=start,
      workers=workers,
    )
    found = [next(made)['first'] for _ in range(start, 8)]
    made.close()
    return found

  whole = batches(source, 0)
  np.testing.assert_array_equal(whole, batches(folder, 0))
  np.testing.assert_array_equal(whole[2:], batches(source, 2, workers=1))


def test_tfrecords_that_tensorflow_has_written():
  files = importlib.resources.files('grain._src.python.testdata')
  path = str(files / 'morris_sequence_first_5.tfrecord')
  fs = fsspec.filesystem('file')
  found = [*shards._walk(fs, path)]
  assert [data.decode() for _, _, data in found] == [
    '1',
    '1 1',
    '2 1',
    '1 2 1 1',
    '1 1 1 2 2 1',
  ]


def test_tfrecords_in_a_bucket_with_names_of_imagenet(photos):
  rows = rows_of(photos / 'train')
  fields = {'image': 'image/encoded', 'label': 'image/class/label'}
  numbered = [(data, label + 1) for data, label in rows]
  write_tfrecord('memory://bucket/in/train-00000-of-00001', numbered, **fields)
  source = sources.open_source('tfrecord:memory://bucket/in/*-of-*', 'all')
  assert source.class_names == ('1', '2', '3')
  assert sorted(x['image'] for x in map(source.__getitem__, range(20))) == (
    sorted(data for data, _ in rows)
  )
  assert source[3]['name'].startswith('memory:///bucket/in/train-')


def test_shards_without_splits_give_a_fifth_of_each_class(tmp_path, photos):
  names = {0: 'cat', 1: 'dog', 2: 'eel'}
  rows = [(data, names[label]) for data, label in rows_of(photos / 'train')]
  write_tfrecord(tmp_path / 'a.tfrecord', rows)
  flat = tmp_path / 'flat'
  shutil.copytree(photos / 'train', flat)
  for split in ('train', 'test'):
    got = sources.open_source(f'tfrecord:{tmp_path}/a.tfrecord', split)
    want = sources.open_source(str(flat), split)
    assert got.class_names == want.class_names
    np.testing.assert_array_equal(got.labels(), want.labels())
    assert [x['image'] for x in map(got.__getitem__, range(len(got)))] == [
      x['image'] for x in map(want.__getitem__, range(len(want)))
    ]


def test_shards_without_labels(tmp_path, photos):
  rows = [(data, None) for data, _ in rows_of(photos / 'train')]
  write_tfrecord(tmp_path / 'train.tfrecord', rows)
  source = sources.open_source(f'tfrecord:{tmp_path}', 'all')
  assert len(source) == 20 and source.class_names == ()
  assert not isinstance(source, sources.LabelledSource)
  assert 'label' not in source[0]


def test_a_shard_that_changed_is_read_again(tmp_path, photos):
  rows = rows_of(photos / 'train')
  write_tfrecord(tmp_path / 'train.tfrecord', rows)
  before = sources.open_source(f'tfrecord:{tmp_path}', 'all')
  again = sources.open_source(f'tfrecord:{tmp_path}', 'all')
  assert [*again.states([0, 8])] == [*before.states([0, 8])]
  write_tfrecord(tmp_path / 'train.tfrecord', rows[:9])
  after = sources.open_source(f'tfrecord:{tmp_path}', 'all')
  assert len(after) == 9
  assert not {*after.states([0, 8])} & {*before.states([0, 8])}
  assert after.identity() != before.identity()
  # The same size with other labels and a later time.
  path = tmp_path / 'train.tfrecord'
  old = path.stat()
  write_tfrecord(path, [(data, 2 - label) for data, label in rows[:9]])
  os.utime(path, ns=(0, old.st_mtime_ns + 1_000_000_000))
  assert path.stat().st_size == old.st_size
  relabelled = sources.open_source(f'tfrecord:{tmp_path}', 'all')
  assert (after.class_names, relabelled.class_names) == (('0', '1'), ('1', '2'))


@pytest.mark.parametrize(
  ('kind', 'damage'),
  [('arrayrecord', 'changed'), ('tfrecord', 'changed'), ('tfrecord', 'cut')],
)
def test_a_damaged_shard_ends_with_one_message(write, tmp_path, kind, damage):
  name = write(kind)
  path = sorted((tmp_path / kind).glob('*train*'))[0]
  data = bytearray(path.read_bytes())
  if damage == 'cut':
    path.write_bytes(data[: len(data) // 2])
  else:
    data[700] ^= 1
    path.write_bytes(data)
  with pytest.raises(ValueError, match=f'{path} is damaged.*download it again'):
    sources.open_source(name, 'train')


@pytest.mark.parametrize('kind', KINDS[:2])
def test_a_record_damaged_after_the_start_is_named(write, tmp_path, kind):
  source = sources.open_source(write(kind), 'train')
  path = sorted((tmp_path / kind).glob('*train*'))[0]
  data = bytearray(path.read_bytes())
  data[700] ^= 1
  path.write_bytes(data)
  with pytest.raises(ValueError, match=str(path)):
    bad_images.checked(source, 'error')
  assert len(bad_images.checked(source, 'skip')) == 19


def test_shards_that_cannot_be_read(write, tmp_path, monkeypatch):
  with pytest.raises(FileNotFoundError, match=r'nothing.*files \*\.tfrec'):
    sources.open_source('tfrecord:./nothing', 'train')
  write_tfrecord(tmp_path / 'train.tfrecord', [(b'x', 3)])
  (tmp_path / 'classes.txt').write_text('cat\ndog\n')
  with pytest.raises(ValueError, match='class 3.*classes.txt'):
    sources.open_source(f'tfrecord:{tmp_path}', 'all')
  (tmp_path / 'classes.txt').unlink()
  source = sources.open_source(f'tfrecord:{tmp_path}', 'all')
  with pytest.raises(ValueError, match='train.tfrecord/0'):
    bad_images.checked(source, 'error')
  write_tfrecord(tmp_path / 'more.tfrecord', [(b'x', 3)])
  with pytest.raises(ValueError, match='more.tfrecord has no split'):
    sources.open_source(f'tfrecord:{tmp_path}', 'all')
  with pytest.raises(ValueError, match="no split 'exam'"):
    sources.open_source(write('arrayrecord'), 'exam')
  monkeypatch.setitem(sys.modules, 'datasets', None)
  with pytest.raises(ImportError, match='datasets'):
    sources.open_source('parquet:./x', 'train')


def test_minus_one_is_no_class():
  labels, names = shards.numbered([20, -1, 3, None])
  assert labels.tolist() == [1, -1, 0, -1] and names == ('3', '20')


def test_writing_is_all_or_nothing(tmp_path, photos, capsys):
  target = tmp_path / 'made'
  (photos / 'test/cat/broken.png').symlink_to('missing.png')
  assert data_command.main([str(photos), f'--shards={target}']) == 2
  assert 'broken.png' in capsys.readouterr().err
  assert not target.exists() and not [*tmp_path.glob('.*')]
  target.mkdir()
  assert data_command.main([str(photos), f'--shards={target}']) == 2
  assert 'exists already' in capsys.readouterr().err


def test_images_without_a_training_split_are_refused(tmp_path, photos, capsys):
  shutil.rmtree(photos / 'train')
  assert data_command.main([str(photos), f'--shards={tmp_path}/made']) == 2
  assert 'has test but no train' in capsys.readouterr().err


def test_all_splits_are_written(tmp_path, photos):
  (photos / 'val').mkdir()
  (photos / 'train/cat').rename(photos / 'val/cat')
  shutil.copytree(photos / 'test/cat', photos / 'train/cat')
  target = tmp_path / 'made'
  assert data_command.main([str(photos), f'--shards={target}']) == 0
  for split in ('train', 'val', 'test'):
    sizes = {
      len(sources.open_source(name, split))
      for name in (str(photos), f'arrayrecord:{target}')
    }
    assert len(sizes) == 1


def test_objects_are_not_written(tmp_path, capsys):
  target = tmp_path / 'made'
  assert data_command.main(['digits_canvas', f'--shards={target}']) == 2
  assert 'has objects' in capsys.readouterr().err


def test_one_split_is_not_written_under_two_names(tmp_path, photos, capsys):
  args = [str(photos), f'--shards={tmp_path}/made', '--splits=train,val,test']
  assert data_command.main(args) == 2  # without val/, val is test
  assert 'begin with the same image' in capsys.readouterr().err
  assert not (tmp_path / 'made').exists()


def test_only_line_feeds_end_the_name_of_a_class(tmp_path):
  listed = tmp_path / 'classes.txt'
  for text in ('a\u2028b\nz\n', 'a\u2028b\r\nz\r\n'):
    listed.write_bytes(text.encode())
    found = shards.class_file(fsspec.filesystem('file'), f'{tmp_path}/x')
    assert found == ('a\u2028b', 'z')
  for text, line in (('a\n\nz\n', "''"), ('cat\ndog\ncat\n', "'cat'")):
    listed.write_text(text)
    with pytest.raises(ValueError, match=f'the line {line}, which is empty or'):
      shards.class_file(fsspec.filesystem('file'), f'{tmp_path}/x')


def test_large_splits_have_several_shards(tmp_path, photos, monkeypatch):
  monkeypatch.setattr('vit_jax.data.write_shards._SHARD_BYTES', 1000)
  target = tmp_path / 'made'
  assert data_command.main([str(photos), f'--shards={target}']) == 0
  assert len([*target.glob('train-*.array_record')]) > 2
  want = sources.open_source(str(photos), 'train')
  got = sources.open_source(f'arrayrecord:{target}', 'train')
  for i in range(20):
    assert got[i]['image'] == want[i]['image']


def test_files_are_found_in_any_case_and_folder(tmp_path, photos):
  folder = tmp_path / '[1]'
  folder.mkdir()
  for name in ('TRAIN.tfrecord', 'Test.tfrecord', '.train.tfrecord'):
    write_tfrecord(folder / name, rows_of(photos / 'test'))
  _, found = shards.find(f'tfrecord:{folder}')
  assert found == {
    'test': [str(folder / 'Test.tfrecord')],
    'train': [str(folder / 'TRAIN.tfrecord')],
  }


def test_folders_are_splits_where_names_are_not(tmp_path, photos):
  for split in ('train', 'test'):
    (tmp_path / 'd' / split).mkdir(parents=True)
    write_tfrecord(tmp_path / f'd/{split}/0.tfrecord', rows_of(photos / split))
  _, found = shards.find(f'tfrecord:{tmp_path}/d/*/*')
  assert found == {
    split: [f'{tmp_path}/d/{split}/0.tfrecord'] for split in ('test', 'train')
  }
  # The folder that holds all shards says nothing.
  assert [*shards.find(f'tfrecord:{tmp_path}/d/test')[1]] == ['train']


def test_a_label_of_several_values_is_no_class(tmp_path, photos):
  data, _ = rows_of(photos / 'train')[0]
  write_tfrecord(tmp_path / 'train.tfrecord', [(data, [0, 0, 1])])
  source = sources.open_source(f'tfrecord:{tmp_path}', 'all')
  assert len(source) == 1 and source.class_names == ()


def test_a_damaged_index_is_made_again(tmp_path, photos):
  write_tfrecord(tmp_path / 'train.tfrecord', rows_of(photos / 'train'))
  before = sources.open_source(f'tfrecord:{tmp_path}', 'all')
  (path,) = (atomic_files.cache_folder() / 'shards').glob('*.npz')
  path.write_bytes(b'')
  after = sources.open_source(f'tfrecord:{tmp_path}', 'all')
  assert after.labels().tolist() == before.labels().tolist()


@pytest.mark.parametrize('key', ['mtime', 'ETag', 'created'])
def test_the_state_of_a_shard_has_what_its_storage_tells(key):
  class Storage:
    def __init__(self, value):
      self.value = value

    def info(self, path):
      return {'size': 3, key: self.value}

  assert shards._state(Storage('a'), 'x') != shards._state(Storage('b'), 'x')
