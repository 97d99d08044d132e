"""How commands end: one message, and a status that tells whose fault it is."""

import argparse
import errno
import fnmatch
import importlib
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from tests.conftest import ROOT
from vit_jax import __main__ as entrance
from vit_jax.__main__ import COMMANDS
from vit_jax.cli import flags
from vit_jax.data import sources


def _caused(by):
  try:
    raise ValueError('cannot be saved') from by
  except ValueError as e:
    return e


@pytest.mark.parametrize(
  ('error', 'status', 'words'),
  [
    (ValueError('batch_size is 7'), 2, 'batch_size is 7'),
    (FileNotFoundError(errno.ENOENT, 'No such file', 'x'), 2, 'No such file'),
    (
      _caused(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), 'x')),
      71,
      'cannot be saved',
    ),
    (OSError(errno.ESTALE, 'Stale file handle', 'x'), 71, 'Stale'),
    (TimeoutError('no answer'), 71, 'no answer'),
    (
      ValueError('UNAVAILABLE: Error writing "x" [tensorstore_spec=...]'),
      71,
      'run the same command to resume',
    ),
    (ValueError('DATA_LOSS: x [tensorstore_spec=...]'), 2, 'DATA_LOSS'),
    (ImportError('pip install timm'), 71, 'pip install timm'),
    (
      jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory: 9 bytes'),
      71,
      'accum_steps',
    ),
    (KeyboardInterrupt(), 130, 'interrupted'),
  ],
)
def test_statuses(capsys, error, status, words):
  assert isinstance(error, flags.ENDINGS)
  assert flags.status(error) == status
  err = capsys.readouterr().err
  assert words in err
  assert err == err.strip() + '\n' and err.count('\n') == 1


def test_an_error_of_ours_keeps_its_traceback():
  with pytest.raises(jax.errors.JaxRuntimeError, match='INTERNAL'):
    flags.status(jax.errors.JaxRuntimeError('INTERNAL: a bug'))


