"""ObjectNet's folder as a source: which images, which pixels, which classes."""

import importlib.util
import json
import logging
import pathlib
import pickle

import numpy as np
import pytest

from tests.conftest import ROOT
from vit_jax.data import bad_images, decode, objectnet

NAMES = ROOT / 'tests/evaluators/objectnet_classes.json'

RED = (255, 0, 0)


@pytest.fixture
def archive(tmp_path, encode):
  """Two classes that overlap ImageNet, one that does not; red borders."""
  root = tmp_path / 'objectnet-1.0'
  for class_name, file_name, grey in (
    ('wok', 'b.png', 10),
    ('wok', 'a.png', 20),
    ('air_freshener', 'c.png', 30),
    ('alarm_clock', 'd.png', 40),
  ):
    pixels = np.full((9, 12, 3), RED, np.uint8)
    pixels[2:-2, 2:-2] = grey
    pixels[2, 2] = pixels[-3, -3] = 200  # the corners of what is kept
    folder = root / 'images' / class_name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file_name).write_bytes(encode(pixels))
  (root / 'images' / 'wok' / 'notes.txt').write_text('no image')
  (root / 'images' / 'wok' / '._a.png').write_text('a Mac was here')
  (root / 'mappings').mkdir()
  return root


def greys(source):
  return [int(source[i]['image'][2, 3, 0]) for i in range(len(source))]


@pytest.mark.parametrize('inside', ['', 'images'])
def test_only_overlapping_classes_in_order(archive, inside):
  source = objectnet.ObjectNet(str(archive / inside))
  assert source.class_names == ('alarm_clock', 'wok')
  assert greys(source) == [40, 20, 10]
  assert [source[i]['label'] for i in range(3)] == [0, 1, 1]
  assert source.labels().tolist() == [0, 1, 1]
  assert source.labels().dtype == np.int32
  assert source[1]['name'] == str(archive / 'images' / 'wok' / 'a.png')
  # Another source would read the same files with their borders.
  assert all(x.startswith('ObjectNet ') for x in source.states(range(3)))
  assert [r['label'] for r in pickle.loads(pickle.dumps(source))] == [0, 1, 1]


def test_two_pixels_of_border_are_gone(archive):
  image = objectnet.ObjectNet(str(archive))[0]['image']
  assert image.shape == (5, 8, 3) and image.dtype == np.uint8
  assert not (image == RED).all(axis=-1).any()
  assert (image[0, 0] == 200).all() and (image[-1, -1] == 200).all()


def test_images_of_border_alone_are_reported_with_others(archive, encode):
  folder = archive / 'images' / 'wok'
  (folder / 'c.png').write_bytes(encode(np.zeros((4, 7, 3), np.uint8)))
  (folder / 'd.png').write_bytes(encode(np.zeros((9, 9, 3), np.uint8))[:20])
  (folder / 'e.png').write_bytes(encode(np.zeros((5, 5, 3), np.uint8)))
  source = objectnet.ObjectNet(str(archive))
  assert len(source) == 6 and source[5]['image'].shape == (1, 1, 3)
  with pytest.raises(decode.UnreadableImage, match='7x4 pixels are too few'):
    source[3]
  bad = bad_images.find_bad_images(source)
  assert [(b.row, pathlib.Path(b.name).name) for b in bad] == [
    (3, 'c.png'),
    (4, 'd.png'),
  ]
  assert len(bad_images.checked(source, 'skip')) == 4


def test_missing_classes_are_told(archive, caplog):
  (archive / 'images' / 'banana').mkdir()
  with caplog.at_level(logging.WARNING):
    objectnet.ObjectNet(str(archive))
  assert 'lacks 111 of 113 classes' in caplog.text
  assert 'backpack, banana' in caplog.text and 'alarm_clock' not in caplog.text


def test_refusals(archive, tmp_path):
  with pytest.raises(FileNotFoundError, match='no folder .*nowhere; give the'):
    objectnet.ObjectNet(str(tmp_path / 'nowhere'))
  with pytest.raises(ValueError, match="no images of ObjectNet's 113 .*lay"):
    objectnet.ObjectNet(str(archive / 'mappings'))


def test_the_table_against_the_names_of_wordnet():
  """The archive gives names; their positions come from another package."""
  timm = importlib.util.find_spec('timm')
  if timm is None:
    pytest.skip('needs the extra `peers`, see requirements.txt')
  info = pathlib.Path(timm.origin).parent / 'data' / '_info'
  ids = (info / 'imagenet_synsets.txt').read_text().split()
  lines = (info / 'imagenet_synset_to_lemma.txt').read_text().splitlines()
  names = dict(line.split('\t') for line in lines)
  ours = {
    folder: sorted(names[ids[i]].lower() for i in indices)
    for folder, indices in objectnet.IMAGENET_CLASSES.items()
  }
  archive = json.loads(NAMES.read_text())
  assert len(ids) == 1000 and ids == sorted(ids)
  assert ours == {k: sorted(v.lower().split('; ')) for k, v in archive.items()}
