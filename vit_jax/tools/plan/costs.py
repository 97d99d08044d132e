"""What the TPU's compiler makes of a training step, and what that costs."""

import collections
import dataclasses
import importlib.util
import math
import os
import pathlib
import re
import tempfile
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
from vit_jax.tools.plan import aot, hlo
from vit_jax.tools.plan.search import TooLarge
from vit_jax.training import hardware
from vit_jax.training.progress import mfu_text

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
    compiled, text = _compiled(lowered)
  except jax.errors.JaxRuntimeError as e:
    if 'RESOURCE_EXHAUSTED' not in str(e):
      raise
    raise TooLarge(_reason(str(e))) from None
  compile_s = time.monotonic() - started_s
  state = program.shapes[0]
  params_bytes = _bytes(state.params)
  return Step(
    hlo.read(text),
    params_bytes,
    _bytes(state) - params_bytes,
    aot.peak_bytes(compiled),
    compile_s,
  )


def _compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
  """Returns a compiled program, and it as text.

  TPUs' compiler writes the text itself: there are programs, as those of TPU7x
  and some of v6e, that an older JAX cannot read.
  """
  with tempfile.TemporaryDirectory() as folder:
    compiled = lowered.compile(
      {'xla_dump_to': folder, 'xla_dump_hlo_as_text': True}
    )
    for path in pathlib.Path(folder).glob('*.after_codegen.txt'):
      return compiled, path.read_text()
  return compiled, compiled.as_text() or ''


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
  match = re.fullmatch(r'(\w+):[1-9]\d*(x[1-9]\d*)*(_\w+)?', topology)
  generation = match[1] if match else ''  # of no chips, libtpu would crash
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
    raise ImportError(
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
  several = False
  if not (num_classes and examples):
    classes, size, several = _size(config.data)
    num_classes, examples = num_classes or classes, examples or size
  return facts_of(config, [*map(str, range(num_classes))], examples, several)


def _size(data: ConfigDict) -> tuple[int, int, bool]:
  """Returns numbers of classes and examples, and whether these have several."""
  name, split = data.name, data.split
  if name in _KNOWN:
    classes, size = _KNOWN[name]
    chosen = splits.select(split, {'train': range(size)}, name)
    return classes, len(chosen), False
  usual = benchmarks.BENCHMARKS.get(name)
  if usual and split == usual.train:
    return usual.num_classes, usual.examples[0], False
  source = sources.open_config(data, split)
  several = source.several_labels
  return len(sources.class_names(source)), len(source), several


@dataclasses.dataclass(frozen=True)
class Cost:
  """What a step costs, by the compiler's estimate.

  Attributes:
    computing_s: without what is sent between devices.
    least_s: with it, if all hides that the schedule runs beside something.
    most_s: with it, if nothing hides.
    sent_bytes: by each device.
    images: in the batch.
    image_flops: of training, for each image.
    peak_flops: of all chips.
    hbm_bytes: that a device has.
    chips: in all.
    cores: in all, see `hardware.cores_per_device`.
    devices: in all.
  """

  computing_s: float
  least_s: float
  most_s: float
  sent_bytes: float
  images: int
  image_flops: float
  peak_flops: float
  hbm_bytes: float
  chips: int
  cores: int
  devices: int

  @property
  def middle_s(self) -> float:
    """Between both bounds, by which steps are compared."""
    return (self.least_s + self.most_s) / 2

  def rate(self, step_s: float) -> float:
    """Returns images/s of a core."""
    return self.images / step_s / self.cores

  def mfu(self, step_s: float) -> float:
    return self.images * self.image_flops / step_s / self.peak_flops


def costs(
  experiment: Experiment,
  step: Step,
  devices: Sequence[jax.Device],
  chip: hardware.TpuChip,
) -> Cost:
  """Returns what a step costs.

  Both bounds have links at their full speed. At the most, the devices of a chip
  send theirs apart; at the least, what one has sent the other need not.
  """
  coords = {tuple(d.coords) for d in devices}
  per_chip = len(devices) // len(coords)
  # Where the topology has both cores of a v4 chip as devices of their own, as
  # one device they would work together.
  cores = len(coords) * max(per_chip, hardware.cores_per_device(devices[0]))
  axes = [max(n) - min(n) + 1 for n in zip(*coords, strict=True)]
  speed = chip.sent_bytes_per_s(axes) or math.inf
  program = step.program
  size, objective = aot.largest(experiment)
  computing_s = program.total_cycles / chip.clock_hz
  sent_bytes = sum(c.sent_bytes() for c in program.collectives)
  return Cost(
    computing_s,
    program.seconds(chip.clock_hz, lambda c: c.sent_bytes() / speed),
    computing_s + sent_bytes * per_chip / speed,
    sent_bytes,
    experiment.config.batch_size,
    3 * objective.images_seen * flops.forward_flops(objective.model, size),
    len(coords) * hardware.chip_flops(devices[0]),
    chip.hbm_gib * GIB / per_chip,
    len(coords),
    cores,
    len(devices),
  )


def share_of_largest(experiment: Experiment) -> float:
  """Returns what the mean step computes of one of the largest size."""
  size, objective = aot.largest(experiment)
  return experiment.forward_flops / flops.forward_flops(objective.model, size)


def report(experiment: Experiment, step: Step, cost: Cost) -> str:
  """Returns what there is to say of a step that fits, a line each."""
  total = experiment.durations.total
  mean_flops = experiment.objective.images_seen * experiment.forward_flops
  exaflops = total * cost.images * 3 * mean_flops / 1e18
  bounds = cost.least_s, cost.most_s
  share = share_of_largest(experiment)
  a_core = cost.rate(cost.computing_s)
  days = [total * share * s / 86_400 * cost.cores for s in bounds]
  hours = [total * share * s / 3_600 for s in bounds]
  rows = {
    'compiled': f'in {step.compile_s:.0f} s',
    'memory': (
      f'{_gib(step.peak_bytes)} of {_gib(cost.hbm_bytes)} at the most: '
      f'parameters {_gib(step.params_bytes)}, optimizer '
      f'{_gib(step.optimizer_bytes)}, all else '
      + _gib(step.peak_bytes - step.params_bytes - step.optimizer_bytes)
    ),
    'computing': (
      f'{1e3 * cost.computing_s:,.1f} ms, MFU '
      f'{mfu_text(cost.mfu(cost.computing_s))}: {a_core:,.1f} images/s a core, '
      f'{a_core * cost.cores / cost.devices:,.1f} a device, '
      f'{a_core * cost.cores / cost.chips:,.1f} a chip'
    ),
    'step': '\n          '.join(
      f'{1e3 * s:,.1f} ms {what}: {cost.rate(s):,.1f} images/s a core, MFU '
      f'{mfu_text(cost.mfu(s))}'
      for s, what in zip(
        bounds,
        ('if what is sent hides where it can', 'if nothing of it hides'),
        strict=True,
      )
    ),
    'sent': '\n          '.join(
      [_gib(cost.sent_bytes), *_collectives(step.program)]
    ),
    'schedule': (
      f'{total:,} steps of {cost.images:,}: {exaflops:,.4g} exaFLOPs, '
      f'{span(days, ".4g")} core-days, {span(hours, ".1f")} hours here'
      + (', of all sizes by their operations' if share < 1 else '')
    ),
  }
  return '\n'.join(f'{name:<9} {text}' for name, text in rows.items())


def span(bounds: Sequence[float], form: str) -> str:
  """Returns bounds as text, once where they are the same."""
  return ' to '.join(dict.fromkeys(f'{x:,{form}}' for x in bounds))


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
