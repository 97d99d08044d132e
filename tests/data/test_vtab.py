"""VTAB's tasks on files with the true sizes and fields of TFDS' datasets.

The builders of TFDS give the fields, its own code cuts the slices and writes
the records; only their bytes come from nowhere, record by record.
"""

import logging
import pickle
import types

import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python import array_record_data_source, array_record_module
from tensorflow_datasets.core import example_serializer

from tests.data.tfds_files import write_info
from vit_jax.data import benchmarks, decode, sources, vtab

_RETINOPATHY = 'diabetic_retinopathy_detection/btgraham-300'
# Examples of the splits of TFDS, from the tests of
# google-research/task_adaptation, as is the table below.
_SIZES = {
  'caltech101': {'train': 3060, 'test': 6084},
  'cifar100': {'train': 50000, 'test': 10000},
  'dtd': {'train': 1880, 'validation': 1880, 'test': 1880},
  'oxford_flowers102': {'train': 1020, 'validation': 1020, 'test': 6149},
  'oxford_iiit_pet': {'train': 3680, 'test': 3669},
  'sun397/tfds': {'train': 76128, 'validation': 10875, 'test': 21750},
  'svhn_cropped': {'train': 73257, 'test': 26032, 'extra': 531131},
  'patch_camelyon': {'train': 262144, 'validation': 32768, 'test': 32768},
  'eurosat/rgb': {'train': 27000},
  'resisc45': {'train': 31500},
  _RETINOPATHY: {
    'sample': 10,
    'train': 35126,
    'validation': 10906,
    'test': 42670,
  },
  'clevr': {'train': 70000, 'validation': 15000, 'test': 15000},
  'dmlab': {'train': 65550, 'validation': 22628, 'test': 22735},
  'dsprites': {'train': 737280},
  'kitti': {'train': 6347, 'validation': 423, 'test': 711},
  'smallnorb': {'train': 24300, 'test': 24300},
}
# By task: dataset; where val200 begins; where test begins; its examples.
_PROTOCOL = {
  'caltech101': ('caltech101', 'train', 2754, 'test', 0, 6084),
  'cifar100': ('cifar100', 'train', 45000, 'test', 0, 10000),
  'dtd': ('dtd', 'validation', 0, 'test', 0, 1880),
  'oxford_flowers102': ('oxford_flowers102', 'validation', 0, 'test', 0, 6149),
  'oxford_iiit_pet': ('oxford_iiit_pet', 'train', 2944, 'test', 0, 3669),
  'sun397': ('sun397/tfds', 'validation', 0, 'test', 0, 21750),
  'svhn': ('svhn_cropped', 'train', 65931, 'test', 0, 26032),
  'patch_camelyon': ('patch_camelyon', 'validation', 0, 'test', 0, 32768),
  'eurosat': ('eurosat/rgb', 'train', 16200, 'train', 21600, 5400),
  'resisc45': ('resisc45', 'train', 18900, 'train', 25200, 6300),
  'diabetic_retinopathy': (_RETINOPATHY, 'validation', 0, 'test', 0, 42670),
  'clevr_count': ('clevr', 'train', 63000, 'validation', 0, 15000),
  'clevr_distance': ('clevr', 'train', 63000, 'validation', 0, 15000),
  'dmlab': ('dmlab', 'validation', 0, 'test', 0, 22735),
  'dsprites_location': ('dsprites', 'train', 589824, 'train', 663552, 73728),
  'dsprites_orientation': ('dsprites', 'train', 589824, 'train', 663552, 73728),
  'kitti': ('kitti', 'validation', 0, 'test', 0, 711),
  'smallnorb_azimuth': ('smallnorb', 'test', 0, 'test', 12150, 12150),
  'smallnorb_elevation': ('smallnorb', 'test', 0, 'test', 12150, 12150),
}
_OBJECTS = {
  'clevr': lambda n: {
    # Their number, and the depth of the nearest one, follow from the row.
    'size': [0] * (3 + n % 8),
    'pixel_coords': [(50, 50, 20)] * (2 + n % 8) + [(1, 2, 7.75 + n % 6 / 2)],
  },
  'kitti': lambda n: {
    'type': [3, n % 4],
    'location': [(1, 2, 3), (0, 0, n % 90)],
  },
}


