"""What command lines share: the config, what is shown, and how they end."""

import argparse
import logging
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import flags
from absl import logging as absl_logging
from ml_collections import ConfigDict, config_flags

from vit_jax import config as config_lib
from vit_jax.models.variants import nearest

EXIT_BAD_INPUT = 2

CONFIG = config_flags.DEFINE_config_file(
  'config',
  None,
  'File in configs/, with its arguments after a colon, as in '
  'configs/vit.py:l16,imagenet2012.',
)


def parse_flags(
  argv: list[str], required: Sequence[str] = ('config', 'workdir')
) -> list[str]:
  """Parses the command line; what is wrong with it becomes one message."""
  try:
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise flags.Error(f'Unexpected argument {rest[1]!r}.')
    for name in required:
      if not flags.FLAGS[name].value:
        raise flags.Error(f'--{name} is missing; --help explains it.')
    CONFIG.value.lock()  # the first use, which reports a missing file
    for field, value in config_flags.get_override_values(
      flags.FLAGS['config']
    ).items():
      if isinstance(value, ConfigDict):
        raise flags.Error(f'config.{field} is a group: set its fields.')
    return rest
  except SystemExit:
    sys.exit(0)  # after --help, which absl takes for a failure
  except (flags.Error, OSError) as e:
    refuse(_last_line(e))
  except (AttributeError, LookupError, TypeError, ValueError):
    # The ways in which config_flags says that there is no such field.
    known = _fields_of_config(argv)
    for arg in argv:
      match = re.match(r'--?(?:no)?config\.([^=]*)', arg)
      if match and match[1] not in known:
        refuse(f'No config field {match[1]!r}. {nearest(match[1], known)}')
    raise


def _fields_of_config(argv: list[str]) -> dict[str, Any]:
  """Returns the fields of the config file named on a command line."""
  named = [
    match[1] or after
    for arg, after in zip(argv, [*argv[1:], ''], strict=True)
    if (match := re.fullmatch(r'--?config(?:=(.*))?', arg))
  ]
  return config_lib.flatten(flags.FLAGS['config'].parser.parse(named[-1]))


def _last_line(error: Exception) -> str:
  """Returns a message without the traceback config_flags puts before it."""
  return str(error).splitlines()[-1].strip().removeprefix('ValueError: ')


def refuse(message: str) -> NoReturn:
  """Ends the command, as bad input does."""
  print(f'error: {message}', file=sys.stderr)
  sys.exit(EXIT_BAD_INPUT)


def show_messages() -> None:
  """Shows what this package has to say, and only warnings of libraries."""
  if not flags.FLAGS['verbosity'].present:
    absl_logging.set_verbosity(absl_logging.WARNING)
  ours = logging.getLogger('vit_jax')
  ours.setLevel(logging.INFO)
  ours.addHandler(logging.StreamHandler())
  ours.propagate = False


def parser(name: str, description: str) -> argparse.ArgumentParser:
  """Returns the parser of a command without a config.

  Args:
    name: of its module, after `vit_jax.`.
    description: its documentation, shown as it is.
  """
  return argparse.ArgumentParser(
    prog=f'python -m vit_jax.{name}',
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )


def command(
  run: Callable[[argparse.Namespace], int | None],
  args: argparse.Namespace,
) -> int:
  """Runs a command without a config; bad input becomes one message.

  Returns:
    The exit status: what `run` returns, or 0 for None, or 2 for bad input.
  """
  # By force, because importing JAX's friends brings handlers of their own.
  logging.basicConfig(format='%(levelname)s: %(message)s', force=True)
  try:
    return run(args) or 0
  except (ValueError, OSError, ImportError) as e:
    print(f'error: {e}', file=sys.stderr)
    return EXIT_BAD_INPUT
