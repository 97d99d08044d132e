"""Shared code of commands: flags, messages and exit status."""

import argparse
import errno
import glob
import logging
import os
import pathlib
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TextIO

from absl import flags
from absl import logging as absl_logging
from etils import epath
from ml_collections import ConfigDict, config_flags

from vit_jax import config as config_lib
from vit_jax.data import atomic_files, sources

# Exit statuses of failed commands. `vit_jax.main` has more.
EXIT_BAD_INPUT = 2
EXIT_ENVIRONMENT = 71  # EX_OSERR of sysexits.h
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
EXIT_INTERRUPTED = 130  # 128 and the number of SIGINT, as in shells

# Advice for errors of the environment: disk, memory, storage, processes. The
# keys are regular expressions for messages of the system and of libraries.
_ENVIRONMENT = {
  'No space left on device|Disk quota exceeded|Read-only file system': (
    'Free disk space, or write elsewhere. --config.data.workers needs space in '
    '/dev/shm for batches.'
  ),
  'Worker process was terminated': (
    'The system killed a worker, usually for lack of memory. Lower '
    '--config.data.workers or --config.batch_size.'
  ),
  'Too many open files': 'Raise the limit with ulimit -n.',
  'Cannot allocate memory|Out of memory': (
    'Use less memory: in training set --config.accum_steps=2 or more, '
    '--config.model.remat=nothing_saveable or a smaller --config.batch_size.'
  ),
  # TensorStore's messages when storage fails.
  '(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|INTERNAL|UNKNOWN|RESOURCE_EXHAUSTED)'
  ': .*tensorstore': (
    'When the storage works again, run the same command to resume.'
  ),
}
# The extra of this package that installs a library.
_EXTRAS = {
  'datasets': 'hf',
  'h11': 'serve',
  'hotcoco': 'detection',
  'onnx': 'onnx',
  'onnxruntime': 'onnx',
  'starlette': 'serve',
  'uvicorn': 'serve',
}
# Error numbers of storage and network failures that may be temporary.
_ERRNOS = {
  errno.EIO,
  errno.ESTALE,
  errno.ENOTCONN,
  errno.EHOSTUNREACH,
  errno.ENETUNREACH,
}
# Errors that may end a command with one message; see `status`. `vit_jax.main`
# handles `Diverged` and `Preempted` too. Any other error is a bug.
ENDINGS = (
  ValueError,
  OSError,
  ImportError,
  MemoryError,
  KeyboardInterrupt,
  RuntimeError,
)

WIDTH = 40  # limit of `short`; some ImageNet class names exceed 100 characters

# Help for the `dataset` argument of commands that need classes.
WHAT_IS_LABELLED = (
  "'digits', a folder (a path with a slash) with one sub-folder per class, a "
  "CSV file of images and labels, a TFDS name, 'vtab/TASK', "
  "'hf://datasets/OWNER/NAME', or shards as 'arrayrecord:FOLDER', "
  "'parquet:FOLDER', 'tfrecord:FOLDER' or 'webdataset:FOLDER'"
)

CONFIG = config_flags.DEFINE_config_file(
  'config',
  None,
  'Config file, with its arguments after a colon, as in '
  'configs/vit.py:l16,imagenet2012. A config in configs/ may be given by name, '
  'as in vit:l16.',
)

_GROUP = (
  'config.{0} is a group. Set its fields, as in --config.{0}.FIELD=VALUE.'
)


def parse_flags(
  argv: list[str], required: Sequence[str] = ('config', 'workdir')
) -> list[str]:
  """Parses the command line of a command with a config.

  Bad flags end the program with one message and status 2. Returns the arguments
  that are not flags: only the program's name.
  """
  argv = _full_configs(argv)
  try:
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise flags.Error(
        f'Unexpected argument {rest[1]!r}. Write flags as --NAME=VALUE.'
      )
    for name in required:
      if not flags.FLAGS[name].value:
        raise flags.Error(
          f'--{name} is missing. See --help, and configs/digits.py for a first '
          'training.'
        )
    CONFIG.value.lock()
    overrides = config_flags.get_override_values(flags.FLAGS['config'])
    for field, value in overrides.items():
      if isinstance(value, ConfigDict):
        refuse(_GROUP.format(field))
    return rest
  except SystemExit as e:
    # absl ends --help with status 1.
    is_help = any(re.fullmatch(r'--?(\?|help\w*)', arg) for arg in argv)
    sys.exit(0 if is_help else e.code)
  except (SyntaxError, ImportError) as e:
    refuse(f'The config cannot be read: {type(e).__name__}: {e}.')
  except flags.UnrecognizedFlagError as e:
    refuse(
      f'{e}. --help lists the flags. Fields of the config are set by '
      '--config.FIELD=VALUE, as in --config.optimizer.lr=0.001.'
    )
  except (flags.Error, OSError) as e:
    if group := re.search(r'--config\.(\S+)=.*as a ConfigDict', str(e)):
      refuse(_GROUP.format(group[1]))
    # config_flags puts its message on the last line, after a traceback.
    refuse(str(e).splitlines()[-1].strip().removeprefix('ValueError: '))
  except (AttributeError, LookupError, TypeError, ValueError) as e:
    if "attribute 'get_config'" in str(e):
      refuse('The config has no function get_config; see configs/digits.py.')
    _refuse_unknown_field(argv)
    raise


