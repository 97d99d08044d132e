"""The paper: its numbers and recipes, and its tables and figures from ours."""

from ml_collections import ConfigDict

from vit_jax.register import nearest
from vit_jax.sweeps import grid
from vit_jax.tools.paper import scaling, tables

# By `config.report`.
REPORTS: dict[str, type[grid.GridReport]] = {
  'grid': grid.GridReport,
  'transfer': tables.TransferReport,
  'scaling': scaling.ScalingReport,
}


def report_type(config: ConfigDict) -> type[grid.GridReport]:
  """Returns what a config's sweep leaves behind.

  Raises:
    ValueError: if there is no such report.
  """
  if config.report not in REPORTS:
    raise ValueError(
      f'report is {config.report!r}. {nearest(config.report, REPORTS)}'
    )
  return REPORTS[config.report]
