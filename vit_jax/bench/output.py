"""Rows that go to a CSV file and into a picture, and how far a grid is."""

import datetime
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from etils import epath

from vit_jax.bench.race import Row
from vit_jax.data import whole
from vit_jax.training import metric_log

Point = TypeVar('Point')


class Output:
  """Collects rows; the files are whole at any moment, or not there.

  Attributes:
    rows: so far.
  """

  def __init__(self, csv_path: str | None, plot_path: str | None):
    """Checks the paths, before anything is measured.

    Raises:
      ValueError: for a picture that would be no PNG.
      FileNotFoundError: for a folder that is not there.
    """
    self.rows: list[Row] = []
    self._csv = epath.Path(csv_path) if csv_path else None
    self._plot = epath.Path(plot_path) if plot_path else None
    if plot_path and not plot_path.endswith('.png'):
      raise ValueError(
        f'--plot={plot_path}: pictures are PNG files, as in {plot_path}.png.'
      )
    for flag, path in ('--csv', self._csv), ('--plot', self._plot):
      if path and not path.parent.is_dir():
        raise FileNotFoundError(
          f'{flag}={path}: there is no folder {path.parent}; make it first.'
        )

  def add(self, rows: Sequence[Row]) -> None:
    """Takes rows and writes the CSV file anew, so that a kill loses none."""
    self.rows += rows
    if self._csv:
      # A column for every name that a row has, in their order.
      names = dict.fromkeys(name for row in self.rows for name in row)
      lines = [[row.get(name, '') for name in names] for row in self.rows]
      text = ''.join(map(metric_log.csv_line, [[*names], *lines]))
      whole.replace(self._csv, text.encode())

  def finish(self, draw: Callable[[Sequence[Row]], bytes]) -> None:
    """Draws the picture, and says what was written where."""
    if not self.rows:
      return
    if self._csv:
      plural = 's' * (len(self.rows) != 1)
      print(f'{len(self.rows)} row{plural} written to {self._csv}')
    if self._plot:
      whole.replace(self._plot, draw(self.rows))
      print(f'picture written to {self._plot}')


def grid(
  points: Sequence[Point], describe: Callable[[Point], str]
) -> Iterator[Point]:
  """Yields the points of a grid, describing each and saying the time left."""
  started_s = time.monotonic()
  for i, point in enumerate(points):
    position = f'{i + 1} of {len(points)}' if len(points) > 1 else ''
    if i:
      left_s = (time.monotonic() - started_s) / i * (len(points) - i)
      left = datetime.timedelta(seconds=math.ceil(left_s))
      position += f', about {left} left'
    print(f'[{position}] ' * bool(position) + describe(point), flush=True)
    yield point
