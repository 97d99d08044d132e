"""Objects and queries of a detector whose answers are made by hand."""

import types

import numpy as np
import pytest

from vit_jax.projects.detr import detections
from vit_jax.projects.detr.detections import Said

CANVAS = (16, 32)
NAMES = ('cat', 'dog', 'bus')


class Model:
  task = 'objects'
  num_classes = 3

  def grid(self, size):
    return size[0] // 4, size[1] // 4


CHECKPOINT = types.SimpleNamespace(
  path='made',
  model=Model(),
  image_size=CANVAS,
  class_name=lambda i: NAMES[i],
)


def said(seed, scores, grid=(4, 8)):
  """Returns what 22 queries say of an image of 30x40 pixels."""
  rng = np.random.default_rng(seed)
  low, high = np.sort(rng.uniform(-0.1, 1.1, (2, 22, 2)), axis=0)
  return Said(
    rng.integers(0, 256, (30, 40, 3), np.uint8),
    (4 * grid[0], 4 * grid[1]),
    (4 * grid[0], 20),
    {
      'scores': np.array([*scores, *[0.01] * (22 - len(scores))]),
      'labels': rng.integers(0, 3, 22),
      'boxes': np.concatenate([low, high], 1),
      'attention': rng.random((22, *grid)),
    },
  )


@pytest.fixture
def section_of(monkeypatch):
  """Makes a section of files of which queries say what they are given."""

  def make(every):
    def said_of(detector, path):
      return every[path]

    monkeypatch.setattr(detections.Detector, 'said_of', said_of)
    return detections.section(CHECKPOINT, [*every], 0.5)

  return make


def test_arrays_are_those_of_likely_objects(section_of):
  every = {
    'a/x.png': said(0, [0.3, 0.6, 0.9]),
    'b/x.png': said(1, [0.4]),
    'tall.png': said(2, [0.7, 0.2, 0.5], grid=(8, 4)),
  }
  section = section_of(every)
  arrays = section.arrays
  assert arrays['image'].tolist() == [0, 0, 2, 2]
  assert arrays['query'].tolist() == [2, 1, 0, 2]
  assert arrays['files'].tolist() == [*every]
  assert arrays['centres'].shape == (3, 22, 4)
  assert arrays['map'].shape == (4, 8, 8)
  for i, (name, query) in enumerate(
    zip(['a/x.png'] * 2 + ['tall.png'] * 2, arrays['query'], strict=True)
  ):
    queries = every[name].queries
    assert arrays['label'][i] == queries['labels'][query]
    assert arrays['score'][i] == queries['scores'][query]
    box_4 = np.clip(queries['boxes'][query], 0, 1)
    np.testing.assert_array_equal(arrays['box'][i], box_4)
    want_hw = np.zeros((8, 8))
    h, w = queries['attention'].shape[1:]
    want_hw[:h, :w] = queries['attention'][query]
    np.testing.assert_array_equal(arrays['map'][i], want_hw)
  low, high = np.split(np.clip(every['b/x.png'].queries['boxes'], 0, 1), 2, 1)
  np.testing.assert_allclose(
    arrays['centres'][1], np.concatenate([(low + high) / 2, high - low], 1)
  )
  assert section.text.startswith('4 objects in 3 images')
  assert 'of 20 queries' in section.text
  # None of the image in which nothing is found.
  names = [figure.name for figure in section.figures]
  assert names == ['x-objects', 'tall-objects']
  assert section.figures[0].caption.startswith('x: ')
  assert section.sheet.name == 'queries'
  assert section.sheet.caption == 'centres of the boxes of each query'


def test_a_map_is_seen_without_the_padding():
  """A ramp over a canvas of which the image has 20 of 32 columns."""
  map_hw = np.tile(np.arange(8.0), (4, 1)) + 10 * np.arange(4.0)[:, None]
  map_HW = detections.seen(said(0, []), map_hw)
  assert map_HW.shape == (30, 40)
  # Centres of pixels: of 30 rows over 4 patches, of 40 columns over 5.
  y, x = (np.arange(30) + 0.5) * 4 / 30 - 0.5, (np.arange(40) + 0.5) / 8 - 0.5
  want = np.clip(x, 0, 7) + 10 * np.clip(y, 0, 3)[:, None]
  inside = np.s_[4:-4, 4:-4]
  # Bilinear twice, between pixels a quarter of a patch apart.
  np.testing.assert_allclose(map_HW[inside], want[inside], atol=0.3)
