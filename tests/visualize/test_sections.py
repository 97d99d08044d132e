"""What sections say and name, of subjects whose numbers are made by hand."""

import numpy as np
import pytest

from vit_jax.visualize import draw, filters, sections, similarity
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


def subject_of(count, label='', **fields):
  photographs = [Photograph(i) for i in range(count)]
  return Subject(Checkpoint(**fields), photographs, label)


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
  ('count', 'entries', 'attention', 'sizes'),
  [
    (5, 2 * 2 * 49, 'all', [2, 2, 1]),
    (5, 3 * 2 * 49 - 1, 'all', [2, 2, 1]),
    (3, 5, 'all', [1, 1, 1]),
    (3, 2**26, 'all', [3]),
    (40, 2**26, 'all', [32, 8]),
    (2, 2**26, '', [1, 1]),
  ],
)
def test_as_many_images_at_once_as_leave_weights_small(
  count, entries, attention, sizes, seen, monkeypatch
):
  """The last batch is filled up with images of zeros."""
  monkeypatch.setattr(subject_lib, '_MAX_ENTRIES', entries)
  subject = subject_of(count)
  subject.checkpoint.model.attention = attention
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


@pytest.mark.parametrize('count', [2, 9])
def test_the_likeliest_classes_come_first(count, seen, monkeypatch):
  monkeypatch.setattr(subject_lib, '_MAX_ENTRIES', 2 * 2 * 49)
  found = subject_of(3).top_classes(count)
  assert len(found) == 3
  for i, row in enumerate(found):
    values = [(9 + i) % p for p in (2, 3, 5, 7)]
    order = sorted(range(4), key=lambda c: -values[c])[:count]
    assert row == [(c, values[c]) for c in order]


@pytest.fixture
def rolled(monkeypatch):
  """Makes maps that say whose they are, and collects sheets."""
  sheets = []

  def rollout_maps(subject, fusion, discard, class_N):
    n = len(subject.photographs)
    if class_N is not None:
      assert class_N.shape == (n,)
    about = [len(subject.label), len(fusion), 100 * discard, 0, 0, 0]
    maps_Nhw = np.tile(np.reshape(about, (1, *GRID)), (n, 1, 1)) / 100
    maps_Nhw[:, 1, 0] = 0 if class_N is None else class_N / 100
    maps_Nhw[:, 1, 1] = np.arange(n) / 100
    return maps_Nhw

  monkeypatch.setattr(sections, 'rollout_maps', rollout_maps)
  monkeypatch.setattr(draw, 'sheet', lambda *args: sheets.append(args) or b'')
  return sheets


def test_a_rollout_of_one_model_is_called_by_its_photograph(rolled):
  section = sections.rollout([subject_of(9)])
  assert section.text.startswith(
    'How much of each patch reaches the output, over all layers (heads fused '
    'by their mean). Brighter'
  )
  assert {k: x.shape for k, x in section.arrays.items()} == {
    **{'files': (9,), 'maps': (1, 9, 2, 3)},
    **{'fusions': (1,), 'classes': (1,)},
  }
  assert section.arrays['files'][1] == 'folder/1.png'
  assert [(f.name, f.caption) for f in section.figures[3:6]] == [
    ('rollout-1-overlay', '1: overlay'),
    ('rollout-1-heat', '1: heat'),
    ('rollout-1-masked', '1: masked'),
  ]
  assert len(section.figures) == 27
  map_hw = section.arrays['maps'][0, 1]
  shown = Photograph(1).shown()
  for figure, kind in zip(section.figures[3:6], (0, 1, 2), strict=True):
    function = (draw.overlay, draw.heat, draw.masked)[kind]
    np.testing.assert_array_equal(
      draw.pixels(figure.draw()), function(shown, map_hw)
    )
  section.sheet.draw()
  ((lines, names),) = rolled
  assert names == [*map(str, range(8))]  # of nine
  for n, line in enumerate(lines):
    assert [*line] == ['image', 'rollout', 'highest half']
    np.testing.assert_array_equal(line['image'], Photograph(n).shown())


