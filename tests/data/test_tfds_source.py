"""TFDS without TensorFlow, on a small dataset in its format."""

import os
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tensorflow_datasets.proto import tf_example_pb2

from tests.data.tfds_files import write_info
from vit_jax.data import decode, sources, tfds_source

_FEATURES = {
  'image': tfds.features.Image(shape=(None, None, 3)),
  'mask': tfds.features.Image(shape=(None, None, 1)),
  'label': tfds.features.ClassLabel(names=['cat', 'dog']),
}


def _example(i, encode):
  example = tf_example_pb2.Example()
  feature = example.features.feature
  image = np.full((4, 6, 3), i, np.uint8)
  feature['image'].bytes_list.value.append(encode(image))
  feature['mask'].bytes_list.value.append(b'nobody decodes this')
  feature['label'].int64_list.value.append(i % 2)
  for key in _FEATURES:
    if key.endswith(('file_name', 'filename')):
      name = f'ILSVRC2012_val_{i:08d}.JPEG'
      feature[key].bytes_list.value.append(name.encode())
  return example.SerializeToString()


def _prepare(
  data_dir,
  encode,
  name='pets',
  file_format='array_record',
  keys=('image', 'label'),
):
  """What `tfds build` leaves behind: 5 + 2 train examples and 3 for test."""
  folder = data_dir / name / '1.0.0'
  folder.mkdir(parents=True)
  first = 0
  splits = {'train': [5, 2], 'test': [3]}
  for split, shards in splits.items():
    for k, length in enumerate(shards):
      path = (
        folder / f'{name}-{split}.{file_format}-{k:05d}-of-{len(shards):05d}'
      )
      writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
      for i in range(first, first + length):
        writer.write(_example(i, encode))
      writer.close()
      first += length
  write_info(folder, name, splits, keys, file_format)
  tfds.features.FeaturesDict(_FEATURES).save_config(str(folder))
  return data_dir


@pytest.fixture
def data_dir(tmp_path, encode):
  return _prepare(tmp_path / 'tfds', encode)


def _open(name, split, data_dir=None):
  return sources.open_source(name, split, data_dir=data_dir and str(data_dir))


def test_records(data_dir):
  source = _open('pets', 'train', data_dir)
  assert len(source) == 7
  assert source.class_names == ('cat', 'dog')
  for i in range(7):
    record = source[i]
    assert isinstance(record['image'], bytes)
    assert record['label'] == i % 2
    assert record['name'] == f'pets/train/{i}'
    pixels = decode.decode(record['image'], record['name'])
    assert pixels.shape == (4, 6, 3) and (pixels == i).all()


@pytest.mark.parametrize(
  'name, split, count',
  [
    ('pets:1.0.0', 'train[:50%]', 4),
    ('pets', 'train[2:]+test', 8),
    ('pets', 'all', 10),
  ],
)
def test_names_and_splits_of_tfds(data_dir, name, split, count):
  assert len(_open(name, split, data_dir)) == count


def test_labels(data_dir, monkeypatch):
  for together in (512, 3):  # In one read, or in several.
    monkeypatch.setattr('vit_jax.data.shards._READ_TOGETHER', together)
    labels = _open('pets', 'train[1:]+test', data_dir).labels()
    assert labels.dtype == np.int32
    assert labels.tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1]


def test_a_split_without_labels_is_refused(tmp_path, encode, monkeypatch):
  """Whose records have -1, as those of TFDS's ImageNet test have."""
  write = _example

  def without(i, encode):
    example = tf_example_pb2.Example.FromString(write(i, encode))
    example.features.feature['label'].int64_list.value[0] = -1
    return example.SerializeToString()

  monkeypatch.setitem(globals(), '_example', without)
  source = _open('pets', 'train', _prepare(tmp_path, encode))
  for read in (source.labels, lambda: source[0]):
    with pytest.raises(ValueError, match='A record has label -1, which is not'):
      read()


def test_states_are_of_the_split_and_the_folder(data_dir, tmp_path):
  def states(split, data_dir=data_dir):
    return [*_open('pets', split, data_dir).states([0, 1])]

  one, other, again = map(states, ('train', 'test', 'train'))
  assert len({*one}) == 2
  assert one == again != other
  # As of a set that was prepared anew, of other images.
  info = data_dir / 'pets/1.0.0/dataset_info.json'
  text = info.read_text()
  info.write_text(text.replace('"1000"', '"1001"'))
  assert states('train') != one
  info.write_text(text)
  (data_dir / 'pets').rename(tmp_path / 'pets')
  assert states('train', tmp_path) != one


def test_neighbouring_values_share_a_class():
  label = tfds_source.class_field('x', 5, ('0', '1'))
  assert label.fields == ('x',)
  found = [label.classify({'x': np.int64(i)}) for i in range(5)]
  assert found == [0, 0, 0, 1, 1]
  for wrong in (-1, 5):
    with pytest.raises(ValueError, match=f'has x {wrong}, which is not'):
      label.classify({'x': wrong})


IMAGE, LABEL = tfds.features.Image(), tfds.features.ClassLabel(num_classes=2)
TEXT = tfds.features.Text()


