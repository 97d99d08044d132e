"""Maps over photographs, and which pixels stay."""

import matplotlib
import numpy as np
import pytest
from PIL import Image

from vit_jax.training import plots
from vit_jax.visualize import draw


@pytest.fixture
def drawn(monkeypatch):
  """Collects figures in place of their files."""
  figures = []

  def keep(figure, dots_per_inch):
    assert dots_per_inch == 110  # or letters of one size would differ
    figures.append(figure)
    return b'PNG'

  monkeypatch.setattr(plots, 'png', keep)
  return figures


def labels(ticks):
  return [text.get_text() for text in ticks]


@pytest.mark.parametrize('share', [0.0, 0.3, 0.5, 1.0])
def test_exactly_a_share_of_the_pixels_is_highest(share):
  rng = np.random.default_rng(0)
  values = rng.random((9, 11))
  found = draw.highest(values, share)
  assert found.sum() == round(share * 99)
  if 0 < share < 1:
    assert values[found].min() > values[~found].max()


def test_a_map_is_enlarged_about_the_centres_of_patches():
  map_hw = np.zeros((3, 4))
  map_hw[1, 2] = 1
  large = draw.enlarge(map_hw, (30, 40))
  assert large.shape == (30, 40)
  # The centre of the patch lies between pixels 14 and 15, 24 and 25.
  np.testing.assert_allclose(large[14:16, 24:26], 0.95**2, rtol=1e-5)
  # Half of the way to the next patch, along the row through the centre.
  np.testing.assert_allclose(large[14, [19, 20]].mean(), 0.5 * 0.95, rtol=1e-5)
  np.testing.assert_array_equal(large[:5], 0)


def test_masked_keeps_pixels_and_grays_the_others():
  rng = np.random.default_rng(0)
  image = rng.integers(0, 100, (8, 8, 3), np.uint8)
  map_hw = np.zeros((2, 2))
  map_hw[:, 0] = 1
  masked = draw.masked(image, map_hw)
  np.testing.assert_array_equal(masked[:, :4], image[:, :4])
  np.testing.assert_array_equal(masked[:, 4:], 128)


def test_overlay_and_heat_brighten_with_the_map():
  image = np.full((4, 4, 3), 100, np.uint8)
  map_hw = np.linspace(0, 1, 16).reshape(4, 4)
  for kind in (draw.overlay, draw.heat):
    brightness = kind(image, map_hw).astype(float).sum(-1).ravel()
    assert np.all(np.diff(brightness) > 0)


def test_a_file_has_the_pixels():
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (5, 7, 3), np.uint8)
  np.testing.assert_array_equal(draw.pixels(draw.png(image)), image)


def test_heat_has_the_colours_of_the_map_and_overlay_more_of_them_than_gray():
  image = np.zeros((4, 6, 3), np.uint8)
  image[:] = 50, 100, 150
  map_hw = np.full((2, 3), 0.4)
  colour = np.round(255 * np.array(matplotlib.colormaps['inferno'](0.4)[:3]))
  heat = draw.heat(image, map_hw)
  assert heat.shape == (4, 6, 3) and heat.dtype == np.uint8
  np.testing.assert_allclose(heat, np.broadcast_to(colour, heat.shape), atol=1)
  gray = np.asarray(Image.fromarray(image).convert('L'))[..., None]
  overlay = draw.overlay(image, map_hw)
  assert overlay.dtype == np.uint8
  np.testing.assert_allclose(overlay, 0.45 * gray + 0.55 * heat, atol=1.5)


def test_of_equal_values_the_first_stay():
  values = np.random.default_rng(0).integers(0, 3, (9, 11))
  found = draw.highest(values, 0.5)
  # Python sorts stably; half of 99 is rounded to 50.
  first = sorted(range(99), key=lambda i: -values.flat[i])[:50]
  np.testing.assert_array_equal(np.flatnonzero(found), sorted(first))


def test_a_sheet_has_names_at_the_left_and_titles_above(drawn):
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (3, 2, 4, 5, 3), np.uint8)
  rows = [{'$a$': x, 'b': y} for x, y in images]
  assert draw.sheet(rows, ['_1', '$2', '3']) == b'PNG'
  (figure,) = drawn
  panels = np.reshape(figure.axes, (3, 2))
  for (y, x), axes in np.ndenumerate(panels):
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), images[y, x])
    assert axes.get_title() == (['$a$', 'b'][x] if y == 0 else '')
    assert axes.get_ylabel() == (['_1', '$2', '3'][y] if x == 0 else '')
    assert not [*axes.get_xticks(), *axes.get_yticks()]
    assert not any(spine.get_visible() for spine in axes.spines.values())
    # Names of files are no formulas.
    for label in (axes.title, axes.yaxis.label):
      assert not label.get_text() or not label.get_parse_math()


