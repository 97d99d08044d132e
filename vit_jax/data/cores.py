"""Runs a function in threads on all CPU cores, with a progress bar."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import TypeVar

from tqdm import tqdm

_T = TypeVar('_T')


def usable_cores() -> int:
  """Returns the number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):  # missing on macOS
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def progress(what: str, total: int, unit: str, *, shown: bool = True) -> tqdm:
  """Returns a progress bar that appears after a second."""
  return tqdm(
    total=total,
    desc=what,
    unit=f' {unit}',
    delay=1,
    # A log file keeps every update, so updates there are rare.
    mininterval=0.5 if sys.stderr.isatty() else 30,
    disable=not shown,
  )


def in_threads(
  function: Callable[[int], _T], indices: Sequence[int], bar: tqdm
) -> Iterator[_T]:
  """Calls a function for each index in threads; yields the results in order.

  Threads suffice, because reading and decoding images release the GIL.
  """
  with bar, futures.ThreadPoolExecutor(usable_cores()) as pool:
    # Chunks bound the number of pending results.
    for start in range(0, len(indices), 4096):
      for result in pool.map(function, indices[start : start + 4096]):
        bar.update()
        yield result
