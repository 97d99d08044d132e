"""The numbers of a run: metrics.csv, and what shows them."""

import csv
import functools
import importlib.util
import io
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.data import whole
from vit_jax.training import dashboards

# By step, in order: the step's metrics, as text, so that a table that is read
# and written again stays the same.
Rows = dict[int, dict[str, str]]


class MetricLog:
  """Writes scalars to `<workdir>/metrics.csv` and, if it can, for TensorBoard.

  The table is wide: a row a step, a column a metric, and an empty cell where
  a step lacks the metric. Every `write` is in the file when it returns.

  Attributes:
    path: the CSV file.
  """

  def __init__(
    self,
    workdir: str,
    resume_step: int | None,
    *,
    enabled: bool = True,
    config: Mapping[str, Any] | None = None,
  ):
    """Starts the table, or goes on with the one in `workdir`.

    Args:
      workdir: folder to write to, local or gs://; made if missing.
      resume_step: the step a run resumes from; rows of later steps are
        dropped, because the run writes them again. None starts a new table.
      enabled: False on all processes but one; nothing is written then.
      config: of the run; its `wandb` names a project to write to besides.

    Raises:
      ImportError: a project is named, and wandb is not installed.
      ConnectionError: a project is named, and the run is not taken.
      ValueError: `metrics.csv` is no table that this class wrote.
    """
    self.path = epath.Path(workdir) / 'metrics.csv'
    self._enabled = enabled
    self._columns: list[str] = []
    self._rows: Rows = {}
    self._last_row_at = 0
    self._dashboards: list[dashboards.Dashboard] = []
    if not enabled:
      return
    self.path.parent.mkdir(parents=True, exist_ok=True)
    if resume_step is not None and self.path.exists():
      self._columns, rows = read_table(self.path)
      self._rows = {s: row for s, row in rows.items() if s <= resume_step}
    self._rewrite()
    if importlib.util.find_spec('tensorboard'):
      first_step = 0 if resume_step is None else resume_step + 1
      event_file = functools.partial(dashboards.EventFile, workdir, first_step)
      self._dashboards.append(dashboards.Dashboard('TensorBoard', event_file))
    if config and (project := config['wandb']):
      run = dashboards.WandbRun(
        project, workdir, dict(config), is_new=resume_step is None
      )
      self._dashboards.append(dashboards.Dashboard('wandb', lambda: run))

  def write(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Adds metrics to the row of `step`; a metric given again is replaced.

    Args:
      step: the training step.
      scalars: numbers, or arrays of shape ().

    Raises:
      ValueError: a value is not a scalar, or a metric is named 'step'.
    """
    if not self._enabled:
      return
    if 'step' in scalars:
      raise ValueError(
        f"Metric 'step' = {scalars['step']} would hide the first column of "
        f'{self.path}: rename the metric.'
      )
    cells = {name: _to_text(name, value) for name, value in scalars.items()}
    new_columns = [name for name in cells if name not in self._columns]
    is_last = not self._rows or step >= next(reversed(self._rows))
    is_new_row = step not in self._rows
    self._rows.setdefault(step, {}).update(cells)
    self._columns += new_columns
    is_local = '://' not in os.fspath(self.path)
    can_append = is_last and not new_columns and is_local
    if can_append and self.path.exists():
      self._write_last_row(step, is_new_row)
    else:
      self._rewrite()
    self.show(step, {name: float(text) for name, text in cells.items()})

  def last(self) -> dict[str, float]:
    """Returns the metrics of the last step that has any."""
    row = self._rows[max(self._rows)] if self._rows else {}
    return {name: float(text) for name, text in row.items()}

  def close(self, wait_s: float = dashboards.CLOSE_S) -> None:
    """Waits until what shows the numbers has them; the table always does."""
    for dashboard in self._dashboards:
      dashboard.close(wait_s)

  def show(self, step: int, values: dashboards.Values) -> None:
    """Passes numbers, and pictures uint8 HWC, to the dashboards alone."""
    for dashboard in self._dashboards:
      dashboard.write(step, values)

  def _write_last_row(self, step: int, is_new_row: bool) -> None:
    with open(self.path, 'r+b') as f:
      if is_new_row:
        self._last_row_at = f.seek(0, os.SEEK_END)
      f.seek(self._last_row_at)
      f.write(self._row_text(step).encode())
      f.truncate()

  def _rewrite(self) -> None:
    self._rows = dict(sorted(self._rows.items()))
    lines = [csv_line(['step', *self._columns])]
    lines += [self._row_text(step) for step in self._rows]
    data = ''.join(lines).encode()
    self._last_row_at = len(data) - len(lines[-1].encode())
    whole.replace(self.path, data)

  def _row_text(self, step: int) -> str:
    row = self._rows[step]
    return csv_line([str(step), *(row.get(c, '') for c in self._columns)])


def read_table(path: epath.Path) -> tuple[list[str], Rows]:
  """Reads what a `MetricLog` wrote: the names of the metrics, and the rows.

  A last line without its end, which a killed process may leave, is ignored.

  Raises:
    ValueError: the file is no such table.
  """
  # A pipe would be waited for; epath takes it for a file.
  local = pathlib.Path(path)
  if local.exists() and not local.is_file():
    raise ValueError(f'{path} is no regular file: move it away.')
  try:
    text = path.read_text()
  except UnicodeDecodeError as e:
    raise ValueError(
      f'{path} is no table ({e}): move the file away, a run starts a new one.'
    ) from e
  lines = csv.reader(text[: text.rfind('\n') + 1].splitlines())
  header = next(lines, ['step']) or ['']
  if len(set(header)) < len(header):
    raise ValueError(
      f'{path} has a column twice: {",".join(header)!r}. Remove one of them.'
    )
  if header[0] != 'step':
    raise ValueError(
      f'The first column of {path} is {header[0]!r} instead of step: move '
      'the file away, a run starts a new one.'
    )
  rows: Rows = {}
  for cells in lines:
    is_row = len(cells) == len(header) and cells[0].isdecimal()
    if not (is_row and all(map(_is_number, filter(None, cells)))):
      raise ValueError(
        f'Line {lines.line_num} of {path} does not fit its {len(header)} '
        f'columns of numbers: {",".join(cells)!r}. Repair or remove that line.'
      )
    named = zip(header[1:], cells[1:], strict=True)
    rows[int(cells[0])] = {name: cell for name, cell in named if cell}
  return header[1:], rows


def _is_number(text: str) -> bool:
  try:
    float(text)
  except ValueError:
    return False
  return True


def csv_line(cells: Sequence[Any]) -> str:
  """Returns a line of a CSV file, with its end."""
  line = io.StringIO()
  csv.writer(line, lineterminator='\n').writerow(cells)
  return line.getvalue()


def _to_text(name: str, value: Any) -> str:
  number = np.asarray(value)
  if number.shape or number.dtype.kind in 'bcOSU':
    raise ValueError(
      f'Metric {name!r} has shape {number.shape} and type {number.dtype}: '
      'give one real number.'
    )
  return str(number[()])  # The shortest text that reads back as this number.


def metrics_and_pictures(
  found: Mapping[str, float | np.ndarray],
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
  """Tells apart what evaluators return."""
  pictures = {k: v for k, v in found.items() if isinstance(v, np.ndarray)}
  values = {k: float(v) for k, v in found.items() if k not in pictures}
  return values, pictures