def test_rollouts_side_by_side_are_called_by_what_differs(rolled):
  subjects = [subject_of(2, 'a/one'), subject_of(2, 'b/three')]
  section = sections.rollout(subjects, ('mean', 'min'), 0.25, ('3', '5'))
  assert '(heads fused by their mean, min, the lowest 25% of the weights ' in (
    section.text
  )
  assert 'discarded, weighted by the gradients of the class). ' in section.text
  ways = [(f, c) for f in ('mean', 'min') for c in (3, 5)]
  for prefix, subject in (('', subjects[0]), ('beside_1_', subjects[1])):
    fusions = section.arrays[f'{prefix}fusions'].tolist()
    classes = section.arrays[f'{prefix}classes'].tolist()
    assert [*zip(fusions, classes, strict=True)] == [
      (f, f'class {c}') for f, c in ways
    ]
    for map_Nhw, (fusion, index) in zip(
      section.arrays[f'{prefix}maps'], ways, strict=True
    ):
      about = [len(subject.label), len(fusion), 25, index, 1, 0]
      np.testing.assert_allclose(100 * map_Nhw[1].ravel(), about)
  # Of each photograph all models, of each of these all ways.
  first, last = section.figures[0], section.figures[-1]
  assert len(section.figures) == 2 * 2 * 4 * 3
  assert first.name == 'rollout-0-1__one-mean-class_3-overlay'
  assert first.caption == '0, 1: one, mean, class 3: overlay'
  assert last.name == 'rollout-1-2__three-min-class_5-masked'
  section.sheet.draw()
  ((lines, _),) = rolled
  titles = [
    f'{i + 1}: {name}\n{f}\nclass {c}'
    for i, name in enumerate(('one', 'three'))
    for f, c in ways
  ]
  assert [*lines[0]] == [
    'image',
    *(f'{t}: {k}' for t in titles for k in ('rollout', 'highest half')),
  ]
  maps = section.arrays['beside_1_maps'][2]
  np.testing.assert_array_equal(
    lines[1][f'{titles[6]}: rollout'],
    draw.overlay(Photograph(1).shown(), maps[1]),
  )


def test_distances_are_means_over_images_in_pixels(seen, monkeypatch):
  """Of three images, two at a time; a patch of 8 pixels over 2 rows has 4."""
  monkeypatch.setattr(subject_lib, '_MAX_ENTRIES', 2 * 2 * 49)
  given = []

  def mean_distances(layers, pixels, count):
    given.append((pixels, count))
    images = np.asarray(layers.logits_BC)[:count, -1:]
    return {'all': np.broadcast_to(images.mean(0), (5, 2))}

  panels = []
  monkeypatch.setattr(sections.distance_lib, 'mean_distances', mean_distances)
  monkeypatch.setattr(sections.distance_lib, 'uniform', lambda grid: grid[1])
  monkeypatch.setattr(draw, 'distances', panels.append)
  section = sections.distance([subject_of(3, x) for x in 'abb'])
  assert given == 3 * [(4, 2), (4, 1)]
  assert '3 images (figures 7' in section.text
  assert {*section.arrays} == {'all', 'beside_1_all', 'beside_2_all'}
  want = np.mean([9 % 7, 10 % 7, 11 % 7])
  np.testing.assert_allclose(section.arrays['all'], np.full((5, 2), want))
  (figure,) = section.figures
  figure.draw()
  # One that is given twice is drawn twice.
  assert [label for label, *_ in panels[0]] == ['a', 'b', 'b']
  _, found, uniform = panels[0][1]
  assert uniform == 3 * 4
  np.testing.assert_allclose(found['all'], np.full((5, 2), want))
  one = sections.distance([subject_of(1)])
  assert 'averaged over 1 image (figures 7' in one.text
  # Of rows and columns none is drawn that looks everywhere.
  monkeypatch.setattr(
    sections.distance_lib, 'mean_distances', lambda *_: {'row': 1, 'column': 2}
  )
  axial = sections.distance([subject_of(2, 'a')])
  axial.figures[0].draw()
  assert panels[1] == [('a', {'row': 1, 'column': 2}, 0)]
  assert axial.arrays == {'row': 1, 'column': 2}


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