def _image(n):
  """An image of n in binary, in zeros and ones."""
  bits = np.unpackbits(np.array([n], '>u4').view(np.uint8))
  return np.tile(bits, 2).reshape(8, 8)


def _number(pixels):
  return int(np.packbits(pixels.ravel()[:32] > 0).view('>u4')[0])


def _default(feature, n):
  """A value of a field that the tests do not look at."""
  if isinstance(feature, tfds.features.Text):
    return b'text'
  if isinstance(feature, tfds.features.ClassLabel):
    return n % feature.num_classes
  if isinstance(feature, tfds.features.Sequence):
    return {
      key: [_default(inner, n)] * 2 for key, inner in feature.feature.items()
    }
  return np.zeros(feature.shape, feature.np_dtype)


def _example(features, name, split, n, encode, objects=None):
  """A record as TFDS writes it."""
  example = {}
  for key, feature in features.items():
    if isinstance(feature, tfds.features.Image):
      example[key] = encode(_image(n))
    elif key.endswith(('file_name', 'filename')):
      example[key] = f'{split}-{n}.png'.encode()
    elif key == 'objects':
      chosen = objects or _OBJECTS[name](n)
      count = len(next(iter(chosen.values())))
      example[key] = {
        k: chosen.get(k, [_default(inner, n)] * count)
        for k, inner in feature.feature.items()
      }
    else:
      # Unlike y, x is the row's number.
      example[key] = _default(feature, n + (key == 'label_y_position'))
  serializer = example_serializer.ExampleSerializer(
    features.get_serialized_info()
  )
  return serializer.get_tf_example(example).SerializeToString()


def _prepare(data_dir, name, sizes, features=None):
  """Writes the description of a dataset, and returns its folder and fields."""
  builder = tfds.builder(name, data_dir=data_dir)
  folder = data_dir / name / str(builder.version)
  folder.mkdir(parents=True, exist_ok=True)
  features = features or builder.info.features
  features.save_config(str(folder))
  shards = {split: [size] for split, size in sizes.items()}
  write_info(folder, name, shards, builder.info.supervised_keys)
  return folder, features


@pytest.fixture(scope='module')
def encode_once(encode):
  """PNGs are written again and again."""
  written = {}

  def encoded(pixels):
    key = pixels.tobytes()
    if key not in written:
      written[key] = encode(pixels)
    return written[key]

  return encoded


@pytest.fixture
def full_size(tmp_path, encode_once, monkeypatch):
  """prepare(name) gives a folder of a dataset in its true size."""
  prepared = {}

  class Records(array_record_data_source.ArrayRecordDataSource):
    def __getitem__(self, index):
      shard, row = self._reader_idx_and_position(index)
      # As in 'clevr-train.array_record-00000-of-00001'.
      path = self._read_instructions[shard].filename
      base, split = path.split('/')[-1].split('.')[0].rsplit('-', 1)
      name, features = prepared[base]
      return _example(features, name, split, row, encode_once)

    def __getitems__(self, indices):
      return [self[i] for i in indices]

  monkeypatch.setattr(
    array_record_data_source, 'ArrayRecordDataSource', Records
  )

  def prepare(name, sizes=None, features=None):
    _, features = _prepare(tmp_path, name, sizes or _SIZES[name], features)
    prepared[name.split('/')[0]] = name, features
    return str(tmp_path)

  return prepare


def _open(task, split, data_dir):
  return sources.open_source(f'vtab/{task}', split, data_dir=data_dir)


def _row(record):
  """The number of a record within its split of TFDS."""
  return _number(decode.decode(record['image'], 'x')[:, :, 0])


