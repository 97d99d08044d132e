"""Who imports whom: downwards, and never in a circle."""

import ast
import graphlib
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# From the lowest; what stands together does not know the others' commands.
FLOORS = (
  {'register'},
  {'models', 'data'},
  {'checkpoints'},
  {'training'},
  {'objectives'},
  {'visualize'},
  {'evaluators'},
  {'config'},
  {'experiment'},
  {'convert', 'own', 'train'},
  {'sweeps', 'finetune'},
  {'projects'},
  {'tools'},
  {'cli', 'main', '__main__'},
)


def imports():
  """Returns by module those of the package that it imports, wherever."""
  paths = {
    '.'.join(path.relative_to(ROOT).with_suffix('').parts): path
    for path in (ROOT / 'vit_jax').rglob('*.py')
  }
  paths = {name.removesuffix('.__init__'): p for name, p in paths.items()}
  del paths['vit_jax']
  found = {}
  for name, path in paths.items():
    wanted = set()
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ImportFrom):
        for alias in node.names:
          full = f'{node.module}.{alias.name}'
          wanted.add(full if full in paths else node.module)
      elif isinstance(node, ast.Import):
        wanted |= {alias.name for alias in node.names}
    found[name] = wanted & paths.keys()
  return found


def floor(name):
  _, *parts = name.split('.')
  room = '__main__' if parts[-1:] == ['__main__'] else parts[0]
  (level,) = (i for i, rooms in enumerate(FLOORS) if room in rooms)
  return level


def test_no_import_goes_up():
  for name, wanted in imports().items():
    if name.startswith('vit_jax.projects.'):
      continue  # they lie above the core once they register by name
    up = [w for w in wanted if floor(w) > floor(name)]
    assert not up, f'{name} imports {up}'


def test_no_circle():
  graphlib.TopologicalSorter(imports()).prepare()


def test_docstrings_begin_with_a_sentence():
  """And not with a list of arguments."""
  for path in (ROOT / 'vit_jax').rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
        said = ast.get_docstring(node) or 'None.'
        assert not re.match(r'\s*\w+:\n', said), (path, said)


def loaded_by(*args):
  """Returns the modules of the package, JAX and Grain that Python loads."""
  done = subprocess.run(
    [sys.executable, '-X', 'importtime', *args],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  return set(
    re.findall(r'\| +(vit_jax[\w.]*|jax|grain)$', done.stderr, re.MULTILINE)
  )


def test_a_config_loads_little():
  modules = loaded_by('-c', 'import vit_jax.config')
  assert 'vit_jax.config' in modules
  assert len(modules) < 10, modules


def test_help_loads_nothing_of_training():
  modules = loaded_by('-m', 'vit_jax.main', '--help')
  assert 'vit_jax.config' in modules
  assert not modules & {'jax', 'vit_jax.train', 'vit_jax.training.run'}


@pytest.mark.slow
def test_predict_loads_no_data_loader():
  modules = loaded_by('-m', 'vit_jax.predict', '--help')
  assert 'jax' in modules and 'grain' not in modules


@pytest.mark.slow
def test_training_digits_loads_no_project_and_no_tool(tmp_path):
  fields = {'total': '1 step', 'batch_size': 16, 'data.image_size': 8}
  sizes = {'width': 16, 'depth': 1, 'mlp_dim': 16, 'heads': 2}
  fields |= {f'model.{name}': size for name, size in sizes.items()}
  modules = loaded_by(
    *('-m', 'vit_jax.main', '--config=configs/digits.py'),
    f'--workdir={tmp_path}/run',
    *(f'--config.{name}={value}' for name, value in fields.items()),
  )
  assert 'vit_jax.train' in modules
  outside = ('vit_jax.projects', 'vit_jax.tools')
  assert not [m for m in modules if m.startswith(outside)]
