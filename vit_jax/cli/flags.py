"""What command lines share: the config, what is shown, and how they end."""

import argparse
import errno
import logging
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NoReturn, TextIO

import jax
from absl import flags
from absl import logging as absl_logging
from ml_collections import ConfigDict, config_flags

from vit_jax import config as config_lib
from vit_jax.data import sources
from vit_jax.register import nearest

# How commands end, besides 0. `main` has the rest of them.
EXIT_BAD_INPUT = 2
EXIT_ENVIRONMENT = 71  # EX_OSERR of sysexits.h
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
EXIT_INTERRUPTED = 130  # 128 and the number of SIGINT, as in shells

# What is wrong with the machine and not with what was asked of it, by what the
# system or the libraries call it, and the way out.
_ENVIRONMENT = {
  'No space left on device': 'Make room on the disk, or write elsewhere.',
  'Disk quota exceeded': 'Make room on the disk, or write elsewhere.',
  'Read-only file system': 'Make it writable, or write elsewhere.',
  'Input/output error': 'The disk fails: see the log of the system.',
  'Too many open files': 'Raise the limit, ulimit -n.',
  'Cannot allocate memory': 'Take less at a time, or a larger machine.',
  'Out of memory': 'Take less at a time: in training by '
  '--config.accum_steps=2, 4 or more, --config.model.remat=nothing_saveable or '
  'a smaller batch_size.',
}
_ERRNOS = {
  errno.ENOSPC,
  errno.EDQUOT,
  errno.EROFS,
  errno.EIO,
  errno.EMFILE,
  errno.ENFILE,
  errno.ENOMEM,
  # Of file systems and connections that may be back by the next time.
  errno.ESTALE,
  errno.ETIMEDOUT,
  errno.ENOTCONN,
  errno.EHOSTUNREACH,
  errno.ENETUNREACH,
}
# What TensorStore says where storage, and not what is asked of it, is to blame.
_PASSING = re.compile(
  '(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|INTERNAL|UNKNOWN|RESOURCE_EXHAUSTED)'
  ': .*tensorstore',
  re.DOTALL,
)
# What commands end with in one message; anything else is an error of ours.
ENDINGS = (
  ValueError,
  OSError,
  ImportError,
  MemoryError,
  KeyboardInterrupt,
  jax.errors.JaxRuntimeError,
)

# The data sets of commands that need classes.
WHAT_IS_LABELLED = (
  "'digits', a folder with one sub-folder a class, written with a slash, a CSV "
  "file of images and labels, a TFDS name, 'vtab/TASK', or "
  "'hf://datasets/OWNER/NAME'"
)

CONFIG = config_flags.DEFINE_config_file(
  'config',
  None,
  'File of a config, with its arguments after a colon, as in '
  'configs/vit.py:l16,imagenet2012; those of configs/ by name, as in vit:l16.',
)


def parse_flags(
  argv: list[str], required: Sequence[str] = ('config', 'workdir')
) -> list[str]:
  """Parses the command line; what is wrong with it becomes one message."""
  argv = [_full_config(arg, before) for before, arg in pairwise(['', *argv])]
  try:
    rest = _parsed(argv)
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
  except (flags.Error, OSError) as e:
    if isinstance(e, flags.DuplicateFlagError):
      _refuse_two_configs(argv)
    if lack := _lack_of_config(_named_config(argv)):
      refuse(f'--config={lack}')
    refuse(_last_line(e))
  except (SyntaxError, ImportError) as e:
    _refuse_config(argv, e)
  except (AttributeError, LookupError, TypeError, ValueError) as e:
    _refuse_two_configs(argv)
    if re.search("attribute '(get_config|lock)'", str(e)):
      _refuse_config(argv, e)
    # The ways in which config_flags says that there is no such field.
    parser = flags.FLAGS['config'].parser
    known = config_lib.flatten(parser.parse(_named_config(argv)))
    for arg in argv:
      match = re.match(r'--?(?:no)?config\.([^=]*)', arg)
      if match and match[1] not in known:
        refuse(f'No config field {match[1]!r}. {nearest(match[1], known)}')
    raise


