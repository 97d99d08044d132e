"""Digits and folders as sources, and what is refused."""

import importlib.util
import logging
import os
import pathlib
import pickle
import unicodedata

import numpy as np
import pytest
import sklearn.datasets

from vit_jax.cli import predict
from vit_jax.data import sources


def _open(path, split='train', **kwargs):
  return sources.open_source(str(path), split, **kwargs)


def _write(folder, count, data):
  folder.mkdir(parents=True, exist_ok=True)
  for i in range(count):
    (folder / f'{i:02d}.png').write_bytes(data)


@pytest.fixture
def png(encode):
  return encode(np.zeros((4, 5, 3), np.uint8))


@pytest.fixture
def flat(tmp_path, png):
  """Class folders alone: 20 cats, 10 dogs, 5 emus."""
  for name, count in {'dog': 10, 'cat': 20, 'emu': 5}.items():
    _write(tmp_path / 'flat' / name, count, png)
  return tmp_path / 'flat'


def test_the_unicode_form_of_names_does_not_change_the_order(tmp_path, png):
  """Archives of a Mac decompose accents: é sorts as e and an accent."""
  for form in ('NFC', 'NFD'):
    for name in ('éclair', 'figue', 'zèbre'):
      _write(tmp_path / form / unicodedata.normalize(form, name), 5, png)
  one, other = (_open(tmp_path / form) for form in ('NFC', 'NFD'))
  assert one.class_names == other.class_names == ('figue', 'zèbre', 'éclair')
  for record in other:
    name = pathlib.Path(record['name']).parent.name
    name = unicodedata.normalize('NFC', name)
    assert one.class_names[record['label']] == name


def test_digits():
  train, test = (_open('digits', split) for split in ('train', 'test'))
  assert (len(train), len(test)) == (1437, 360)
  assert train.class_names == tuple('0123456789')
  digits = sklearn.datasets.load_digits()
  seen = set()
  for source in (train, test):
    for i in range(len(source)):
      record = source[i]
      position = int(record['name'].removeprefix('digits/'))
      seen.add(position)
      assert record['label'] == digits.target[position]
      assert record['image'].dtype == np.uint8
      np.testing.assert_array_equal(
        record['image'][:, :, 2], np.round(digits.images[position] * 255 / 16)
      )
  assert seen == set(range(1797))  # Disjoint, and nothing is lost.
  labels = [test[i]['label'] for i in range(len(test))]
  counts = np.bincount(digits.target) / 5
  assert np.abs(np.bincount(labels) - counts).max() <= 1
  other = _open('digits', 'test', split_seed=1)
  assert {x['name'] for x in other} != {x['name'] for x in test}


def test_flat_folder(flat, caplog):
  caplog.set_level(logging.INFO, logger='vit_jax')
  train, test = _open(flat), _open(flat, 'test')
  assert train.class_names == ('cat', 'dog', 'emu')
  counts = [
    np.bincount([s[i]['label'] for i in range(len(s))]).tolist()
    for s in (train, test)
  ]
  assert counts == [[16, 8, 4], [4, 2, 1]]
  assert not caplog.text  # there is nothing to say
  both = [s[i]['name'] for s in (train, test) for i in range(len(s))]
  assert len(set(both)) == 35
  for i in range(len(train)):
    folder = os.path.basename(os.path.dirname(train[i]['name']))
    assert train.class_names[train[i]['label']] == folder
  # A slice is not one class, and another seed is another split.
  part = _open(flat, 'train[:14]')
  assert len({part[i]['label'] for i in range(14)}) > 1
  other = _open(flat, 'test', split_seed=1)
  assert {other[i]['name'] for i in range(7)} != {
    test[i]['name'] for i in range(7)
  }


def test_split_folders(tmp_path, png):
  _write(tmp_path / 'train' / 'a', 3, png)
  _write(tmp_path / 'train' / 'b', 3, png)
  _write(tmp_path / 'val' / 'b', 2, png)
  for split in ('val', 'validation', 'test'):
    source = _open(tmp_path, split)
    assert [source[i]['label'] for i in range(len(source))] == [1, 1]
    assert source.class_names == ('a', 'b')
  assert len(_open(tmp_path, 'train[:50%]+val')) == 5
  # The seed holds nothing out here, but gives the order that slices are of.
  orders = []
  for seed in (0, 1):
    source = _open(tmp_path, split_seed=seed)
    orders.append([source[i]['name'] for i in range(6)])
  assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
  _write(tmp_path / 'test' / 'a', 1, png)
  assert len(_open(tmp_path, 'test')) == 1
  with pytest.raises(ValueError, match="no split 'dev'; it has train, val, te"):
    _open(tmp_path, 'dev')


def test_split_folders_in_any_case(tmp_path, png):
  for name, count in (('TRAIN', 3), ('Val', 2)):
    _write(tmp_path / name / 'a', count, png)
    _write(tmp_path / name / 'b', count, png)
  assert len(_open(tmp_path, 'train')) == 6
  source = _open(tmp_path, 'test')
  assert (len(source), source.class_names) == (4, ('a', 'b'))


