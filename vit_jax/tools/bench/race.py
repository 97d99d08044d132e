"""Contenders that run in turns, and what came out."""

import dataclasses
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from vit_jax.data import atomic_files, cores
from vit_jax.training import metric_log
from vit_jax.training.progress import mfu_text

# A round is a turn of each; one more, which warms up, does not count.
ROUNDS = 9
# About what a turn takes where a single step takes less: enough for a device
# that works off a queue to show its speed and not that of the host.
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
    facts: what is known of it after the race, by the name of a column:
      `compile_s`, `memory_gib`, `mfu_per_image_s` (MFU of one image/s).
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


def race(
  makers: Iterable[Callable[[], Contender]],
) -> tuple[list[Row], list[str]]:
  """Runs contenders in turns, ours first.

  In turns, so that whatever else the machine does hits all of them alike.

  Returns:
    A row for each contender: `contender`, `images_per_s` (the median of the
    rounds), `slowest`, `fastest`, its facts, and for all but the first `ratio`,
    that of the first one's speed to its own, if that ran. And for each that
    did not fit into memory a sentence.
  """
  contenders, too_large = [], []
  has_first = True
  for number, maker in enumerate(makers, 1):
    try:
      contender = maker()
      contender.turn()
      contenders.append(contender)
    except RuntimeError as e:
      if not is_out_of_memory(e):
        raise
      has_first = has_first and number > 1
      said = str(e).splitlines()[0][:200]
      too_large.append(f'contender {number} does not fit: {said}')
  rates = rounds([contender.turn for contender in contenders], ROUNDS)
  rows = []
  for contender, found in zip(contenders, rates, strict=True):
    row = {
      'contender': contender.name,
      'images_per_s': statistics.median(found),
      'slowest': min(found),
      'fastest': max(found),
    }
    if has_first and found is not rates[0]:
      row['ratio'] = ratio(rates[0], found)
    facts = {k: v for k, v in contender.facts.items() if v is not None}
    if share := facts.pop('mfu_per_image_s', None):
      row['mfu'] = share * row['images_per_s']
    rows.append(row | facts)
  return rows, too_large


def is_out_of_memory(error: RuntimeError) -> bool:
  """Whether JAX or PyTorch says so."""
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


def write(rows: Sequence[Row], path: str | None) -> None:
  """Writes a CSV file anew, with a column for every name that a row has."""
  if path:
    names = dict.fromkeys(name for row in rows for name in row)
    cells = [[row.get(name, '') for name in names] for row in rows]
    text = metric_log.csv_text([[*names], *cells])
    atomic_files.replace(epath.Path(path), text.encode())


def machine(packages: Iterable[str]) -> str:
  """Returns what runs here: the load is that of the minute before."""
  versions = ', '.join(f'{p} {importlib.metadata.version(p)}' for p in packages)
  load = os.getloadavg()[0]
  return (
    f'Python {platform.python_version()}, {versions}; '
    f'{cores.usable_cores()} cores, '
    f'load {load:.1f}'
  )
