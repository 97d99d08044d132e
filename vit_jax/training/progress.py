"""Shows a run's progress: status lines, the curves and a summary."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from vit_jax.checkpoints import saving
from vit_jax.data import atomic_files
from vit_jax.training import metric_log, plots


@dataclasses.dataclass(kw_only=True)
class Progress:
  """Prints the status lines of a run, and computes its rates and totals.

  The time of compilations counts in core-days, but not in rates.

  Attributes:
    start_step: step from which the run resumes; 0 for a new run.
    cores: cores in use, over all devices (see `hardware`).
    train_flops_per_image: FLOPs of one image's forward and backward pass;
      None to omit MFU.
    peak_flops: peak FLOP/s of all devices together; None to omit MFU.
    prior_s: wall seconds of the run before it was resumed.
    enabled: whether to print; totals are computed in any case.
  """

  total_steps: int
  start_step: int
  batch_size: int
  cores: int
  train_flops_per_image: float | None
  peak_flops: float | None
  prior_s: float = 0.0
  enabled: bool = True
  stream: TextIO = dataclasses.field(default_factory=lambda: sys.stdout)
  clock: Callable[[], float] = time.monotonic

  def __post_init__(self) -> None:
    """Starts the clock."""
    self._started_at = self.clock()
    self._step = self.start_step
    # Time of the last update (or first step), and seconds of pauses since then.
    self._updated_at = 0.0
    self._paused_s = 0.0
    # Steps and seconds since the first step, without pauses.
    self._trained_steps = 0
    self._trained_s = 0.0

  def first_step_done(self, step: int) -> None:
    """Starts measuring rates; call it before the first `update`."""
    now = self.clock()
    self._first = (step, now)
    self._step, self._updated_at, self._paused_s = step, now, 0.0

  def update(
    self, step: int, scalars: Mapping[str, Any], data_wait_s: float
  ) -> None:
    """Prints a status line after a step.

    `data_wait_s` is how long the loop waited for data since the last update.
    """
    now = self.clock()
    steps = step - self._step
    seconds = now - self._updated_at - self._paused_s
    self._trained_steps += steps
    self._trained_s += seconds
    self._step, self._updated_at, self._paused_s = step, now, 0.0
    percent = 100 * step // self.total_steps
    parts = [f'step {step:,}/{self.total_steps:,} {percent}%']
    if 'train/loss' in scalars:
      parts.append(f'loss {float(scalars["train/loss"]):#.3g}')
    if 'train/accuracy' in scalars:
      parts.append(f'acc {float(scalars["train/accuracy"]):.1%}')
    if steps > 0 and seconds > 0:
      parts += self._rates(steps, seconds, data_wait_s)
      parts.append(self._time_left(step, now))
    self.message(' | '.join(parts))

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """Excludes the time inside from rates."""
    began_at = self.clock()
    try:
      yield
    finally:
      self._paused_s += self.clock() - began_at

  def message(self, text: str) -> None:
    """Prints text, if `enabled`."""
    if not self.enabled:
      return
    try:
      print(text, file=self.stream, flush=True)
    except OSError:
      # A closed terminal or pipe (Ctrl-C ends `tee` too) or a full disk must
      # not stop training. Later output, and Python's flush at exit, go to
      # /dev/null.
      self.enabled = False
      with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

  @property
  def images_per_s_per_core(self) -> float | None:
    """Training speed without compiling and pauses; None before measurements."""
    if self._trained_steps <= 0 or self._trained_s <= 0:
      return None
    images = self._trained_steps * self.batch_size
    return images / self._trained_s / self.cores

  @property
  def elapsed_s(self) -> float:
    """Wall seconds of the run, including the time before it was resumed."""
    return self.prior_s + self.clock() - self._started_at

  @property
  def core_days(self) -> float:
    """Cost of the run in days times cores, as in the paper's tables."""
    return self.elapsed_s * self.cores / 86_400

  def summary(
    self,
    log: metric_log.MetricLog,
    metrics: Mapping[str, str],
    checkpoint: str,
    files: Sequence[str],
  ) -> str:
    """Returns the summary at the end of a run.

    `metrics` says which value is best ('highest' or 'lowest'), by column of the
    log. The summary shows the best value of these columns, the first step that
    reached it, and the final value.
    """
    lines: list[tuple[str, str]] = []
    for name in log.columns:
      steps, values = log.points(name)
      if name in metrics and steps:
        best = saving.best_index(values, metrics[name]) or 0
        form = '.2%' if name.endswith('accuracy') else '.4f'
        for which, i in (('best', best), ('final', -1)):
          lines.append(
            (f'{which} {name}', f'{values[i]:{form}} at step {steps[i]:,}')
          )
    lines.append(('checkpoint', checkpoint))
    if speed := self.images_per_s_per_core:
      lines.append(('speed', f'{_rate_text(speed)} images/s per core'))
    lines.append(('cost', f'{self.core_days:.3g} core-days'))
    lines += [('written', path) for path in files]
    width = max(len(label) for label, _ in lines)
    return '\n'.join(f'{label:<{width}}  {text}' for label, text in lines)

  def _rates(self, steps: int, seconds: float, data_wait_s: float) -> list[str]:
    images_per_s = steps * self.batch_size / seconds
    parts = [
      f'{_rate_text(images_per_s)} img/s',
      f'{_rate_text(images_per_s / self.cores)} img/s/core',
    ]
    if self.train_flops_per_image is not None and self.peak_flops is not None:
      mfu = images_per_s * self.train_flops_per_image / self.peak_flops
      parts.append(f'MFU {mfu_text(mfu)}')
    return [*parts, f'data wait {min(1.0, data_wait_s / seconds):.0%}']

  def _time_left(self, step: int, now: float) -> str:
    first_step, first_at = self._first
    # Includes pauses, because the rest of the run has pauses too.
    seconds_per_step = (now - first_at) / (step - first_step)
    seconds = round((self.total_steps - step) * seconds_per_step)
    minutes, seconds = divmod(max(0, seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02}:{seconds:02} left'


def plot_curves(
  log: metric_log.MetricLog, png_path: str, metrics: Iterable[str] = ()
) -> bool:
  """Draws loss, `metrics` and learning rate of a run against steps.

  Each quantity with values, such as `accuracy` of `test/accuracy`, has a panel
  with the curves of training and of all evaluators. Returns False, and writes
  nothing, if there is no panel.
  """
  named = ('loss', *(name.rpartition('/')[2] for name in metrics), 'lr')
  panels = [
    (
      'learning rate' if name == 'lr' else name,
      [c for c in log.columns if c.endswith(f'/{name}') and log.points(c)[0]],
    )
    for name in dict.fromkeys(named)
  ]
  panels = [(title, names) for title, names in panels if names]
  if not panels:
    return False
  figure = plots.figure(8, 0.6 + 2.5 * len(panels))
  all_axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
  sources = dict.fromkeys(_source(c) for _, names in panels for c in names)
  colors = {source: f'C{i}' for i, source in enumerate(sources)}
  for axes, (title, names) in zip(all_axes, panels, strict=True):
    _draw_panel(axes, title, names, log, colors)
  all_axes[-1].set_xlabel('step')
  all_axes[-1].xaxis.set_major_formatter('{x:,.0f}')
  # With one step, allow one tick; a second tick would be at a fractional step.
  locator = all_axes[-1].xaxis.get_major_locator()
  locator.set_params(integer=True, min_n_ticks=1)
  figure.align_ylabels()
  atomic_files.replace(png_path, plots.png(figure))
  return True


def _draw_panel(
  axes: Any,
  title: str,
  names: list[str],
  log: metric_log.MetricLog,
  colors: dict[str, str],
) -> None:
  from matplotlib.ticker import PercentFormatter

  for name in names:
    source = _source(name)
    steps, values = log.points(name)
    # Evaluations have few points, so the points are marked and drawn on top.
    is_few = source != 'train' or len(steps) == 1
    axes.plot(
      steps,
      values,
      label=source,
      color=colors[source],
      linewidth=1.5 if is_few else 1,
      marker='.' if is_few else '',
      zorder=3 if is_few else 2,
    )
  axes.set_ylabel(title)
  if title.endswith('accuracy'):
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
  plots.tidy(axes)
  if title != 'learning rate':
    axes.legend(frameon=False)


def _source(name: str) -> str:
  """Returns the prefix of a metric: 'train', or an evaluator's name."""
  return name.rsplit('/', 1)[0]


def mfu_text(share: float) -> str:
  """Formats an MFU (model FLOPs utilisation), such as 41.2% or <0.1%."""
  return f'{share:.1%}' if share >= 0.001 else '<0.1%'


def _rate_text(per_s: float) -> str:
  """Formats a rate, such as 1,834 or 7.3."""
  return f'{per_s:,.0f}' if per_s >= 100 else f'{per_s:.3g}'
