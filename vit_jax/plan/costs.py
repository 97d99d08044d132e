"""What the TPU's compiler makes of a training step, and what that costs."""

import collections
import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from ml_collections import ConfigDict

from vit_jax.data import benchmarks, sources, splits
from vit_jax.experiment import Experiment, facts_of
from vit_jax.models import flops
from vit_jax.objectives.objective import Facts
from vit_jax.plan import aot, hlo
from vit_jax.plan.search import TooLarge
from vit_jax.training import hardware

GIB = 2**30

# Classes and examples of data that nobody can open here: ImageNet-21k's 21,841
# synsets in the two more logits that the paper's own code gives them, and the
# 14.2 million images of its fall 2011 release.
_KNOWN = {'imagenet21k': (21_843, 14_197_122)}

# libtpu looks for its machine on the network, complains that there is none, and
# lets one process at a time use the TPU, which this one does not.
_LIBTPU = {
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_ACCELERATOR_TYPE': 'v3-8',
  'TPU_MIN_LOG_LEVEL': '3',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_STDERR_LOG_LEVEL': '3',
  'TPU_WORKER_HOSTNAMES': 'localhost',
}


@dataclasses.dataclass(frozen=True)
class Step:
  """What the compiler made of a training step.

  Attributes:
    program: its costs.
    params_bytes: of the parameters, in each core.
    optimizer_bytes: of the optimizer's state and the average of parameters.
    peak_bytes: the most that is in use, with these.
    compile_s: seconds that compiling took.
  """

  program: hlo.CompiledProgram
  params_bytes: int
  optimizer_bytes: int
  peak_bytes: int
  compile_s: float


def compile_step(experiment: Experiment) -> Step:
  """Compiles the training step of an experiment as `train` would run it.

  Raises:
    TooLarge: if it does not fit.
  """
  program = aot.training(experiment)
  lowered = program.lower()
  started_s = time.monotonic()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as e:
    if 'RESOURCE_EXHAUSTED' not in str(e):
      raise
    raise TooLarge(_reason(str(e))) from None
  compile_s = time.monotonic() - started_s
  state = program.shapes[0]
  params_bytes = _bytes(state['params'])
  return Step(
    hlo.read(compiled.as_text() or ''),
    params_bytes,
    _bytes(state) - params_bytes,
    aot.peak_bytes(compiled),
    compile_s,
  )


