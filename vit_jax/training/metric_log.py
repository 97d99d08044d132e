"""Logs the metrics of a run to metrics.csv and to dashboards."""

import csv
import functools
import importlib.util
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.data import atomic_files
from vit_jax.training import dashboards

# Metrics by step, in order. Values are text, so that reading and rewriting a
# table does not change them.
Rows = dict[int, dict[str, str]]


class MetricLog:
  """Writes scalars to `<workdir>/metrics.csv` and to available dashboards.

  The table has a row per step and a column per metric; a cell is empty if the
  step lacks the metric. `write` returns once the file has the row.
  """

  def __init__(
    self,
    workdir: str,
    resume_step: int | None,
    *,
    enabled: bool = True,
    config: Mapping[str, Any] | None = None,
  ):
    """Starts a table, or continues the table in `workdir`.

    Args:
      workdir: folder to write to, local or gs://; made if missing.
      resume_step: the step from which a run resumes; rows of later steps are
        dropped, because the run writes them again. None starts a new table.
      enabled: whether to write anything; False in all processes except one.
      config: the run's config; its `wandb` may name a project.

    Raises:
      ConnectionError: if Weights & Biases rejects the run.
      ValueError: if `metrics.csv` has another format.
    """
    self.path = epath.Path(workdir) / 'metrics.csv'
    self._enabled = enabled
    self.columns: list[str] = []
    self._rows: Rows = {}
    self._dashboards: list[dashboards.Dashboard] = []
    if not enabled:
      return
    self.path.parent.mkdir(parents=True, exist_ok=True)
    if resume_step is not None and self.path.exists():
      self.columns, rows = read_table(self.path)
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

  def write(self, step: int, values: dashboards.Values) -> None:
    """Adds numbers to the row of `step`, replacing existing values.

    Pictures go only to dashboards.
    """
    if not self._enabled:
      return
    found = numbers(values)
    if found:
      self._write_row(step, {name: str(x) for name, x in found.items()})
    for dashboard in self._dashboards:
      dashboard.write(step, {**values, **found})

  def points(self, name: str) -> tuple[list[int], list[float]]:
    """Returns the steps at which a metric was measured, and its values."""
    steps = [step for step, row in self._rows.items() if name in row]
    return steps, [float(self._rows[step][name]) for step in steps]

  def last(self) -> dict[str, float]:
    """Returns the metrics of the last row."""
    row = self._rows[max(self._rows)] if self._rows else {}
    return {name: float(text) for name, text in row.items()}

  def close(self, wait_s: float = dashboards.CLOSE_S) -> None:
    """Waits for the dashboards; the table is always complete."""
    while self._dashboards:  # a second call has nothing to wait for
      self._dashboards.pop().close(wait_s)

  def _write_row(self, step: int, row: dict[str, str]) -> None:
    new_columns = [name for name in row if name not in self.columns]
    is_next = step > max(self._rows, default=-1)
    self._rows.setdefault(step, {}).update(row)
    self.columns += new_columns
    is_local = '://' not in os.fspath(self.path)
    if is_next and not new_columns and is_local and self.path.exists():
      with open(self.path, 'a', newline='') as f:
        f.write(csv_text([self._cells(step)]))
    else:
      self._rewrite()

  def _rewrite(self) -> None:
    self._rows = dict(sorted(self._rows.items()))
    text = csv_text([['step', *self.columns], *map(self._cells, self._rows)])
    atomic_files.replace(self.path, text.encode())

  def _cells(self, step: int) -> list[str]:
    row = self._rows[step]
    return [str(step), *(row.get(c, '') for c in self.columns)]


def read_table(path: epath.Path) -> tuple[list[str], Rows]:
  """Reads the table of a `MetricLog`: names of the metrics, and rows.

  An incomplete last line, which a killed process may leave, is ignored.

  Raises:
    ValueError: if the file has another format.
  """
  text = path.read_bytes().decode(errors='replace')
  lines = csv.reader(text[: text.rfind('\n') + 1].splitlines())
  cells = header = next(lines, ['step'])
  rows: Rows = {}
  try:
    if header[:1] != ['step'] or len(set(header)) < len(header):
      raise ValueError('the first column is not step, or names repeat')
    for cells in lines:
      row = dict(zip(header[1:], cells[1:], strict=True))
      rows[int(cells[0])] = {name: cell for name, cell in row.items() if cell}
      list(map(float, filter(None, cells)))
  except (ValueError, IndexError) as e:
    raise ValueError(
      f'{path} is not a table of metrics: line {lines.line_num} is '
      f'{",".join(cells)!r} ({e}). Repair it, or move the file away.'
    ) from e
  return header[1:], rows


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
  """Returns rows as lines of a CSV file."""
  text = io.StringIO()
  csv.writer(text, lineterminator='\n').writerows(rows)
  return text.getvalue()


def numbers(found: dashboards.Values) -> dict[str, float]:
  """Returns the numbers among the results of evaluators, without pictures."""
  return {
    k: float(v) for k, v in found.items() if not isinstance(v, np.ndarray)
  }
