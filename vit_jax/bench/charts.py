"""Pictures of benchmarks as PNG; figure 12 of the paper is one of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.models import variants
from vit_jax.paper import scaling
from vit_jax.training import plots

Row = Mapping[str, Any]


def rates(rows: Sequence[Row], title: str) -> bytes:
  """Draws images/s of races: a panel for each model, a line for each contender.

  Over the image size where there are several, of the best batch size each, as
  figure 12 does; else over the batch size. At a single place there are bars.

  Args:
    rows: with `variant`, `image_size`, `batch_size`, `contender`,
      `images_per_s`, `slowest` and `fastest`.
    title: above all.
  """
  first = rows[0]
  place = ('variant', 'image_size', 'batch_size')
  if len({tuple(row[name] for name in place) for row in rows}) == 1:
    where = f'{first["variant"]} at {first["image_size"]}'
    where += f', batch {first["batch_size"]}: {first["device"]}'
    return bars(rows, f'{title}, {where}')
  several_sizes = len({row['image_size'] for row in rows}) > 1
  axis = 'image_size' if several_sizes else 'batch_size'
  models = list(dict.fromkeys(row['variant'] for row in rows))
  names = list(dict.fromkeys(row['contender'] for row in rows))
  figure, panels = _figure(len(models))
  for axes, model in zip(panels, models, strict=True):
    of_model = [row for row in rows if row['variant'] == model]
    for i, name in enumerate(names):
      members = [row for row in of_model if row['contender'] == name]
      members.sort(key=lambda row: (row[axis], row['images_per_s']))
      best = {row[axis]: row for row in members}  # the last of each place
      axes.errorbar(
        list(best),
        [row['images_per_s'] for row in best.values()],
        yerr=[
          [row['images_per_s'] - row['slowest'] for row in best.values()],
          [row['fastest'] - row['images_per_s'] for row in best.values()],
        ],
        capsize=3,
        label=name,
        **plots.style(i),
      )
    at = f' at {first["image_size"]} pixels'
    axes.set_title(model + (', best batch size' if several_sizes else at))
    _x_axis(axes, {row[axis] for row in of_model}, axis)
    axes.set_ylim(bottom=0)
    plots.tidy(axes)
  panels[0].set_ylabel('images/s (bars: slowest to fastest round)')
  figure.suptitle(f'{title}: {first["device"]}')
  handles, _ = panels[0].get_legend_handles_labels()
  plots.legend(figure, handles, 'lower center', columns=2)
  return plots.png(figure)


def bars(
  rows: Sequence[Row],
  title: str,
  column: str = 'images_per_s',
  x_label: str = 'images/s, more is better',
) -> bytes:
  """Draws a bar for each contender, with its slowest and fastest round.

  Args:
    rows: with `contender`, the column, `slowest` and `fastest`.
    title: above it.
    column: what is shown.
    x_label: of the axis.
  """
  figure, (axes,) = _figure(1, height=1.4 + 0.5 * len(rows), width=8)
  for y, row in enumerate(rows):
    value = row[column]
    low, high = sorted((row['slowest'], row['fastest']))
    axes.barh(
      y,
      value,
      height=0.6,
      xerr=[[value - low], [high - value]],
      capsize=3,
      color=plots.style(y)['color'],
    )
    axes.annotate(
      f'{value:.3g}',
      (high, y),
      xytext=(5, 0),
      textcoords='offset points',
      verticalalignment='center',
    )
  axes.set_yticks(range(len(rows)), [row['contender'] for row in rows])
  axes.invert_yaxis()
  axes.margins(x=0.12)
  axes.set_xlim(left=0)
  axes.set_xlabel(f'{x_label} (lines: slowest to fastest round)')
  axes.set_title(title)
  plots.tidy(axes)
  axes.grid(False, axis='y')
  return plots.png(figure)


def figure_12(rows: Sequence[Row]) -> bytes:
  """Draws figure 12: left images/s, right the largest batch, by image size.

  A colour is a model, a marker its family; training is dashed and hollow.
  Without any estimates of speed there is no left panel.

  Args:
    rows: with `variant`, `image_size`, `mode`, `batch_size`, `device`,
      `limit_gib`, `dtype` and perhaps `images_per_s`.
  """
  timed = [row for row in rows if 'images_per_s' in row]
  figure, panels = _figure(2 if timed else 1, width=6)
  if timed:
    panels[0].set_title("Best of the batch sizes, the compiler's estimate")
    panels[0].set_ylabel('images/s of a core')
    _draw_models(panels[0], rows, timed, 'images_per_s')
  panels[-1].set_title('Largest batch that fits')
  panels[-1].set_ylabel('images in a batch')
  fitting = [row for row in rows if row['batch_size']]
  _draw_models(panels[-1], rows, fitting, 'batch_size')
  figure.suptitle('{device}, {limit_gib:.3g} GiB, {dtype}'.format(**rows[0]))
  handles = [
    plots.entry(model, **style) for model, style in _model_styles(rows).items()
  ]
  if len({row['mode'] for row in rows}) > 1:
    handles += [
      plots.entry(mode, color='#444444', marker='o', **drawn)
      for mode, drawn in _MODES.items()
    ]
  plots.legend(figure, handles, 'right center')
  return plots.png(figure)


def _draw_models(
  axes: Any, rows: Sequence[Row], shown: Sequence[Row], value: str
) -> None:
  from matplotlib.ticker import LogLocator

  for model, style in _model_styles(rows).items():
    for mode, drawn in _MODES.items():
      points = sorted(
        (row['image_size'], row[value])
        for row in shown
        if (row['variant'], row['mode']) == (model, mode)
      )
      axes.plot(*_transposed(points), **style, **drawn)
  axes.set_yscale('log')
  low, high = axes.get_ylim()
  axes.yaxis.set_major_locator(
    LogLocator(subs=(1,) if high > 500 * low else (1, 2, 5))
  )
  axes.yaxis.set_major_formatter('{x:,.0f}')
  axes.yaxis.set_minor_formatter('')
  _x_axis(axes, {row['image_size'] for row in rows}, 'image_size')
  plots.tidy(axes)


def _transposed(points: Sequence[tuple[int, float]]) -> tuple[list, list]:
  return [x for x, _ in points], [y for _, y in points]


# Where there is one image size, no line tells them apart.
_MODES: dict[str, dict[str, Any]] = {
  'inference': {'linestyle': '-'},
  'training': {'linestyle': '--', 'markerfacecolor': 'white'},
}


def _model_styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
  models = dict.fromkeys(row['variant'] for row in rows)
  styles = {}
  for i, model in enumerate(models):
    fields = variants.fields(model)
    family = scaling.family(variants.defaults(fields['name']) | fields)
    marker = plots.MARKERS[scaling.FAMILIES.index(family)]
    styles[model] = {'color': plots.style(i)['color'], 'marker': marker}
  return styles


def loop(row: Row, gaps: Sequence[Any]) -> bytes:
  """Draws where the time of a run went, and every gap between its steps.

  Args:
    row: of `bench.loop.summary`, with `config` and `device`.
    gaps: of `bench.loop.gaps`.
  """
  figure = plots.figure(10, 5)
  above, below = figure.subplots(2, 1, height_ratios=(1, 4))
  parts = ('steps', 'evaluating', 'saving', 'idle')
  left = 0.0
  for i, part in enumerate(parts):
    seconds = row[f'{part}_s']
    label = f'{part} {seconds:.2f} s'
    above.barh(
      0, seconds, left=left, color=plots.style(i)['color'], label=label
    )
    left += seconds
  above.set_xlim(0, left)
  above.set_yticks([])
  above.set_xlabel('seconds after the first step')
  above.spines[['top', 'right', 'left']].set_visible(False)
  figure.suptitle(f'{row["config"]}: {row["device"]}')
  handles, _ = above.get_legend_handles_labels()
  plots.legend(figure, handles, 'lower center', columns=4)
  for name, saved in ('saving', True), ('idle', False):
    points = [(x.step, 1e3 * x.seconds) for x in gaps if x.saving == saved]
    i = parts.index(name)
    below.plot(
      *_transposed(points),
      linestyle='',
      marker='s' if saved else '.',
      color=plots.style(i)['color'],
      label=f'{name}: {len(points):,} gaps',
    )
  below.set_yscale('log')
  below.yaxis.set_major_formatter('{x:g}')
  below.yaxis.set_minor_formatter('')
  # Powers of ten, of which there shall be two at least.
  if gaps:
    shortest = min(1e3 * gap.seconds for gap in gaps)
    below.set_ylim(bottom=min(1, shortest / 2))
  below.set_xlim(0, row['steps'] * 1.02 + 1)
  below.set_xlabel('step')
  below.set_ylabel('ms without a step under way')
  if gaps:
    below.legend(frameon=False)
  plots.tidy(below)
  return plots.png(figure)


def _figure(
  count: int, height: float = 5, width: float | None = None
) -> tuple[Any, list[Any]]:
  if width is None:
    width = 7 if count == 1 else 5
  figure = plots.figure(width * count, height)
  return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _x_axis(axes: Any, places: set[int], name: str) -> None:
  ticks = sorted(places)
  axes.set_xscale('log', base=2)
  axes.set_xticks(ticks, [f'{tick:,}' for tick in ticks])
  axes.xaxis.minorticks_off()
  axes.set_xlabel(
    'image size in pixels' if name == 'image_size' else 'images in a batch'
  )
  if len(ticks) == 1:
    axes.set_xlim(ticks[0] / 1.5, ticks[0] * 1.5)
