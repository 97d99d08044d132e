"""What to say where a device has too little memory for the training step."""

import logging

import jax

from vit_jax.experiment import Experiment
from vit_jax.tools.plan import aot

_log = logging.getLogger(__name__)

_GIB = 2**30


def advice(experiment: Experiment) -> str:
  """Returns flags with which the training step would fit into a device.

  The compiler tells: the step is compiled once more for each way tried, in the
  order of what they cost, until its memory is within the device's. Empty for a
  device that does not say how much it has.
  """
  # Of its own: no process is told of another's.
  limit = _limit_bytes(experiment.mesh.local_devices[0])
  if not limit:
    return ''
  ways = _ways(experiment)
  _log.warning(
    'The training step does not fit into a device. Looking for flags with '
    'which it does, in up to %d programs.',
    len(ways),
  )
  for changes in ways:
    peak = _peak_bytes(experiment, changes)
    if peak is not None and peak <= limit:
      flags = ' '.join(f'--config.{k}={v}' for k, v in changes.items())
      return (
        f'The training step fits with {flags}: '
        f'{peak / _GIB:.2f} of {limit / _GIB:.2f} GiB.'
      )
  return (
    f'The device has {limit / _GIB:.2f} GiB, and neither parts of a batch nor '
    'remat make the training step fit.'
  )


def _limit_bytes(device: jax.Device) -> int:
  return (device.memory_stats() or {}).get('bytes_limit', 0)


def _ways(experiment: Experiment) -> list[dict[str, int | str]]:
  """Returns changes of the config that take less memory, the cheapest first."""
  config, mesh = experiment.config, experiment.mesh
  less: dict[str, int | str] = {'model.remat': 'nothing_saveable'}
  ways, count = [], 2 * config.accum_steps
  while (
    config.batch_size % (count * mesh.shape['data'] * mesh.shape['fsdp']) == 0
  ):
    ways += [{'accum_steps': count}, {'accum_steps': count} | less]
    count *= 2
  return ways or [less]


def _peak_bytes(
  experiment: Experiment, changes: dict[str, int | str]
) -> int | None:
  """Returns what a device holds in a step, or None if it cannot be."""
  config = experiment.config.copy_and_resolve_references()
  config.update_from_flattened_dict(changes)
  devices = list(experiment.mesh.devices.flat)
  try:
    changed = Experiment(config, experiment.facts, devices)
  except ValueError:  # as of groups, which parts of a batch may not split
    return None
  try:
    return aot.peak_bytes(aot.training(changed).lower().compile())
  except jax.errors.JaxRuntimeError as e:
    if 'RESOURCE_EXHAUSTED' not in str(e):
      raise
    return None
