"""Maps over photographs, and which pixels stay."""

import numpy as np
import pytest

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


def test_exactly_a_share_of_the_pixels_is_highest():
  rng = np.random.default_rng(0)
  values = rng.random((9, 11))
  found = draw.highest(values, 0.3)
  assert found.sum() == 30
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


def test_an_overlay_brightens_with_the_map():
  image = np.full((4, 4, 3), 100, np.uint8)
  map_hw = np.linspace(0, 1, 16).reshape(4, 4)
  brightness = draw.overlay(image, map_hw).astype(float).sum(-1).ravel()
  assert np.all(np.diff(brightness) > 0)


def test_a_file_has_the_pixels():
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (5, 7, 3), np.uint8)
  np.testing.assert_array_equal(draw.pixels(draw.png(image)), image)


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
  draw.heads(image, maps_XNhw, query)
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
  assert labels(axes.get_yticklabels()) == ['1', '2', '3']
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


def test_distances_are_points_over_their_layers(drawn):
  want_XN = np.array([[1.0, 2, 3], [5, 4, 60]])
  draw.distances(want_XN, 2.5)
  (axes,) = drawn[0].axes
  (points,) = axes.collections
  layer, head = np.indices(want_XN.shape).reshape(2, -1)
  at = np.stack([layer + 1, want_XN.ravel()], -1)
  np.testing.assert_array_equal(points.get_offsets(), at)
  np.testing.assert_array_equal(points.get_array(), head)
  (line,) = axes.lines
  assert set(line.get_ydata()) == {2.5}
  said = labels(axes.get_legend().get_texts())
  assert said == ['a head', 'uniform attention']
  assert all(float(x).is_integer() for x in axes.get_xticks())
  # From 0, with some room above.
  assert axes.get_ylim() == (0, pytest.approx(1.08 * 60))


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


def test_similarities_are_tiles_where_their_patches_are(drawn):
  h, w = 2, 23
  cosines = np.random.default_rng(0).uniform(-1, 1, (2, h, w, h, w))
  draw.similarities(cosines)
  axes, other, bar = drawn[0].axes
  tiles = axes.images[0].get_array()
  assert axes.images[0].get_clim() == (-1, 1)
  for y, x in np.ndindex(h, w):
    tile = tiles[3 * y : 3 * y + 2, 24 * x : 24 * x + 23]
    np.testing.assert_array_equal(tile, cosines[0, y, x])
  # At most ten are numbered, from 1, each at the middle of its tile.
  columns = np.arange(1, 24, 3)
  assert labels(axes.get_xticklabels()) == [*map(str, columns)]
  np.testing.assert_allclose(axes.get_xticks(), 24 * (columns - 1) + 11)
  assert labels(axes.get_yticklabels()) == ['1', '2']
  np.testing.assert_allclose(axes.get_yticks(), [0.5, 3.5])
  assert (axes.get_xlabel(), axes.get_ylabel()) == (
    *('patch column', 'patch row'),
  )
  assert (axes.get_title(), other.get_title()) == ('layer 1', 'layer 2')
  assert bar.get_ylabel() == 'cosine similarity'
