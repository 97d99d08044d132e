"""Bar charts side by side, as in figure 2 of the paper."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.training import plots


class Bar(NamedTuple):
  """What one model has in one panel.

  Attributes:
    mean: in percent, None where there is nothing to show yet.
    deviation: in percent, None of a single value.
    missing: what stands for the bar where there is none.
  """

  mean: float | None
  deviation: float | None = None
  missing: str = ''


# The title of a panel, and by the name of the model.
Panel = tuple[str, Mapping[str, Bar]]


def png(
  panels: Sequence[Panel],
  names: Sequence[str],
  hatched: Sequence[str],
  y_label: str,
) -> bytes:
  """Returns the picture of panels in up to five columns.

  The legend has `names` in their order; bars of those in `hatched` are.
  """
  # Here, because it is slow to import.
  from matplotlib.patches import Patch

  across = len(panels) if len(panels) < 5 else min(5, -(-len(panels) // 2))
  down = -(-len(panels) // across)
  styles = _styles(names, hatched)
  size = (max(9, across * max(2, 0.42 * len(names))), 1 + 3.2 * down)
  figure = plots.figure(*size)
  all_axes = figure.subplots(down, across, squeeze=False).ravel()
  for axes, (title, bars) in zip(all_axes, panels, strict=False):
    draw(axes, bars, styles)
    axes.set_title(title)
  for axes in all_axes[len(panels) :]:
    axes.set_axis_off()
  for axes in all_axes[::across]:
    axes.set_ylabel(y_label)
  handles = [Patch(label=name, **style) for name, style in styles.items()]
  plots.legend(figure, handles, 'lower center', min(4, across + 1))
  return plots.png(figure)


def draw(
  axes: Any,
  bars: Mapping[str, Bar],
  styles: Mapping[str, Mapping[str, Any]],
) -> None:
  """Draws a panel: a bar for each model, or why it has none."""
  lowest, highest = 100.0, 0.0
  for x, (name, bar) in enumerate(bars.items()):
    if bar.mean is None:
      # Not at a height, which would be read as a value.
      axes.annotate(
        bar.missing,
        (x, 0.03),
        xycoords=('data', 'axes fraction'),
        rotation=90,
        horizontalalignment='center',
      )
      continue
    deviation = bar.deviation or 0
    axes.bar(x, bar.mean, yerr=deviation or None, capsize=3, **styles[name])
    axes.annotate(
      f'{bar.mean:.1f}',
      (x, bar.mean + deviation),
      xytext=(0, 2),
      textcoords='offset points',
      horizontalalignment='center',
      fontsize='small',
    )
    lowest = min(lowest, bar.mean - deviation)
    highest = max(highest, bar.mean + deviation)
  # Published models differ by little: zero would hide it, as in figure 2.
  bottom = 5 * ((lowest - 4) // 5) if lowest > 50 else 0
  axes.set_ylim(bottom, bottom + 1.08 * (max(highest, bottom + 1) - bottom))
  axes.set_yticks([tick for tick in axes.get_yticks() if bottom <= tick <= 100])
  # Bars as wide as those of the panels beside.
  middle = (len(bars) - 1) / 2
  axes.set_xlim(middle - len(styles) / 2, middle + len(styles) / 2)
  axes.set_xticks([])
  plots.tidy(axes, 'y')


def _styles(
  names: Sequence[str], hatched: Sequence[str]
) -> dict[str, dict[str, Any]]:
  return {
    name: {
      'facecolor': plots.COLORS[i % len(plots.COLORS)],
      'edgecolor': 'white',
      'hatch': '//' if name in hatched else '',
    }
    for i, name in enumerate(names)
  }