def test_a_message_is_shown_once():
  """Whatever a library has told the root logger, and by the last command.

  So are those of commands without a config, with what they are before them.
  """
  program = (
    'import logging\n'
    'logging.basicConfig(level=logging.INFO)\n'
    'from vit_jax import flags\n'
    "flags.flags.FLAGS(['x'])\n"
    'flags.show_messages()\n'
    'flags.show_messages()\n'
    "logging.getLogger('vit_jax.some').info('said of %s', 'a\\x1b[0m')\n"
    "flags.command(lambda _: logging.warning('of\\x1b and\\nmore'), None)\n"
  )
  done = subprocess.run(
    [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True
  )
  assert (done.returncode, done.stderr) == (
    0,
    'said of a\\x1b[0m\nWARNING: of\\x1b and\nmore\n',
  )


def test_of_an_error_over_many_lines_one_is_said(capsys):
  """And the machine is to blame whatever the error was caused by."""
  error = RuntimeError('cannot')
  error.__cause__ = ValueError('at all')
  error.__cause__.__cause__ = OSError('no SPACE left on DEVICE')
  outer = ValueError(f' {"x" * 999}\nand more')
  outer.__cause__ = error
  assert flags.status(outer) == 71
  err = capsys.readouterr().err
  assert err.startswith(f'error: {"x" * 600} Free disk space')
  assert err.count('\n') == 1
  assert flags.status(ValueError('one\ntwo')) == 2
  assert capsys.readouterr().err == 'error: one\ntwo\n'


@pytest.mark.parametrize(('ended', 'status'), [(None, 0), (3, 3)])
def test_a_command_ends_with_what_it_returns(ended, status):
  got = []
  args = argparse.Namespace()

  def run(args):
    got.append(args)
    return ended

  assert flags.command(run, args) == status and got == [args]


def test_a_command_ends_with_its_error(capsys):
  def run(error):
    raise error

  assert flags.command(run, ValueError('bad')) == 2
  assert flags.command(run, ValueError('no file a\x1b[0m\nthere')) == 2
  assert flags.command(run, KeyboardInterrupt()) == 130
  assert capsys.readouterr().err == (
    'error: bad\nerror: no file a\\x1b[0m\nthere\ninterrupted\n'
  )
  with pytest.raises(KeyError):
    flags.command(run, KeyError('ours'))


@pytest.mark.parametrize(
  ('text', 'shown', 'cell'),
  [
    ('', '', ''),
    ('a\tb\n', r'a\tb\n', r'a\tb\n'),
    ('\x1b[0m', r'\x1b[0m', r'\x1b[0m'),
    (os.fsdecode(b'x\xff'), r'x\udcff', r'x\udcff'),
    ('9.41\u202fAM', '9.41\u202fAM', '9.41\u202fAM'),
    *((f'{c}1', f'{c}1', f"'{c}1") for c in '=+-@'),
  ],
)
def test_names_are_shown_as_text_and_nothing_else(text, shown, cell):
  assert flags.printable(text) == shown
  assert flags.cell(text) == cell


def test_whole_numbers_above_0_are_told_from_others():
  assert [flags.positive(x) for x in ('1', ' 20 ', '007')] == [1, 20, 7]
  for wrong in ('0', '-1', '1.5', '', 'x', '²', '1e3'):
    with pytest.raises(argparse.ArgumentTypeError, match=repr(wrong)):
      flags.positive(wrong)


def test_flags_of_a_dataset_are_fields_of_a_config():
  parser = flags.parser('some', 'What it does.\n\n  as it is')
  flags.add_data(parser)
  assert 'What it does.\n\n  as it is' in parser.format_help()
  assert parser.prog == 'python -m vit_jax.some'
  base = sources.data_config('x').to_dict()
  assert flags.data_of('x', parser.parse_args([])).to_dict() == base
  with pytest.raises(ValueError, match="No field 'data_dir' of data. Did"):
    sources.data_config({'name': 'x', 'data_dir': '/d'})
  path = pathlib.Path('photos')  # a folder, where 'photos' is a dataset
  assert sources.data_config(path).name == './photos'
  given = ['--data_dir=/d', '--split_seed=7', '--on_bad_image=skip']
  given += ['--class_order=number']
  assert flags.data_of('y', parser.parse_args(given)).to_dict() == {
    **{'name': 'y', 'dir': '/d', 'split_seed': 7, 'on_bad_image': 'skip'},
    'class_order': 'number',
  }


@pytest.mark.parametrize(
  ('argv', 'full'),
  [
    (['--config=digits', '--workdir=x'], ['--config={}/digits.py', None]),
    (['-config', 'vit:l16,a=b:c', 'x'], ['-config={}/vit.py:l16,a=b:c', None]),
    (['--workdir', 'digits'], ['--workdir', 'digits']),
  ],
)
def test_configs_are_known_by_their_names(argv, full):
  want = [(text or argv[-1]).format(ROOT / 'configs') for text in full]
  assert flags._full_configs(argv) == want


def test_configs_lie_beside_the_package_or_in_it(monkeypatch, tmp_path, capsys):
  """In a clone, or where the package is installed."""
  monkeypatch.setattr(flags, '__file__', str(tmp_path / 'vit_jax/cli/flags.py'))
  for place in ('vit_jax/configs/b.py', 'configs/a.py', 'configs/c.py'):
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    full = flags._full_configs([f'--config={path.stem}:x'])
    assert full == [f'--config={path}:x'] == flags._full_configs(full)
  with pytest.raises(SystemExit, match='2'):
    flags._full_configs(['--config', 'd:x'])
  assert capsys.readouterr().err == (
    'error: --config=d is not a file. Give a path, or a name: a, b, c.\n'
  )


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason='only root can make a small disk')
def test_a_full_disk_is_one_message(tmp_path):
  disk = tmp_path / 'disk'
  disk.mkdir()
  if subprocess.run(
    ['mount', '-t', 'tmpfs', '-o', 'size=3m', 'tmpfs', str(disk)],
    check=False,
  ).returncode:
    pytest.skip('mounting is not allowed here')
  try:
    done = subprocess.run(
      [
        *(sys.executable, '-m', 'vit_jax.main'),
        *('--config=configs/digits.py', f'--workdir={disk}/run'),
        *('--config.total=4 steps', '--config.optimizer.warmup=1 step'),
      ],
      cwd=ROOT,
      capture_output=True,
      text=True,
    )
  finally:
    subprocess.run(['umount', '-l', str(disk)], check=True)
  assert done.returncode == flags.EXIT_ENVIRONMENT
  assert 'Free disk space' in done.stderr


@pytest.mark.parametrize('args', [[], ['hlep']])
def test_whoever_asks_for_help_is_told_of_all_commands(
  monkeypatch, capsys, args
):
  monkeypatch.setattr(sys, 'argv', ['vit-jax', *args])
  is_error = args == ['hlep']
  assert entrance.main() == (2 if is_error else 0)
  told, other = capsys.readouterr()[:: -1 if is_error else 1]
  assert (
    other == ''
    and told.startswith("error: Unknown command 'hlep'.") is is_error
  )
  assert sum(f'  {name} ' in told for name in COMMANDS) == len(COMMANDS)


