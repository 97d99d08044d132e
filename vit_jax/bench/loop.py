"""What the training loop itself costs: a device that waits, and saving.

A real training of a config runs, by `train.train`, and is watched from outside.
A step is *under way* from the moment the loop has handed it to the device until
its results are there. The run, without what comes before the first step is
done (compiling), falls into

  steps        some step is under way;
  evaluating   none is, and the evaluators are running;
  saving       none is, in a gap between two steps in which a checkpoint was
               saved, evaluation not counted: waiting for the checkpoint's
               arrays to leave the device, and getting going again;
  idle         none is, in any other gap: the loop was late, with its data or
               its books.

Handing over is asynchronous: the loop runs ahead of the device by up to
`run.MAX_IN_FLIGHT` steps, and a loop that is fast enough leaves no gap at all.
A step counts as handed over when the call returns, as done when a thread that
waits for its metrics wakes up. So gaps come out too long by what handing over
takes, and too short by what waking up does, well below a millisecond both.

Shares of idle and saving are of the time without evaluation. What saving does
in the background, after the loop has gone on, takes memory bandwidth and cores
and shows in the steps, not here; where the run ends before the last checkpoint
is written, that wait is shown apart.
"""

import contextlib
import dataclasses
import importlib.util
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax import train
from vit_jax.bench import charts as report
from vit_jax.bench import race
from vit_jax.bench.output import Output, show
from vit_jax.checkpoints import saving
from vit_jax.experiment import Experiment
from vit_jax.training import run

Interval = tuple[float, float]


@dataclasses.dataclass
class LoopWatch:
  """What happened when, in seconds of one clock.

  Attributes:
    handed: when each step was handed to the device, in order.
    done: when its results were there.
    evaluations: begin and end of each.
    saves: likewise, once no step is under way any more.
    compile_s: of the first call of the step.
    ended: when the loop had nothing more to do but to wait for the checkpoint.
    last_write_s: how long that took.
  """

  handed: list[float] = dataclasses.field(default_factory=list)
  done: list[float] = dataclasses.field(default_factory=list)
  evaluations: list[Interval] = dataclasses.field(default_factory=list)
  saves: list[Interval] = dataclasses.field(default_factory=list)
  compile_s: float = 0.0
  ended: float = 0.0
  last_write_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Gap:
  """Time in which no step was under way.

  Attributes:
    step: after which it came; the first one is 1.
    seconds: without evaluation.
    saving: whether a checkpoint was saved in it.
    evaluating_s: of evaluation.
  """

  step: int
  seconds: float
  saving: bool
  evaluating_s: float


def bench_loop(config: ConfigDict, name: str, output: Output) -> None:
  """Trains as the config says, in a folder that is gone afterwards.

  Args:
    config: of a run, as short as one likes.
    name: of it, for the table.
    output: takes the row.

  Raises:
    ValueError: for a config or data that cannot work, or too few steps.
    FileNotFoundError: for data that is not there.
  """
  print(race.machine(['jax', 'flax', 'orbax-checkpoint']))
  with tempfile.TemporaryDirectory() as workdir, watched() as watch:
    train.train(config, workdir)
  if len(watch.done) < 3:
    raise ValueError(
      f'total is {config.total!r}, {len(watch.done)} steps: the loop shows '
      'itself only after some, at least 3.'
    )
  found = gaps(watch)
  row = {
    'device': jax.devices()[0].device_kind,
    'config': name,
    'batch_size': config.batch_size,
  } | summary(watch, found, config.batch_size)
  show(_lines(row))
  output.add([row])
  output.finish(
    lambda rows: report.loop(
      rows[-1],
      [(gap.step, gap.seconds, gap.saving) for gap in found],
    )
  )


def gaps(watch: LoopWatch) -> list[Gap]:
  """Returns all gaps after the first step was done, the last one included.

  Steps are done in the order in which they were handed over: the device works
  off a queue.
  """
  found = []
  ends = [*watch.handed[1:], watch.ended]
  for i, (begin, end) in enumerate(zip(watch.done, ends, strict=True)):
    if end <= begin:
      continue
    evaluating = sum(_overlap(x, (begin, end)) for x in watch.evaluations)
    found.append(
      Gap(
        step=i + 1,
        seconds=end - begin - evaluating,
        saving=any(_overlap(x, (begin, end)) > 0 for x in watch.saves),
        evaluating_s=evaluating,
      )
    )
  return found


def _overlap(a: Interval, b: Interval) -> float:
  return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))


