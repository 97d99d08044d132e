"""What the training loop itself costs, by a real training.

CONFIG is as `main` takes it, a file or a name of configs/, with its arguments
after a colon:

  python -m vit_jax.bench loop digits
  python -m vit_jax.bench loop 'configs/small.py:./cifar10,total=500 steps'

It trains in a temporary folder. A step is under way from the moment the loop
has handed it to the device until its results are there. The run, after its
first step is done, falls into

  steps        some step is under way;
  evaluating   none is, and the evaluators are running;
  saving       none is, in a gap between two steps in which a checkpoint was
               saved, evaluation not counted: waiting for the checkpoint's
               arrays to leave the device, and getting going again;
  idle         none is, in any other gap: the loop was late, with its data or
               its books.

Shares of idle and saving are of the time without evaluation. What saving does
in the background, after the loop has gone on, takes memory bandwidth and cores
and shows in the steps, not here; where the run ends before the last checkpoint
is written, that wait is shown apart.
"""

import argparse
import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from vit_jax import train
from vit_jax.bench import charts, race
from vit_jax.bench.output import Output
from vit_jax.training.run import Diverged, Preempted

Interval = tuple[float, float]


@dataclasses.dataclass
class LoopWatch:
  """What happened when, in seconds of one clock.

  The loop runs ahead of the device by up to `run.MAX_IN_FLIGHT` steps. A step
  counts as handed over when the call returns, as done when a thread that waits
  for its metrics wakes up. So gaps come out too long by what handing over
  takes, and too short by what waking up does, well below a millisecond both.

  Attributes:
    handed: when each step was handed to the device, in order.
    done: when its results were there.
    evaluations: begin and end of each.
    saves: likewise, once no step is under way any more.
    compile_s: until the first step was handed over, its batch being there.
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


class Gap(NamedTuple):
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


def bench(args: argparse.Namespace, output: Output) -> None:
  """Trains as `args.config` says, in a folder that is gone afterwards.

  `args.config_of` gives the config of this name.

  Raises:
    ValueError: for a config or data that cannot work, or too few steps.
    FileNotFoundError: for a config or data that is not there.
  """
  config = args.config_of(args.config).lock()
  print(race.machine(['jax', 'flax', 'orbax-checkpoint']))
  try:
    watch = watched(config)
  except Diverged as e:
    raise ValueError(f'{e} There is no loop to be measured.') from e
  except Preempted:
    raise KeyboardInterrupt from None
  if len(watch.done) < 3:
    raise ValueError(
      f'total is {config.total!r}, {len(watch.done)} steps: the loop shows '
      'itself only after some, at least 3.'
    )
  found = gaps(watch)
  row = {
    'device': jax.devices()[0].device_kind,
    'config': args.config,
    'batch_size': config.batch_size,
  } | summary(watch, found, config.batch_size)
  print(_TABLE.format(**row))
  output.add([row])
  output.finish(lambda rows: charts.loop(rows[-1], found))


def watched(config: ConfigDict) -> LoopWatch:
  """Trains, and returns what happened when."""
  watch = LoopWatch()
  last: dict[str, float] = {}

  def wait_for(metrics: Any) -> None:
    # A step that fails is reported by the loop.
    with contextlib.suppress(Exception):
      jax.block_until_ready(metrics)
    watch.done.append(time.perf_counter())

  def note(event: str, metrics: Any = None) -> None:
    now = last[event] = time.perf_counter()
    if event == 'step':
      watch.compile_s = watch.compile_s or now - last['batch']
      watch.handed.append(now)
      waiting.submit(wait_for, metrics)
    elif event == 'evaluated':
      watch.evaluations.append((last['evaluate'], now))
    elif event == 'saved':
      watch.saves.append((last['save'], now))

  with (
    tempfile.TemporaryDirectory() as workdir,
    _switching_often(),
    ThreadPoolExecutor(max_workers=1) as waiting,
  ):
    train.train(config, workdir, listener=note)
  watch.ended = last['ended']
  watch.last_write_s = last['written'] - last['ended']
  return watch


@contextlib.contextmanager
def _switching_often() -> Iterator[None]:
  """Python hands its lock on only so often; the thread would notice late."""
  interval_s = sys.getswitchinterval()
  sys.setswitchinterval(1e-4)
  try:
    yield
  finally:
    sys.setswitchinterval(interval_s)


def gaps(watch: LoopWatch) -> list[Gap]:
  """Returns all gaps after the first step was done, the last one included.

  Steps are done in the order in which they were handed over: the device works
  off a queue.
  """
  found = []
  ends = [*watch.handed[1:], watch.ended]
  for i, gap in enumerate(zip(watch.done, ends, strict=True)):
    begin, end = gap
    if end > begin:
      evaluating = sum(_overlap(x, gap) for x in watch.evaluations)
      saving = any(_overlap(x, gap) > 0 for x in watch.saves)
      found.append(Gap(i + 1, end - begin - evaluating, saving, evaluating))
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


_TABLE = """\
{config}: {steps:,} steps of {batch_size:,} after the first, {total_s:.1f} s, \
{images_per_s:,.0f} images/s
  compiling            {compile_s:8.2f} s, before all this
  steps                {steps_s:8.2f} s
  evaluating           {evaluating_s:8.2f} s, {evaluating_share:.2%} of all
  saving               {saving_s:8.2f} s, {saving_share:.2%} of the time \
without evaluation; {saves} checkpoints
  idle between steps   {idle_s:8.2f} s, {idle_share:.2%} of the time without \
evaluation
  last checkpoint      {last_write_s:8.2f} s until it was written, after all \
this"""
