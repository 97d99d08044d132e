"""Shared style of plots: colours, frames, legends and PNG files."""

import io
import warnings
from typing import Any

# Okabe and Ito's palette for colour-blind readers. Grey replaces yellow, which
# is too pale for lines.
COLORS = (
  '#0072B2',
  '#D55E00',
  '#009E73',
  '#CC79A7',
  '#E69F00',
  '#56B4E9',
  '#000000',
  '#999999',
)
MARKERS = 'os^Dvp'


def style(i: int) -> dict[str, Any]:
  """Returns the colour and marker of curve i, as arguments of matplotlib."""
  return {
    'color': COLORS[i % len(COLORS)],
    'marker': MARKERS[i % len(MARKERS)],
  }


def figure(width: float, height: float) -> Any:
  """Returns an empty figure of a size in inches."""
  # Imported here, because the import is slow. pyplot would keep every figure in
  # memory and might need a display.
  from matplotlib.figure import Figure

  return Figure(figsize=(width, height), layout='constrained')


def tidy(axes: Any) -> None:
  """Gives axes faint grid lines in the background and an open frame."""
  axes.grid(alpha=0.3)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)


def accuracy_axes(drawn: Any, title: str, x_label: str, y_label: str) -> Any:
  """Adds axes whose y axis is in percent, under a title; returns the axes."""
  from matplotlib.ticker import PercentFormatter

  axes = drawn.subplots()
  axes.set_xlabel(x_label)
  axes.set_ylabel(y_label)
  axes.yaxis.set_major_formatter(PercentFormatter(1))
  # Paths may have dollar signs, which would start a formula.
  axes.set_title(title, fontsize='medium', parse_math=False, wrap=True)
  tidy(axes)
  return axes


def legend(drawn: Any, side: str, columns: int = 1) -> None:
  """Puts a legend outside the axes of a figure."""
  texts = drawn.legend(loc=f'outside {side}', ncols=columns, frameon=False)
  for text in texts.get_texts():
    text.set_parse_math(False)


def png(drawn: Any, dots_per_inch: int = 100) -> bytes:
  """Returns a figure as a PNG file."""
  from matplotlib.text import Text

  # File names may contain bytes that are not UTF-8 and cannot be drawn.
  for text in drawn.findobj(Text):
    shown = text.get_text().encode(errors='backslashreplace')
    text.set_text(shown.decode())
  file = io.BytesIO()
  with warnings.catch_warnings():
    # matplotlib warns about each glyph that the font lacks, and draws a box.
    warnings.filterwarnings('ignore', 'Glyph')
    drawn.savefig(
      file, format='png', dpi=dots_per_inch, metadata={'Software': None}
    )
  return file.getvalue()
