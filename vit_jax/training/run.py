"""Logs, evaluates and saves a run around its training steps."""

import collections
import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
from clu import profiler

from vit_jax.checkpoints import saving
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
from vit_jax.training.preemption import Preempted

# Maximum number of dispatched steps whose metrics have not been read. A larger
# number keeps the devices busier; a smaller number ends a run sooner after a
# non-finite loss.
MAX_IN_FLIGHT = 3


class Diverged(Exception):
  """The loss, the gradient or the parameters are no longer finite."""


@dataclasses.dataclass(kw_only=True)
class Run:
  """The log, evaluations, checkpoints and summary of one run.

  Attributes:
    evaluators: functions from parameters to metrics and pictures by name.
    shown: which value is best ('highest' or 'lowest'), by metric in the curves
      and the summary.
    meta: metadata (JSON) that every checkpoint stores. `save` updates four
      values. `elapsed_s` is the wall seconds of the run. `since_log` has the
      metrics of the steps since the last logged row. `evaluation_due` tells
      whether a signal interrupted the evaluation of the step. `evaluated` has
      the value of `best_metric` in every evaluation.
    forward_flops: FLOPs of one example's forward pass.
    profiled: steps whose trace is written to WORKDIR/profile; the same for all
      runs of the process.
  """

  workdir: str
  mesh: jax.sharding.Mesh
  durations: Durations
  checkpoints: Checkpoints
  evaluators: Sequence[Callable[[Params], Mapping[str, Any]]]
  shown: Mapping[str, str]
  meta: dict[str, Any]
  start_step: int
  batch_size: int
  forward_flops: float
  profiled: ClassVar[range] = range(0)

  def __post_init__(self) -> None:
    """Opens the log and starts the clocks."""
    self._in_flight: collections.deque[tuple[int, Any]] = collections.deque()
    self._since_log: list[dict[str, float]] = list(self.meta['since_log'])
    self._evaluated: list[float] = list(self.meta['evaluated'])
    self._compiled: set[tuple[Any, ...]] = set()
    self._wait_s = 0.0
    self._eval_metrics: dict[str, float] = {}
    device = jax.devices()[0]
    peak_flops = hardware.peak_flops(device)
    enabled = jax.process_index() == 0
    # A new run overwrites metrics.csv.
    self._log = metric_log.MetricLog(
      self.workdir,
      self.start_step or None,
      enabled=enabled,
      config=self.meta['config'],
    )
    self._progress = progress.Progress(
      total_steps=self.durations.total,
      start_step=self.start_step,
      batch_size=self.batch_size,
      cores=jax.device_count() * hardware.cores_per_device(device),
      train_flops_per_image=3 * self.forward_flops,
      peak_flops=peak_flops and peak_flops * jax.device_count(),
      prior_s=self.meta['elapsed_s'],
      enabled=enabled,
    )
    self._watch = processes.Watch()
    self._trace = contextlib.ExitStack()

  def profile(self, step: int) -> None:
    """Starts or stops the trace if `profiled` starts or stops at this step.

    Raises Diverged if the metrics of an earlier step are not finite.
    """
    if step not in (self.profiled.start, self.profiled.stop):
      return
    self._wait(0)
    self._trace.close()
    if step in self.profiled:
      folder = os.path.join(self.workdir, 'profile')
      self._progress.message(f'writing a profile of the next steps to {folder}')
      profiler.start(folder)
      self._trace.callback(profiler.stop)

  def wait_for(self, batches: Iterator[dict[str, Any]]) -> dict[str, jax.Array]:
    """Returns the next batch on the devices, and counts the waiting time."""
    before_s = time.monotonic()
    batch = sharding.global_batch(next(batches), self.mesh)
    self._wait_s += time.monotonic() - before_s
    return batch

  @contextlib.contextmanager
  def compiling(self, batch: dict[str, jax.Array]) -> Iterator[None]:
    """Announces a compilation if the batch's shapes are new.

    The time of compilations does not count in images/s.
    """
    shapes = tuple((name, x.shape) for name, x in batch.items())
    if shapes in self._compiled:
      yield
      return
    self._compiled.add(shapes)
    self._progress.message('compiling the training step ...')
    with self._progress.pause():
      yield

  def add_metrics(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Adds the metrics of a step, which may still be running.

    Raises Diverged if the metrics of an earlier step are not finite.
    """
    self._in_flight.append((step, metrics))
    self._wait(MAX_IN_FLIGHT)

  def _wait(self, in_flight: int) -> None:
    """Waits until at most `in_flight` steps are running; logs finished steps.

    Raises Diverged if a metric is not finite.
    """
    while len(self._in_flight) > in_flight:
      step, metrics = self._in_flight.popleft()
      metrics = {k: float(v) for k, v in jax.device_get(metrics).items()}
      self._watch.progress()
      if not all(map(math.isfinite, metrics.values())):
        saved = self.checkpoints.latest_step()
        last = 'The run has no checkpoint yet.'
        if saved is not None:
          last = f'The last good checkpoint is {self.checkpoints.path(saved)}.'
        raise Diverged(
          f'Step {step}: the loss is {metrics["loss"]}, the norm of the '
          f'gradient {metrics["grad_norm"]} and the norm of the parameters '
          f'{metrics["param_norm"]}. {last} In a new --workdir, lower '
          'optimizer.lr, lengthen optimizer.warmup or set optimizer.clip_norm.'
        )
      if step == self.start_step + 1:
        # The first step includes compiling, so rates start after it.
        self._progress.first_step_done(step)
        self._wait_s = 0.0
      self._since_log.append(metrics)
      if step % self.durations.log_every == 0 or step == self.durations.total:
        self._write(step)

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
    """Whether the evaluators run after this step; true for the last step."""
    every, total = self.durations.eval_every, self.durations.total
    return step % every == 0 or step == total

  def is_checkpoint_step(self, step: int) -> bool:
    """Whether this step is saved; true for every evaluated step."""
    every = self.durations.checkpoint_every
    return step % every == 0 or self.is_eval_step(step)

  def evaluate(self, step: int, state: Any) -> None:
    """Runs the evaluators on the result of training up to this step.

    The result is the part of the objective's state that `meta['result']` names,
    such as a momentum teacher. Without a name, it is the Polyak average if
    there is one, else the parameters.

    Raises:
      Diverged: if the metrics of a step are not finite.
      Preempted: after SIGTERM or Ctrl-C, once the state is saved. The resumed
        run starts with this evaluation.
    """
    self._wait(0)
    result = state.average or state.params
    if name := self.meta.get('result'):
      result = state.objective_state[name]
    found: dict[str, Any] = {}
    try:
      with self._progress.pause():
        for evaluator in self.evaluators:
          found |= evaluator(result)
          self._watch.progress()
    except Preempted:
      self.save(step, state, evaluation_due=True)
      raise Preempted(f'Preempted: saved step {step}.') from None
    self._eval_metrics = metric_log.numbers(found)
    name = self.meta['config']['best_metric']
    if name in self._eval_metrics:
      self._evaluated.append(self._eval_metrics[name])
    self._log.write(step, found)
    self._progress.message(
      f'step {step:,} evaluated: '
      + ', '.join(
        f'{k} {v:,.0f}' if v.is_integer() else f'{k} {v:.4f}'
        for k, v in self._eval_metrics.items()
      )
    )

  def is_out_of_patience(self) -> bool:
    """Whether the last `patience` evaluations did not improve the metric."""
    patience, found = self.meta['config']['patience'], self._evaluated
    if not patience or len(found) <= patience:
      return False
    best = saving.best_index(found, self.meta['best']) or 0
    return best < len(found) - patience

  def evaluate_again(self, step: int, state: Any) -> None:
    """Repeats the interrupted evaluation of a saved step."""
    self.evaluate(step, state)
    self.checkpoints.add_metrics(
      step, self._eval_metrics, {'evaluated': self._evaluated}
    )

  def save(self, step: int, state: Any, evaluation_due: bool = False) -> None:
    """Saves a checkpoint; raises Diverged if a metric is not finite."""
    self._wait(0)
    is_evaluated = self.is_eval_step(step) and not evaluation_due
    metrics = self._eval_metrics if is_evaluated else {}
    now = {
      'elapsed_s': self._progress.elapsed_s,
      'since_log': self._since_log,
      'evaluation_due': evaluation_due,
      'evaluated': self._evaluated,
    }
    with self._progress.pause():
      self.checkpoints.save(step, vars(state), self.meta | now, metrics)
    self._watch.progress()

  def finish(self) -> dict[str, float]:
    """Waits for the last checkpoint, draws the curves and prints a summary.

    Returns the metrics in the last row of metrics.csv; {} except in the first
    process.
    """
    self.checkpoints.wait()
    self.close(dashboards.CLOSE_S)
    if jax.process_index() != 0:
      return {}
    png_path = os.path.join(self.workdir, 'curves.png')
    files = [os.fspath(self._log.path)]
    if progress.plot_curves(self._log, png_path, self.shown):
      files.append(png_path)
    step = self.checkpoints.latest_step() or self.durations.total
    if self.meta['config']['early_stopping']:
      step = self.checkpoints.best_step() or step
    checkpoint = self.checkpoints.path(step)
    print(self._progress.summary(self._log, self.shown, checkpoint, files))
    return self._log.last()

  def close(self, patience_s: float = dashboards.BRIEF_S) -> None:
    """Closes the log; waits up to `patience_s` for each dashboard."""
    self._watch.stop()
    self._trace.close()
    self._log.close(patience_s)
