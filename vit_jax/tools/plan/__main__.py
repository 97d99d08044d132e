"""What training a config will take on a TPU that is not there.

  python -m vit_jax.plan --config=configs/vit.py:l16 --topology=v3:16x16
  python -m vit_jax.plan --config=configs/vit.py:h14 --topology=v3:4x4 \
    --config.accum_steps=16 --config.model.remat=nothing_saveable

  python -m vit_jax.plan --config=configs/vit.py:h14 --topology=v3:4x4 --search

compiles the real training step with the TPU's own compiler, which runs on any
machine (`pip install -c requirements.txt -e '.[plan]'`), and prints for each
device memory, the compiler's estimate of a step, images/s and MFU, and what is
sent; and for the whole schedule exaFLOPs and core-days.

The estimate is for a step with its data at hand and leaves out what devices
send one another. That is added twice: all of it, and what is left of it when
collectives run beside whatever the compiler has put between their start and
their end, both with links at the speed that they are sold for. Where the step
does not fit, the compiler says by how much, and the exit status is 1.

--search tries parts of the batch, rematerialisation, loops over layers and
meshes, and says which of those that fit is fastest, with its flags.

A topology is written as a generation (v2, v3, v4, v5e, v5p, v6e, tpu7x) and its
chips: v3:4x4, v4:2x2x4. A chip of v5e and v6e has one core, any other two. A
device is a core, and on v5p both of a chip; on v4 it is both where training
runs, and one in what is compiled here.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags
from ml_collections import ConfigDict

from vit_jax.checkpoints import from_init
from vit_jax.cli.flags import ENDINGS, parse_flags, show_messages, status
from vit_jax.experiment import Experiment
from vit_jax.objectives.objective import Facts
from vit_jax.sweeps import axes
from vit_jax.tools.plan import search as searching
from vit_jax.tools.plan.costs import (
  GIB,
  Step,
  compile_step,
  costs,
  devices_of,
  facts_given,
  profile,
  report,
)
from vit_jax.tools.plan.search import TooLarge
from vit_jax.training import hardware, sharding
from vit_jax.training.progress import mfu_text

EXIT_TOO_LARGE = 1

_TOPOLOGY = flags.DEFINE_string(
  'topology', '', 'Generation and chips, as in v3:16x16 or v5p:4x4x8.'
)
_NUM_CLASSES = flags.DEFINE_integer(
  'num_classes',
  0,
  'Classes of the data, where it is not at hand.',
  lower_bound=0,
)
_EXAMPLES = flags.DEFINE_integer(
  'examples',
  0,
  'Training examples of the data, where it is not at hand.',
  lower_bound=0,
)
_SEARCH = flags.DEFINE_bool(
  'search',
  False,
  'Finds accum_steps, gather, mesh, model.scan and model.remat for the fastest '
  'step that fits, in ten to twenty compilations.',
)
_PROFILE = flags.DEFINE_integer(
  'profile',
  0,
  'Prints so many of the operations that take longest.',
  lower_bound=0,
)


def search(
  config: ConfigDict,
  facts: Facts,
  devices: Sequence[jax.Device],
  chip: hardware.TpuChip,
) -> tuple[dict[str, Any], Step]:
  """Prints what is tried, and returns the best fields with the step of them.

  The best has the least time in the middle between the bounds of a step with
  what is sent: the fastest without would send most.

  Raises:
    TooLarge: if nothing fits.
  """
  print(
    'images parts gather tensor layers   remat             GiB      step in ms '
    ' images/s  MFU    compiled'
  )

  def compiled(config: ConfigDict) -> tuple[float, Step]:
    images = config.batch_size * config.mesh.tensor // len(devices)
    layers = 'looped' if config.model.scan else 'unrolled'
    print(
      f'{images // config.accum_steps:<6} {config.accum_steps:<5} '
      f'{config.gather:<6} {config.mesh.tensor:<6} {layers:<8} '
      f'{config.model.remat:<16} ',
      end='',
      flush=True,
    )
    try:
      experiment = Experiment(config, facts, devices)
      step = compile_step(experiment)
    except TooLarge as e:
      print(str(e).partition(',')[0].removeprefix('it takes '))
      raise
    cost = costs(experiment, step, devices, chip)
    print(
      f'{step.peak_bytes / GIB:5.2f} {1e3 * cost.least_s:7.1f}-'
      f'{1e3 * cost.most_s:<7.1f} {cost.rate(cost.middle_s):9.1f} '
      f'{mfu_text(cost.mfu(cost.middle_s)):>6} {step.compile_s:6.0f} s'
    )
    return cost.middle_s, step

  best = searching.best(config, len(devices), compiled)
  if best is None:
    raise TooLarge('nothing that was tried does. Take a larger topology')
  return best.fields, best.step


def run(argv: list[str]) -> None:
  """Prints the plan of a config, or why there is none."""
  del argv  # what is left of it without flags
  show_messages()
  # Arrays of this process, of which there are few, belong on its own CPU.
  jax.config.update('jax_platforms', 'cpu')
  config = flags.FLAGS.config
  try:
    from_init.resolve(config)
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
      f'batch in {config.accum_steps} parts',
      flush=True,
    )
    step = step or compile_step(experiment)
    cost = costs(experiment, step, devices, chip)
    print(report(experiment, step, cost))
    for line in profile(step.program, _PROFILE.value):
      print(line)
  except TooLarge as e:
    print(f'error: The step does not fit: {e}.', file=sys.stderr)
    sys.exit(EXIT_TOO_LARGE)
  except ENDINGS as e:
    sys.exit(status(e))


if __name__ == '__main__':
  required = ('config', 'topology')
  app.run(run, flags_parser=functools.partial(parse_flags, required=required))
