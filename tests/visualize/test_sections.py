"""What sections say and name, of subjects whose numbers are made by hand."""

import numpy as np
import pytest

from vit_jax.visualize import draw, filters, sections
from vit_jax.visualize import subject as subject_lib
from vit_jax.visualize.subject import Subject

GRID = (2, 3)


class Model:
  attention = 'all'
  extra_tokens = ('cls',)
  heads = 2
  posemb = 'learned'

  def grid(self, size):
    return GRID

  def num_tokens(self, size):
    return 7


class Checkpoint:
  """Of 8x12 pixels and seven classes; sees images as they are, less 1."""

  image_size = (8, 12)
  on_device = 'params'

  def __init__(self, **fields):
    self.model = Model()
    self.__dict__.update(fields)

  def class_index(self, text):
    return int(text)

  def class_name(self, index):
    return f'class {index}'

  def normalize(self, images_BHWC):
    return images_BHWC - 1.0

  def probabilities(self, logits_BC):
    return logits_BC


class Photograph:
  def __init__(self, i):
    self.path, self.name = f'folder/{i}.png', f'{i}'
    self.seen_HWC = np.full((8, 12, 3), 10 + i, np.uint8)

  def shown(self):
    return np.full((4, 6, 3), int(self.name), np.uint8)


def subject_of(count, **fields):
  photographs = [Photograph(i) for i in range(count)]
  return Subject(Checkpoint(**fields), photographs)


@pytest.fixture
def seen(monkeypatch):
  """Collects what models see; the logits of an image are its first pixel."""
  batches = []

  class Layers:
    def __init__(self, model, params, images_BHWC):
      assert params == 'params'
      batches.append(np.asarray(images_BHWC))
      self.grid = GRID
      first_B1 = images_BHWC[:, :1, 0, 0]
      self.logits_BC = first_B1 % np.array([[2, 3, 5, 7]])

  monkeypatch.setattr(subject_lib, 'Layers', Layers)
  return batches


@pytest.mark.parametrize(
  ('count', 'entries', 'sizes'),
  [(5, 2 * 2 * 49, [2, 2, 1]), (3, 5, [1, 1, 1]), (40, 2**26, [32, 8])],
)
def test_as_many_images_at_once_as_leave_weights_small(
  count, entries, sizes, seen, monkeypatch
):
  """The last batch is filled up with images of zeros."""
  monkeypatch.setattr(subject_lib, '_MAX_ENTRIES', entries)
  subject = subject_of(count)
  found = [batch for _, batch in subject.at_work('here')]
  assert [len(batch) for batch in found] == sizes
  assert [p for batch in found for p in batch] == subject.photographs
  at = 0
  for images_BHWC, size in zip(seen, sizes, strict=True):
    assert images_BHWC.shape == (sizes[0], 8, 12, 3)
    want_B = np.full(sizes[0], -1.0)
    want_B[:size] = 9 + np.arange(at, at + size)
    np.testing.assert_array_equal(images_BHWC[..., 0].min((1, 2)), want_B)
    np.testing.assert_array_equal(images_BHWC.max((1, 2, 3)), want_B)
    at += size


@pytest.fixture
def rolled(monkeypatch):
  """Makes maps that say whose they are, and collects sheets."""
  sheets = []

  def rollout_maps(subject, fusion, discard, class_N=None):
    n = len(subject.photographs)
    if class_N is not None:
      assert class_N.shape == (n,)
    about = [len(fusion), 100 * discard, 0, 0, 0, 0]
    maps_Nhw = np.tile(np.reshape(about, (1, *GRID)), (n, 1, 1)) / 100
    maps_Nhw[:, 1, 0] = 0 if class_N is None else class_N / 100
    maps_Nhw[:, 1, 1] = np.arange(n) / 100
    return maps_Nhw

  monkeypatch.setattr(sections, 'rollout_maps', rollout_maps)
  monkeypatch.setattr(draw, 'sheet', lambda *args: sheets.append(args) or b'')
  return sheets


def test_rollouts_are_called_by_their_classes(rolled):
  """Ten photographs, of which eight are in the first picture."""
  section = sections.rollout(subject_of(10), 'min', 0.25, ('3', '0'))
  assert 'by their min, the lowest 25% of the weights disc' in section.text
  assert 'weighted by the gradients of the class). ' in section.text
  assert section.arrays['classes'].tolist() == ['class 3', 'class 0']
  for maps_Nhw, index in zip(section.arrays['maps'], (3, 0), strict=True):
    about = [3, 25, 0, index, 1, 0]
    np.testing.assert_allclose(100 * maps_Nhw[1].ravel(), about)
  assert [figure.name for figure in section.figures] == ['rollout', 'rollout-2']
  for figure in section.figures:
    figure.draw()
  (lines, names), (_, others) = rolled
  assert (names, others) == ([*'01234567'], ['8', '9'])
  assert [*lines[0]] == [
    'image',
    *(f'class {c}: {k}' for c in (3, 0) for k in ('rollout', 'highest half')),
  ]
  np.testing.assert_array_equal(
    lines[1]['class 0: rollout'],
    draw.overlay(Photograph(1).shown(), section.arrays['maps'][1, 1]),
  )


@pytest.mark.parametrize(
  ('name', 'what'),
  [('embedding', 'patch embedding'), ('conv_root', "ResNet's first conv")],
)
def test_filters_are_the_leading_28(name, what):
  kernel = np.random.default_rng(0).standard_normal((4, 5, 3, 40))
  subject = subject_of(0, params={name: {'kernel': kernel}})
  section = sections.first_filters(subject)
  want = filters.principal_components(kernel, 28)
  np.testing.assert_array_equal(section.arrays['components'], want)
  assert section.text.startswith('The leading 28 principal components of the')
  assert f'40 filters of the {what}' in section.text
  assert '(4x5 pixels)' in section.text
  (figure,) = section.figures
  assert figure.caption.startswith(f'principal components of the {what}')
