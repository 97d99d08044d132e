"""Finds the imports of each file, and the tests that a changed file affects."""

import ast
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
# These tests run most of the code, so they run after more specific tests.
LAST = ['tests/test_main.py', 'tests/test_train.py', 'tests/cli/test_flags.py']
REGISTERED = re.compile(r'(vit_jax[\w.]*):\w+')


def python_files():
  """Returns the project's Python files, relative to its root."""
  folders = ('vit_jax', 'configs', 'tests')
  paths = [p for folder in folders for p in (ROOT / folder).rglob('*.py')]
  return sorted(path.relative_to(ROOT) for path in paths)


def module_name(path):
  return '.'.join(p for p in path.with_suffix('').parts if p != '__init__')


@functools.cache
def imports():
  """Returns the files that each file imports, also inside functions.

  If a test imports a register, the modules that the register names as
  'module:Name' count as its imports too.
  """
  files = python_files()
  file_of = {module_name(path): path for path in files}
  direct, registered = {}, {}
  for path in files:
    tree = ast.parse((ROOT / path).read_text())
    names, texts = set(), set()
    for node in ast.walk(tree):
      if isinstance(node, ast.Import):
        names |= {alias.name for alias in node.names}
      elif isinstance(node, ast.ImportFrom) and node.module:
        names.add(node.module)
        names |= {f'{node.module}.{alias.name}' for alias in node.names}
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        texts |= set(REGISTERED.findall(node.value))
    direct[path] = {file_of[name] for name in names if name in file_of}
    registered[path] = {file_of[name] for name in texts if name in file_of}
  for path in files:
    if path.parts[0] == 'tests':
      for found in list(direct[path]):
        direct[path] |= registered[found]
  return direct


def is_test(path):
  return path.name.startswith('test_') and path.suffix == '.py'


def tests_of(path):
  """Returns the test files of a module, the most specific first.

  The order is: the module's own test, tests that import the module, other tests
  in the same folder, and `LAST`.
  """
  parts = path.with_suffix('').parts
  command = 'main' if parts[-1] == '__main__' else parts[-1]
  tests = {p: found for p, found in imports().items() if is_test(p)}
  own = pathlib.Path('tests', *parts[1:-1], f'test_{command}.py')
  found = [
    *(p for p in tests if p == own),
    *(p for p in tests if path in tests[p]),
    *(p for p in tests if p.parts[1:-1] == parts[1:-1] and len(parts) > 2),
  ]
  return list(dict.fromkeys([*map(str, found), *LAST]))


def affected(changed):
  """Returns the test files that the changed files affect.

  A test file is affected in three cases: it imports a changed module, directly
  or through other modules; it is beside or below a changed `conftest.py`; or
  its text names a changed file that is not a module.
  """
  direct = imports()
  reached = {path for path in changed if path in direct}
  while more := {p for p, found in direct.items() if found & reached} - reached:
    reached |= more
  folders = {path.parent for path in changed if path.name == 'conftest.py'}
  names = {
    path.name
    for path in changed
    if path.suffix and (path.suffix != '.py' or path.parts[0] == 'configs')
  }
  return [
    str(test)
    for test in filter(is_test, direct)
    if test in reached
    or folders & set(test.parents)
    or any(name in (ROOT / test).read_text() for name in names)
  ]
