"""Sweeps: many runs of one config."""

from vit_jax.register import Register

# Report classes by `config.report`. A report writes the tables of a sweep.
REPORTS = Register(
  'report',
  {
    'grid': 'vit_jax.sweeps.grid:GridReport',
    'transfer': 'vit_jax.tools.paper.tables:TransferReport',
    'scaling': 'vit_jax.tools.paper.scaling:ScalingReport',
  },
)