@pytest.mark.fast('caltech101', 'cifar100', 'dtd', 'eurosat', 'dmlab', 'kitti')
@pytest.mark.parametrize('task', _PROTOCOL)
def test_splits_are_those_of_the_benchmark(task, full_size, caplog):
  name, val_split, val, test_split, test, test_size = _PROTOCOL[task]
  data_dir = full_size(name)
  train800, val200, both, whole_test = (
    _open(task, split, data_dir) for split in vtab.SPLITS
  )
  sizes = [len(s) for s in (both, whole_test, train800, val200)]
  assert sizes == [1000, test_size, 800, 200]
  assert benchmarks.BENCHMARKS[f'vtab/{task}'].examples == tuple(sizes)
  for source, position, split, row in (
    (train800, 0, 'train', 0),
    (train800, 799, 'train', 799),
    (val200, 0, val_split, val),
    (val200, 199, val_split, val + 199),
    (both, 0, 'train', 0),
    (both, 799, 'train', 799),
    (both, 800, val_split, val),
    (both, 999, val_split, val + 199),
    (whole_test, 0, test_split, test),
    (whole_test, test_size - 1, test_split, test + test_size - 1),
  ):
    assert _row(source[position]) == row
    records = source._records.data_source
    shard, _ = records._reader_idx_and_position(position)
    assert f'-{split}.' in records._read_instructions[shard].filename
  assert test + test_size == _SIZES[name][test_split]  # Up to its end.
  assert 'are not comparable' not in caplog.text


@pytest.mark.parametrize(
  'task',
  ['caltech101', 'patch_camelyon', 'clevr_distance', 'smallnorb_azimuth'],
)
def test_classes(task, full_size):
  source = _open(task, 'val200', full_size(_PROTOCOL[task][0]))
  labels = source.labels()
  assert labels.dtype == np.int32 and labels.shape == (200,)
  assert labels.min() >= 0
  assert labels.max() < len(source.class_names)
  num_classes = benchmarks.BENCHMARKS[f'vtab/{task}'].num_classes
  assert len(source.class_names) == num_classes
  assert len(set(source.class_names)) == num_classes
  for i in (0, 1, 57, 199):
    record = source[i]
    assert type(record['label']) is int and record['label'] == labels[i]
  if num_classes < 100:
    assert set(labels) == set(range(num_classes))


def test_names_are_those_of_tfds_where_it_has_some(full_size):
  source = _open('dtd', 'test', full_size('dtd'))
  assert source.class_names[:2] == ('banded', 'blotchy')
  assert source[3]['name'] == 'vtab/dtd/test/3/test-3.png'
  source = _open('svhn', 'val200', full_size('svhn_cropped'))
  assert source[3]['name'] == 'vtab/svhn/val200/3'


@pytest.mark.parametrize(
  ('task', 'classes'),
  [
    # Two positions, and two or three turns, share a class.
    ('dsprites_location', {0: 0, 1: 0, 2: 1, 15: 7, 16: 8, 30: 15, 31: 15}),
    (
      'dsprites_orientation',
      # Turns over 2.5, rounded down.
      {0: 0, 2: 0, 3: 1, 4: 1, 5: 2, 7: 2, 8: 3, 19: 7, 20: 8, 37: 14, 39: 15},
    ),
  ],
)
def test_dsprites(task, classes, full_size):
  source = _open(task, 'train800', full_size('dsprites'))
  for value, label in classes.items():
    assert source[value]['label'] == label
  record = source[37]
  assert record['image'].dtype == np.uint8
  np.testing.assert_array_equal(
    record['image'], np.repeat(_image(37)[:, :, None], 3, 2) * 255
  )


def _write(data_dir, name, split_objects, encode):
  """A small dataset on disk, by split the objects of each record."""
  sizes = {split: len(every) for split, every in split_objects.items()}
  folder, features = _prepare(data_dir, name, sizes)
  for split, every in split_objects.items():
    path = folder / f'{name}-{split}.array_record-00000-of-00001'
    writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
    for n, objects in enumerate(every):
      writer.write(_example(features, name, split, n, encode, objects))
    writer.close()