@pytest.mark.parametrize('tables', [1, 2])
def test_cosines_of_position_embeddings_are_named_by_layer(tables, monkeypatch):
  x_XLD = np.random.default_rng(0).standard_normal((tables, 7, 5))
  drawn = []
  monkeypatch.setattr(similarity, 'tables', lambda checkpoint: x_XLD)
  monkeypatch.setattr(draw, 'similarities', drawn.append)
  section = sections.posemb(subject_of(0))
  names = ['layer 1', 'layer 2'] if tables > 1 else ['']
  assert section.arrays['names'].tolist() == names
  want = [similarity.cosine(x, GRID) for x in x_XLD]
  np.testing.assert_array_equal(section.arrays['cosines'], want)
  assert 'position embedding of each patch (a tile)' in section.text
  (figure,) = section.figures
  assert figure.caption == 'cosine similarity, learned'
  figure.draw()
  assert [*drawn[0]] == names


@pytest.mark.parametrize('alike', [True, False])
def test_cosines_of_offsets_are_apart_where_they_differ_in_size(
  alike, monkeypatch
):
  found = {'layer 1 row': np.eye(3)}
  found['layer 1 column'] = np.eye(3 if alike else 5)
  monkeypatch.setattr(similarity, 'of_offsets', lambda checkpoint: found)
  subject = subject_of(0)
  subject.checkpoint.model.posemb = 'relative'
  section = sections.posemb(subject)
  arrays = section.arrays
  assert arrays['names'].tolist() == [*found]
  if alike:
    assert {*arrays} == {'cosines', 'names'}
    assert arrays['cosines'].shape == (2, 3, 3)
  else:
    assert {*arrays} == {'layer_1_row', 'layer_1_column', 'names'}
    assert arrays['layer_1_column'].shape == (5, 5)
  assert 'every two offsets' in section.text
  assert section.figures[0].caption == 'cosine similarity, relative'


@pytest.mark.parametrize('extra', [('cls',), ()])
def test_without_a_query_it_is_the_class_token_or_the_middle(
  extra, monkeypatch
):
  """Weights of which each says its query and its key."""
  monkeypatch.setattr(subject_lib, '_MAX_ENTRIES', 2 * 2 * 49)
  (h, w), L = (2, 4), 8 + len(extra)
  weights = np.arange(4.0)[:, None, None, None] + np.zeros((4, 2, L, L))
  weights = weights + 10 * np.arange(L)[:, None] + 100 * np.arange(L)

  class Layers:
    grid = h, w

    def __init__(self, *args):
      pass

    def attention(self):
      return iter([{'all': weights[:2]}, {'all': weights[2:]}])

  monkeypatch.setattr(subject_lib, 'Layers', Layers)
  drawn = []
  monkeypatch.setattr(draw, 'heads', lambda *args: drawn.append(args))
  subject = subject_of(3)
  subject.checkpoint.model.extra_tokens = extra
  section = sections.attention(subject)
  query = None if extra else (1, 2)
  token = 'the class token' if extra else 'patch 1,2'
  assert section.text.startswith(f'What {token} attends to.')
  row = 0 if extra else 1 * w + 2
  keys = np.reshape(100 * np.arange(len(extra), L) + 10 * row, (h, w))
  maps = section.arrays['maps']
  assert maps.shape == (3, 2, 2, h, w)
  for image, layer, head in np.ndindex(3, 2, 2):
    want = keys + 2 * layer + image % 2
    np.testing.assert_array_equal(maps[image, layer, head], want)
  assert [(f.name, f.caption) for f in section.figures] == [
    (f'attention-{i}', f'{i}: attention of {token}') for i in range(3)
  ]
  section.figures[1].draw()
  ((shown, maps_XNhw, names, asked),) = drawn
  np.testing.assert_array_equal(shown, Photograph(1).shown())
  np.testing.assert_array_equal(maps_XNhw, maps[1])
  assert (names, asked) == (['1', '2'], query)