@pytest.mark.parametrize('query', [None, (1, 0)])
def test_heads_are_tiles_each_with_its_own_scale(query, drawn):
  rng = np.random.default_rng(0)
  maps_XNhw = rng.random((3, 4, 2, 5)) * np.arange(12).reshape(3, 4, 1, 1)
  image = rng.integers(0, 256, (20, 40, 3), np.uint8)
  draw.heads(image, maps_XNhw, ['1', '2', '2b'], query)
  (figure,) = drawn
  photograph, axes = figure.axes
  np.testing.assert_array_equal(photograph.images[0].get_array(), image)
  assert not photograph.axison
  tiles = axes.images[0].get_array()
  assert axes.images[0].get_clim() == (0, 1)
  assert tiles.shape == (3 * 2 + 2, 4 * 5 + 3)
  for (x, n), largest in np.ndenumerate(maps_XNhw.max((2, 3))):
    tile = tiles[3 * x : 3 * x + 2, 6 * n : 6 * n + 5]
    # The first is 0 everywhere.
    np.testing.assert_allclose(tile, maps_XNhw[x, n] / (largest or 1))
  assert tiles.mask[2::3].all() and tiles.mask[:, 5::6].all()  # lines
  np.testing.assert_allclose(axes.get_xticks(), [2, 8, 14, 20])
  np.testing.assert_allclose(axes.get_yticks(), [0.5, 3.5, 6.5])
  assert labels(axes.get_xticklabels()) == ['1', '2', '3', '4']
  assert labels(axes.get_yticklabels()) == ['1', '2', '2b']
  assert (axes.get_xlabel(), axes.get_ylabel()) == ('head', 'layer')
  assert len(photograph.patches) == (2 if query else 0)
  for frame in photograph.patches:  # around the patch, pixels' edges at halves
    assert not frame.get_fill()
    box = (*frame.get_xy(), frame.get_width(), frame.get_height())
    np.testing.assert_allclose(box, (-0.5, 9.5, 8, 10))
  if query:  # seen on bright pixels and on dark ones
    below, above = photograph.patches
    assert below.get_linewidth() > above.get_linewidth() > 1
    below, above = (np.mean(x.get_edgecolor()[:3]) for x in (below, above))
    assert below < 0.1 and above > 0.4


def test_pictures_grow_by_what_is_in_them(drawn):
  """So that all panels of a kind have one size and shape."""
  image = np.zeros((8, 8, 3), np.uint8)
  for Y, X in ((1, 1), (4, 3)):
    draw.sheet([{f'{x}': image for x in range(X)}] * Y, [''] * Y)
  for X, N, h, w in ((10, 2, 4, 2), (15, 7, 4, 2), (1, 2, 4, 2)):
    draw.heads(image, np.ones((X, N, h, w)), ['x'] * X, None)
  for X in (7, 21):
    draw.filters(np.ones((X, 2, 2, 3)))
  for X in (1, 2):
    draw.distances([(f'{i}', {'all': np.ones((2, 2))}, 0) for i in range(X)])
  for X in (1, 8):
    draw.similarities({f'{i}': np.eye(5) for i in range(X)})
  sizes = np.array([figure.get_size_inches() for figure in drawn])
  # Three rows more and two columns, of panels that are square.
  width, height = sizes[1] - sizes[0]
  assert width > 0 and height / width == pytest.approx(3 / 2)
  # Five layers and heads more, of maps that are twice as high as wide.
  width, height = sizes[3] - sizes[2]
  assert width > 0 and height / width == pytest.approx(2)
  # The photograph takes room beside them, however few they are.
  assert sizes[4][0] == sizes[2][0] and sizes[4][1] > sizes[4][0] / 2
  np.testing.assert_allclose(sizes[5], sizes[6] / [1, 3])
  assert sizes[5][0] / sizes[5][1] == pytest.approx(7)
  few, many = (
    drawn[i].axes[0].get_gridspec().get_width_ratios() for i in (2, 3)
  )
  assert many[1] / many[0] == pytest.approx(7 / 2 * few[1] / few[0])
  # Panels are square: two beside one another, and two rows of four.
  width, height = sizes[8] - sizes[7]
  assert (width, height) == (pytest.approx(sizes[7][1]), 0)
  one, many = sizes[9:]
  assert one[0] - one[1] == pytest.approx(many[0] - 2 * many[1])
  assert 0 < one[0] - one[1] < 1 < many[1] / 2 < one[1]


