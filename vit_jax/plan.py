"""What training a config will take on a TPU that is not there.

  python -m vit_jax.plan --config=configs/vit.py:l16 --topology=v3:16x16
  python -m vit_jax.plan --config=configs/vit.py:h14 --topology=v3:4x4 \
    --config.accum_steps=16 --config.model.remat=nothing_saveable

  python -m vit_jax.plan --config=configs/vit.py:h14 --topology=v3:4x4 --search

compiles the real training step with the TPU's own compiler, which runs on any
machine (`pip install -c requirements.txt -e '.[plan]'`), and prints for each
core: memory, the compiler's estimate of a step, images/s and MFU, what is sent
between cores; and for the whole schedule exaFLOPs and core-days.

The estimate is for a step with its data at hand and leaves out the collectives,
which may or may not hide behind it: their bytes and a lower bound for their
time stand beside it. Where the step does not fit, the compiler says by how
much, and the exit status is 1.

--search tries parts of the batch, rematerialisation, loops over layers and
meshes, and says which of those that fit is fastest, with its flags.

A topology is written as a generation (v2, v3, v4, v5e, v5p, v6e) and its chips:
v3:4x4, v4:2x2x4. Of v2, v3 and v4 every chip counts as two cores.
"""

import collections
import dataclasses
import importlib.util
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags
from jax.experimental import topologies
from ml_collections import ConfigDict

from vit_jax import main
from vit_jax.data import benchmarks, sources, splits
from vit_jax.experiment import Experiment, facts_of
from vit_jax.models import flops
from vit_jax.objectives.objective import Facts
from vit_jax.plan import aot, hlo
from vit_jax.plan.search import Search, TooLarge
from vit_jax.sweeps import axes
from vit_jax.training import hardware, sharding

EXIT_TOO_LARGE = 1
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

_TOPOLOGY = flags.DEFINE_string(
  'topology', '', 'Generation and chips, as in v3:16x16 or v5p:4x4x8.'
)
_NUM_CLASSES = flags.DEFINE_integer(
  'num_classes', 0, 'Classes of the data, where it is not at hand.'
)
_EXAMPLES = flags.DEFINE_integer(
  'examples', 0, 'Training examples of the data, where it is not at hand.'
)
_SEARCH = flags.DEFINE_bool(
  'search',
  False,
  'Finds accum_steps, gather, mesh, model.scan and model.remat for the fastest '
  'step that fits, in ten to twenty compilations.',
)
_PROFILE = flags.DEFINE_integer(
  'profile', 0, 'Prints so many of the operations that take longest.'
)


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

  program: hlo.Program
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
    program=hlo.read(compiled.as_text() or ''),
    params_bytes=params_bytes,
    optimizer_bytes=_bytes(state) - params_bytes,
    peak_bytes=aot.peak_bytes(compiled),
    compile_s=compile_s,
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

  Args:
    config: names the data.
    num_classes: takes the place of the data's, if not 0.
    examples: takes the place of the data's, if not 0.

  Raises:
    ValueError: if the data is neither known nor at hand.
    FileNotFoundError: likewise.
  """
  found = num_classes, examples
  name, split = config.data.name, config.data.split
  usual = benchmarks.benchmark(name)
  if all(found):
    pass
  elif name in _KNOWN:
    classes, size = _KNOWN[name]
    found = classes, len(splits.select(split, {'train': range(size)}, name))
  elif usual and split == usual.train:
    found = usual.num_classes, usual.examples[0]
  else:
    source = sources.open_source(
      name,
      split,
      data_dir=config.data.dir or None,
      split_seed=config.data.split_seed,
      on_bad_image=None,
    )
    found = len(sources.class_names(source)), len(source)
  names = tuple(map(str, range(num_classes or found[0])))
  return facts_of(config, names, examples or found[1])


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
  """Returns what `main` prints of a step that fits."""
  cost = costs(experiment, step, devices, chip)
  total, batch_size = experiment.durations.total, experiment.config.batch_size
  exaflops = total * batch_size * cost['image_flops'] / 1e18
  rows = [
    ('compiled', f'in {step.compile_s:.0f} s'),
    (
      'memory',
      f'{_gib(step.peak_bytes)} of {_gib(cost["hbm_bytes"])} at the most: '
      f'parameters {_gib(step.params_bytes)}, optimizer '
      f'{_gib(step.optimizer_bytes)}, all else '
      + _gib(step.peak_bytes - step.params_bytes - step.optimizer_bytes),
    ),
    (
      'step',
      f'{1e3 * cost["step_s"]:,.1f} ms: {cost["images_per_s"]:,.1f} images/s a '
      f'core, MFU {cost["mfu"]:.1%}, collectives not counted',
    ),
    (
      'sent',
      f'{_gib(cost["sent_bytes"])}, at least {1e3 * cost["sent_s"]:,.1f} ms',
    ),
    *(('', line) for line in _collective_lines(step.program)),
    (
      'schedule',
      f'{total:,} steps of {batch_size:,}: {exaflops:,.4g} exaFLOPs, '
      f'{total * cost["step_s"] / 86_400 * cost["cores"]:,.4g} core-days, '
      f'{total * cost["step_s"] / 3_600:,.1f} hours here',
    ),
  ]
  return '\n'.join(f'{name:<9} {text}' for name, text in rows)


def search(
  config: ConfigDict,
  facts: Facts,
  devices: Sequence[jax.Device],
  chip: hardware.TpuChip,
) -> tuple[dict[str, Any], Step]:
  """Prints what is tried, and returns the best fields of the config.

  What is sent is added to a step at its least time, as if nothing else ran
  beside it: the fastest without would send most.

  Returns:
    The fields, and the step with them.

  Raises:
    TooLarge: if nothing fits.
  """
  steps: list[tuple[dict[str, Any], Step]] = []
  print(
    'images parts gather tensor layers   remat             GiB     step + sent '
    'ms  images/s  MFU    compiled'
  )

  def step_s(config: ConfigDict, fields: dict[str, Any]) -> float:
    images = config.batch_size * config.mesh.tensor // len(devices)
    start = (
      f'{images // config.accum_steps:<6} {config.accum_steps:<5} '
      f'{config.gather:<6} {config.mesh.tensor:<6} '
      f'{"looped" if config.model.scan else "unrolled":<8} '
      f'{config.model.remat:<16} '
    )
    print(start, end='', flush=True)
    try:
      experiment = Experiment(config, facts, devices)
      step = compile_step(experiment)
    except TooLarge as e:
      print(str(e).partition(',')[0].removeprefix('it takes '))
      raise
    steps.append((fields, step))
    cost = costs(experiment, step, devices, chip)
    total_s = cost['step_s'] + cost['sent_s']
    print(
      f'{step.peak_bytes / GIB:5.2f} {1e3 * cost["step_s"]:8.1f} + '
      f'{1e3 * cost["sent_s"]:<7.1f}{cost["images_per_s"]:9.1f} '
      f'{cost["mfu"]:6.1%} {step.compile_s:6.0f} s'
    )
    return total_s

  best = Search(config, len(devices), step_s).best()
  if best is None:
    raise TooLarge('nothing that was tried does. Take a larger topology')
  return next(found for found in steps if found[0] == best.fields)


def _gib(count: float) -> str:
  return f'{count / GIB:.2f} GiB'


def _collective_lines(program: hlo.Program) -> list[str]:
  """Returns what is sent, by kind and number of devices."""
  counts: collections.Counter[tuple[str, int]] = collections.Counter()
  sent: collections.Counter[tuple[str, int]] = collections.Counter()
  for found in program.collectives:
    key = found.kind, found.devices
    counts[key] += found.count
    sent[key] += round(found.sent_bytes())
  return [
    f'{counts[kind, n]} x {kind} over {n}: {_gib(sent[kind, n])}'
    for kind, n in sorted(counts)
  ]


def _profile_lines(program: hlo.Program, count: int) -> list[str]:
  """Returns the operations that take longest, all layers' together."""
  cycles: collections.Counter[str] = collections.Counter()
  for name, number in program.cycles.items():
    cycles[re.sub(r'block_\d+', 'block_*', name)] += number
  return [
    f'{number / program.total_cycles:6.1%}  {name}'
    for name, number in cycles.most_common(count)
  ]