def _parsed(argv: list[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except SystemExit as e:
    # absl takes help for a failure. A config that exits is one.
    is_help = any(re.fullmatch(r'--?(\?|help\w*)', arg) for arg in argv)
    sys.exit(0 if is_help else e.code or 1)


def _refuse_two_configs(argv: list[str]) -> None:
  """Says what is wrong where fields are set of several configs."""
  if len(named := _named_configs(argv)) > 1:
    refuse(f'--config is given {len(named)} times, {", ".join(named)}: once.')


def _refuse_config(argv: list[str], error: Exception) -> NoReturn:
  refuse(
    f'{_named_config(argv)} is no config ({type(error).__name__}: {error}): '
    'one has a function get_config that returns vit_jax.config.base(), changed;'
    ' see configs/digits.py.'
  )


def _full_config(arg: str, before: str) -> str:
  """Returns an argument with the path of a config that is only named."""
  match = re.fullmatch(r'(--?config=)?(\w+)(:.*)?', arg)
  if not match or not (match[1] or before in ('-config', '--config')):
    return arg
  for path in _own_configs():
    if path.stem == match[2]:
      return f'{match[1] or ""}{path}{match[3] or ""}'
  return arg


def _own_configs() -> list[pathlib.Path]:
  # In a clone they lie beside the package, when installed in it.
  package = pathlib.Path(__file__).parents[1]
  return [*package.parent.glob('configs/*.py'), *package.glob('configs/*.py')]


def _lack_of_config(text: str) -> str:
  """Returns what to do where a config with its arguments is no file, or ''."""
  path = text.partition(':')[0]
  if not path or pathlib.Path(path).is_file():
    return ''
  names = ', '.join(sorted({x.stem for x in _own_configs()}))
  return f'{path} is no file: give the path of one, or a name: {names}.'


def _named_config(argv: list[str]) -> str:
  return ['', *_named_configs(argv)][-1]


def _named_configs(argv: list[str]) -> list[str]:
  return [
    match[1] or after
    for arg, after in zip(argv, [*argv[1:], ''], strict=True)
    if (match := re.fullmatch(r'--?config(?:=(.*))?', arg))
  ]


def _last_line(error: Exception) -> str:
  """Returns a message without the traceback config_flags puts before it."""
  return str(error).splitlines()[-1].strip().removeprefix('ValueError: ')


def refuse(message: str) -> NoReturn:
  """Ends the command, as bad input does."""
  say(f'error: {message}')
  sys.exit(EXIT_BAD_INPUT)


def status(error: BaseException) -> int:
  """Prints what ended a command, and returns its exit status.

  Args:
    error: one of `ENDINGS`.

  Raises:
    JaxRuntimeError: the error itself, if neither the input nor the machine is
      to blame.
  """
  if isinstance(error, KeyboardInterrupt):
    print('interrupted', file=sys.stderr)
    return EXIT_INTERRUPTED
  way_out = _environment(error)
  if way_out is None and isinstance(error, jax.errors.JaxRuntimeError):
    raise error
  absl_logging.debug('%s', error, exc_info=error)
  if way_out is None:
    say(f'error: {error}')
    return EXIT_BAD_INPUT
  # Libraries report it over many lines.
  reason = str(error).strip().partition('\n')[0] or type(error).__name__
  say(f'error: {reason:.600} {way_out}'.rstrip())
  return EXIT_ENVIRONMENT


def _environment(error: BaseException | None) -> str | None:
  """Returns the way out where the machine is to blame, else None."""
  while error:
    for sign, way_out in _ENVIRONMENT.items():
      if sign.lower() in str(error).lower():
        return way_out
    if isinstance(error, MemoryError):
      return _ENVIRONMENT['Cannot allocate memory']
    if isinstance(error, ImportError | TimeoutError | ConnectionError) or (
      isinstance(error, OSError) and error.errno in _ERRNOS
    ):
      return ''
    if isinstance(error, ValueError) and _PASSING.match(str(error)):
      return 'Once it can be written or read, the same command goes on.'
    error = error.__cause__
  return None


def show_messages() -> None:
  """Shows what this package has to say, and only warnings of libraries."""
  if not flags.FLAGS['verbosity'].present:
    absl_logging.set_verbosity(absl_logging.WARNING)
  ours = logging.getLogger('vit_jax')
  ours.setLevel(logging.INFO)
  ours.handlers = [_handler('%(message)s')]
  ours.propagate = False


def printable(text: str) -> str:
  """Returns text for a terminal: control characters as their escapes.

  So are the bytes of file names that are no UTF-8.
  """
  return ''.join(
    c if c.isprintable() else c.encode('unicode_escape').decode() for c in text
  )


def lines(text: str) -> str:
  """Returns a message for a terminal: `printable`, but for its line ends."""
  return '\n'.join(map(printable, text.split('\n')))


def say(text: str) -> None:
  """Prints a message to stderr."""
  print(lines(text), file=sys.stderr)


class _Lines(logging.Formatter):
  """Formats what is logged as `lines`."""

  def format(self, record: logging.LogRecord) -> str:
    return lines(super().format(record))


def _handler(form: str, stream: TextIO | None = None) -> logging.Handler:
  handler = logging.StreamHandler(stream)
  handler.setFormatter(_Lines(form))
  return handler


def cell(text: str) -> str:
  """Returns text for a CSV file, which no spreadsheet takes for a formula."""
  text = printable(text)
  return f"'{text}" if text.startswith(('=', '+', '-', '@')) else text


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


def positive(text: str) -> int:
  """Returns a whole number above 0, for the `type` of a flag."""
  if not text.strip().isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text!r} is no whole number above 0')
  return int(text)


def add_data(parser: argparse.ArgumentParser) -> None:
  """Adds what commands say of a dataset without a config; see `data_of`."""
  parser.add_argument(
    '--data_dir', default='', help='where TFDS has its data sets'
  )
  parser.add_argument(
    '--split_seed',
    type=int,
    default=0,
    help='of what is held out where the data bring no test split (default: 0)',
  )
  parser.add_argument(
    '--class_order',
    choices=('text', 'number'),
    default='',
    help='of classes that are numbers: 1, 10, 2 as text, which is how folders '
    'are sorted, or 1, 2, 10',
  )
  parser.add_argument(
    '--on_bad_image',
    choices=('error', 'skip'),
    default='error',
    help='what to do about unreadable images (default: error)',
  )


def data_of(name: str, args: argparse.Namespace) -> ConfigDict:
  """Returns a dataset as `config.data` has it, by the flags of `add_data`."""
  given = {'name': name, 'dir': args.data_dir}
  fields = 'split_seed', 'class_order', 'on_bad_image'
  return sources.data_config(given | {x: getattr(args, x) for x in fields})


def command(
  run: Callable[[argparse.Namespace], int | None],
  args: argparse.Namespace,
) -> int:
  """Runs a command without a config; bad input becomes one message.

  Returns:
    The exit status: what `run` returns, 0 for None, or that of `status`.
  """
  # By force, because importing JAX's friends brings handlers of their own.
  handler = _handler('%(levelname)s: %(message)s')
  handler.setLevel(logging.WARNING)
  logging.basicConfig(handlers=[handler], force=True)
  # Library functions print nothing. The progress that they log is for stdout.
  progress = _handler('%(message)s', sys.stdout)
  progress.addFilter(lambda record: record.levelno == logging.INFO)
  ours = logging.getLogger('vit_jax')
  ours.setLevel(logging.INFO)
  ours.handlers = [progress]
  try:
    return run(args) or 0
  except ENDINGS as e:
    return status(e)
