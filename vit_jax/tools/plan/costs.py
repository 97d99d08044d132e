"""Compiles a training step for TPU, and computes its time and memory.

`Failures` computes the cost of losing a slice.
"""

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
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from ml_collections import ConfigDict

from vit_jax.data import benchmarks, sources, splits
from vit_jax.experiment import Experiment
from vit_jax.models import flops
from vit_jax.objectives.objective import Facts
from vit_jax.tools.plan import aot, hlo
from vit_jax.training import hardware
from vit_jax.training.progress import mfu_text

GIB = 2**30

# Numbers of classes and examples of datasets that need not be on this machine.
# ImageNet-21k (release of fall 2011) has 14.2 million images and 21,841
# synsets. The paper's models have two more logits.
_KNOWN = {'imagenet21k': (21_843, 14_197_122)}

# Environment variables for libtpu. Without them, libtpu searches the network
# for a TPU, logs errors, and keeps other processes from using libtpu.
_LIBTPU = {
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_ACCELERATOR_TYPE': 'v3-8',
  'TPU_MIN_LOG_LEVEL': '3',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_STDERR_LOG_LEVEL': '3',
  'TPU_WORKER_HOSTNAMES': 'localhost',
}


class TooLarge(Exception):
  """The step does not fit into the memory of a device."""


class Step(NamedTuple):
  """A compiled training step. Memory is in bytes per device."""

  program: hlo.CompiledProgram
  params_bytes: int
  optimizer_bytes: int  # the training state without the parameters
  peak_bytes: int  # includes the training state
  compile_s: float


