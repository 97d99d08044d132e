"""How commands end: one message, and a status that tells whose fault it is."""

import argparse
import errno
import importlib
import os
import re
import subprocess
import sys

import jax
import pytest

from tests.conftest import ROOT
from vit_jax import flags
from vit_jax.__main__ import COMMANDS


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
    (PermissionError(errno.EACCES, 'Permission denied', 'x'), 2, 'denied'),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'x'), 71, 'Make room'),
    (OSError(errno.EROFS, os.strerror(errno.EROFS), 'x'), 71, 'writable'),
    (OSError(errno.EIO, os.strerror(errno.EIO), 'x'), 71, 'disk fails'),
    (_caused(OSError(errno.EDQUOT, 'over', 'x')), 71, 'cannot be saved'),
    (
      ValueError('RESOURCE_EXHAUSTED: x: No space left on device [28]\nmore'),
      71,
      'Make room',
    ),
    (OSError(errno.ESTALE, 'Stale file handle', 'x'), 71, 'Stale'),
    (TimeoutError('no answer'), 71, 'no answer'),
    (ConnectionResetError('gone'), 71, 'gone'),
    (
      ValueError('UNAVAILABLE: Error writing "x" [tensorstore_spec=...]'),
      71,
      'the same command goes on',
    ),
    (ValueError('DATA_LOSS: x [tensorstore_spec=...]'), 2, 'DATA_LOSS'),
    (ValueError('INTERNAL: a class called so'), 2, 'INTERNAL'),
    (ImportError('pip install timm'), 71, 'pip install timm'),
    (MemoryError(), 71, 'MemoryError Take less'),
    (
      jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory: 9 bytes'),
      71,
      'accum_steps',
    ),
    # As the compiler for TPUs says it.
    (
      jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Ran out of memory.'),
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
  assert err.count('\n') == 1


def test_an_error_of_ours_keeps_its_traceback():
  with pytest.raises(jax.errors.JaxRuntimeError, match='INTERNAL'):
    flags.status(jax.errors.JaxRuntimeError('INTERNAL: a bug'))


def test_a_write_that_was_never_begun_is_no_message_of_its_own():
  program = (
    'from vit_jax import flags\n'
    "flags.flags.FLAGS(['x'])\n"
    'flags.show_messages()\n'
    'async def write(): pass\n'
    'left = write()\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True
  )
  assert (done.returncode, done.stderr) == (0, '')


def test_a_message_is_shown_once():
  """Whatever a library has told the root logger, and by the last command."""
  program = (
    'import logging\n'
    'logging.basicConfig(level=logging.INFO)\n'
    'from vit_jax import flags\n'
    "flags.flags.FLAGS(['x'])\n"
    'flags.show_messages()\n'
    'flags.show_messages()\n'
    "logging.getLogger('vit_jax.some').info('said')\n"
  )
  done = subprocess.run(
    [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True
  )
  assert (done.returncode, done.stderr) == (0, 'said\n')


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason='only root can make a small disk')
@pytest.mark.parametrize('size', ['128k', '2m', '3m'])
def test_a_full_disk_is_one_message(tmp_path, size):
  disk = tmp_path / 'disk'
  disk.mkdir()
  if subprocess.run(
    ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(disk)],
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
  assert 'Traceback' not in done.stderr
  assert 'Make room on the disk' in done.stderr.splitlines()[-1]


@pytest.mark.parametrize('command', sorted({*COMMANDS} - {'train', 'plan'}))
def test_flags_are_explained_and_have_the_defaults_they_say(
  command, monkeypatch
):
  found = []

  def stop(parser, argv=None):
    found.append(parser)
    sys.exit()

  monkeypatch.setattr(argparse.ArgumentParser, 'parse_args', stop)
  module = importlib.import_module(COMMANDS[command][0])
  if hasattr(module, '__path__'):
    module = importlib.import_module(f'{module.__name__}.__main__')
  with pytest.raises(SystemExit):
    module.main()
  for parser in found:
    for action in parser._actions:
      if isinstance(action, argparse._SubParsersAction):
        found += action.choices.values()
        continue
      assert action.help, (parser.prog, action.dest)
      said = re.search(r'default: (\S+?)[,;)]*(\s|$)', action.help)
      if said and action.default not in (None, ''):
        convert = action.type or str
        assert convert(said[1]) == action.default, (parser.prog, action.dest)
