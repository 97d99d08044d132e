"""Trains, resumes, fine-tunes or evaluates what a config describes.

  python -m vit_jax.main --config=configs/digits.py --workdir=runs/digits

The same command again resumes where the last one stopped. Damaged checkpoints
are stepped over; where none is whole, only --start_over starts from step 0. A
workdir takes one run at a time: a second one is refused. Any field of the
config can be set with --config.FIELD=VALUE; vit_jax/config.py explains them
all. --config.init=CHECKPOINT starts from other weights;
--config.eval_only=True only evaluates.

  python -m vit_jax.main --config=configs/digits.py --workdir=runs/rates \
    --sweep=optimizer.lr=0.001,0.003 --sweep=seed=0,1,2

runs every combination, each in a folder of its own in WORKDIR/runs/, and writes
results.csv and table.md. The first axis gives the rows of the table,
the second the columns, and seeds are averaged. The same command again resumes
the sweep; with more values it runs only what is new. A config can bring axes
too, as configs/ablation.py does; --sweep then replaces the values of an axis or
adds one.

  python -m vit_jax.main --config=configs/digits.py --workdir=runs/tuned \
    --tune=optimizer.lr=0.001,0.003 --sweep=seed=0,1,2

chooses first: each learning rate is trained once on config.tune.train and
measured on config.tune.val, parts of the training set; the best one is then
trained on all of it, with every seed. Other axes of the sweep each choose for
themselves. tune.csv says what was tried.

WORKDIR gets checkpoints/, metrics.csv and curves.png, and TensorBoard's event
files where that is installed (the extra `tensorboard`).

Exit status:

  0    done
  1    an error in the program, with its traceback
  2    bad input: a config, data or checkpoint that cannot work
  65   the loss diverged, as it would again
  69   another process was lost, or nothing moved for --timeout_s
  71   the machine: a full or broken disk, storage that does not answer, too
       little memory, a missing package
  75   preempted: SIGTERM or Ctrl-C came, and everything is saved
  130  Ctrl-C came twice, or before there was anything to save

After 69 and 75 the same command goes on, with another
number of processes too: from the last checkpoint after 69, from one saved for
it after 75. slurm.sbatch and tpu.sh in launch/ start again by themselves after
75 and not after 69, which an error that comes again may cause: the lost
process's last words tell. On GKE everything but 2 and 65 starts again, a
limited number of times.
"""

import os
import sys

from absl import app, flags
from ml_collections import config_flags

from vit_jax.cli.flags import (
  CONFIG,
  ENDINGS,
  EXIT_PREEMPTED,
  parse_flags,
  refuse,
  say,
  show_messages,
  status,
)

# EX_DATAERR of sysexits.h. Runs are exact: it would diverge again.
EXIT_DIVERGED = 65

_WORKDIR = flags.DEFINE_string(
  'workdir', '', 'Folder for checkpoints, metrics and curves; gs:// works.'
)
_SWEEP = flags.DEFINE_multi_string(
  'sweep',
  [],
  'FIELD=V1,V2,...: runs the config once for each value of the field. Given '
  'again for other fields, it runs every combination.',
)
_TUNE = flags.DEFINE_multi_string(
  'tune',
  [],
  'FIELD=V1,V2,...: chooses the value of the field that is best on a part held '
  'out of training (config.tune), before the runs. Given again for other '
  'fields, it tries every combination; a single value is taken as it is.',
)
_START_OVER = flags.DEFINE_bool(
  'start_over',
  False,
  'Whether to start from step 0, with a new metrics.csv, where the workdir has '
  'damaged checkpoints and no whole one. From a whole one it resumes anyway.',
)
_DISTRIBUTED = flags.DEFINE_bool(
  'distributed',
  False,
  'Whether this is one of several processes that train together: on TPU pods, '
  'Slurm, or with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and '
  'JAX_PROCESS_ID set.',
)
_TIMEOUT_S = flags.DEFINE_float(
  'timeout_s',
  1800.0,
  'Seconds after which training ends if no step, evaluation or save has '
  'finished. The first step includes compiling.',
  lower_bound=1.0,
)
_PROFILE = flags.DEFINE_string(
  'profile',
  '',
  'START:STEPS: writes a trace of so many steps, from step START on, to '
  'WORKDIR/profile. TensorBoard shows it with the plugin xprof. Step 1 is '
  'mostly compiling.',
)


def main(argv: list[str]) -> None:
  """Runs the command and turns what can go wrong into a message and a code."""
  del argv  # parse_flags leaves nothing
  # Here and below, so that --help does without all that training needs.
  from vit_jax.training import processes

  show_messages()
  processes.Watch.timeout_s = _TIMEOUT_S.value
  if not _DISTRIBUTED.value:
    _run()
    return
  try:
    processes.join()
  except ValueError as e:
    refuse(str(e))
  with processes.failing_together():
    _run()


def _run() -> None:
  config = CONFIG.value
  import jax

  from vit_jax.checkpoints import from_init
  from vit_jax.evaluators import final
  from vit_jax.sweeps import REPORTS, axes, running, stages
  from vit_jax.train import evaluate_only
  from vit_jax.training.preemption import Preempted
  from vit_jax.training.run import Diverged, Run

  # No shell expands what comes after --workdir=.
  workdir = os.path.expanduser(_WORKDIR.value)
  try:
    Run.profiled = _profiled(_PROFILE.value)
    from_init.resolve(config)
    axes.add_axes(config, _SWEEP.value, _TUNE.value)
    overrides = config_flags.get_override_values(flags.FLAGS['config'])
    axes.refuse_swept(config, overrides)
    # Where nothing is trained there is nothing to choose.
    if config.sweep or (config.tune.axes and not config.eval_only):
      report = REPORTS.load(config.report)
      running.run(config, workdir, _START_OVER.value, report)
    elif config.eval_only:
      last, place = stages.runs(config, workdir)[-1]
      for name, value in evaluate_only(last, place).items():
        print(f'{name} {value:.4f}')
    else:
      stages.train(config, workdir, _START_OVER.value)
      if jax.process_count() == 1:
        print(final.report(*stages.runs(config, workdir)[-1]))
  except ENDINGS as e:
    sys.exit(status(e))
  except Diverged as e:
    say(f'error: {e}')
    sys.exit(EXIT_DIVERGED)
  except Preempted as e:
    print(e, file=sys.stderr)
    sys.exit(EXIT_PREEMPTED)


def _profiled(flag: str) -> range:
  """Parses --profile=START:STEPS."""
  if not flag:
    return range(0)
  start, _, steps = flag.partition(':')
  if not (
    start.isdecimal() and steps.isdecimal() and int(start) and int(steps)
  ):
    raise ValueError(
      f'--profile is {flag!r}; it must be START:STEPS, such as 10:5 for the '
      'steps 10 to 14.'
    )
  return range(int(start), int(start) + int(steps))


if __name__ == '__main__':
  app.run(main, flags_parser=parse_flags)