def compile_step(experiment: Experiment) -> Step:
  """Compiles the training step of an experiment, as `train` would run it.

  Raises:
    TooLarge: if the step does not fit into memory.
    ValueError: if the devices are not TPUs.
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
  """Compiles a program; returns it with its HLO text.

  The text is the compiler's dump, because for TPU7x `as_text` lists other
  collectives than the dump.
  """
  with tempfile.TemporaryDirectory() as folder:
    compiled = lowered.compile(
      {'xla_dump_to': folder, 'xla_dump_hlo_as_text': True}
    )
    for path in pathlib.Path(folder).glob('*.after_codegen.txt'):
      return compiled, path.read_text()
  return compiled, compiled.as_text() or ''


def _bytes(tree: Any) -> int:
  """Returns the bytes of a tree's arrays on one device."""
  return sum(
    int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


def _reason(message: str) -> str:
  """Returns the memory figures of the compiler's message, with advice.

  A message without figures is cut to its first line.
  """
  match = re.search(r'\(([\d.]+)G\) exceeds available HBM \(([\d.]+)G', message)
  if not match:
    return message.splitlines()[0]
  needed, there = map(float, match.groups())
  return (
    f'it needs {needed:.2f} GiB, but a device has {there:.2f} GiB, '
    f'{needed - there:.2f} too few. Try a higher --config.accum_steps, '
    '--config.model.remat=nothing_saveable, --config.gather=layer with '
    '--config.mesh.fsdp=-1, or a larger topology'
  )


def devices_of(
  topology: str, slices: int = 1
) -> tuple[list[jax.Device], hardware.TpuChip]:
  """Returns the devices of all slices, and the facts about the chip.

  `topology` is the generation and grid of chips of a slice, as in v3:16x16.

  Raises:
    ImportError: if libtpu is not installed.
    ValueError: if the topology is unknown, or if the speed of the network
      between slices is not published.
  """
  # Refuses a side of 0, because libtpu crashes on it.
  match = re.fullmatch(r'(\w+):[1-9]\d*(x[1-9]\d*)*(_\w+)?', topology)
  generation = match[1] if match else ''
  if generation not in hardware.TPU_CHIPS:
    raise ValueError(
      f'--topology={topology} is unknown. Write a generation and its chips, '
      f'as in v3:16x16. Generations: {", ".join(hardware.TPU_CHIPS)}.'
    )
  chip = hardware.TPU_CHIPS[generation]
  if slices > 1 and not chip.network_bytes_per_s:
    known = [k for k, v in hardware.TPU_CHIPS.items() if v.network_bytes_per_s]
    raise ValueError(
      f'--slices is {slices}, but the network speed between slices of '
      f'{generation} is not published. It is known for {", ".join(known)}.'
    )
  for name, value in _LIBTPU.items():
    os.environ.setdefault(name, value)
  if not (
    importlib.util.find_spec('libtpu') or os.environ.get('TPU_LIBRARY_PATH')
  ):
    raise ImportError(
      'The TPU compiler is not installed. Run pip install -c '
      "requirements.txt -e '.[plan]'."
    )
  try:
    described = topologies.get_topology_desc(
      platform='tpu', topology_name=topology, num_slices=slices
    )
  except jax.errors.JaxRuntimeError as e:
    raise ValueError(f'--topology={topology}: {e}') from None
  return list(described.devices), chip


def facts_given(config: ConfigDict, num_classes: int, examples: int) -> Facts:
  """Returns facts about a config's data; class names are numbers.

  Looks up `num_classes` and `examples` where they are 0.

  Raises:
    ValueError: if the dataset or the split is invalid.
    FileNotFoundError: if the data are missing.
    ImportError: if a library that the dataset needs is not installed.
  """
  name, split = config.data.name, config.data.split
  usual = benchmarks.BENCHMARKS.get(name)
  several = False
  if num_classes and examples:
    classes, size = num_classes, examples
  elif name in _KNOWN:
    classes, size = _KNOWN[name]
    size = len(splits.select(split, {'train': range(size)}, name))
  elif usual and split == usual.train:
    classes, size = usual.num_classes, usual.examples[0]
  else:
    source = sources.open_config(config.data, split)
    classes, size = len(source.class_names), len(source)
    several = source.several_labels
  numbers = map(str, range(num_classes or classes))
  return Facts(tuple(numbers), examples or size, several)


class Cost:
  """The estimated cost of a step.

  Attributes:
    computing_s: time of computation, without collectives.
    least_s: lower bound of the step time. Collectives overlap with computation
      as scheduled, and data that the devices of a chip share is sent once.
    most_s: upper bound of the step time. Nothing overlaps, and each device
      sends its own data.
    sent_bytes: data that each device sends inside its slice.
    network_bytes: data that each device sends to other slices.
    network_s: time to send `network_bytes`.
    flops: FLOPs of a step at the largest image size.
    peak_flops: peak FLOP/s of all chips.
    hbm_bytes: memory of a device.
  """

  def __init__(
    self,
    experiment: Experiment,
    program: hlo.CompiledProgram,
    devices: Sequence[jax.Device],
    chip: hardware.TpuChip,
  ):
    """Computes all costs; assumes that links and network run at full speed."""
    coords = {tuple(d.coords) for d in devices}  # the same in each slice
    self.devices = len(devices)
    # With a single slice, devices lack the attribute.
    slices = {getattr(d, 'slice_index', 0) for d in devices}
    self.chips = len(coords) * len(slices)
    per_chip = self.devices // self.chips
    # The topology may list the two cores of a v4 chip as two devices, but
    # training uses a chip as one device.
    device_cores = hardware.cores_per_device(devices[0])
    self.cores = self.chips * max(per_chip, device_cores)
    self.peak_flops = self.chips * hardware.chip_flops(devices[0])
    self.hbm_bytes = chip.hbm_gib * GIB / per_chip
    axes = [max(n) - min(n) + 1 for n in zip(*coords, strict=True)]
    speed = chip.sent_bytes_per_s(axes) or math.inf
    # The devices of a chip share its network: each sends its own gradients.
    network = chip.network_bytes_per_s / per_chip or math.inf
    self.sent_bytes, self.network_bytes = (
      sum(
        c.sent_bytes()
        for c in program.collectives
        if c.between_slices == between
      )
      for between in (False, True)
    )
    self.network_s = self.network_bytes / network
    self.computing_s = program.total_cycles / chip.clock_hz
    self.least_s = program.seconds(
      chip.clock_hz,
      lambda c: c.sent_bytes() / (network if c.between_slices else speed),
    )
    self.most_s = (
      self.computing_s + self.sent_bytes * per_chip / speed + self.network_s
    )
    self.images = experiment.config.batch_size
    seen = self.images * experiment.objective.images_seen
    self.flops = 3 * seen * _compiled_flops(experiment)

  def rate(self, step_s: float) -> float:
    """Returns images/s per core."""
    return self.images / step_s / self.cores

  def mfu(self, step_s: float) -> str:
    return mfu_text(self.flops / step_s / self.peak_flops)


def _compiled_flops(experiment: Experiment) -> int:
  """Returns the forward FLOPs of an image of the compiled step."""
  objective = experiment.objective
  *_, H, W, _ = objective.batch_shapes(1)['image'].shape
  return flops.forward_flops(objective.model, (H, W))


def report(experiment: Experiment, step: Step, cost: Cost) -> str:
  total = experiment.durations.total
  # FLOPs of the average step as a share of a step at the largest image size.
  share = experiment.forward_flops / _compiled_flops(experiment)
  a_core = cost.rate(cost.computing_s)
  bounds = (cost.least_s, cost.most_s)
  days = [total * share * s / 86_400 * cost.cores for s in bounds]
  hours = [total * share * s / 3_600 for s in bounds]
  step_texts = [
    f'{1e3 * s:,.1f} ms if communication {does}: {cost.rate(s):,.1f} images/s '
    f'a core, MFU {cost.mfu(s)}'
    for s, does in zip(bounds, ('overlaps', 'does not overlap'), strict=True)
  ]
  unknown = collections.Counter(step.program.unknown)
  rest_bytes = step.peak_bytes - step.params_bytes - step.optimizer_bytes
  rows = {
    'compiled': f'in {step.compile_s:.0f} s',
    'memory': (
      f'{_gib(step.peak_bytes)} of {_gib(cost.hbm_bytes)} at peak: '
      f'parameters {_gib(step.params_bytes)}, optimizer '
      f'{_gib(step.optimizer_bytes)}, the rest {_gib(rest_bytes)}'
    ),
    'computing': (
      f'{1e3 * cost.computing_s:,.1f} ms, MFU {cost.mfu(cost.computing_s)}: '
      f'{a_core:,.1f} images/s a core, '
      f'{a_core * cost.cores / cost.devices:,.1f} a device, '
      f'{a_core * cost.cores / cost.chips:,.1f} a chip'
    ),
    'unknown': 'operations without an estimate count as 0: '
    + ', '.join(f'{n} x {name}' for name, n in unknown.most_common(3)),
    'step': '\n          '.join(step_texts),
    'sent': '\n          '.join(
      [_gib(cost.sent_bytes), *_collectives(step.program)]
    ),
    'network': (
      f'{cost.network_bytes / 2**20:,.1f} MiB to other slices by each device, '
      f'{1e3 * cost.network_s:,.1f} ms'
    ),
    'schedule': (
      f'{total:,} steps of {cost.images:,}: '
      f'{total * share * cost.flops / 1e18:,.4g} exaFLOPs, '
      f'{_span(days, ".4g")} core-days, {_span(hours, ".1f")} wall-clock hours'
      + (', averaged over image sizes by FLOPs' if share < 1 else '')
    ),
  }
  if not cost.network_bytes:
    del rows['network']
  if not unknown:
    del rows['unknown']
  return '\n'.join(f'{name:<9} {text}' for name, text in rows.items())


@dataclasses.dataclass(frozen=True)
class Failures:
  """Rate and cost of failures, after which all slices restart."""

  mtbf_s: float  # mean time between failures of any slice
  restart_s: float  # from a failure to the next step
  save_s: float  # pause of training for a checkpoint

  def interval_s(self) -> float:
    """Returns the checkpoint interval in seconds that loses the least time.

    Uses the approximation of Young, "A first order approximation to the optimum
    checkpoint interval", 1974.
    """
    return math.sqrt(2 * self.save_s * self.mtbf_s)

  def lost_s(self, interval_s: float) -> float:
    """Returns the mean number of seconds that a failure costs."""
    return interval_s / 2 + self.restart_s

  def lost_share(self, interval_s: float) -> float:
    """Returns the share of time lost to failures and to saving."""
    return self.save_s / interval_s + self.lost_s(interval_s) / self.mtbf_s

  def report(self, step_s: float, every: int) -> str:
    """Returns lines about a run that saves a checkpoint every `every` steps."""
    set_s, best_s = every * step_s, self.interval_s()
    best = max(1, round(best_s / step_s))
    return (
      f'failures  one every {self.mtbf_s / 3600:,.1f} h, each costing '
      f'{self.lost_s(set_s) / 60:,.1f} min: half of checkpoint_every and a '
      f'restart; {self.lost_share(set_s):.1%} of time lost, saving included\n'
      f'          {self.lost_share(best_s):.1%} lost with the best interval, '
      f"--config.checkpoint_every='{best} steps', {best_s / 60:,.1f} min"
    )


def _span(bounds: Sequence[float], form: str) -> str:
  """Formats bounds as 'a to b', or as 'a' if both give the same text."""
  return ' to '.join(dict.fromkeys(f'{x:,{form}}' for x in bounds))


def _gib(count: float) -> str:
  return f'{count / GIB:.2f} GiB'


def _collectives(program: hlo.CompiledProgram) -> list[str]:
  """Returns a line for each kind of collective and number of devices."""
  found: dict[tuple[bool, str, int], list[hlo.Collective]] = {}
  for each in program.collectives:
    key = (each.between_slices, each.kind, each.devices)
    found.setdefault(key, []).append(each)
  return [
    f'{len(same)} x {kind} over {n}{" slices" if between else ""}: '
    f'{_gib(sum(round(each.sent_bytes()) for each in same))}'
    for (between, kind, n), same in sorted(found.items())
  ]


def profile(program: hlo.CompiledProgram, count: int) -> list[str]:
  """Returns the `count` slowest operations, summed over the layers of a ViT."""
  cycles: collections.Counter[str] = collections.Counter()
  for name, number in program.cycles.items():
    cycles[re.sub(r'block_\d+', 'block_*', name)] += number
  return [
    f'{number / program.total_cycles:6.1%}  {name}'
    for name, number in cycles.most_common(count)
  ]