def test_distances_are_points_over_their_layers(drawn):
  all_XN = np.array([[1.0, 2, 3], [5, 4, 6]])
  row_XN, column_XN = all_XN[:, :2], 10 * all_XN[:, 1:]
  draw.distances(
    [
      ('$', {'all': all_XN}, 2.5),
      ('2', {'row': row_XN, 'column': column_XN}, 0),
    ]
  )
  (figure,) = drawn
  one, two = figure.axes
  for axes, found in ((one, [all_XN]), (two, [row_XN, column_XN])):
    for points, want_XN in zip(axes.collections, found, strict=True):
      layer, head = np.indices(want_XN.shape).reshape(2, -1)
      at = np.stack([layer + 1, want_XN.ravel()], -1)
      np.testing.assert_array_equal(points.get_offsets(), at)
      np.testing.assert_array_equal(points.get_array(), head)
    assert axes.get_xlabel() == 'layer'
    assert all(float(x).is_integer() for x in axes.get_xticks())
  assert (one.get_title(), two.get_title()) == ('$', '2')
  assert not one.title.get_parse_math()
  (line,) = one.lines
  assert set(line.get_ydata()) == {2.5} and not two.lines
  said = [labels(axes.get_legend().get_texts()) for axes in (one, two)]
  assert said == [
    ['a head', 'all patches alike'],
    ['a head along each row', 'a head along each column'],
  ]
  # One scale for both, from 0, with some room above.
  assert one.get_ylim() == two.get_ylim() == (0, pytest.approx(1.08 * 60))
  assert one.get_ylabel().endswith('(pixels)') and not two.get_ylabel()


def test_filters_are_gray_where_they_are_0(drawn):
  rng = np.random.default_rng(0)
  components = rng.standard_normal((9, 2, 3, 3))
  components[4] = 0
  draw.filters(components)
  (figure,) = drawn
  (axes,) = figure.axes
  assert not axes.axison
  tiles = axes.images[0].get_array()
  assert tiles.shape == (2 * 2 + 1, 7 * 3 + 6, 3)
  for i in range(14):
    y, x = divmod(i, 7)
    tile = tiles[3 * y : 3 * y + 2, 4 * x : 4 * x + 3]
    want = 1.0  # the paper
    if i < 9:
      largest = abs(components[i]).max() or 1
      want = (components[i] / largest + 1) / 2
    np.testing.assert_allclose(tile, np.broadcast_to(want, tile.shape))
  np.testing.assert_array_equal(tiles[2], 1)


def test_few_filters_are_in_one_row(drawn):
  draw.filters(np.ones((3, 2, 2, 3)))
  (axes,) = drawn[0].axes
  assert axes.images[0].get_array().shape == (2, 3 * 2 + 2, 3)


def test_similarities_are_tiles_where_their_patches_are(drawn):
  h, w = 2, 23
  cosines = np.random.default_rng(0).uniform(-1, 1, (h, w, h, w))
  draw.similarities({'layer 1': cosines})
  axes, bar = drawn[0].axes
  tiles = axes.images[0].get_array()
  assert axes.images[0].get_clim() == (-1, 1)
  for y, x in np.ndindex(h, w):
    tile = tiles[3 * y : 3 * y + 2, 24 * x : 24 * x + 23]
    np.testing.assert_array_equal(tile, cosines[y, x])
  # At most ten are numbered, from 1, each at the middle of its tile.
  columns = np.arange(1, 24, 3)
  assert labels(axes.get_xticklabels()) == [*map(str, columns)]
  np.testing.assert_allclose(axes.get_xticks(), 24 * (columns - 1) + 11)
  assert labels(axes.get_yticklabels()) == ['1', '2']
  np.testing.assert_allclose(axes.get_yticks(), [0.5, 3.5])
  assert (axes.get_xlabel(), axes.get_ylabel()) == (
    *('patch column', 'patch row'),
  )
  assert axes.get_title() == 'layer 1'
  assert bar.get_ylabel() == 'cosine similarity'


def test_similarities_of_offsets_are_around_0(drawn):
  tables = {f'{i}': np.eye(5) * i / 9 for i in range(5)}
  draw.similarities(tables)
  (figure,) = drawn
  *panels, _ = figure.axes
  assert len(panels) == 8 and panels[0].get_gridspec().ncols == 4
  for axes, (name, x) in zip(panels, tables.items(), strict=False):
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), x)
    assert image.get_extent() == [-2.5, 2.5, 2.5, -2.5]
    assert image.get_clim() == (-1, 1)
    assert axes.get_title() == name
    assert axes.get_xlabel() == axes.get_ylabel() == 'offset'
  assert [axes.axison for axes in panels] == [True] * 5 + [False] * 3
