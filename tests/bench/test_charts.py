"""Pictures of benchmarks: which numbers are where."""

import io

import matplotlib.colors
import matplotlib.image
import pytest

from vit_jax.bench import charts
from vit_jax.bench.loop import Gap
from vit_jax.training import plots


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
      (224, 8, 30 + shift),
      (64, 1, 20 + shift),
      (64, 8, 90 + shift),
      (224, 1, 10 + shift),
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
  for i, container in enumerate((ours, theirs)):
    line = container.lines[0]
    assert plots.style(i) == {
      'color': line.get_color(),
      'marker': line.get_marker(),
    }
  (whiskers,) = ours.lines[2]
  assert whiskers.get_segments()[0][:, 1].tolist() == [89, 92]
  assert axes.get_xlabel() == 'image size in pixels'
  # Speeds are compared from 0 on, and sizes by their ratio.
  assert axes.get_ylim()[0] == 0
  assert [text.get_text() for text in axes.get_xticklabels()] == ['64', '224']
  assert axes.get_xscale() == 'log' and not axes.get_xticks(minor=True).size
  assert axes.xaxis.get_transform().base == 2
  assert axes.get_title() == 'b16, best batch size'
  assert 'slowest to fastest' in axes.get_ylabel()
  assert figures[0].get_suptitle() == 'inference: cpu'
  legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
  assert legend == ['ours', 'theirs']


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
  colours = [matplotlib.colors.to_hex(x.get_facecolor()) for x in axes.patches]
  assert colours == [colour.lower() for colour in plots.COLORS[:2]]
  # The picture is as high as it has bars, which do not touch one another.
  assert figures[0].get_size_inches().tolist() == [8, 2.4]
  heights = [bar.get_height() for bar in axes.patches]
  assert heights == pytest.approx([0.6, 0.6])
  assert [text.get_text() for text in axes.get_yticklabels()] == [
    'ours',
    'theirs',
  ]
  assert axes.get_title() == 'training, b16 at 224, batch 8: cpu'
  # The first is on top; a number stands beside its fastest round.
  bottom, top = axes.get_ylim()
  assert bottom > top and axes.get_xlim()[0] == 0
  assert [text.get_text() for text in axes.texts] == ['10', '10']
  assert [text.xy for text in axes.texts] == [(12, 0), (12, 1)]
  assert {
    (*x.get_position(), x.get_verticalalignment()) for x in axes.texts
  } == {(5, 0, 'center')}
  lines = [axis.get_gridlines()[0] for axis in (axes.xaxis, axes.yaxis)]
  assert [line.get_visible() for line in lines] == [True, False]
  whiskers = [c.lines[2][0] for c in axes.containers if hasattr(c, 'has_xerr')]
  assert [w.get_segments()[0][:, 0].tolist() for w in whiskers] == 2 * [[9, 12]]
  assert axes.get_xlabel() == (
    'images/s, more is better (lines: slowest to fastest round)'
  )


def test_bars_of_seconds_have_their_fastest_round_left(figures):
  row = {'contender': 'a', 'seconds': 3.0, 'fastest': 2.0, 'slowest': 7.0}
  charts.bars([row], 'fits', column='seconds', x_label='seconds')
  (axes,) = figures[0].axes
  (bar,) = (c for c in axes.containers if hasattr(c, 'has_xerr'))
  assert bar.lines[2][0].get_segments()[0][:, 0].tolist() == [2, 7]
  assert axes.texts[0].xy == (7, 0) and axes.patches[0].get_width() == 3


def test_panels_have_one_size_and_more_room_alone():
  made = [charts._figure(count) for count in (1, 2, 4)]
  assert [len(panels) for _, panels in made] == [1, 2, 4]
  one, two, four = (figure.get_size_inches() for figure, _ in made)
  assert four.tolist() == [2 * two[0], two[1]]
  assert one[0] > two[0] / 2 and one[1] == two[1]