def _bytes(tree: Any) -> int:
  """Returns what one device holds of the arrays of a tree."""
  return sum(
    int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def _reason(message: str) -> str:
  """Returns what the compiler says of memory: needed, and there."""
  match = re.search(r'\(([\d.]+)G\) exceeds available HBM \(([\d.]+)G', message)
  if not match:
    return message.splitlines()[0]
  needed, there = map(float, match.groups())
  return (
    f'it takes {needed:.2f} GiB of a core that has {there:.2f}, '
    f'{needed - there:.2f} too much. Try more of --config.accum_steps, '
    '--config.model.remat=nothing_saveable, --config.gather=layer with '
    '--config.mesh.fsdp=-1, or a larger topology; --search finds out'
  )


def devices_of(topology: str) -> tuple[list[jax.Device], hardware.TpuChip]:
  """Returns the devices of a topology, and what its chips are.

  Raises:
    ValueError: for a name that is none, or where libtpu is not installed.
  """
  generation = topology.partition(':')[0]
  if generation not in hardware.TPU_CHIPS:
    raise ValueError(
      f'--topology={topology}: write a generation and its chips, as in '
      f'v3:16x16; known are {", ".join(hardware.TPU_CHIPS)}.'
    )
  for name, value in _LIBTPU.items():
    os.environ.setdefault(name, value)
  if not (
    importlib.util.find_spec('libtpu') or os.environ.get('TPU_LIBRARY_PATH')
  ):
    raise ValueError(
      "The TPU's compiler is not installed: pip install -c requirements.txt -e "
      "'.[plan]'."
    )
  try:
    described = topologies.get_topology_desc(
      platform='tpu', topology_name=topology
    )
  except jax.errors.JaxRuntimeError as e:
    raise ValueError(f'--topology={topology}: {e}') from None
  return list(described.devices), hardware.TPU_CHIPS[generation]


def facts_given(config: ConfigDict, num_classes: int, examples: int) -> Facts:
  """Returns the facts of a config's data; classes have numbers for names.

  Numbers of classes and examples that are not 0 take the place of the data's.

  Raises:
    ValueError: if the data is neither known nor at hand.
    FileNotFoundError: likewise.
  """
  if not (num_classes and examples):
    classes, size = _size(config.data)
    num_classes, examples = num_classes or classes, examples or size
  return facts_of(config, [*map(str, range(num_classes))], examples)


def _size(data: ConfigDict) -> tuple[int, int]:
  name, split = data.name, data.split
  if name in _KNOWN:
    classes, size = _KNOWN[name]
    return classes, len(splits.select(split, {'train': range(size)}, name))
  usual = benchmarks.benchmark(name)
  if usual and split == usual.train:
    return usual.num_classes, usual.examples[0]
  source = sources.open_source(
    name, split, data_dir=data.dir or None, split_seed=data.split_seed
  )
  return len(sources.class_names(source)), len(source)


def costs(
  experiment: Experiment,
  step: Step,
  devices: Sequence[jax.Device],
  chip: hardware.TpuChip,
) -> dict[str, float]:
  """Returns what a step costs.

  Returns:
    `step_s` without collectives, `sent_bytes` by each device and the `sent_s`
    this takes at the least, `images_per_s` of a core and `mfu` (of `step_s`),
    `hbm_bytes` that a device has, `cores` in all and `image_flops` of training.
  """
  image_flops = 3 * flops.forward_flops(
    experiment.objective.model, experiment.facts.image_size
  )
  chips = len({tuple(d.coords) for d in devices})
  per_chip = len(devices) // chips
  # Where the topology has both cores of a v4 chip as devices of their own, as
  # one device they would work together.
  cores = chips * max(per_chip, hardware.cores_per_device(devices[0]))
  step_s = step.program.total_cycles / chip.clock_hz
  sent = sum(c.sent_bytes() for c in step.program.collectives)
  rate = experiment.config.batch_size / step_s
  return {
    'step_s': step_s,
    'sent_bytes': sent,
    'sent_s': sent * per_chip / chip.ici_bytes_per_s,
    'images_per_s': rate / cores,
    'mfu': rate * image_flops / (chips * hardware.chip_flops(devices[0])),
    'hbm_bytes': chip.hbm_gib * GIB / per_chip,
    'cores': cores,
    'image_flops': image_flops,
  }


def report(
  experiment: Experiment,
  step: Step,
  devices: Sequence[jax.Device],
  chip: hardware.TpuChip,
) -> str:
  """Returns what there is to say of a step that fits, a line each."""
  cost = costs(experiment, step, devices, chip)
  total, batch_size = experiment.durations.total, experiment.config.batch_size
  exaflops = total * batch_size * cost['image_flops'] / 1e18
  sent = f'{_gib(cost["sent_bytes"])}, at least {1e3 * cost["sent_s"]:,.1f} ms'
  rows = {
    'compiled': f'in {step.compile_s:.0f} s',
    'memory': (
      f'{_gib(step.peak_bytes)} of {_gib(cost["hbm_bytes"])} at the most: '
      f'parameters {_gib(step.params_bytes)}, optimizer '
      f'{_gib(step.optimizer_bytes)}, all else '
      + _gib(step.peak_bytes - step.params_bytes - step.optimizer_bytes)
    ),
    'step': (
      f'{1e3 * cost["step_s"]:,.1f} ms: {cost["images_per_s"]:,.1f} images/s a '
      f'core, MFU {cost["mfu"]:.1%}, collectives not counted'
    ),
    'sent': '\n          '.join([sent, *_collectives(step.program)]),
    'schedule': (
      f'{total:,} steps of {batch_size:,}: {exaflops:,.4g} exaFLOPs, '
      f'{total * cost["step_s"] / 86_400 * cost["cores"]:,.4g} core-days, '
      f'{total * cost["step_s"] / 3_600:,.1f} hours here'
    ),
  }
  return '\n'.join(f'{name:<9} {text}' for name, text in rows.items())


def _gib(count: float) -> str:
  return f'{count / GIB:.2f} GiB'


def _collectives(program: hlo.CompiledProgram) -> list[str]:
  """Returns what is sent, by kind and number of devices."""
  found: dict[tuple[str, int], list[hlo.Collective]] = {}
  for each in program.collectives:
    found.setdefault((each.kind, each.devices), []).append(each)
  return [
    f'{sum(each.count for each in same)} x {kind} over {n}: '
    f'{_gib(sum(round(each.sent_bytes()) for each in same))}'
    for (kind, n), same in sorted(found.items())
  ]


def profile(program: hlo.CompiledProgram, count: int) -> list[str]:
  """Returns the operations that take longest, all layers' together."""
  cycles: collections.Counter[str] = collections.Counter()
  for name, number in program.cycles.items():
    cycles[re.sub(r'block_\d+', 'block_*', name)] += number
  return [
    f'{number / program.total_cycles:6.1%}  {name}'
    for name, number in cycles.most_common(count)
  ]
