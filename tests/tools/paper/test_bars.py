"""Bars, their labels and where the axis begins."""

import io

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from vit_jax.tools.paper import bars
from vit_jax.tools.paper.bars import Bar


def draw(*found):
  axes = Figure().subplots()
  named = {f'model {i}': bar for i, bar in enumerate(found)}
  bars.draw(axes, named, bars._styles(list(named), ['model 1']))
  return axes


def test_a_bar_has_its_height_deviation_and_label():
  axes = draw(Bar(80.0, 2.0), Bar(90.04))
  assert [p.get_height() for p in axes.patches] == [80, 90.04]
  assert [p.get_hatch() for p in axes.patches] == ['', '//']
  assert [t.get_text() for t in axes.texts] == ['80.0', '90.0']
  # Above the deviation.
  assert axes.texts[0].xy == (0, 82)
  (container,) = [c for c in axes.containers if hasattr(c, 'has_yerr')]
  low, high = container.lines[2][0].get_segments()[0][:, 1]
  assert (low, high) == (78, 82)
  # The axis begins below the deviation, too.
  assert axes.get_ylim()[0] == 70


def test_what_is_missing_is_said_and_has_no_bar():
  axes = draw(Bar(None, missing='3 of 8 tasks'), Bar(70.0))
  assert [t.get_text() for t in axes.texts] == ['3 of 8 tasks', '70.0']
  assert len(axes.patches) == 1
  assert axes.patches[0].get_x() + axes.patches[0].get_width() / 2 == 1


@pytest.mark.parametrize(
  ('means', 'bottom'),
  [((88.0, 91.0), 80), ((57.5, 65.0), 50), ((45.0, 90.0), 0), ((10.0,), 0)],
)
def test_the_axis_begins_below_all_bars_and_ends_at_100(means, bottom):
  axes = draw(*(Bar(mean) for mean in means))
  low, high = axes.get_ylim()
  assert low == bottom
  assert high > max(means)
  full = draw(Bar(99.9), Bar(98.0))
  assert max(full.get_yticks()) <= 100
  assert min(full.get_yticks()) >= 90


def test_no_bars_at_all_is_no_error():
  draw(Bar(None, missing='pending'))


@pytest.mark.parametrize(
  ('n', 'names', 'across', 'down', 'inches'),
  [
    (1, 'ab', 1, 1, 9),
    (4, 'ab', 4, 1, 9),
    (5, 'abcdefghij', 3, 2, 3 * 4.2),
    (7, 'ab', 4, 2, 9),
    (12, 'ab', 5, 3, 10),
  ],
)
def test_a_picture_of_any_number_of_panels(
  figures, n, names, across, down, inches
):
  panels = [
    (f'panel {i}', {'a': Bar(60.0 + i), 'b': Bar(70.0)}) for i in range(n)
  ]
  png = bars.png(panels, [*names], ['b'], 'accuracy in percent')
  picture = matplotlib.image.imread(io.BytesIO(png))
  assert picture.shape[0] == pytest.approx(100 * (1 + 3.2 * down), abs=1)
  assert picture.shape[1] == pytest.approx(100 * inches, abs=1)
  assert picture.std() > 0
  (figure,) = figures
  shown = [axes for axes in figure.axes if axes.axison]
  assert len(figure.axes) == across * down
  assert [axes.get_title() for axes in shown] == [title for title, _ in panels]
  assert [i for i, axes in enumerate(shown) if axes.get_ylabel()] == [
    *range(0, n, across)
  ]
  labels = [text.get_text() for text in figure.legends[0].get_texts()]
  assert labels == [*names]


def test_bars_are_as_wide_as_those_of_the_panels_beside():
  """Of three models a panel has two: they stand in the middle."""
  axes = Figure().subplots()
  named = {'a': Bar(40.0, 5.0), 'b': Bar(30.0)}
  bars.draw(axes, named, bars._styles(['a', 'b', 'c'], []))
  assert axes.get_xlim() == (-1, 2)
  # Zero shows, and there is room for the label of what reaches highest.
  low, high = axes.get_ylim()
  assert low == 0 and high >= 1.08 * 45
  assert not axes.get_xticks().size


def test_colours_of_bars_come_again():
  styles = bars._styles([str(i) for i in range(9)], ['3'])
  colours = [style['facecolor'] for style in styles.values()]
  assert len(set(colours)) == 8 and colours[8] == colours[0]
  assert [n for n, style in styles.items() if style['hatch']] == ['3']