def module_of(command):
  module = importlib.import_module(COMMANDS[command][0])
  if hasattr(module, '__path__'):
    module = importlib.import_module(f'{module.__name__}.__main__')
  return module


def actions_of(command):
  """Returns the flags of a command and of what it divides into, by parser."""
  found = []

  def stop(parser, argv=None):
    found.append(parser)
    sys.exit()

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(argparse.ArgumentParser, 'parse_args', stop)
    with pytest.raises(SystemExit):
      module_of(command).main()
  actions = []
  for parser in found:
    for action in parser._actions:
      if isinstance(action, argparse._SubParsersAction):
        found += action.choices.values()
      else:
        actions.append((parser, action))
  return actions


_HELP = """
import contextlib, io, runpy, sys
from vit_jax.__main__ import COMMANDS
for name in sys.argv[1:]:
  sys.modules[name] = None
for command in COMMANDS:
  sys.argv = ['vit-jax', command, '--help']
  text = io.StringIO()
  try:
    with contextlib.redirect_stdout(text):
      runpy.run_module('vit_jax', run_name='__main__')
  except SystemExit as e:
    assert not e.code and '--help' in text.getvalue(), command
"""


@pytest.mark.slow
def test_help_needs_no_extra():
  extras = (
    'datasets gcsfs h11 hotcoco huggingface_hub libtpu onnx onnxruntime '
    'pillow_heif starlette tensorboard timm torch transformers uvicorn wandb'
  )
  subprocess.run([sys.executable, '-c', _HELP, *extras.split()], check=True)


@pytest.mark.parametrize('command', sorted({*COMMANDS} - {'train', 'plan'}))
def test_flags_are_explained_and_have_the_defaults_they_say(command):
  for parser, action in actions_of(command):
    assert action.help, (parser.prog, action.dest)
    said = re.search(r'default: (\S+?)[,;)]*(\s|$)', action.help)
    if said and action.default not in (None, ''):
      convert, usual = action.type or str, action.default
      # A default that is text is converted when flags are parsed.
      usual = convert(usual) if isinstance(usual, str) else usual
      assert convert(said[1]) == usual, (parser.prog, action.dest)


def test_a_reader_of_stdout_that_ends_is_not_an_error(capsys):
  def run(_):
    raise BrokenPipeError(errno.EPIPE, 'Broken pipe')

  assert flags.command(run, None) == flags.EXIT_ENVIRONMENT
  assert capsys.readouterr() == ('', '')


def test_options_have_the_type_of_their_default_and_tell_it():
  parser = flags.parser('some', 'What it does.')
  parser.option('--size', 3, 'how large')
  parser.option('--rates', '1,2', 'how fast', type=lambda x: x.split(','))
  parser.option('--deep', False, 'whether')
  parser.option('--path', None, 'where')
  assert vars(parser.parse_args([])) == {
    'size': 3,
    'rates': ['1', '2'],
    'deep': False,
    'path': None,
  }
  given = parser.parse_args(['--size=4', '--deep', '--path=x'])
  assert (given.size, given.deep, given.path) == (4, True, 'x')
  told = parser.format_help()
  for text in ('how large (default: 3)', 'how fast (default: 1,2)'):
    assert text in told
  assert told.count('default:') == 2


def test_a_missing_library_is_told_with_its_extra(capsys):
  error = ImportError("No module named 'onnx.defs'", name='onnx.defs')
  assert flags.status(error) == 71
  assert capsys.readouterr().err == (
    "error: No module named 'onnx.defs' (pip install -c requirements.txt -e "
    "'.[onnx]')\n"
  )
  assert flags.status(ImportError('no such', name='some')) == 71
  assert capsys.readouterr().err == 'error: no such\n'


@pytest.mark.parametrize('device', ['', '/dev/vfio/0', '/dev/accel3'])
def test_libtpu_searches_for_a_tpu_only_on_machines_with_one(
  monkeypatch, device
):
  monkeypatch.delenv('TPU_WORKER_HOSTNAMES', raising=False)
  monkeypatch.setattr(flags.glob, 'glob', lambda x: fnmatch.filter([device], x))
  found = []
  flags.command(
    lambda _: found.append('TPU_WORKER_HOSTNAMES' in os.environ), None
  )
  assert found == [not device]
