"""What READMEs and the site name exists: files, sections, commands, fields."""

import argparse
import functools
import importlib
import importlib.util
import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver
from ml_collections import config_dict
from PIL import Image

from tests.cli.test_flags import actions_of, module_of
from tests.test_old_workdirs import unpack
from vit_jax import config as config_lib
from vit_jax import objectives
from vit_jax.__main__ import COMMANDS
from vit_jax.cli import flags

_ROOT = pathlib.Path(__file__).parents[1]
_PAGES = sorted(
  path
  for pattern in [
    *('*.md', 'configs/*.md', 'docs/*.md', 'docs/[!_]*/**/*.md'),
    *('launch/*.md', 'vit_jax/**/*.md'),
  ]
  for path in _ROOT.glob(pattern)
  if path.name != 'CHANGELOG.md'  # history names what has gone
)
_STEP = re.compile(r'\| \d+ \| \[.*\]\((.*)\) \| (.*) \| (\d+) \|')


@pytest.fixture(params=_PAGES, ids=lambda path: str(path.relative_to(_ROOT)))
def page(request):
  return request.param


def test_the_first_page_is_short():
  assert len((_ROOT / 'README.md').read_text().splitlines()) <= 120


def test_every_folder_of_commands_has_a_page():
  commands = {path.parent for path in _ROOT.glob('vit_jax/*/__main__.py')}
  assert not [
    folder for folder in commands if not (folder / 'README.md').exists()
  ]


def test_links(page):
  for target in re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', page.read_text()):
    address = target[0] or target[1]
    if address.startswith('https://'):
      continue
    path, _, anchor = address.partition('#')
    linked = (page.parent / path) if path else page
    assert linked.exists(), address
    if anchor:
      assert anchor in _anchors(linked), address


def _anchors(page):
  headings = re.findall(r'^#+ (.*)$', page.read_text(), re.MULTILINE)
  return [re.sub(r'[^\w -]', '', h.lower()).replace(' ', '-') for h in headings]


def test_dependencies_are_listed_with_their_pins():
  page = (_ROOT / 'docs/reference/dependencies.md').read_text()
  pins = (_ROOT / 'requirements.txt').read_text()
  for name, version in re.findall(r'([\w-]+) (\d+\.[\w.]+)', page):
    if name not in ('Python', 'to', 'JAX', 'Flax'):
      pin = f'{name}=={version}'
      assert re.search(rf'^{re.escape(pin)}( ;.*)?$', pins, re.M), pin
  required = (_ROOT / 'setup.py').read_text().partition('\n]\n')[0]
  for name in re.findall(r"^  '([\w-]+)", required, re.M):
    name = name.replace('_', '-')
    assert re.search(rf'^\| .*\b{name}\b', page, re.M), name


def test_commands_configs_and_files(page):
  text = page.read_text()
  for module in re.findall(r'python -m (vit_jax[\w.]*)', text):
    spec = importlib.util.find_spec(module)
    assert spec, module
    if spec.submodule_search_locations:
      assert importlib.util.find_spec(f'{module}.__main__'), module
  for path in re.findall(r'\b((?:configs|tests|launch)/[\w/]+\.\w+)', text):
    assert (_ROOT / path).exists(), path
  for path in re.findall(r'\b(tests/[\w/]+)(?=[`\' ,)])', text):
    assert (_ROOT / path).exists() or list(_ROOT.glob(path + '.py')), path


@pytest.mark.parametrize(
  'path', sorted(_ROOT.glob('configs/*.py')), ids=lambda p: p.stem
)
def test_fields_that_a_config_explains_have_the_values_it_says(path):
  module = importlib.import_module(f'configs.{path.stem}')
  known = config_lib.flatten(module.get_config())
  for field, value in re.findall(
    r'^  (\w[\w.]*)=(\S+)  ', module.__doc__, re.MULTILINE
  ):
    assert field in known or field == 'model', field
    if value in ('True', 'False') or field in ('model', 'objective.name'):
      continue  # another choice
    said = type(known[field])(value)
    assert known[field] == said or value.startswith(('./', 'PATH')), field


