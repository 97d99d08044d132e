"""What happens around the steps of a run: watching, evaluating, saving."""

import collections
import contextlib
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils

from vit_jax.checkpoints.saving import Checkpoints
from vit_jax.models.model import Params
from vit_jax.training import (
  dashboards,
  hardware,
  metric_log,
  processes,
  progress,
  sharding,
)
from vit_jax.training.durations import Durations

# Steps handed to the devices before the oldest one's loss is looked at: enough
# to keep them busy, few enough to stop soon after a loss that is not finite.
MAX_IN_FLIGHT = 3


class Diverged(Exception):
  """The loss, the gradient or the parameters are not finite any more."""


class Preempted(Exception):
  """SIGTERM or Ctrl-C came; all is saved and the same command goes on."""


class Run:
  """Keeps the books of one run."""

  def __init__(
    self,
    *,
    workdir: str,
    mesh: jax.sharding.Mesh,
    durations: Durations,
    checkpoints: Checkpoints,
    evaluators: Sequence[Callable[[Params], Mapping[str, Any]]],
    shown: Mapping[str, str],
    meta: dict[str, Any],
    start_step: int,
    batch_size: int,
    forward_flops: int,
  ):
    """Takes what `train` made.

    Args:
      workdir: receives metrics and curves.
      mesh: that batches are laid out on.
      durations: of the run.
      checkpoints: of the workdir.
      evaluators: from parameters to metrics and pictures by name.
      shown: metrics that the curves and the summary have, and which of their
        values are good.
      meta: goes into every checkpoint, with the seconds that were trained in
        `elapsed_s` and the metrics of steps that no row has yet in `since_log`.
      start_step: steps taken before.
      batch_size: images a step.
      forward_flops: of one example.
    """
    self._workdir = workdir
    self._shown = shown
    self._mesh = mesh
    self._durations = durations
    self._checkpoints = checkpoints
    self._evaluators = evaluators
    self._meta = meta
    self._start_step = start_step
    self._in_flight: collections.deque[tuple[int, Any]] = collections.deque()
    self._since_log: list[dict[str, float]] = list(meta['since_log'])
    self._compiled: set[tuple[Any, ...]] = set()
    self._wait_s = 0.0
    self._hurried = False
    self._eval_metrics: dict[str, float] = {}
    device = jax.devices()[0]
    peak_flops = hardware.peak_flops(device)
    enabled = jax.process_index() == 0
    # Only a resumed run has rows to keep.
    self._log = metric_log.MetricLog(
      workdir, start_step or None, enabled=enabled, config=meta['config']
    )
    self._progress = progress.Progress(
      total_steps=self._durations.total,
      start_step=start_step,
      batch_size=batch_size,
      cores=jax.device_count() * hardware.cores_per_device(device),
      train_flops_per_image=3 * forward_flops,
      peak_flops=peak_flops and peak_flops * jax.device_count(),
      prior_s=meta['elapsed_s'],
      enabled=enabled,
    )
    self._watch = processes.Watch(workdir)

  def wait_for(self, batches: Iterator[dict[str, Any]]) -> dict[str, jax.Array]:
    """Returns the next batch on the devices, noting how long it took."""
    before_s = time.monotonic()
    batch = sharding.global_batch(next(batches), self._mesh)
    self._wait_s += time.monotonic() - before_s
    return batch

  @contextlib.contextmanager
  def compiling(self, batch: dict[str, jax.Array]) -> Iterator[None]:
    """Says that the step inside is compiled, if batches of such shapes are new.

    After the first, that is no part of the rates either.
    """
    what = 'compiling the training step'
    shapes = tuple((name, x.shape) for name, x in batch.items())
    saying: Any = contextlib.nullcontext()
    if not self._compiled:
      saying = progress.phase(what, shown=jax.process_index() == 0)
    elif shapes not in self._compiled:
      saying = self._progress.pause(what)
    self._compiled.add(shapes)
    with saying:
      yield

  def take(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Takes a step's metrics, which the devices may still be working on."""
    self._in_flight.append((step, metrics))
    self._settle(MAX_IN_FLIGHT)

  def _settle(self, in_flight: int) -> None:
    """Waits until no more than `in_flight` steps are unfinished.

    Raises:
      Diverged: naming the first step whose loss, gradient or new parameters are
        not finite.
    """
    while len(self._in_flight) > in_flight:
      step, metrics = self._in_flight.popleft()
      metrics = {k: float(v) for k, v in jax.device_get(metrics).items()}
      self._watch.progress()
      if not all(map(math.isfinite, metrics.values())):
        raise Diverged(
          f'Step {step}: the loss is {metrics["loss"]}, the norm of the '
          f'gradient {metrics["grad_norm"]}, and that of the parameters '
          f'{metrics["param_norm"]}. '
          f'{self._last_checkpoint()} In a new --workdir, lower optimizer.lr, '
          'lengthen optimizer.warmup or set optimizer.clip_norm.'
        )
      if step == self._start_step + 1:
        # Compiling took most of it, which would spoil the rates.
        self._progress.first_step_done(step)
        self._wait_s = 0.0
      self._since_log.append(metrics)
      if step % self._durations.log_every == 0 or step == self._durations.total:
        self._write(step)

  def _last_checkpoint(self) -> str:
    step = self._checkpoints.latest_step()
    if step is None:
      return 'No checkpoint had been saved yet.'
    return f'The last good checkpoint is {self._checkpoints.path(step)}.'

  def _write(self, step: int) -> None:
    means = {
      f'train/{name}': math.fsum(m[name] for m in self._since_log)
      / len(self._since_log)
      for name in self._since_log[0]
    }
    self._since_log.clear()
    self._log.write(step, means)
    self._progress.update(step, means, self._wait_s)
    self._wait_s = 0.0

  def is_eval_step(self, step: int) -> bool:
    """Whether the evaluators run after this step: the last one in any case."""
    d = self._durations
    return step % d.eval_every == 0 or step == d.total

  def is_checkpoint_step(self, step: int) -> bool:
    """Whether this step is saved; evaluated ones are, to have the best."""
    every = self._durations.checkpoint_every
    return step % every == 0 or self.is_eval_step(step)

  def evaluate(self, step: int, state: dict[str, Any]) -> None:
    """Runs the evaluators on the average, or else on the parameters."""
    self._settle(0)
    found: dict[str, Any] = {}
    with self._progress.pause('evaluating'):
      for evaluator in self._evaluators:
        found |= evaluator(state['average'] or state['params'])
        self._watch.progress()
    self._eval_metrics, pictures = metric_log.metrics_and_pictures(found)
    self._log.write(step, self._eval_metrics)
    if pictures:
      self._log.show(step, pictures)
    self._progress.message(
      f'step {step:,} evaluated: '
      + ', '.join(
        f'{k} {v:,.0f}' if v.is_integer() else f'{k} {v:.4f}'
        for k, v in self._eval_metrics.items()
      )
    )

  def save(self, step: int, state: dict[str, Any]) -> None:
    """Saves a checkpoint, after making sure that it is worth keeping."""
    self._settle(0)
    metrics = self._eval_metrics if self.is_eval_step(step) else {}
    elapsed_s = self._progress.elapsed_s
    with self._progress.pause('saving'):
      self._checkpoints.save(
        step,
        state,
        self._meta | {'elapsed_s': elapsed_s, 'since_log': self._since_log},
        metrics,
      )
    self._watch.progress()

  def finish(self) -> None:
    """Waits for the last checkpoint, draws the curves and prints a summary."""
    self._checkpoints.wait()
    self._close(dashboards.CLOSE_S)
    if jax.process_index() != 0:
      return
    csv_path = os.path.join(self._workdir, 'metrics.csv')
    png_path = os.path.join(self._workdir, 'curves.png')
    files = [csv_path]
    if progress.plot_curves(csv_path, png_path, self._shown):
      files.append(png_path)
    print(
      progress.summary_text(
        csv_path,
        self._shown,
        checkpoint=self._checkpoints.path(self._durations.total),
        images_per_s_per_core=self._progress.images_per_s_per_core,
        core_days=self._progress.core_days,
        files=files,
      )
    )

  def hurry(self) -> None:
    """Has `close` not wait for long, as the machine may soon be gone."""
    self._hurried = True

  def close(self) -> None:
    """Writes what is still in memory."""
    # Where one of several fails or diverges, the others do not wait for long.
    hurried = self._hurried or jax.process_count() > 1
    self._close(dashboards.BRIEF_S if hurried else dashboards.CLOSE_S)

  def _close(self, patience_s: float) -> None:
    self._watch.stop()
    self._log.close(patience_s)
    self._progress.close()


# Each Ctrl-C since the outermost notice was opened.
_CTRL_C: list[bytes] = []
# What was received, of the notices that are open now.
_NOTICES: list[threading.Event] = []


# How often the processes have been asked, and whether the answer was yes once.
_ASKED = itertools.count(1)
_RECEIVED_BY_ALL = threading.Event()


def _all_received(step: int) -> bool:
  """Whether SIGTERM came to one of several processes, the same in all.

  JAX has them agree on the number after the highest that any was asked by, and
  knows no other. Steps would not do: those of a resumed run begin above it, and
  those of the next run of a sweep below.
  """
  del step
  if multihost_utils.reached_preemption_sync_point(next(_ASKED)):
    _RECEIVED_BY_ALL.set()
  return _RECEIVED_BY_ALL.is_set()


@contextlib.contextmanager
def preemption_notice() -> Iterator[Callable[[int], bool]]:
  """Gives a function that says, after a step, whether SIGTERM or Ctrl-C came.

  With several processes JAX's own handler makes all of them agree on a step at
  SIGTERM; alone, a handler of ours is enough. A second Ctrl-C ends the process,
  where it is alone at once, even in the middle of compiling. What came before,
  in a notice around this one, counts as well.
  """
  is_main = threading.current_thread() is threading.main_thread()
  if jax.process_count() > 1:
    with _ctrl_c_as_sigterm() if is_main else contextlib.nullcontext():
      yield _all_received
    return
  if not is_main:
    yield lambda step: False  # only the main thread can have handlers
    return
  received = threading.Event()
  previous: dict[int, Any] = {}

  def note(number: int, frame: Any) -> None:
    received.set()
    # Whoever runs several of these wants to know as well.
    handler = previous[number]
    if callable(handler) and handler is not signal.default_int_handler:
      handler(number, frame)

  with _ended_by_the_second_ctrl_c():
    for number in map(int, (signal.SIGTERM, signal.SIGINT)):
      previous[number] = signal.getsignal(number)
      # Ignored in what a shell runs in the background, and so it stays.
      if previous[number] != signal.SIG_IGN:
        signal.signal(number, note)
    notices = [*_NOTICES, received]
    _NOTICES.append(received)
    try:
      yield lambda step: any(x.is_set() for x in notices)
    finally:
      _NOTICES.pop()
      for number, handler in previous.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def _ctrl_c_as_sigterm() -> Iterator[None]:
  """Has one Ctrl-C do what SIGTERM does; a second one interrupts."""
  previous = signal.getsignal(signal.SIGINT)

  def once(number: int, frame: Any) -> None:
    del frame
    signal.signal(number, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGTERM)

  # Ignored in what a shell runs in the background, and so it stays.
  if previous != signal.SIG_IGN:
    signal.signal(signal.SIGINT, once)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _ended_by_the_second_ctrl_c() -> Iterator[None]:
  """Looks at the signals' numbers as they come.

  A handler in Python would only run once the main thread is back from C++.
  """
  if not _NOTICES:
    _CTRL_C.clear()
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

  def watch() -> None:
    while number := os.read(reader, 1):
      if number[0] != signal.SIGINT:
        continue
      _CTRL_C.append(number)
      if len(_CTRL_C) > 1:
        os._exit(128 + signal.SIGINT)
      with contextlib.suppress(OSError):  # of a terminal that is gone
        os.write(2, b'\nCtrl-C: saving and ending; again to end at once.\n')

  thread = threading.Thread(target=watch, daemon=True)
  thread.start()
  try:
    yield
  finally:
    signal.set_wakeup_fd(previous)
    os.close(writer)
    thread.join()
    os.close(reader)