def parse_flags(argv: list[str]) -> list[str]:
  """As `main.parse_flags`, without a workdir."""
  return main.parse_flags(argv, required=('config', 'topology'))


def run(argv: list[str]) -> None:
  """Prints the plan of a config, or why there is none."""
  del argv
  main.show_messages()
  # Arrays of this process, of which there are few, belong on its own CPU.
  jax.config.update('jax_platforms', 'cpu')
  config = flags.FLAGS.config
  try:
    devices, chip = devices_of(_TOPOLOGY.value)
    facts = facts_given(config, _NUM_CLASSES.value, _EXAMPLES.value)
    print(
      f'plan      {config.data.name}, {len(facts.class_names):,} classes, '
      f'{facts.examples:,} examples; batch {config.batch_size:,}'
    )
    step = None
    if _SEARCH.value:
      best, step = search(config, facts, devices, chip)
      axes.set_fields(config, best)
      given = ' '.join(f'--config.{name}={x}' for name, x in best.items())
      print(f'fastest   {given}')
    experiment = Experiment(config, facts, devices)
    print(
      f'topology  {_TOPOLOGY.value}: {sharding.describe(experiment.mesh)}; '
      'batch in '
      f'{config.accum_steps} parts',
      flush=True,
    )
    step = step or compile_step(experiment)
    print(report(experiment, step, devices, chip))
    for line in _profile_lines(step.program, _PROFILE.value):
      print(line)
  except TooLarge as e:
    print(f'error: The step does not fit: {e}.', file=sys.stderr)
    sys.exit(EXIT_TOO_LARGE)
  except (ValueError, FileNotFoundError, ImportError) as e:
    print(f'error: {e}', file=sys.stderr)
    sys.exit(main.EXIT_BAD_INPUT)


if __name__ == '__main__':
  app.run(run, flags_parser=parse_flags)
