"""Pictures of benchmarks: which numbers are where."""

import io

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from vit_jax.bench import charts
from vit_jax.bench.loop import Gap


def rate(variant, image_size, batch_size, contender, value):
  return {
    'device': 'cpu',
    'variant': variant,
    'image_size': image_size,
    'batch_size': batch_size,
    'contender': contender,
    'images_per_s': value,
    'slowest': value - 1,
    'fastest': value + 2,
  }


def fitting(variant, image_size, mode, batch_size, **speed):
  return {
    'device': 'TPU v3',
    'dtype': 'bfloat16',
    'limit_gib': 16.0,
    'variant': variant,
    'image_size': image_size,
    'mode': mode,
    'batch_size': batch_size,
  } | speed


@pytest.fixture
def figures(monkeypatch):
  """Gives the figures that are drawn, in a list."""
  found = []
  savefig = Figure.savefig

  def noting(self, *args, **kwargs):
    found.append(self)
    savefig(self, *args, **kwargs)

  monkeypatch.setattr(Figure, 'savefig', noting)
  return found


def points(axes):
  return {
    line.get_label(): list(zip(*line.get_data(), strict=True))
    for line in axes.lines
  }


def is_picture(png):
  return matplotlib.image.imread(io.BytesIO(png)).std() > 0.05


def test_rates_over_image_sizes_are_those_of_the_best_batch(figures):
  rows = [
    rate('b16', size, batch, name, value)
    for name, shift in (('ours', 0), ('theirs', 5))
    for size, batch, value in (
      (224, 1, 10 + shift),
      (64, 1, 20 + shift),
      (64, 8, 90 + shift),
      (224, 8, 30 + shift),
    )
  ]
  assert is_picture(charts.rates(rows, 'inference'))
  (axes,) = figures[0].axes
  ours, theirs = axes.containers
  assert list(zip(*ours.lines[0].get_data(), strict=True)) == [
    (64, 90),
    (224, 30),
  ]
  assert list(theirs.lines[0].get_ydata()) == [95, 35]
  (whiskers,) = ours.lines[2]
  assert whiskers.get_segments()[0][:, 1].tolist() == [89, 92]
  assert axes.get_xlabel() == 'image size in pixels'


def test_rates_over_batch_sizes_have_a_panel_a_model(figures):
  rows = [
    rate(variant, 224, batch, 'ours', 10.0 * batch)
    for variant in ('ti16', 'b16')
    for batch in (4, 2)
  ]
  assert is_picture(charts.rates(rows, 'training'))
  titles = [axes.get_title() for axes in figures[0].axes]
  assert titles == ['ti16 at 224 pixels', 'b16 at 224 pixels']
  for axes in figures[0].axes:
    assert list(axes.containers[0].lines[0].get_xdata()) == [2, 4]
    assert axes.get_xlabel() == 'images in a batch'


def test_a_single_place_has_bars(figures):
  rows = [rate('b16', 224, 8, name, 10.0) for name in ('ours', 'theirs')]
  assert is_picture(charts.rates(rows, 'training'))
  (axes,) = figures[0].axes
  assert [bar.get_width() for bar in axes.patches] == [10, 10]
  assert [text.get_text() for text in axes.get_yticklabels()] == [
    'ours',
    'theirs',
  ]
  assert axes.get_title() == 'training, b16 at 224, batch 8: cpu'


def test_figure_12_has_speed_left_and_batches_right(figures):
  rows = [
    fitting('b16', 224, 'inference', 100, images_per_s=50.0),
    fitting('b16', 64, 'inference', 900, images_per_s=70.0),
    fitting('b16', 224, 'training', 10, images_per_s=20.0),
    fitting('r50x1', 64, 'inference', 0),
  ]
  assert is_picture(charts.figure_12(rows))
  left, right = figures[0].axes

  def drawn(axes):
    return [
      (line.get_linestyle(), list(line.get_xdata()), list(line.get_ydata()))
      for line in axes.lines
      if len(line.get_xdata())
    ]

  assert drawn(left) == [('-', [64, 224], [70, 50]), ('--', [224], [20])]
  assert drawn(right) == [('-', [64, 224], [900, 100]), ('--', [224], [10])]
  filled = [
    line.get_markerfacecolor() == line.get_color()
    for line in left.lines
    if len(line.get_xdata())
  ]
  assert filled == [True, False]
  labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
  assert labels == ['b16', 'r50x1', 'inference', 'training']


def test_without_estimates_there_is_one_panel(figures):
  assert is_picture(charts.figure_12([fitting('b16', 64, 'training', 10)]))
  (axes,) = figures[0].axes
  assert axes.get_title() == 'Largest batch that fits'


@pytest.mark.parametrize(
  'gaps', [[], [Gap(3, 0.2, True, 0), Gap(5, 0.004, False, 0)]]
)
def test_a_run(figures, gaps):
  row = {
    'config': 'digits',
    'device': 'cpu',
    'steps': 9,
    'total_s': 10.0,
    'steps_s': 6.0,
    'evaluating_s': 3.0,
    'saving_s': 0.75,
    'idle_s': 0.25,
  }
  assert is_picture(charts.loop(row, gaps))
  above, below = figures[0].axes
  assert [bar.get_x() for bar in above.patches] == [0, 6, 9, 9.75]
  drawn = points(below)
  if gaps:
    assert drawn == {'saving: 1 gaps': [(3, 200)], 'idle: 1 gaps': [(5, 4)]}
  else:
    assert drawn == {'saving: 0 gaps': [], 'idle: 0 gaps': []}