def test_class_named_train_beside_other_classes(tmp_path, png):
  for name in ('Bus', 'Train', 'Tram'):
    _write(tmp_path / name, 5, png)
  source = _open(tmp_path, 'all')
  assert (len(source), source.class_names) == (15, ('Bus', 'Train', 'Tram'))


def test_class_folders_beside_a_list_of_classes(tmp_path, png):
  """Without masks/, classes.txt does not make a folder of masks."""
  _write(tmp_path / 'a', 5, png)
  _write(tmp_path / 'b', 5, png)
  (tmp_path / 'classes.txt').write_text('a\nb\n')
  assert _open(tmp_path, 'all').class_names == ('a', 'b')


def test_class_that_train_lacks(tmp_path, png):
  _write(tmp_path / 'train' / 'a', 1, png)
  _write(tmp_path / 'test' / 'zebra', 1, png)
  with pytest.raises(ValueError, match="class 'zebra' of .*test is not among"):
    _open(tmp_path)


def test_labels(flat):
  for source in (
    _open('digits', 'train[10%:]+test'),
    _open(flat),
    sources.subset(_open(flat), [5, 0, 5]),
  ):
    every = [source[i]['label'] for i in range(len(source))]
    assert source.labels().dtype == np.int32
    assert source.labels().tolist() == every
  # Files are not even opened.
  source = _open(flat)
  os.remove(source[0]['name'])
  assert len(source.labels()) == 28


def test_sources_are_picklable(flat):
  for source in (_open(flat), _open('digits')):
    copy = pickle.loads(pickle.dumps(source))
    assert len(copy) == len(source)
    assert copy[3]['name'] == source[3]['name']


def test_images_are_told_by_extension_or_content(
  flat, png, encode, photo, caplog
):
  (flat / 'cat/00.png').rename(flat / 'cat/CAMERA.PNG')
  # A JPEG of several pictures.
  (flat / 'dog/00.png').rename(flat / 'dog/STEREO.MPO')
  jpeg = encode(photo[:40, :60], 'JPEG')
  for name in ('x.jpg_large', 'without', 'x.2019'):
    (flat / 'cat' / name).write_bytes(jpeg)
  (flat / 'cat/unreadable.jpg').write_bytes(b'x')
  train = _open(flat)
  assert len(train) + len(_open(flat, 'test')) == 39
  assert not caplog.text
  # Of other files some begin as images.
  raw = encode(photo[:40, :60], 'TIFF')
  others = {
    'x.txt': b'x',
    'x.bak': jpeg,
    'x.pdf': b'x',
    'x.h5': b'\x89HDF\r\n\x1a\n',
  }
  others |= {'clip.MPG': b'\0\0\1\xb3', 'x.nef': raw, 'x.jpg~': jpeg}
  others |= {'phone.HEIC': b'\0\0\0\x1cftypheic', 'empty': b''}
  for name, content in others.items():
    (flat / 'cat' / name).write_bytes(content)
  os.mkfifo(flat / 'dog/pipe')
  (flat / 'cat/._x.png').write_bytes(png)
  (flat / 'dog/more').mkdir()
  for hidden in ('.git', '__MACOSX'):
    (flat / hidden).mkdir()
    (flat / hidden / 'x').write_bytes(png)
  for _ in range(2):
    assert len(_open(flat)) == len(train)
  (said,) = caplog.messages
  assert 'files that are not images are left out (2 without extension' in said
  for extension in ('.txt', '.bak', '.pdf', '.h5', '.mpg', '.nef', '.jpg~'):
    assert f'1 {extension}' in said
  assert importlib.util.find_spec('pillow_heif') or 'HEIC images need' in said


def test_images_lie_at_any_depth(flat, png):
  """Their class is the first folder, and `predict` sees the same ones."""
  _write(flat / 'cat/session2/a', 4, png)
  (flat / 'cat/session2/loop').symlink_to(flat / 'cat')
  source = _open(flat, 'all')
  names = [source[i]['name'] for i in range(len(source))]
  assert len(names) == 39
  assert sorted(names) == predict.find_files([str(flat)])
  assert np.bincount(source.labels()).tolist() == [24, 10, 5]


def test_names_of_splits(tmp_path, png):
  for name, count in (('training', 3), ('testing', 2)):
    _write(tmp_path / name / 'a', count, png)
  sizes = [len(_open(tmp_path, x)) for x in ('train', 'val', 'test')]
  assert sizes == [3, 2, 2]
  # Alone it may be a class.
  (tmp_path / 'testing').rename(tmp_path / 'match')
  assert _open(tmp_path).class_names == ('match', 'training')


