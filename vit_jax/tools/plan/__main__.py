"""Plans the training of a config on a TPU that is not there.

  python -m vit_jax.plan --config=configs/vit.py:l16 --topology=v3:16x16
  python -m vit_jax.plan --config=configs/vit.py:h14 --topology=v3:4x4 \
    --config.accum_steps=16 --config.model.remat=nothing_saveable
  python -m vit_jax.plan --config=configs/vit.py:l16 --topology=v5e:16x16 \
    --slices=2 --config.batch_size=8192

compiles the real training step with the TPU's own compiler, which runs on any
machine (`pip install -c requirements.txt -e '.[plan]'`). It prints for each
device memory, the compiler's estimate of a step, images/s and MFU, and the
bytes that devices send one another; for the whole schedule exaFLOPs and
core-days.

The estimate is for a step whose batch is on the devices, and leaves out
collectives. Their time is added in two ways: in full, and only the part that
does not run beside computation in the compiled schedule. Both assume links at
their advertised speed. With several slices the bytes between them are counted
apart. If the step does not fit, the compiler says by how much, and the exit
status is 1.

The last lines say what losing a slice costs, and how often to save, for the
failures that --slice_mtbf_h, --restart_min and --save_s describe. Their
defaults are not measured.

A topology is written as a generation (v2, v3, v4, v5e, v5p, v6e, tpu7x) and its
chips: v3:4x4, v4:2x2x4. A chip of v5e and v6e has one core, any other two. A
device is a core, and on v5p both of a chip; on v4 it is both where training
runs, and one in what is compiled here.
"""

import functools
import sys

import jax
from absl import app, flags

from vit_jax.checkpoints import from_init
from vit_jax.cli.flags import ENDINGS, parse_flags, show_messages, status
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.tools.plan.costs import (
  Cost,
  TooLarge,
  compile_step,
  devices_of,
  facts_given,
  profile,
  report,
)
from vit_jax.tools.plan.failures import Failures
from vit_jax.training import sharding

EXIT_TOO_LARGE = 1

_TOPOLOGY = flags.DEFINE_string(
  'topology', '', 'Generation and chips, as in v3:16x16 or v5p:4x4x8.'
)
_SLICES = flags.DEFINE_integer(
  'slices',
  1,
  'TPU slices of that topology, joined by the data-centre network.',
  lower_bound=1,
)
_SLICE_MTBF_H = flags.DEFINE_float(
  'slice_mtbf_h',
  168.0,
  'Hours between two failures or preemptions of one slice.',
  lower_bound=0.01,
)
_RESTART_MIN = flags.DEFINE_float(
  'restart_min', 10.0, 'Minutes from a failure to the next step.', lower_bound=0
)
_SAVE_S = flags.DEFINE_float(
  'save_s', 5.0, 'Seconds that training waits for a save.', lower_bound=0.01
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
_SLOWEST = flags.DEFINE_integer(
  'slowest',
  0,
  'Prints this many of the operations that take longest.',
  lower_bound=0,
)


def run(argv: list[str]) -> None:
  """Prints the plan of a config, or why there is none."""
  del argv  # what is left of it without flags
  show_messages()
  # Arrays of this process, of which there are few, belong on its own CPU.
  jax.config.update('jax_platforms', 'cpu')
  config = flags.FLAGS.config
  try:
    from_init.resolve(config)
    devices, chip = devices_of(_TOPOLOGY.value, _SLICES.value)
    facts = facts_given(config, _NUM_CLASSES.value, _EXAMPLES.value)
    print(
      f'plan      {config.data.name}, {len(facts.class_names):,} classes, '
      f'{facts.examples:,} examples; batch {config.batch_size:,}'
    )
    experiment = Experiment(CheckedConfig(config, devices), facts)
    print(
      f'topology  {_TOPOLOGY.value}: {sharding.describe(experiment.mesh)}; '
      f'batch in {config.accum_steps} parts',
      flush=True,
    )
    step = compile_step(experiment)
    cost = Cost(experiment, step.program, devices, chip)
    print(report(experiment, step, cost))
    mtbf_s = 3600 * _SLICE_MTBF_H.value / _SLICES.value
    failures = Failures(mtbf_s, 60 * _RESTART_MIN.value, _SAVE_S.value)
    print(failures.report(cost.most_s, experiment.durations.checkpoint_every))
    for line in profile(step.program, _SLOWEST.value):
      print(line)
  except TooLarge as e:
    print(f'error: The step does not fit: {e}.', file=sys.stderr)
    sys.exit(EXIT_TOO_LARGE)
  except ENDINGS as e:
    sys.exit(status(e))


if __name__ == '__main__':
  required = ('config', 'topology')
  app.run(run, flags_parser=functools.partial(parse_flags, required=required))