def test_a_single_size_stands_in_the_middle(figures):
  rows = [rate('b16', 64, batch, 'ours', 1.0) for batch in (1, 2)]
  charts.rates([*rows, rate('s16', 64, 8, 'ours', 1.0)], 'training')
  left, right = figures[0].axes
  assert right.get_xlim() == pytest.approx((8 / 1.5, 8 * 1.5))
  assert [text.get_text() for text in left.get_xticklabels()] == ['1', '2']


def test_figure_12_has_speed_left_and_batches_right(figures):
  rows = [
    fitting('r50x1', 64, 'inference', 0),
    fitting('b16', 224, 'inference', 100, images_per_s=50.0),
    fitting('b16', 64, 'inference', 900, images_per_s=70.0),
    fitting('b16', 224, 'training', 10, images_per_s=20.0),
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
  (legend,) = figures[0].legends
  labels = [text.get_text() for text in legend.get_texts()]
  assert labels == ['r50x1', 'b16', 'inference', 'training']
  modes = legend.legend_handles[2:]
  assert [mode.get_linestyle() for mode in modes] == ['-', '--']
  assert [mode.get_markerfacecolor() for mode in modes] == ['#444444', 'white']
  assert figures[0].get_size_inches().tolist() == [12, 5]
  # Also where a model before it in the legend is not drawn.
  colour = legend.legend_handles[1].get_color()
  for axes in (left, right):
    drawn_in = {x.get_color() for x in axes.lines if len(x.get_xdata())}
    assert drawn_in == {colour}
  assert figures[0].get_suptitle() == 'TPU v3, 16 GiB, bfloat16'
  # A colour is a model, a marker its family.
  styles = charts._model_styles(
    [fitting(name, 64, 'training', 1) for name in ('b16', 'r50x1', 's16')]
  )
  markers = [style['marker'] for style in styles.values()]
  assert markers[0] == markers[2] != markers[1]
  assert len({style['color'] for style in styles.values()}) == 3
  for axes in (left, right):
    assert axes.get_yscale() == 'log'
    assert {20, 50} <= {*axes.get_yticks()}


def test_without_estimates_there_is_one_panel(figures):
  assert is_picture(charts.figure_12([fitting('b16', 64, 'training', 10)]))
  (axes,) = figures[0].axes
  assert axes.get_title() == 'Largest batch that fits'
  # Nor does a legend tell modes apart where there is one.
  texts = figures[0].legends[0].get_texts()
  assert [text.get_text() for text in texts] == ['b16']


def test_over_many_sizes_the_axis_has_powers_of_ten(figures):
  rows = [
    fitting('b16', size, 'training', batch)
    for size, batch in ((64, 20_000), (224, 3))
  ]
  charts.figure_12(rows)
  ticks = {*figures[0].axes[0].get_yticks()}
  assert {10, 1000} <= ticks and not {20, 50, 2000} & ticks


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
  assert above.get_xlim() == (0, 10)
  # The gaps have the colours of their sums, and saving a marker that shows.
  _, _, *colours = (
    matplotlib.colors.to_hex(x.get_facecolor()) for x in above.patches
  )
  drawn = [(x.get_color().lower(), x.get_marker()) for x in below.lines]
  assert drawn == [*zip(colours, 's.', strict=True)]
  assert {line.get_linestyle() for line in below.lines} == {'None'}
  assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [
    'steps 6.00 s',
    'evaluating 3.00 s',
    'saving 0.75 s',
    'idle 0.25 s',
  ]
  assert figures[0].get_suptitle() == 'digits: cpu'
  # All steps and a little more, and what is below a millisecond.
  assert below.get_xlim() == pytest.approx((0, 9 * 1.02 + 1))
  assert (below.get_legend() is not None) == bool(gaps)
  if gaps:
    assert below.get_ylim()[0] == 1
    shorter = [gap._replace(seconds=gap.seconds / 100) for gap in gaps]
    charts.loop(row, shorter)
    assert figures[1].axes[1].get_ylim()[0] == pytest.approx(0.02)
  drawn = points(below)
  if gaps:
    assert drawn == {'saving: 1 gaps': [(3, 200)], 'idle: 1 gaps': [(5, 4)]}
  else:
    assert drawn == {'saving: 0 gaps': [], 'idle: 0 gaps': []}