@pytest.mark.filterwarnings('ignore:the load_module:')
def test_commands_parse(page, tmp_path, monkeypatch):
  """Each whole command, where it lies beside the files that it names."""
  (tmp_path / 'configs').symlink_to(_ROOT / 'configs')
  for name in ('runs/first', 'runs/mine'):
    (tmp_path / name).mkdir(parents=True)
  (tmp_path / 'l16.npz').touch()
  np.save(tmp_path / 'palette.npy', np.zeros((512, 3), np.float32))
  monkeypatch.chdir(tmp_path)
  parse_args = argparse.ArgumentParser.parse_args

  def parse(parser, argv=None):
    raise _Parsed(parse_args(parser, argv))

  monkeypatch.setattr(argparse.ArgumentParser, 'parse_args', parse)
  text = re.sub(r'\\\n\s*', ' ', page.read_text())
  for module, rest in re.findall(r'python -m (vit_jax\.\w+) ([^`\n]+)', text):
    if '...' in rest:
      continue
    (command,) = (name for name, (x, _) in COMMANDS.items() if x == module)
    # A comment, a description or the end of a quoted command may follow.
    whole, *_ = re.split(r" #|   |(?<=/l16)'$", rest)
    argv = [command, *shlex.split(whole)]
    monkeypatch.setattr(sys, 'argv', argv)
    module_defining_flags = module_of(command)
    try:
      if command in ('train', 'plan'):
        with flagsaver.flagsaver():
          flags.parse_flags(argv, required=['config'])
      else:
        with pytest.raises(_Parsed):
          module_defining_flags.main()
    except SystemExit:
      pytest.fail(f'does not parse: {module} {rest}')
    absl_flags.FLAGS.unparse_flags()


class _Parsed(Exception):
  pass


def test_flags_of_commands():
  """Checks pages and docstrings, including commands with `...`."""
  texts = [page.read_text() for page in _PAGES]
  texts += [module_of(command).__doc__ for command in COMMANDS]
  texts += [
    importlib.import_module(f'configs.{path.stem}').__doc__
    for path in _ROOT.glob('configs/*.py')
  ]
  for text in texts:
    for module, rest in re.findall(
      r'python -m (vit_jax\.\w+)\b([^`\n]*)', text.replace('\\\n', '')
    ):
      for name in re.findall(r'\s--(\w+)', rest):
        assert name in _flags_of(module), f'{module} --{name}'


@functools.cache
def _flags_of(module):
  (command,) = (name for name, (x, _) in COMMANDS.items() if x == module)
  if command in ('train', 'plan'):
    own = absl_flags.FLAGS.get_flags_for_module(module_of(command).__name__)
    return {'config', *(flag.name for flag in own)}
  options = (
    x for _, action in actions_of(command) for x in action.option_strings
  )
  return {x.removeprefix('--') for x in options}


def test_fields(page):
  config = config_lib.base()
  for objective in objectives.OBJECTIVES:
    fields = _with_objective(objective)
    config.objective.update(fields.objective)
    config.model.update(fields.model)
  for name in re.findall(r'--config\.([\w.]+)=', page.read_text()):
    assert _has(config, name), name


@functools.cache
def _with_objective(name):
  config = config_lib.base()
  config_lib.choose_objective(config, name)
  return config


def _has(config, name):
  for part in name.split('.'):
    if not isinstance(config, config_dict.ConfigDict) or part not in config:
      return False
    config = config[part]
  return True


def test_the_way_through_the_code():
  steps = _STEP.findall((_ROOT / 'docs/contribute/code.md').read_text())
  assert len(steps) >= 8
  steps += _STEP.findall((_ROOT / 'README.md').read_text())
  for path, what, lines in steps:
    path = path.removeprefix('../../')
    actual = len((_ROOT / path).read_text().splitlines())
    assert abs(int(lines) - actual) <= 0.1 * actual, (path, lines, actual)
    if not path.startswith('vit_jax/'):
      continue
    module = importlib.import_module(path.removesuffix('.py').replace('/', '.'))
    for name in re.findall(r'`(\w+)`', what):
      classes = [c for c in vars(module).values() if isinstance(c, type)]
      assert any(hasattr(owner, name) for owner in [module, *classes]), name


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
  pytest.importorskip('sphinx', reason='needs the extra `docs`')
  build = [sys.executable, *'-m sphinx -W -q docs'.split(), tmp_path]
  done = subprocess.run(build, cwd=_ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'index.html').exists()


@pytest.mark.parametrize(
  'page',
  [
    # One that compiles the whole training step takes most of a minute.
    pytest.param(path, marks=[pytest.mark.slow] * (path.stem == 'own_loop'))
    for path in _PAGES
    if '```python' in path.read_text()
  ],
  ids=lambda path: str(path.relative_to(_ROOT)),
)
def test_snippets_run(page, tmp_path, monkeypatch):
  """On a workdir and an image in the places that they name."""
  unpack('vit', tmp_path / 'runs').rename(tmp_path / 'runs/digits')
  Image.new('RGB', (8, 8)).save(tmp_path / 'my_digit.png')
  monkeypatch.chdir(tmp_path)
  scope: dict[str, object] = {}  # one for all blocks of a page
  blocks = re.findall(r'```python\n(.*?)```', page.read_text(), re.DOTALL)
  for snippet in blocks:
    if snippet.startswith('# not run: '):
      continue
    try:
      exec(snippet, scope)
    except ImportError as e:
      if (e.name or '').startswith('vit_jax'):
        raise
      pytest.skip(str(e))  # of an extra
