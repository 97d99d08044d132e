"""Trains, resumes, fine-tunes or evaluates the model of a config.

  python -m vit_jax.main --config=configs/digits.py --workdir=runs/digits

The same command resumes from the newest checkpoint that is not damaged. A
workdir takes one run at a time. --config.FIELD=VALUE sets a field of the
config; vit_jax/config.py explains the fields. --config.init=CHECKPOINT starts
from pre-trained weights. --config.eval_only=True only evaluates.

  python -m vit_jax.main --config=configs/digits.py --workdir=runs/rates \
    --sweep=optimizer.lr=0.001,0.003 --sweep=seed=0,1,2

This is a sweep. It runs every combination, each in its own folder under
WORKDIR/runs/, and writes results.csv and table.md. Not counting seeds, the
second axis gives the columns of the table, all others the rows; cells are means
over seeds. The same command resumes the sweep. If you add values, it runs only
the new combinations. A config can define axes too, as configs/ablation.py does.
--sweep then adds an axis or replaces the values of an axis.

  python -m vit_jax.main --config=configs/digits.py --workdir=runs/tuned \
    --tune=optimizer.lr=0.001,0.003 --sweep=seed=0,1,2

This tunes before the sweep. It trains once with each learning rate on
config.tune.train and compares them on config.tune.val; both are parts of the
training set. Then it trains with the best learning rate on the whole training
set, with every seed. If the sweep has axes besides the seed, each of their
combinations is tuned separately. tune.csv lists the trials.

WORKDIR receives checkpoints/, metrics.csv, curves.png, parameters.txt and, with
the extra `tensorboard`, TensorBoard's files. A single run in one process also
writes report.txt, if it trains a classifier with at most 1,000 classes.

Exit status:

  0    done
  1    an error in the program, with its traceback
  2    bad input: a config, data or checkpoint that cannot work
  65   training diverged; the same command would diverge again
  69   another process was lost, or no step, evaluation or save finished within
       --timeout_s seconds
  71   the machine failed: full or broken disk, storage that does not answer,
       too little memory, a missing package
  75   preempted: SIGTERM or Ctrl-C was received and the state is saved
  130  Ctrl-C was pressed twice, or outside of training

After 69 and 75 the same command resumes, even with another number of processes.
After 75 it resumes at the step where the run stopped, after 69 at the last
checkpoint. slurm.sbatch and tpu.sh in launch/ run the command again after 75,
but not after 69 (unless the TPU was preempted), because its cause may recur:
read the last messages of the lost process. On GKE, launch/gke.sh runs it again
after every failure except 2 and 65, a limited number of times.
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

# EX_DATAERR of sysexits.h: runs are deterministic and would diverge again.
EXIT_DIVERGED = 65

_WORKDIR = flags.DEFINE_string(
  'workdir', '', 'Folder for checkpoints, metrics and curves; gs:// works.'
)
_SWEEP = flags.DEFINE_multi_string(
  'sweep',
  [],
  'FIELD=V1,V2,...: runs the config once for each value of the field. Repeat '
  'the flag for other fields to run every combination.',
)
_TUNE = flags.DEFINE_multi_string(
  'tune',
  [],
  'FIELD=V1,V2,...: before the runs, chooses the value of the field that is '
  'best on a validation split (config.tune). Repeat the flag for other fields '
  'to try every combination. A single value is used without a trial.',
)
_START_OVER = flags.DEFINE_bool(
  'start_over',
  False,
  'Whether to start from step 0, with a new metrics.csv, if all checkpoints of '
  'the workdir are damaged. If a checkpoint is intact, the run resumes.',
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
  'START:STEPS: writes a trace of STEPS steps, beginning with step START, to '
  'WORKDIR/profile. TensorBoard shows it with the plugin xprof. Step 1 is '
  'mostly compilation.',
)


def main(argv: list[str]) -> None:
  """Runs the command; exits with a message and a status on expected errors."""
  del argv  # parse_flags has consumed all arguments
  # Imported here and below, so that --help does not load JAX.
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
  from vit_jax.sweeps import axes, running, stages
  from vit_jax.train import evaluate_only
  from vit_jax.training.preemption import Preempted
  from vit_jax.training.run import Diverged, Run

  # Shells do not expand ~ after --workdir=.
  workdir = os.path.expanduser(_WORKDIR.value)
  try:
    Run.profiled = _profiled(_PROFILE.value)
    from_init.resolve(config)
    axes.add_axes(config, _SWEEP.value, _TUNE.value)
    overrides = config_flags.get_override_values(flags.FLAGS['config'])
    axes.refuse_swept(config, overrides)
    # Evaluation alone does not tune.
    if config.sweep or (config.tune.axes and not config.eval_only):
      running.run(config, workdir, _START_OVER.value)
    elif config.eval_only:
      last, place = stages.runs(config, workdir)[-1]
      metrics = evaluate_only(last, place)
      if jax.process_index() == 0:
        for name, value in metrics.items():
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
  """Returns the steps to profile, from --profile=START:STEPS."""
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