def _kitti_objects(*kinds_and_metres):
  return {
    'type': [kind for kind, _ in kinds_and_metres],
    'location': [(-5, 1, metres) for _, metres in kinds_and_metres],
  }


def test_kitti_from_its_files(tmp_path, encode_once, caplog):
  test = [
    _kitti_objects((0, 30.0), (3, 2.0)),
    _kitti_objects(),
    _kitti_objects((2, 8.0), (0, 30.0)),
    _kitti_objects((4, 1.0), (1, 12.0), (0, 70.0)),
    # An edge belongs to the nearer class.
    _kitti_objects((1, 8.01)),
  ]
  _write(tmp_path, 'kitti', {'validation': test[:1], 'test': test}, encode_once)
  with caplog.at_level(logging.WARNING, 'vit_jax'):
    source = _open('kitti', 'test', str(tmp_path))
  assert 'vtab/kitti has 5 images, but the benchmark has 711' in caplog.text
  assert source.labels().tolist() == [2, 3, 0, 1, 1]
  copy = pickle.loads(pickle.dumps(source))  # As for the loader's workers.
  for opened in (source, copy):
    assert [opened[i]['label'] for i in range(5)] == [2, 3, 0, 1, 1]
    assert isinstance(opened[2]['image'], bytes) and _row(opened[2]) == 2
    assert opened[2]['name'] == 'vtab/kitti/test/2/test-2.png'


@pytest.mark.parametrize(
  ('nearest', 'label'),
  [
    (8.0, 0),  # An edge belongs to the nearer class.
    (8.001, 1),
    (8.75, 2),
    (10.001, 5),
  ],
)
def test_clevr_distance_by_hand(nearest, label):
  task = vtab.TASKS['clevr_distance'].label
  # Only the third number is the depth, and only the nearest object counts.
  coords = np.array([[0, 1, 120], [300, 9.7, nearest]], np.float32)
  for order in (coords, coords[::-1]):
    assert task.classify({'objects': {'pixel_coords': order}}) == label


def test_clevr_from_its_files(tmp_path, encode_once):
  validation = [
    {'size': [0, 1, 0], 'pixel_coords': [(1, 2, 9), (3, 4, 8.25), (5, 6, 9)]},
    {'size': [1] * 10, 'pixel_coords': [(1, 2, 11)] * 10},
  ]
  splits = {'train': validation, 'validation': validation}
  _write(tmp_path, 'clevr', splits, encode_once)
  count, distance = (
    _open(f'clevr_{kind}', 'test', str(tmp_path))
    for kind in ('count', 'distance')
  )
  assert count.labels().tolist() == [0, 7]
  assert distance.labels().tolist() == [1, 5]
  assert [distance[i]['label'] for i in range(2)] == [1, 5]


def test_other_splits_are_refused():
  with pytest.raises(ValueError) as error:
    _open('dtd', 'train800[:10]', None)
  assert str(error.value) == (
    "split 'train800[:10]' of vtab/dtd is unknown; VTAB has the splits "
    'train800, val200, train800val200, test'
  )


def test_unknown_tasks_are_refused(tmp_path, monkeypatch):
  with pytest.raises(ValueError) as error:
    _open('caltech', 'test', None)
  message = str(error.value)
  assert "unknown task 'vtab/caltech'. Did you mean caltech101?" in message
  assert 'For a folder, give ./vtab/caltech' in message
  # Not even where there is a folder of that name.
  (tmp_path / 'vtab' / 'mine' / 'a').mkdir(parents=True)
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match="unknown task 'vtab/mine'"):
    _open('mine', 'test', None)
  with pytest.raises(ValueError, match='class folder .* has no images'):
    sources.open_source('./vtab/mine', 'test')


def test_the_start_of_val200_is_rounded_down():
  sizes = {'train': types.SimpleNamespace(num_examples=3059)}
  sizes['test'] = types.SimpleNamespace(num_examples=6085)
  split = vtab.tfds_split(vtab.TASKS['caltech101'], 'train800val200', sizes)
  assert split == 'train[:800]+train[2753:2953]'
