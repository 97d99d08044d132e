"""A CSV file of images and their classes as a data set."""

import pathlib

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import bad_images, sources


@pytest.fixture
def table(tmp_path):
  """Returns a function that writes a table of 30 images of 3 classes."""
  (tmp_path / 'images').mkdir()
  rng = np.random.default_rng(0)
  for i in range(30):
    pixels = rng.integers(0, 256, (4, 5, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / f'images/{i}.png')

  def write(head='file,label', line='images/{i}.png,{label}', **kwargs):
    rows = [
      line.format(i=i, label='cab'[i % 3], split='train' if i < 20 else 'val')
      for i in range(30)
    ]
    text = '\n'.join([head, *rows])
    (tmp_path / 'x.csv').write_text(text, **kwargs)
    return str(tmp_path / 'x.csv')

  return write


@pytest.mark.parametrize('encoding', ['utf-8', 'utf-8-sig'])
def test_images_and_classes_are_those_of_the_table(table, encoding):
  name = table(encoding=encoding)
  splits = [sources.open_source(name, s) for s in ('train', 'test')]
  assert [len(s) for s in splits] == [24, 6]
  seen = set()
  for source in splits:
    assert source.class_names == ('a', 'b', 'c')
    assert (np.bincount(source.labels()) == len(source) // 3).all()
    for i in range(len(source)):
      record = source[i]
      number = int(record['name'].split('/')[-1][:-4])
      assert source.class_names[record['label']] == 'cab'[number % 3]
      assert record['image'] == pathlib.Path(record['name']).read_bytes()
      seen.add(number)
  assert seen == set(range(30))
  assert (
    sources.open_source(name, 'train').fingerprint() == splits[0].fingerprint()
  )


def test_splits_are_those_of_the_table(table):
  name = table('label,split,file', '{label},{split},images/{i}.png')
  assert len(sources.open_source(name, 'train')) == 20
  assert len(sources.open_source(name, 'val')) == 10
  with pytest.raises(ValueError, match='table .*x.csv'):
    sources.open_source(name, 'tests')


@pytest.mark.parametrize(
  ('head', 'line', 'message'),
  [
    ('path,label', 'x,{label}', "no column 'file', only 'path', 'label'"),
    ('file', 'x', "no column 'label', only 'file'"),
    ('file,label', 'x,', "image 1: file is 'x' and label '': both"),
    ('file,label', 'x', "image 1: file is 'x' and label None: both"),
    ('file,label,split', 'x,a,dev', "image 1: split is 'dev': use train, val"),
  ],
)
def test_other_tables_are_refused(table, head, line, message):
  with pytest.raises(ValueError, match=message):
    sources.open_source(table(head, line), 'train')


def test_what_is_no_table_is_refused(tmp_path):
  path = tmp_path / 'x.csv'
  with pytest.raises(FileNotFoundError, match='no file .*x.csv'):
    sources.open_source(str(path), 'train')
  path.write_bytes(b'')
  with pytest.raises(ValueError, match='has no rows'):
    sources.open_source(str(path), 'train')
  path.write_bytes(b'file,label\n\xff,a\n')
  with pytest.raises(ValueError, match='is no CSV file in UTF-8'):
    sources.open_source(str(path), 'train')


def test_missing_images_are_named_before_training(table, tmp_path):
  name = table()
  (tmp_path / 'images/7.png').unlink()
  with pytest.raises(ValueError, match='images/7.png'):
    for split in ('train', 'test'):
      bad_images.checked(sources.open_source(name, split), 'error')
