"""Contenders that run in turns, and the table of their speeds."""

import dataclasses
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vit_jax.data import cores
from vit_jax.training.progress import mfu_text

# In a round each contender has a turn. One more turn warms up.
ROUNDS = 9
# Seconds of a turn, if a step takes less: long enough that the speed of the
# device counts and not that of the host.
TURN_S = 0.5

_FACTS: Mapping[str, Callable[[Any], str]] = {
  'compile_s': ', compiled in {:.1f} s'.format,
  'memory_gib': ', {:.2f} GiB'.format,
  'mfu': lambda share: f', MFU {mfu_text(share)}',
}

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Contender:
  """Something that is measured.

  Attributes:
    name: in tables.
    turn: runs it once and returns images/s.
    facts: `compile_s`, `memory_gib` and `mfu_per_image_s` (MFU of one
      image/s), as far as they are known.
  """

  name: str
  turn: Callable[[], float]
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def paced(
  start: Callable[[], Any], wait: Callable[[], Any], images: int
) -> Callable[[], float]:
  """Returns a turn of as many steps as `TURN_S` has room for.

  Args:
    start: hands a step to the device.
    wait: until the device has done all steps.
    images: of a step.
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
      seconds(1)  # perhaps compiles
      steps = max(1, min(100, round(TURN_S / seconds(1))))
    return steps * images / seconds(steps)

  return turn


def rounds(
  turns: Sequence[Callable[[], float]], count: int
) -> list[list[float]]:
  """Returns what each turn gave in each of some rounds."""
  found = [[turn() for turn in turns] for _ in range(count)]
  return [list(values) for values in zip(*found, strict=True)]


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
  """Returns the median over the rounds: both sides saw the same machine."""
  return statistics.median(x / y for x, y in zip(a, b, strict=True))


def race(makers: Iterable[Callable[[], Contender]]) -> list[Row]:
  """Runs contenders in turns, ours first.

  In turns, so that whatever else the machine does affects all of them alike.
  A contender that does not fit into memory is reported and left out.

  Returns:
    A row for each contender: `contender`, `images_per_s` (the median of the
    rounds), `slowest`, `fastest`, its facts, and `ratio` for all but the first:
    the first one's speed divided by its own.
  """
  contenders = []
  for number, maker in enumerate(makers, 1):
    try:
      contender = maker()
      contender.turn()
      contenders.append(contender)
    except RuntimeError as e:
      if not is_out_of_memory(e):
        raise
      said = str(e).splitlines()[0][:200]
      print(f'contender {number} does not fit: {said}')
  rates = rounds([contender.turn for contender in contenders], ROUNDS)
  rows = []
  for contender, found in zip(contenders, rates, strict=True):
    row = {
      'contender': contender.name,
      'images_per_s': statistics.median(found),
      'slowest': min(found),
      'fastest': max(found),
    }
    if found is not rates[0]:
      row['ratio'] = ratio(rates[0], found)
    facts = {k: v for k, v in contender.facts.items() if v is not None}
    if share := facts.pop('mfu_per_image_s', None):
      row['mfu'] = share * row['images_per_s']
    rows.append(row | facts)
  return rows


def is_out_of_memory(error: RuntimeError) -> bool:
  """Whether JAX or PyTorch ran out of memory."""
  text = str(error)
  return 'RESOURCE_EXHAUSTED' in text or 'out of memory' in text.lower()


def lines(rows: Iterable[Row]) -> list[str]:
  """Returns the table that a person reads."""
  rows = list(rows)
  found = [f'images/s, median of {ROUNDS} rounds (slowest to fastest):']
  width = max([26, *(len(row['contender']) for row in rows)])
  for row in rows:
    found.append(
      f'  {row["contender"]:{width}}{row["images_per_s"]:9.1f}'
      f'  ({row["slowest"]:.1f} to {row["fastest"]:.1f})'
      + ''.join(text(row[k]) for k, text in _FACTS.items() if k in row)
    )
  for row in rows:
    if 'ratio' in row:
      name = row['contender']
      found.append(f'{rows[0]["contender"]} / {name}: {row["ratio"]:.2f}')
  return found


def machine(packages: Iterable[str]) -> str:
  """Returns versions, cores, and the load of the last minute."""
  versions = ', '.join(f'{p} {importlib.metadata.version(p)}' for p in packages)
  load = os.getloadavg()[0]
  return (
    f'Python {platform.python_version()}, {versions}; '
    f'{cores.usable_cores()} cores, '
    f'load {load:.1f}'
  )
