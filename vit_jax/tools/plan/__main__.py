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
from typing import Any

import jax
from absl import app, flags

from vit_jax.checkpoints import from_init
from vit_jax.cli.flags import ENDINGS, parse_flags, show_messages, status
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.tools.plan import costs
from vit_jax.training import sharding

EXIT_TOO_LARGE = 1

flags.DEFINE_string(
  'topology', '', 'TPU generation and chips, as in v3:16x16 or v5p:4x4x8.'
)
# Name, default, smallest value and help of the flags that are numbers.
_NUMBERS: tuple[tuple[str, float, float, str], ...] = (
  ('slices', 1, 1, 'TPU slices, joined by the data-centre network.'),
  ('slice_mtbf_h', 168.0, 0.01, 'Mean hours between losses of one slice.'),
  ('restart_min', 10.0, 0, 'Minutes from a failure to the next step.'),
  ('save_s', 5.0, 0.01, 'Seconds that a checkpoint pauses training.'),
  ('num_classes', 0, 0, 'Classes. With --examples, the data are not opened.'),
  ('examples', 0, 0, 'Training examples; see --num_classes.'),
  ('slowest', 0, 0, 'Number of slowest operations to print.'),
)
for _name, _default, _least, _help in _NUMBERS:
  _is_whole = isinstance(_default, int)
  _define: Any = flags.DEFINE_integer if _is_whole else flags.DEFINE_float
  _define(_name, _default, _help, lower_bound=_least)


def run(argv: list[str]) -> None:
  show_messages()
  # This process runs only small computations itself, so a CPU suffices.
  jax.config.update('jax_platforms', 'cpu')
  given = flags.FLAGS
  config = given.config
  try:
    from_init.resolve(config)
    devices, chip = costs.devices_of(given.topology, given.slices)
    checked = CheckedConfig(config, devices)
    facts = costs.facts_given(config, given.num_classes, given.examples)
    print(
      f'plan      {config.data.name}, {len(facts.class_names):,} classes, '
      f'{facts.examples:,} examples; batch {config.batch_size:,}'
    )
    experiment = Experiment(checked, facts)
    print(
      f'topology  {given.topology}: {sharding.describe(experiment.mesh)}; '
      f'accum_steps {config.accum_steps}',
      flush=True,
    )
    step = costs.compile_step(experiment)
    cost = costs.Cost(experiment, step.program, devices, chip)
    print(costs.report(experiment, step, cost))
    mtbf_s = 3600 * given.slice_mtbf_h / given.slices
    failures = costs.Failures(mtbf_s, 60 * given.restart_min, given.save_s)
    print(failures.report(cost.most_s, experiment.durations.checkpoint_every))
    for line in costs.profile(step.program, given.slowest):
      print(line)
  except costs.TooLarge as e:
    print(f'error: The step does not fit: {e}.', file=sys.stderr)
    sys.exit(EXIT_TOO_LARGE)
  except ENDINGS as e:
    sys.exit(status(e))


if __name__ == '__main__':
  required = ('config', 'topology')
  app.run(run, flags_parser=functools.partial(parse_flags, required=required))