def test_a_test_split_without_classes_is_left_out(tmp_path, png, caplog):
  for name, count in (('train', 3), ('val', 2)):
    _write(tmp_path / name / 'a', count, png)
  _write(tmp_path / 'test', 4, png)
  assert [len(_open(tmp_path, x)) for x in ('train', 'test')] == [3, 2]
  # The second opening does not repeat the warning.
  assert caplog.text.count('test is left out: it has no class folders') == 1


def test_what_lies_beside_is_said(tmp_path, png, caplog):
  """Images beside classes, and classes beside one that is called train."""
  _write(tmp_path / 'mixed', 3, png)
  _write(tmp_path / 'mixed/thumbs', 5, png)
  assert len(_open(tmp_path / 'mixed', 'all')) == 5
  assert '3 images beside the class folders' in caplog.text
  for name in ('bus', 'car', 'train'):
    _write(tmp_path / 'vehicles' / name, 2, png)
  _open(tmp_path / 'vehicles')
  assert 'other folders are left out, such as bus, car' in caplog.text
  for i in range(6):
    (tmp_path / 'vehicles' / f'v{i}').mkdir()
  _open(tmp_path / 'vehicles')
  assert caplog.messages[-1].endswith(' left out, such as bus, car, v0, v1, v2')


def test_empty_folders(tmp_path, png):
  with pytest.raises(FileNotFoundError, match='no folder .*nowhere; give a'):
    _open(tmp_path / 'nowhere')
  with pytest.raises(ValueError, match='gs://my/x.csv is a bucket or URL, but'):
    _open('gs://my/x.csv')
  with pytest.raises(ValueError, match='and no images; the layout must be'):
    _open(tmp_path)
  _write(tmp_path / 'val' / 'a', 2, png)
  with pytest.raises(ValueError, match='has val but no train: rename'):
    _open(tmp_path)
  _write(tmp_path / 'a', 2, png)
  # A class may be called so.
  (tmp_path / 'val' / 'a').rename(tmp_path / 'x')
  (tmp_path / 'val').rmdir()
  (tmp_path / 'x').rename(tmp_path / 'val')
  assert _open(tmp_path).class_names == ('a', 'val')
  (tmp_path / 'b').mkdir()
  (tmp_path / 'b' / 'readme.md').write_text('x')
  with pytest.raises(
    ValueError, match=r'b has no images \(1 .md\); add images'
  ):
    _open(tmp_path)
  (tmp_path / 'b/readme.md').rename(tmp_path / 'b/0.txt')
  with pytest.raises(ValueError, match="YOLO's labels, export the dataset in"):
    _open(tmp_path)


@pytest.mark.parametrize('layout', ['alone', 'splits'])
def test_images_without_classes_have_no_labels(layout, tmp_path, png):
  if layout == 'alone':
    _write(tmp_path, 10, png)
  else:
    _write(tmp_path / 'train', 8, png)
    _write(tmp_path / 'test', 2, png)
  train, test = _open(tmp_path, 'train'), _open(tmp_path, 'test')
  assert (len(train), len(test)) == (8, 2)
  names = {s[i]['name'] for s in (train, test) for i in range(len(s))}
  assert len(names) == 10
  for source in (train, sources.subset(train, [3])):
    assert source[0].keys() == {'image', 'name'}
    assert source.class_names == ()
    assert not isinstance(source, sources.LabelledSource)
    with pytest.raises(ValueError, match='photos has images without classes'):
      sources.labelled(source, 'photos')
  assert not {*train.states(range(8))} & {*test.states(range(2))}


def test_the_states_of_a_part_change_with_the_files(flat):
  def states(*indices):
    return [*sources.subset(_open(flat), indices).states([0, 1])]

  before = states(1, 0)
  assert before == states(1, 0) == states(0, 1)[::-1]
  path = pathlib.Path(_open(flat)[0]['name'])
  os.utime(path, (1, 1))
  touched = states(1, 0)
  assert before != touched
  # As where a copy keeps the times.
  path.write_bytes(path.read_bytes() + b' ')
  os.utime(path, (1, 1))
  assert touched != states(1, 0)
  assert sources.subset(_open('digits'), [0]).states([0]) is None


def test_classes_with_too_few_images_are_said(tmp_path, png, caplog):
  for name, train, test in (('cat', 4, 2), ('dog', 1, 1), ('emu', 3, 0)):
    _write(tmp_path / 'train' / name, train, png)
    if test:
      _write(tmp_path / 'test' / name, test, png)
  _open(tmp_path)
  assert (
    '1 of 3 classes have fewer than 2 images in train, such as dog\n'
    in caplog.text
  )
  assert (
    '1 of 3 classes have fewer than 1 images in test, such as emu\n'
    in caplog.text
  )
  caplog.clear()
  _open(tmp_path, 'test')
  assert not caplog.text
  _write(tmp_path / 'train' / 'two', 2, png)
  for i in range(4):
    _write(tmp_path / 'train' / f'x{i}', 1, png)
  _open(tmp_path)
  assert ' in train, such as dog, x0, x1, x2, x3\n' in caplog.text
