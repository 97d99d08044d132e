"""Outputs that appear whole or not at all.

They are written under a hidden name beside their own, which is removed if
anything is raised. A killed process leaves only the hidden name behind.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator

from etils import epath


def replace(target: str | os.PathLike[str], data: bytes) -> None:
  """Writes a file, on disk or in a bucket, in the place of one there."""
  if '://' in os.fspath(target):
    epath.Path(target).write_bytes(data)  # objects in a bucket appear whole
    return
  with _beside(pathlib.Path(target)) as partial:
    partial.write_bytes(data)
    os.replace(partial, target)


def cache_folder() -> pathlib.Path:
  """Returns the folder for files that can be made again; it may not exist."""
  base = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  return pathlib.Path(base).expanduser() / 'vit_jax'


@contextlib.contextmanager
def new_file(target: str) -> Iterator[pathlib.Path]:
  """Gives a path to write to, which becomes `target` if nothing is raised.

  Raises:
    FileExistsError: if something is there already.
    FileNotFoundError: if the folder it is to lie in does not exist.
    PermissionError: if nothing can be written there.
  """
  refuse_existing(target)
  with _beside(pathlib.Path(target)) as partial:
    yield partial
    # Writing took a while, and a rename would replace a file.
    refuse_existing(target)
    os.rename(partial, target)


@contextlib.contextmanager
def new_folder(target: str) -> Iterator[pathlib.Path]:
  """Gives an empty folder, which becomes `target` as of `new_file`."""
  with new_file(target) as partial:
    partial.mkdir()
    yield partial


@contextlib.contextmanager
def _beside(path: pathlib.Path) -> Iterator[pathlib.Path]:
  # Not the process id: two containers that share a folder may have the same.
  partial = path.with_name(f'.{path.name}.{secrets.token_hex(4)}.partial')
  try:
    yield partial
  finally:
    if partial.is_dir():
      shutil.rmtree(partial)
    else:
      partial.unlink(missing_ok=True)


def refuse_existing(target: str) -> None:
  """Raises what `new_file` raises, before any work is done."""
  path = pathlib.Path(target)
  if os.path.lexists(path):
    raise FileExistsError(
      f'{target} exists already: remove it or choose another name.'
    )
  if not path.parent.is_dir():
    raise FileNotFoundError(
      f'{target} cannot be written: there is no folder {path.parent}.'
    )
  if not os.access(path.parent, os.W_OK | os.X_OK):
    raise PermissionError(
      f'{target} cannot be written: {path.parent} is not writable.'
    )
