"""What the READMEs name exists: files, sections, commands, fields, classes."""

import functools
import importlib
import importlib.util
import pathlib
import re

import pytest
from ml_collections import config_dict
from PIL import Image

from tests.test_old_workdirs import unpack
from vit_jax import config as config_lib
from vit_jax import objectives

_ROOT = pathlib.Path(__file__).parents[1]
_PAGES = sorted(
  path
  for folder in ['.', 'configs', 'launch', 'vit_jax']
  for path in (_ROOT / folder).glob(
    '**/*.md' if folder == 'vit_jax' else '*.md'
  )
)
_STEP = re.compile(r'\| \d+ \| \[.*\]\((.*)\) \| (.*) \| (\d+) \|')


@pytest.fixture(params=_PAGES, ids=lambda path: str(path.relative_to(_ROOT)))
def page(request):
  return request.param


def test_the_first_page_is_short():
  assert len((_ROOT / 'README.md').read_text().splitlines()) <= 250


def test_as_many_checkpoints_are_kept_as_it_says():
  assert 'the last two and the best one' in (_ROOT / 'README.md').read_text()
  assert config_lib.base().keep_last == 2


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
  steps = _STEP.findall((_ROOT / 'README.md').read_text())
  assert len(steps) >= 8
  for path, what, lines in steps:
    actual = len((_ROOT / path).read_text().splitlines())
    assert abs(int(lines) - actual) <= 0.1 * actual, (path, lines, actual)
    if not path.startswith('vit_jax/'):
      continue
    module = importlib.import_module(path.removesuffix('.py').replace('/', '.'))
    for name in re.findall(r'`(\w+)`', what):
      classes = [c for c in vars(module).values() if isinstance(c, type)]
      assert any(hasattr(owner, name) for owner in [module, *classes]), name


def test_snippets_run(tmp_path, monkeypatch):
  """On a workdir and an image in the places that they name."""
  unpack('vit', tmp_path / 'runs').rename(tmp_path / 'runs/digits')
  Image.new('RGB', (8, 8)).save(tmp_path / 'my_digit.png')
  monkeypatch.chdir(tmp_path)
  snippets = re.findall(
    r'```python\n(.*?)```', (_ROOT / 'README.md').read_text(), re.DOTALL
  )
  assert snippets
  for snippet in snippets:
    exec(snippet, {})
