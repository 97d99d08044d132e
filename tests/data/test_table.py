"""A CSV file of images and their classes as a dataset."""

import codecs
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


def test_images_and_classes_are_those_of_the_table(table):
  name = table(encoding='utf-8-sig')
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
  again = sources.open_source(name, 'train')
  assert [*again.states(range(24))] == [*splits[0].states(range(24))]
  # Another seed holds out others.
  held_out = [
    {source[i]['name'] for i in range(6)}
    for source in (
      splits[1],
      *(sources.open_source(name, 'test', split_seed=s) for s in (1, 2)),
    )
  ]
  assert held_out[0] != held_out[1] != held_out[2]


def test_blanks_around_a_class_are_none_of_its_name(table):
  name = table(line='images/{i}.png, {label} ')
  assert sources.open_source(name, 'train').class_names == ('a', 'b', 'c')


def test_splits_are_those_of_the_table(table):
  name = table('label,split,file', '{label},{split},images/{i}.png')
  assert len(sources.open_source(name, 'train')) == 20
  assert len(sources.open_source(name, 'val')) == 10
  with pytest.raises(ValueError, match='table .*x.csv'):
    sources.open_source(name, 'tests')


@pytest.mark.parametrize(
  ('head', 'line', 'message'),
  [
    ('path,label', 'x,{label}', "the columns 'path', 'label': the first line"),
    ('file,label,labels', 'x,a,a', "the columns 'file', 'label', 'labels'"),
    ('file,label,split,split', 'x,a,train,a', "'split', 'split': the first"),
    ('file,label', 'x{i},', "image 1: label is '': give a class"),
    ('label,file', '{label},', "image 1: file is '': give a path"),
    ('file,label', 'x,{label}', "image 2: 'x' is also image 1, so it could be"),
    ('file,labels', 'x{i},;', 'the column labels is empty'),
    ('file,label', 'x{i},a, b', r"image 1: more cells than columns, \[' b'\]"),
    (
      'file,label,split',
      'x{i},a,dev',
      "image 1: split is 'dev': use train, val",
    ),
  ],
)
def test_other_tables_are_refused(table, head, line, message):
  with pytest.raises(ValueError, match=message):
    sources.open_source(table(head, line), 'train')


@pytest.mark.parametrize(
  'column, separator, refused',
  [
    ('label', ';', True),
    ('label', ',', False),
    ('labels', ';', False),
    ('labels', ',', True),
  ],
)
def test_other_separators_are_named(table, column, separator, refused):
  name = table(f'file,{column}', f'images/{{i}}.png,"{{label}}{separator}x"')
  if not refused:
    assert len(sources.open_source(name, 'all')) == 30
    return
  message = f"'a[{separator}]x' in the column {column} looks like several"
  with pytest.raises(ValueError, match=message):
    sources.open_source(name, 'train')


def test_a_semicolon_anywhere_settles_the_separator(table):
  name = table('file,labels', 'images/{i}.png,"{label}, x;"')
  source = sources.open_source(name, 'all')
  assert source.class_names == ('a, x', 'b, x', 'c, x')


def test_paths_may_be_spelled_otherwise(table, tmp_path):
  (tmp_path / 'images').rename(tmp_path / 'cafe\u0301')
  for line in (' cafe\u0301/{i}.png ', 'caf\u00e9\\{i}.png'):
    name = table(line=f'{line},{{label}}', encoding='utf-8')
    source = sources.open_source(name, 'all')
    assert bad_images.checked(source, 'error') is source
  # Which may be one image twice.
  path = pathlib.Path(name)
  path.write_text(path.read_text('utf-8') + '\ncafe\u0301/3.png,a', 'utf-8')
  with pytest.raises(ValueError, match='image 31: .* is also image 4'):
    sources.open_source(name, 'all')


def test_several_classes_an_image(table):
  # Empty cells at the end of a line are no matter.
  name = table('file,labels', 'images/{i}.png, {label} ;b;;,, ')
  whole = sources.open_source(name, 'all')
  assert whole.several_labels
  assert whole.class_names == ('a', 'b', 'c')
  for source in (whole, sources.subset(whole, range(5, 25))):
    assert source.several_labels
    assert source.class_names == ('a', 'b', 'c')
    for i in range(len(source)):
      record = source[i]
      own = 'cab'[int(record['name'].split('/')[-1][:-4]) % 3]
      want = [name in {own, 'b'} for name in 'abc']
      np.testing.assert_array_equal(record['label'], np.array(want, np.uint8))
  parts = [sources.open_source(name, split) for split in ('train', 'test')]
  assert [len(part) for part in parts] == [24, 6]
  with pytest.raises(ValueError, match='several classes, but one class per'):
    sources.labelled(whole, 'x')
  assert not sources.open_source(table(), 'train').several_labels


def test_other_labels_are_other_data(table):
  found = [
    sources.open_source(table(line=line), 'train').identity()
    for line in (
      'images/{i}.png,{label}',
      'images/{i}.png,{split}',
      'images/{i}.png,{label}',
    )
  ]
  assert found[0] == found[2] != found[1]


def test_an_image_may_have_no_class(table):
  name = table('file,labels', 'images/{i}.png,{label}')
  text = pathlib.Path(name).read_text().replace(',a', ',')
  pathlib.Path(name).write_text(text)
  source = sources.open_source(name, 'all')
  assert source.class_names == ('b', 'c')
  counts = np.bincount([source[i]['label'].sum() for i in range(30)])
  np.testing.assert_array_equal(counts, [10, 20])


def test_what_is_no_table_is_refused(tmp_path):
  path = tmp_path / 'x.csv'
  with pytest.raises(FileNotFoundError, match='no file .*x.csv'):
    sources.open_source(str(path), 'train')
  path.write_bytes(b'')
  with pytest.raises(ValueError, match='has no rows'):
    sources.open_source(str(path), 'train')
  path.write_text(f'file,label\nx,{"a" * 200_000}\n')
  with pytest.raises(ValueError, match='is not a CSV file: field larg'):
    sources.open_source(str(path), 'train')
  # Of which what follows would be a part, line after line.
  path.write_text('file,label\n0.png,a\n1.png,"b\n2.png,a\n')
  with pytest.raises(ValueError, match='is not a CSV file: unexpected end'):
    sources.open_source(str(path), 'train')
  for mark in (b'', codecs.BOM_UTF8):
    path.write_bytes(mark + b'file,label\n\xff,a\n')
    where = f'x.csv has the byte 0xff at position {len(mark) + 11},'
    with pytest.raises(ValueError, match=where):
      sources.open_source(str(path), 'train')