def _full_configs(argv: list[str]) -> list[str]:
  """Replaces each --config=NAME, or --config NAME, by --config=PATH."""
  # configs/ is beside the package in a clone, and inside it when installed.
  package = pathlib.Path(__file__).parents[1]
  own = {
    path.stem: str(path)
    for folder in (package, package.parent)
    for path in folder.glob('configs/*.py')
  }
  full: list[str] = []
  for arg in argv:
    if full and full[-1] in ('-config', '--config'):
      arg = f'{full.pop()}={arg}'
    if match := re.fullmatch(r'(--?config=)([^:]+)(.*)', arg):
      path = os.path.expanduser(own.get(match[2], match[2]))
      if not pathlib.Path(path).is_file():
        refuse(
          f'--config={path} is not a file. Give a path, or a name: '
          f'{", ".join(sorted(own))}.'
        )
      arg = f'{match[1]}{path}{match[3]}'
    full.append(arg)
  return full


def _refuse_unknown_field(argv: list[str]) -> None:
  configs = [arg for arg in argv if re.match('--?config=', arg)]
  given = flags.FLAGS['config'].parser.parse(configs[-1].partition('=')[2])
  known = config_lib.flatten(given)
  for arg in argv:
    match = re.match(r'--?(?:no)?config\.([^=]*)', arg)
    if match and match[1] not in known:
      refuse(config_lib.unknown_field(match[1], known))


def refuse(message: str) -> NoReturn:
  """Prints an error and exits with the status for bad input."""
  say(f'error: {message}')
  sys.exit(EXIT_BAD_INPUT)


def status(error: BaseException) -> int:
  """Prints an error of `ENDINGS`; returns the command's exit status.

  Raises:
    RuntimeError: `error` itself, if it is a RuntimeError that the environment
      did not cause.
  """
  if isinstance(error, KeyboardInterrupt):
    print('interrupted', file=sys.stderr)
    return EXIT_INTERRUPTED
  way_out = _environment(error)
  if way_out is None and isinstance(error, RuntimeError):
    raise error
  absl_logging.debug('%s', error, exc_info=error)
  if way_out is None:
    say(f'error: {error}')
    return EXIT_BAD_INPUT
  # Messages of libraries may have many lines; the first says enough.
  reason = str(error).strip().partition('\n')[0] or type(error).__name__
  say(f'error: {reason:.600} {way_out}'.rstrip())
  return EXIT_ENVIRONMENT


def _environment(error: BaseException | None) -> str | None:
  """Returns advice, possibly '', if the environment failed; else None."""
  while error:
    said = 'Out of memory' if isinstance(error, MemoryError) else str(error)
    for pattern, way_out in _ENVIRONMENT.items():
      if re.search(pattern, said, re.IGNORECASE | re.DOTALL):
        return way_out
    if isinstance(error, ImportError):
      extra = _EXTRAS.get(str(error.name).partition('.')[0])
      pip = "(pip install -c requirements.txt -e '.[{}]')"
      return pip.format(extra) if extra else ''
    if isinstance(error, TimeoutError | ConnectionError) or (
      isinstance(error, OSError) and error.errno in _ERRNOS
    ):
      return ''
    error = error.__cause__
  return None


def _calm_libtpu() -> None:
  """Without a TPU, keeps libtpu from a network search that logs errors."""
  # A machine with TPUs has at least one of these device files.
  if not glob.glob('/dev/accel*') + glob.glob('/dev/vfio/[0-9]*'):
    os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v3-8')
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')


def show_messages() -> None:
  """Logs messages of this package, and warnings of libraries, to stderr."""
  _calm_libtpu()
  if not flags.FLAGS['verbosity'].present:
    absl_logging.set_verbosity(absl_logging.WARNING)
  ours = logging.getLogger('vit_jax')
  ours.setLevel(logging.INFO)
  ours.handlers = [_handler('%(message)s')]
  ours.propagate = False


def printable(text: str) -> str:
  """Escapes control characters, and bytes of file names that are not UTF-8."""

  # Spaces of every width and the joiner of emoji are printed too.
  def is_shown(c: str) -> bool:
    return c.isprintable() or unicodedata.category(c) == 'Zs' or c == '\u200d'

  return ''.join(
    c if is_shown(c) else c.encode('unicode_escape').decode() for c in text
  )


def short(text: str) -> str:
  """Returns printable text for a table, at most `WIDTH` characters."""
  text, half = printable(text), WIDTH // 2
  return text if len(text) <= WIDTH else f'{text[:half]}…{text[1 - half :]}'


def lines(text: str) -> str:
  return '\n'.join(map(printable, text.split('\n')))


def say(text: str) -> None:
  """Prints a message to stderr."""
  print(lines(text), file=sys.stderr)


