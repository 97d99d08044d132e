"""Which format a checkpoint has, found by looking."""

import os

from vit_jax.convert import archive, npz
from vit_jax.convert.table import File


def read(path: str) -> File:
  """Reads a checkpoint of any foreign format.

  Args:
    path: an .npz file.

  Raises:
    ValueError: if it is damaged, or of no known format.
  """
  if not os.path.isdir(path) and archive.is_archive(path):
    return npz.read(path, archive.load(path))
  raise ValueError(f'{path} is no checkpoint.')
