"""Who imports whom: downwards, and never in a circle."""

import ast
import graphlib
import re
import subprocess
import sys

from tests.conftest import ROOT

# From the lowest; what stands together does not know the others' commands.
FLOORS = (
  {'register'},
  {'models', 'data', 'projects'},
  {'checkpoints'},
  {'training'},
  {'objectives'},
  {'visualize'},
  {'evaluators'},
  {'config'},
  {'experiment'},
  {'convert', 'train'},
  {'sweeps'},
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


def loaded_by(code):
  """Returns the modules of the package that a fresh process has loaded."""
  report = "import sys; print(*(m for m in sys.modules if m[:7] == 'vit_jax'))"
  done = subprocess.run(
    [sys.executable, '-c', f'{code}\n{report}'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  return done.stdout.splitlines()[-1].split()


def test_a_config_loads_little():
  modules = loaded_by('import vit_jax.config')
  assert len(modules) < 10, modules
