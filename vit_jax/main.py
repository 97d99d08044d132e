"""Trains, resumes, fine-tunes or evaluates what a config describes.

  python -m vit_jax.main --config=configs/digits.py --workdir=runs/digits

The same command again resumes where the last one stopped. Any field of the
config can be set with --config.FIELD=VALUE; --config.init=CHECKPOINT starts
from other weights; --config.eval_only=True only evaluates.

Exit status: 0 done, 1 the loss diverged, 2 bad input, 75 preempted (the state
is saved: run the same command again).
"""

import sys

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from vit_jax import run, train

EXIT_DIVERGED = 1
EXIT_BAD_INPUT = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'File in configs/, with its arguments after a colon.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir',
  None,
  'Folder for checkpoints, metrics and curves; gs:// works.',
  required=True,
)
_DISTRIBUTED = flags.DEFINE_bool(
  'distributed',
  False,
  'Whether this is one of several processes that train together: on TPU pods, '
  'Slurm, or with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and '
  'JAX_PROCESS_ID set.',
)


def main(argv: list[str]) -> None:
  """Runs the command and turns what can go wrong into a message and a code."""
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected argument {argv[1]!r}.')
  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)  # orbax tells every detail
  if _DISTRIBUTED.value:
    jax.distributed.initialize()
  config = _CONFIG.value
  try:
    if config.eval_only:
      for name, value in train.evaluate_only(config, _WORKDIR.value).items():
        print(f'{name} {value:.4f}')
    else:
      train.train(config, _WORKDIR.value)
  except (ValueError, FileNotFoundError) as e:
    logging.debug('%s', e, exc_info=True)
    print(f'error: {e}', file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)
  except run.Diverged as e:
    print(f'error: {e}', file=sys.stderr)
    sys.exit(EXIT_DIVERGED)
  except run.Preempted as e:
    print(e, file=sys.stderr)
    sys.exit(EXIT_PREEMPTED)


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  app.run(main)
