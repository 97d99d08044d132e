"""Sweeps: many runs of one config."""

from vit_jax.register import Register

# Keys are values of `config.report`, the kind of tables that a sweep writes.
REPORTS = Register(
  'report',
  {
    'grid': 'vit_jax.sweeps.grid:GridReport',
    'transfer': 'vit_jax.tools.paper.tables:TransferReport',
    'scaling': 'vit_jax.tools.paper.scaling:ScalingReport',
  },
)
