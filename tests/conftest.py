"""Runs every test on eight CPU devices, whatever the machine has.

XLA reads these variables once, when JAX first looks for devices. pytest and
every xdist worker import this file before any test module, and commands that
a test starts inherit the variables.
"""

import os

# Small models are compiled often and run briefly: less optimisation takes a
# third of the time. The numbers stay within the tests' tolerances.
_FLAGS = (
  '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 '
  '--xla_cpu_use_fusion_emitters=false '
  '--xla_cpu_parallel_codegen_split_count=1'
)

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_FLAGS}'.strip()