def summary(
  watch: LoopWatch, found: Sequence[Gap], batch_size: int
) -> dict[str, Any]:
  """Returns the columns of the table: times in seconds, and shares."""
  total = watch.ended - watch.done[0]
  evaluating = sum(gap.evaluating_s for gap in found)
  saving = sum(gap.seconds for gap in found if gap.saving)
  idle = sum(gap.seconds for gap in found if not gap.saving)
  # Without what evaluation takes, however often a config asks for it.
  training = total - evaluating
  steps = len(watch.done) - 1
  return {
    'steps': steps,
    'compile_s': watch.compile_s,
    'total_s': total,
    'steps_s': training - saving - idle,
    'evaluating_s': evaluating,
    'saving_s': saving,
    'idle_s': idle,
    'saves': len(watch.saves),
    'idle_share': idle / training,
    'saving_share': saving / training,
    'evaluating_share': evaluating / total,
    'last_write_s': watch.last_write_s,
    'images_per_s': steps * batch_size / training,
  }


def _lines(row: Mapping[str, Any]) -> list[str]:
  return [
    f'{row["config"]}: {row["steps"]:,} steps of {row["batch_size"]:,} after '
    f'the first, {row["total_s"]:.1f} s, {row["images_per_s"]:,.0f} images/s',
    f'  compiling            {row["compile_s"]:8.2f} s, before all this',
    f'  steps                {row["steps_s"]:8.2f} s',
    f'  evaluating           {row["evaluating_s"]:8.2f} s, '
    f'{row["evaluating_share"]:.2%} of all',
    f'  saving               {row["saving_s"]:8.2f} s, '
    f'{row["saving_share"]:.2%} of the time without evaluation; '
    f'{row["saves"]} checkpoints',
    f'  idle between steps   {row["idle_s"]:8.2f} s, '
    f'{row["idle_share"]:.2%} of the time without evaluation',
    f'  last checkpoint      {row["last_write_s"]:8.2f} s until it was written,'
    ' after all this',
  ]


@contextlib.contextmanager
def watched() -> Iterator[LoopWatch]:
  """Watches the trainings that run inside.

  The functions of the loop are replaced by ones that note the time and do the
  same.
  """
  watch = LoopWatch()
  pending: queue.SimpleQueue[Any] = queue.SimpleQueue()

  def wait_for_steps() -> None:
    while (metrics := pending.get()) is not None:
      # A step that fails is reported by the loop.
      with contextlib.suppress(Exception):
        jax.block_until_ready(metrics)
      watch.done.append(time.perf_counter())

  thread = threading.Thread(target=wait_for_steps, daemon=True)
  train_step = Experiment.train_step

  def make(experiment: Experiment) -> Callable[..., Any]:
    step = train_step(experiment)

    def noting(*args: Any) -> Any:
      started_s = time.perf_counter()
      result = step(*args)
      watch.handed.append(time.perf_counter())
      if len(watch.handed) == 1:
        watch.compile_s = watch.handed[0] - started_s
      pending.put(result[1])
      return result

    return noting

  # Python hands its lock on only so often; the thread would notice late.
  interval_s = sys.getswitchinterval()
  with (
    _replaced(Experiment, 'train_step', make),
    _replaced(
      run.Run, 'evaluate', _noting(watch.evaluations, run.Run.evaluate)
    ),
    _replaced(
      saving.Checkpoints,
      'save',
      _noting(watch.saves, saving.Checkpoints.save),
    ),
    _replaced(saving.Checkpoints, 'wait', _timing_the_end(watch)),
  ):
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
      yield watch
    finally:
      pending.put(None)
      thread.join()
      sys.setswitchinterval(interval_s)


def _timing_the_end(watch: LoopWatch) -> Callable[..., Any]:
  wait = saving.Checkpoints.wait

  def noting(self: saving.Checkpoints) -> None:
    watch.ended = time.perf_counter()
    wait(self)
    watch.last_write_s = time.perf_counter() - watch.ended

  return noting


def _noting(
  intervals: list[Interval], function: Callable[..., Any]
) -> Callable[..., Any]:
  def noting(*args: Any, **kwargs: Any) -> Any:
    started_s = time.perf_counter()
    try:
      return function(*args, **kwargs)
    finally:
      intervals.append((started_s, time.perf_counter()))

  return noting


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
  before = getattr(owner, name)
  setattr(owner, name, value)
  try:
    yield
  finally:
    setattr(owner, name, before)


def load_config(text: str) -> ConfigDict:
  """Returns the config of FILE:ARGUMENT, as --config of `main` takes it.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: for an argument that the file refuses.
  """
  path, _, argument = text.partition(':')
  if not os.path.isfile(path):
    raise FileNotFoundError(f'No config file at {path}.')
  spec = importlib.util.spec_from_file_location('bench_config', path)
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config(*([argument] if argument else [])).lock()
