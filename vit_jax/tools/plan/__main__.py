"""Plan the training of a config on a TPU that is not attached.

  python -m vit_jax.plan --config=configs/vit.py:l16 --topology=v3:16x16
  python -m vit_jax.plan --config=configs/vit.py:h14 --topology=v3:4x4 \
    --config.accum_steps=16 --config.model.remat=nothing_saveable
  python -m vit_jax.plan --config=configs/vit.py:l16 --topology=v5e:16x16 \
    --slices=2 --config.batch_size=8192

The command compiles the real training step with the TPU compiler, which works
without a TPU (`pip install -c requirements.txt -e '.[plan]'`). It prints
memory, step time, images/s, MFU and the bytes that each device sends. It also
prints the cost of the whole run, and the cost of losing a slice. If the step
does not fit into memory, the exit status is 1. docs/guides/plan.md explains the
output.

A topology is a TPU generation (v2, v3, v4, v5e, v5p, v6e, tpu7x) and its grid
of chips: v3:4x4, v4:2x2x4.
"""

import functools
import sys

import jax
from absl import app, flags

from vit_jax.checkpoints import from_init
from vit_jax.cli.flags import ENDINGS, parse_flags, show_messages, status
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.tools.plan import costs
from vit_jax.training import sharding

EXIT_TOO_LARGE = 1

_TOPOLOGY = flags.DEFINE_string(
  'topology', '', 'TPU generation and chips, as in v3:16x16 or v5p:4x4x8.'
)
_SLICES = flags.DEFINE_integer(
  'slices',
  1,
  'Number of TPU slices, joined by the data-centre network.',
  lower_bound=1,
)
_SLICE_MTBF_H = flags.DEFINE_float(
  'slice_mtbf_h',
  168.0,
  'Mean hours between failures or preemptions of one slice.',
  lower_bound=0.01,
)
_RESTART_MIN = flags.DEFINE_float(
  'restart_min', 10.0, 'Minutes from a failure to the next step.', lower_bound=0
)
_SAVE_S = flags.DEFINE_float(
  'save_s', 5.0, 'Seconds that a checkpoint pauses training.', lower_bound=0.01
)
_NUM_CLASSES = flags.DEFINE_integer(
  'num_classes',
  0,
  'Number of classes. If you give --examples too, the data are not opened.',
  lower_bound=0,
)
_EXAMPLES = flags.DEFINE_integer(
  'examples',
  0,
  'Number of training examples; see --num_classes.',
  lower_bound=0,
)
_SLOWEST = flags.DEFINE_integer(
  'slowest',
  0,
  'Number of slowest operations to print.',
  lower_bound=0,
)


def run(argv: list[str]) -> None:
  show_messages()
  # This process runs only small computations itself, so a CPU suffices.
  jax.config.update('jax_platforms', 'cpu')
  config = flags.FLAGS.config
  try:
    from_init.resolve(config)
    devices, chip = costs.devices_of(_TOPOLOGY.value, _SLICES.value)
    checked = CheckedConfig(config, devices)
    facts = costs.facts_given(config, _NUM_CLASSES.value, _EXAMPLES.value)
    print(
      f'plan      {config.data.name}, {len(facts.class_names):,} classes, '
      f'{facts.examples:,} examples; batch {config.batch_size:,}'
    )
    experiment = Experiment(checked, facts)
    print(
      f'topology  {_TOPOLOGY.value}: {sharding.describe(experiment.mesh)}; '
      f'accum_steps {config.accum_steps}',
      flush=True,
    )
    step = costs.compile_step(experiment)
    cost = costs.Cost(experiment, step.program, devices, chip)
    print(costs.report(experiment, step, cost))
    mtbf_s = 3600 * _SLICE_MTBF_H.value / _SLICES.value
    failures = costs.Failures(mtbf_s, 60 * _RESTART_MIN.value, _SAVE_S.value)
    print(failures.report(cost.most_s, experiment.durations.checkpoint_every))
    for line in costs.profile(step.program, _SLOWEST.value):
      print(line)
  except costs.TooLarge as e:
    print(f'error: The step does not fit: {e}.', file=sys.stderr)
    sys.exit(EXIT_TOO_LARGE)
  except ENDINGS as e:
    sys.exit(status(e))


if __name__ == '__main__':
  required = ('config', 'topology')
  app.run(run, flags_parser=functools.partial(parse_flags, required=required))
