"""Write files and folders atomically.

A file or folder is written to a hidden temporary path beside the target and
renamed at the end. A killed process leaves only the temporary path behind.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator

from etils import epath


def replace(target: str | os.PathLike[str], data: bytes) -> None:
  """Writes or replaces a file, on disk or in a bucket."""
  if '://' in os.fspath(target):
    epath.Path(target).write_bytes(data)  # writes to a bucket are atomic
    return
  with _beside(pathlib.Path(target)) as partial:
    partial.write_bytes(data)
    os.replace(partial, target)


def cache_folder() -> pathlib.Path:
  """Returns the cache folder; it may not exist."""
  base = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  return pathlib.Path(base).expanduser() / 'vit_jax'


@contextlib.contextmanager
def new_file(target: str) -> Iterator[pathlib.Path]:
  """Yields a temporary path, and renames it to `target` at the end.

  Raises the errors of `refuse_existing`.
  """
  refuse_existing(target)
  with _beside(pathlib.Path(target)) as partial:
    yield partial
    # A rename would replace a target that has appeared meanwhile.
    refuse_existing(target)
    os.rename(partial, target)


@contextlib.contextmanager
def new_folder(target: str) -> Iterator[pathlib.Path]:
  """Like `new_file`, but yields the path of an empty folder."""
  with new_file(target) as partial:
    partial.mkdir()
    yield partial


@contextlib.contextmanager
def _beside(path: pathlib.Path) -> Iterator[pathlib.Path]:
  # Process ids are not unique: several containers may share a folder.
  partial = path.with_name(f'.{path.name}.{secrets.token_hex(4)}.partial')
  try:
    yield partial
  finally:
    if partial.is_dir():
      shutil.rmtree(partial)
    else:
      partial.unlink(missing_ok=True)


def refuse_existing(target: str) -> None:
  """Raises an OSError if `new_file` could not write `target`.

  Raises:
    FileExistsError: if `target` exists.
    FileNotFoundError: if its folder does not exist.
    PermissionError: if its folder is not writable.
  """
  path = pathlib.Path(target)
  if os.path.lexists(path):
    raise FileExistsError(
      f'{target} exists already: remove it or choose another name.'
    )
  if not path.parent.is_dir():
    raise FileNotFoundError(
      f'{target} cannot be written: the folder {path.parent} is missing.'
    )
  if not os.access(path.parent, os.W_OK | os.X_OK):
    raise PermissionError(
      f'{target} cannot be written: {path.parent} is not writable.'
    )
