"""Writes a folder that serves a model without JAX, for small boards.

The folder contains a copy of the server and of the modules that it imports.
"""

import pathlib
import re
import shutil

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.convert import onnx
from vit_jax.data import atomic_files

DTYPES = ('float32', 'int8')

_PACKAGE = pathlib.Path(__file__).parents[2]
_SERVER = _PACKAGE / 'tools' / 'serve'
# The modules that decode and resize images, and the modules that they import.
_PIXELS = (
  'data/decode.py',
  'data/orientation.py',
  'data/preprocessing.py',
  'models/__init__.py',
  'models/fields.py',
)
_START = '''\
"""Serves the models of this folder: python serve.py --help."""

import sys

from vit_jax.tools.serve.listening import main

if __name__ == '__main__':
  sys.exit(main())
'''


def write(checkpoint: Checkpoint, target: str, dtype: str) -> list[str]:
  """Writes a folder with a model, the server and its requirements.

  With the dtype 'int8', writes the model in float32 too, because that is faster
  on some boards. Returns a sentence for each difference from the checkpoint.

  Raises:
    OSError: if the target exists or cannot be written.
    ImportError, ValueError: as in `write_model`.
  """
  with atomic_files.new_folder(target) as folder:
    # `__main__` and `board` need JAX.
    served = [
      path
      for path in _SERVER.iterdir()
      if path.suffix in ('.py', '.html', '.json')
      and path.stem not in ('__main__', 'board')
    ]
    pixels = [_PACKAGE / name for name in _PIXELS]
    for path in (*pixels, *served):
      copy = folder / 'vit_jax' / path.relative_to(_PACKAGE)
      copy.parent.mkdir(parents=True, exist_ok=True)
      shutil.copyfile(path, copy)
    # vit_jax/__init__.py needs etils, so its copy is empty.
    (folder / 'vit_jax' / '__init__.py').touch()
    shutil.copyfile(_SERVER / 'requirements.txt', folder / 'requirements.txt')
    (folder / 'serve.py').write_text(_START)
    (folder / 'models').mkdir()
    name = name_of(checkpoint.path)
    lost = write_model(checkpoint, folder / 'models', name, dtype)
    if dtype != 'float32':
      write_model(checkpoint, folder / 'models', name, 'float32')
  return lost


def write_model(
  checkpoint: Checkpoint, folder: pathlib.Path, name: str, dtype: str
) -> list[str]:
  """Writes FOLDER/NAME.DTYPE.onnx; returns differences from the checkpoint.

  Raises:
    ImportError: if onnx, or onnxruntime for int8, is not installed.
    ValueError: if the model cannot be served or written.
  """
  checkpoint.check_head()
  if (task := checkpoint.model.task) not in ('classes', 'objects'):
    raise ValueError(
      f'{checkpoint.path} predicts {task}, which the page does not show. Use '
      'python -m vit_jax.predict.'
    )
  path = str(folder / f'{name}.{dtype}.onnx')
  return onnx.write(checkpoint, path, dtype, served=True)


def name_of(path: str) -> str:
  """Returns the name of a model: the last part of its path, or its workdir."""
  parts = pathlib.PurePath(path.partition('://')[2] or path).parts
  if len(parts) > 2 and parts[-2] == 'checkpoints':
    parts = parts[:-2]
  # The hub's folders are models--ORG--NAME/snapshots/REVISION.
  elif len(parts) > 2 and parts[-2] == 'snapshots':
    parts = (parts[-3].rpartition('--')[2],)
  stem = parts[-1].removesuffix('.npz').removesuffix('.safetensors')
  return re.sub(r'[^\w-]+', '_', stem) or 'model'