@pytest.mark.parametrize(
  ('keys', 'features', 'want'),
  [
    (('b', 'a'), {'a': LABEL, 'b': IMAGE}, ('b', 'a')),
    # Where a set does not say it, but there is one of each.
    (None, {'a': LABEL, 'b': IMAGE, 'c': TEXT}, ('b', 'a')),
    (('b', 'c', 'a'), {'a': LABEL, 'b': IMAGE, 'c': TEXT}, ('b', 'a')),
    (None, {'a': LABEL, 'b': IMAGE, 'c': LABEL}, None),
  ],
)
def test_image_and_class_are_found_where_that_is_clear(keys, features, want):
  info = types.SimpleNamespace(features=features, supervised_keys=keys)
  if want:
    assert tfds_source._keys('x', info) == want
    return
  said = f'its features are {", ".join(sorted(features))}\\. To detect objects'
  with pytest.raises(ValueError, match=said):
    tfds_source._keys('x', info)


def test_images_may_have_another_name(tmp_path, encode):
  data_dir = _prepare(tmp_path, encode, keys=('mask', 'label'))
  record = _open('pets', 'test', data_dir)[0]
  assert record['image'] == b'nobody decodes this' and record['label'] == 1


def test_labels_need_no_image(tmp_path):
  data_dir = _prepare(tmp_path, lambda _: b'no image')
  source = _open('pets', 'test', data_dir)
  assert source.labels().tolist() == [1, 0, 1]
  assert source[0]['image'] == b'no image'


def test_file_names_end_the_names_of_records(tmp_path, encode, monkeypatch):
  """The labels of ReaL are by the number in there."""
  monkeypatch.setitem(_FEATURES, 'file_name', tfds.features.Text())
  source = _open('pets', 'test', _prepare(tmp_path, encode))
  name = 'ILSVRC2012_val_00000008.JPEG'
  assert source[1]['name'] == f'pets/test/1/{name}'
  assert source[1]['label'] == 0


def test_picklable(data_dir):
  source = _open('pets', 'test', data_dir)
  assert pickle.loads(pickle.dumps(source))[2] == source[2]
  source = _open('pets', 'test', data_dir)  # Also before its first use.
  assert pickle.loads(pickle.dumps(source))[0]['label'] == source[0]['label']


@pytest.mark.slow
def test_tensorflow_is_never_imported(data_dir, tmp_path):
  (tmp_path / 'tensorflow.py').write_text('raise AssertionError("imported")')
  code = (
    'from vit_jax.data import sources\n'
    f's = sources.open_source("pets", "train", data_dir={str(data_dir)!r})\n'
    'assert len(s) == 7 and s[6]["label"] == 0\n'
  )
  subprocess.run(
    [sys.executable, '-W', 'error', '-c', code],
    env={**os.environ, 'PYTHONPATH': ':'.join([str(tmp_path), *sys.path])},
    check=True,
  )


@pytest.mark.parametrize(
  'split',
  ['val', 'train[3:3]', 'train[3:2]', 'train[3:2]+test', 'all[:50%]'],
)
def test_wrong_splits(data_dir, split):
  with pytest.raises(
    ValueError,
    match='pets cannot be read; the dataset has the splits train: 7, test: 3',
  ):
    _open('pets', split, data_dir)


def test_not_prepared(tmp_path):
  with pytest.raises(FileNotFoundError) as error:
    _open('imagenet2012', 'train', tmp_path)
  message = str(error.value)
  assert f'imagenet2012 is not prepared in {tmp_path}' in message
  command = 'tfds build imagenet2012 --file_format=array_record'
  assert f'{command} --data_dir={tmp_path}\n' in message


def test_names_with_a_slash(tmp_path):
  with pytest.raises(FileNotFoundError, match='tfds build imagenet_v2/topima'):
    _open('imagenet_v2/topimages', 'test', tmp_path)
  with pytest.raises(FileNotFoundError, match='no folder some/where'):
    _open('some/where', 'test', tmp_path)


def test_unknown_names(tmp_path):
  with pytest.raises(ValueError) as error:
    _open('cifar', 'train', tmp_path)
  message = str(error.value)
  assert "unknown dataset 'cifar'; did you mean" in message
  assert 'cifar10' in message.split('?')[0]
  assert 'given as a path with a slash, such as ./cifar' in message
  assert "(.csv), 'hf://datasets/OWNER/NAME', " in message


def test_datasets_that_tfds_does_not_know(tmp_path, encode):
  """They have no builder, but their files may well be there."""
  with pytest.raises(ValueError, match="in TFDS's format in "):
    _open('imagenet22k', 'train', tmp_path)
  data_dir = _prepare(tmp_path, encode, name='imagenet22k')
  assert len(_open('imagenet22k', 'train', data_dir)) == 7


def test_not_a_classification_dataset(tmp_path, encode, monkeypatch):
  monkeypatch.setitem(_FEATURES, 'label', tfds.features.Scalar(np.int64))
  data_dir = _prepare(tmp_path, encode)
  with pytest.raises(
    ValueError, match='pets does not pair one image with one class'
  ):
    _open('pets', 'train', data_dir)
