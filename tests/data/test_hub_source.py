"""Datasets of the hub's library, here from a folder in its format."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import bad_images, decode, sources

datasets = pytest.importorskip('datasets')


@pytest.fixture
def write(tmp_path, monkeypatch):
  """Returns a function that writes 30 images, and gives the name.

  One of the columns may be there twice.
  """
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')

  def write(label, values, splits=('train',), column='kind', twice=''):
    for split in splits:
      rng = np.random.default_rng(0)
      images = [
        Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
        for _ in range(30)
      ]
      features = {'img': datasets.Image(), column: label}
      columns = {'img': images, column: values}
      if twice:
        features['again'], columns['again'] = features[twice], columns[twice]
      table = datasets.Dataset.from_dict(columns, datasets.Features(features))
      (tmp_path / 'set').mkdir(exist_ok=True)
      table.to_parquet(tmp_path / f'set/{split}.parquet')
    return f'hf://datasets/{tmp_path}/set'

  return write


def numbers():
  return [i % 3 for i in range(30)]


def pixels(i):
  rng = np.random.default_rng(0)
  for _ in range(i + 1):
    found = rng.integers(0, 256, (4, 5, 3), np.uint8)
  return found


def test_images_and_classes_are_those_of_the_set(write):
  name = write(datasets.ClassLabel(names=['c', 'a', 'b']), numbers())
  parts = [sources.open_source(name, split) for split in ('train', 'test')]
  assert [len(part) for part in parts] == [24, 6]
  position = {pixels(i).tobytes(): i for i in range(30)}
  seen = set()
  for source in parts:
    assert source.class_names == ('c', 'a', 'b')
    source = pickle.loads(pickle.dumps(source))
    for i in range(len(source)):
      record = source[i]
      image = np.asarray(Image.open(io.BytesIO(record['image'])))
      where = position[image.tobytes()]
      assert record['label'] == where % 3 == source.labels()[i]
      seen.add(where)
  assert seen == set(range(30))
  again = sources.open_source(name, 'train')
  assert [*again.states([3])] == [*parts[0].states([3])]
  assert [*parts[1].states([3])] != [*parts[0].states([3])]
  assert len(bad_images.checked(again, 'error')) == 24


def test_splits_are_those_of_the_set(write):
  label = datasets.ClassLabel(names=['a', 'b', 'c'])
  name = write(label, numbers(), ('train', 'validation', 'test'))
  assert len(sources.open_source(name, 'train')) == 30
  assert len(sources.open_source(name, 'train[:10]+test')) == 40
  # No image of one is in another.
  rows = sources.open_source(name, 'train+validation+test')._rows
  assert sorted(rows) == list(range(90))
  with pytest.raises(ValueError, match="no split 'exam'"):
    sources.open_source(name, 'exam')


def test_a_set_for_testing_alone_is_not_split(write):
  label = datasets.ClassLabel(names=['a', 'b', 'c'])
  name = write(label, numbers(), ('test',))
  assert len(sources.open_source(name, 'test')) == 30
  with pytest.raises(ValueError, match="no split 'train'; it has test"):
    sources.open_source(name, 'train')


def test_classes_that_are_a_plain_column(write):
  values = [(20, 0, 10)[x] for x in numbers()]
  label = datasets.Value('int64')
  source = sources.open_source(write(label, values, column='label'), 'all')
  assert source.class_names == ('0', '10', '20')
  np.testing.assert_array_equal(np.bincount(source.labels()), [10, 10, 10])
  position = {pixels(i).tobytes(): i for i in range(30)}
  for i in range(30):
    record = source[i]
    image = np.asarray(Image.open(io.BytesIO(record['image'])))
    want = str(values[position[image.tobytes()]])
    assert source.class_names[record['label']] == want


@pytest.mark.parametrize(
  ('label', 'twice'),
  [
    (datasets.Value('int64'), ''),
    (datasets.ClassLabel(names=['a', 'b', 'c']), 'img'),
  ],
)
def test_one_column_has_the_images_and_one_the_classes(write, label, twice):
  name = write(label, numbers(), twice=twice)
  with pytest.raises(ValueError, match='one column of images .* img, kind'):
    sources.open_source(name, 'all')


def test_images_without_a_class_are_refused(write):
  values = [None if i == 7 else i % 3 for i in range(30)]
  name = write(datasets.Value('int64'), values, column='label')
  with pytest.raises(ValueError, match='1 images of .* have no class'):
    sources.open_source(name, 'all')


def test_slices_are_of_an_order_that_the_seed_gives(write):
  name = write(datasets.ClassLabel(names=['a', 'b', 'c']), numbers())

  def rows(split, seed):
    source = sources.open_source(name, split, split_seed=seed)
    assert source[0]['name'] == f'{name}/{split}/0'
    return source._rows.tolist(), [*source.states([0])]

  (some, first), (others, second) = (rows('train[:10]', s) for s in (0, 1))
  assert sorted(some) != some and some != others and first != second
  assert sorted(rows('all', 1)[0]) == list(range(30))
  held_out = [sorted(rows('test', seed)[0]) for seed in (0, 1)]
  assert held_out[0] != held_out[1]


def test_images_may_lie_beside_the_table_or_be_missing(write, tmp_path):
  name = write(datasets.ClassLabel(names=['a', 'b', 'c']), numbers())
  source = sources.open_source(name, 'all')
  (tmp_path / 'x.png').write_bytes(b'pixels')
  beside = {'bytes': None, 'path': str(tmp_path / 'x.png')}
  source._table = [{'img': x} for x in (beside, None)]
  source._rows = np.array([0, 1])
  assert source[0]['image'] == b'pixels'
  with pytest.raises(
    decode.UnreadableImage, match='all/1: the record has no image'
  ):
    source[1]


def test_what_is_not_there_is_one_message(tmp_path):
  for start in ('hf://', 'hf://datasets/'):
    with pytest.raises(
      ValueError, match=f'cannot be loaded: .*{tmp_path}/none'
    ):
      sources.open_source(f'{start}{tmp_path}/none', 'train')
