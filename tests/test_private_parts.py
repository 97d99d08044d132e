"""Private parts of JAX and orbax that this package or its tests stand on.

A new release may rename them. This file then says which, and who uses it.
"""

import inspect

import orbax.checkpoint as ocp
from jax._src import distributed
from jax._src.interpreters import mlir
from jax._src.lib import _jax


def parameters(function):
  return list(inspect.signature(function).parameters)


def test_of_jax_the_state_that_processes_share():
  """training/processes.py: meets the others, and knows its own number."""
  assert {'client', 'process_id'} <= set(dir(distributed.global_state))
  assert hasattr(_jax.DistributedRuntimeClient, 'wait_at_barrier')


def test_of_orbax_the_end_of_a_save():
  """checkpoints/saving.py: a failed process does not wait for the others."""
  manager = ocp.CheckpointManager
  assert parameters(manager._finalize) == ['self', 'step', 'steps_to_remove']
  assert parameters(manager._wait_for_checkpointers) == ['self']


def test_of_jax_the_context_of_lowered_programs():
  """tests/conftest.py: one for all programs of a file."""
  assert parameters(mlir.make_ir_context) == []
