"""Many runs of one config: axes, choosing, running, refusing."""

from vit_jax.register import Register

# By `config.report`: what a sweep leaves behind.
REPORTS = Register(
  'report',
  {
    'grid': 'vit_jax.sweeps.grid:GridReport',
    'transfer': 'vit_jax.tools.paper.tables:TransferReport',
    'scaling': 'vit_jax.tools.paper.scaling:ScalingReport',
  },
)
