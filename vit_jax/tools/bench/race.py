"""Measures contenders in turns, and formats a table of their speeds."""

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from vit_jax.data import cores
from vit_jax.training.progress import mfu_text

# Number of rounds. In each round, every contender has one turn. One more turn,
# before the rounds, warms up.
ROUNDS = 9
# Target duration of a turn in seconds, long enough that starting it and waiting
# for its end hardly count.
TURN_S = 0.5
# In messages of JAX and PyTorch.
_OUT_OF_MEMORY = 'resource_exhausted', 'out of memory', "can't allocate memory"


class Contender(NamedTuple):
  """An implementation to measure. None: a fact is unknown or does not apply."""

  name: str
  turn: Callable[[], float]  # runs one turn and returns images/s
  compile_s: float | None = None
  memory_gib: float | None = None  # peak per device
  mfu_per_image_s: float | None = None  # model FLOPs utilisation at one image/s


def paced(
  start: Callable[[], Any], wait: Callable[[], Any], images: int
) -> Callable[[], float]:
  """Returns a function that runs a turn and returns images/s.

  A turn takes about `TURN_S`, but has 1 to 100 steps.

  `start` dispatches a step of `images` images. `wait` blocks until the device
  has finished all steps.
  """
  steps = 0

  def seconds(count: int) -> float:
    started_s = time.perf_counter()
    for _ in range(count):
      start()
    wait()
    return time.perf_counter() - started_s

  def turn() -> float:
    nonlocal steps
    if not steps:
      seconds(1)  # may compile
      steps = max(1, min(100, round(TURN_S / seconds(1))))
    return steps * images / seconds(steps)

  return turn


def race(makers: Iterable[Callable[[], Contender]]) -> list[str]:
  """Runs contenders in turns and returns the lines of a table of speeds.

  `makers` make the contenders, ours first. If a contender does not fit into
  memory in its first turn, prints a message and leaves it out.
  """
  contenders = []
  for number, maker in enumerate(makers, 1):
    try:
      contender = maker()
      contender.turn()
      contenders.append(contender)
    except RuntimeError as e:
      if not any(sign in str(e).lower() for sign in _OUT_OF_MEMORY):
        raise
      said = str(e).splitlines()[0][:200]
      print(f'Implementation {number} does not fit into memory: {said}')
  taken = [[each.turn() for each in contenders] for _ in range(ROUNDS)]
  rates = [*zip(*taken, strict=True)]
  lines = [f'images/s, median of {ROUNDS} rounds (minimum to maximum):']
  width = max([26, *(len(each.name) for each in contenders)])
  for each, found in zip(contenders, rates, strict=True):
    median = statistics.median(found)
    lines.append(
      f'  {each.name:{width}}{median:9.1f}'
      f'  ({min(found):.1f} to {max(found):.1f})'
    )
    if each.compile_s is not None:
      lines[-1] += f', compiled in {each.compile_s:.1f} s'
    if each.memory_gib is not None:
      lines[-1] += f', {each.memory_gib:.2f} GiB'
    if each.mfu_per_image_s is not None:
      lines[-1] += f', MFU {mfu_text(median * each.mfu_per_image_s)}'
  for each, found in zip(contenders[1:], rates[1:], strict=True):
    # Compare turns of the same round, because they had a similar load.
    ratio = statistics.median(
      x / y for x, y in zip(rates[0], found, strict=True)
    )
    lines.append(f'{contenders[0].name} / {each.name}: {ratio:.2f}')
  return lines


def machine(packages: Iterable[str]) -> str:
  """Returns a line of versions, number of cores and load in the last minute."""
  versions = ', '.join(f'{p} {importlib.metadata.version(p)}' for p in packages)
  load = os.getloadavg()[0]
  return (
    f'Python {platform.python_version()}, {versions}; '
    f'{cores.usable_cores()} cores, load {load:.1f}'
  )
