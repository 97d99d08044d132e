"""Figures as files."""

import io

from matplotlib.figure import Figure
from PIL import Image

from vit_jax.training import plots


def test_a_picture_has_as_many_pixels_as_were_asked_for():
  """Inches times dots per inch; and no version of matplotlib in the file."""
  data = plots.png(plots.figure(2, 3), **{'dots_per_inch': 110})
  with Image.open(io.BytesIO(data)) as image:
    assert (image.format, image.size) == ('PNG', (220, 330))
    assert 'Software' not in image.info


def test_grid_lines_are_faint_and_the_frame_is_open():
  axes = Figure().subplots()
  plots.tidy(axes)
  for axis in (axes.xaxis, axes.yaxis):
    (line, *_) = axis.get_gridlines()
    assert line.get_visible() and line.get_alpha() < 0.5
  # Behind what is drawn, and not before it.
  assert axes.get_axisbelow() is True
  shown = {name for name, spine in axes.spines.items() if spine.get_visible()}
  assert shown == {'left', 'bottom'}


def test_a_legend_lies_outside_in_as_many_columns_as_are_asked_for():
  drawn = plots.figure(4, 3)
  axes = drawn.subplots()
  for i in range(4):
    axes.plot([0, 1], [0, i], label=f'{i}', **plots.style(i))
  for columns in ({}, {'columns': 3}):
    plots.legend(drawn, 'lower center', **columns)
    (made,) = drawn.legends
    drawn.draw_without_rendering()
    assert [text.get_text() for text in made.get_texts()] == list('0123')
    assert [line.get_marker() for line in made.get_lines()] == list('os^D')
    assert made._ncols == columns.get('columns', 1)
    assert not made.get_frame_on()
    top = drawn.axes[0].get_tightbbox().y0
    assert made.get_window_extent().y1 <= top
    made.remove()


def test_bytes_of_names_that_are_no_text_are_escaped():
  """`os.fsdecode` gives them so, and matplotlib ends in a TypeError."""
  figure = plots.figure(2, 2)
  axes = figure.subplots()
  axes.plot([0, 1], label='a\udcff')
  axes.set_title('é\n\udc80')
  said = [axes.title, *axes.legend().get_texts()]
  assert plots.png(figure)
  assert [text.get_text() for text in said] == ['é\n\\udc80', 'a\\udcff']


def test_letters_that_the_font_lacks_are_no_warnings():
  figure = plots.figure(2, 2)
  figure.subplots().set_xticks([0], ['猫'])
  assert plots.png(figure)
