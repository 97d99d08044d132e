"""Bars, their labels and where the axis begins."""

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
  ('means', 'bottom'), [((88.0, 91.0), 80), ((45.0, 90.0), 0), ((10.0,), 0)]
)
def test_the_axis_begins_below_all_bars_and_ends_at_100(means, bottom):
  axes = draw(*(Bar(mean) for mean in means))
  low, high = axes.get_ylim()
  assert low == bottom
  assert high > max(means)
  full = draw(Bar(99.9), Bar(98.0))
  assert max(full.get_yticks()) <= 100
  assert min(full.get_yticks()) >= 90