class _Lines(logging.Formatter):
  def format(self, record: logging.LogRecord) -> str:
    return lines(super().format(record))


def _handler(form: str, stream: TextIO | None = None) -> logging.Handler:
  handler = logging.StreamHandler(stream)
  handler.setFormatter(_Lines(form))
  return handler


def cell(text: str) -> str:
  """Escapes text for CSV, so that spreadsheets do not read it as a formula."""
  text = printable(text)
  return f"'{text}" if text.startswith(('=', '+', '-', '@')) else text


class Parser(argparse.ArgumentParser):
  """A parser that keeps the lines of its description."""

  def __init__(self, **fields: Any):
    how = argparse.RawDescriptionHelpFormatter
    super().__init__(formatter_class=how, **fields)

  def option(self, name: str, default: Any, text: str, **more: Any) -> None:
    """Adds a flag; its help is `text` and the default, unless empty or None.

    With the default False, the flag takes no value. Otherwise `more` may have
    arguments of `add_argument`; values have the type of the default.
    """
    if default is False:
      self.add_argument(name, action='store_true', help=text)
      return
    if default not in (None, ''):
      more.setdefault('type', type(default))
      text += f' (default: {default})'
    self.add_argument(name, default=default, help=text, **more)


def parser(name: str, description: str) -> Parser:
  """Returns a parser for `python -m vit_jax.NAME`, a command without config."""
  return Parser(prog=f'python -m vit_jax.{name}', description=description)


def positive(text: str) -> int:
  """Parses a whole number above 0; for `type` of `add_argument`."""
  if not text.strip().isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text!r} is not a whole number above 0')
  return int(text)


def share(text: str) -> float:
  """Parses a number from 0 to below 1; for `type` of `add_argument`."""
  if not 0 <= float(text) < 1:
    raise argparse.ArgumentTypeError(
      f'{text} is not a share; give a number from 0 to below 1'
    )
  return float(text)


def add_subject(parser: Parser) -> None:
  """Adds the arguments `checkpoint` and `dataset`, and the data flags."""
  # Imported here, so that --help of training does not load the formats.
  from vit_jax.checkpoints.formats.recognise import WHAT_OPENS

  parser.add_argument('checkpoint', help=WHAT_OPENS)
  parser.add_argument('dataset', help=WHAT_IS_LABELLED)
  add_data(parser)


def add_data(parser: Parser) -> None:
  """Adds the flags that describe a dataset without a config; see `data_of`."""
  parser.option('--data_dir', '', 'folder of the TFDS datasets')
  parser.option(
    '--split_seed',
    0,
    'seed that shuffles examples before slicing, and draws a test split from '
    'data without splits; TFDS datasets ignore it',
  )
  parser.option(
    '--class_order',
    '',
    'order of class names that are numbers: text (1, 10, 2) or number '
    '(1, 2, 10) (default: the order of the data)',
    choices=('text', 'number'),
  )
  parser.option(
    '--on_bad_image',
    'error',
    'error: unreadable images end the command; skip: they are left out',
    choices=('error', 'skip'),
  )


def data_of(name: str, args: argparse.Namespace) -> ConfigDict:
  """Returns the fields of `config.data` from the flags of `add_data`."""
  given = {'name': name, 'dir': args.data_dir}
  fields = 'split_seed', 'class_order', 'on_bad_image'
  return sources.data_config(given | {x: getattr(args, x) for x in fields})


def write_files(folder: str, files: Mapping[str, str | bytes]) -> None:
  """Writes files into a folder, replacing old files, and prints their paths."""
  place = epath.Path(folder)
  place.mkdir(parents=True, exist_ok=True)
  for name, content in files.items():
    data = content.encode() if isinstance(content, str) else content
    atomic_files.replace(place / name, data)
    print(f'written  {place / name}')


def command(
  run: Callable[[argparse.Namespace], int | None],
  args: argparse.Namespace,
) -> int:
  """Runs a command without a config; returns its exit status.

  If `run` returns None, the status is 0. Errors of `ENDINGS`, except for
  BrokenPipeError, are printed; see `status`.
  """
  _calm_libtpu()
  # force=True replaces handlers that libraries have installed.
  handler = _handler('%(levelname)s: %(message)s')
  handler.setLevel(logging.WARNING)
  logging.basicConfig(handlers=[handler], force=True)
  # Library functions log their progress; commands print it to stdout.
  progress = _handler('%(message)s', sys.stdout)
  progress.addFilter(lambda record: record.levelno == logging.INFO)
  ours = logging.getLogger('vit_jax')
  ours.setLevel(logging.INFO)
  ours.handlers = [progress]
  for name in ('out', 'output', 'shards'):  # shells do not expand --out=~/x
    if value := getattr(args, name, None):
      setattr(args, name, os.path.expanduser(value))
  try:
    return run(args) or 0
  except BrokenPipeError:  # the reader of a pipe, such as `head`, has ended
    return EXIT_ENVIRONMENT
  except ENDINGS as e:
    return status(e)
