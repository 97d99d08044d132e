"""A folder that serves a model where there is no JAX.

The server is that of `vit_jax/tools/serve/`, copied with what it imports.
"""

import pathlib
import re
import shutil

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.convert import onnx
from vit_jax.data import whole

DTYPES = onnx.DTYPES

_PACKAGE = pathlib.Path(__file__).parents[2]
_SERVER = pathlib.Path(__file__).parent
# Of the data pipeline what the server's decoder needs.
_PIXELS = ('data/__init__.py', 'data/preprocessing.py', 'data/upright.py')
_START = '''\
"""Serves the models of this folder: python serve.py --help."""

import sys

from vit_jax.tools.serve.listening import main

if __name__ == '__main__':
  sys.exit(main())
'''


def write(checkpoint: Checkpoint, target: str, dtype: str) -> list[str]:
  """Writes a folder with a model, the server and its requirements.

  With the dtype 'int8' there are both, of which the server takes the faster: on
  some boards that is float32.

  Raises:
    ImportError: if ONNX is not installed.
    ValueError: if there is nothing to predict, or the model cannot be written.
  """
  with whole.new_folder(target) as folder:
    root = folder / 'vit_jax'
    package = root / 'tools' / 'serve'
    package.mkdir(parents=True)
    (root / '__init__.py').write_text(
      '"""The part of vit_jax that serves."""\n'
    )
    (root / 'data').mkdir()
    for name in _PIXELS:
      shutil.copyfile(_PACKAGE / name, root / name)
    for path in _SERVER.iterdir():
      # This file and __main__ need JAX, which a board is without.
      if path.suffix in ('.py', '.html') and path.stem not in (
        '__main__',
        'board',
      ):
        shutil.copyfile(path, package / path.name)
    shutil.copyfile(_SERVER / 'requirements.txt', folder / 'requirements.txt')
    (folder / 'serve.py').write_text(_START)
    (folder / 'models').mkdir()
    name = name_of(checkpoint.path)
    lost = []
    for each in dict.fromkeys(('float32', dtype)):
      lost = write_model(checkpoint, folder / 'models', name, each)
  return lost


def write_model(
  checkpoint: Checkpoint, folder: pathlib.Path, name: str, dtype: str
) -> list[str]:
  """Writes the file that the server opens, and returns what it cannot hold.

  Raises:
    ImportError: if ONNX is not installed.
    ValueError: if there is nothing to predict, or the model cannot be written.
  """
  if not checkpoint.model.num_classes:
    raise ValueError(f'{checkpoint.path} has no head: it predicts nothing.')
  return onnx.write(
    checkpoint,
    str(folder / f'{name}.{dtype}.onnx'),
    dtype,
    served=True,
  )


def name_of(path: str) -> str:
  """Returns what a model is called: the last part of where it is from.

  Of a step of a workdir, that of the workdir.
  """
  parts = pathlib.PurePath(path.partition('://')[2] or path).parts
  if len(parts) > 2 and parts[-2] == 'checkpoints':
    parts = parts[:-2]
  stem = parts[-1].removesuffix('.npz').removesuffix('.safetensors')
  return re.sub(r'[^\w-]+', '_', stem) or 'model'
