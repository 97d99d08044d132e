"""Builds the site: `python -m sphinx -W docs docs/_build`."""

import pathlib
import subprocess
import sys

_DOCS = pathlib.Path(__file__).parent
sys.path.insert(0, str(_DOCS.parent))

project = 'vit_jax'
extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon']
autodoc_typehints = 'description'
myst_heading_anchors = 3  # headings are link targets, as on GitHub
html_theme = 'sphinx_book_theme'  # the theme of JAX's and Optax's sites
html_theme_options = {'show_toc_level': 2}
exclude_patterns = ['_build']


def setup(app):
  app.connect('builder-inited', _write_reference)


def _write_reference(app):
  """Writes the reference pages that show the output of commands."""
  del app
  from vit_jax.__main__ import COMMANDS

  commands = ['# Commands and flags\n']
  for name, (module, what) in COMMANDS.items():
    printed = _printed('vit_jax', name, '--help')
    commands.append(
      f'## {name}\n\n{what}: `python -m {module}`\n\n```text\n{printed}```\n'
    )
  pages = {
    'commands': '\n'.join(commands),
    'models': (
      '# Models\n\nThe named models:\n\n'
      + f'```text\n{_printed("vit_jax.models")}```\n'
      + '\nThe fields of `config.model`:\n\n'
      + _table('vit_jax.models', '--fields', '--format=csv')
    ),
    'weights': (
      '# Published weights\n\n'
      'Every command takes these names for a checkpoint.\n\n'
      + _table('vit_jax.models', '--pretrained', '--format=csv')
    ),
  }
  folder = _DOCS / '_generated'
  folder.mkdir(exist_ok=True)
  for name, text in pages.items():
    (folder / f'{name}.md').write_text(text)


def _table(*command):
  return f'```{{csv-table}}\n:header-rows: 1\n\n{_printed(*command)}```\n'


def _printed(*command):
  return subprocess.run(
    [sys.executable, '-m', *command],
    cwd=_DOCS.parent,
    capture_output=True,
    text=True,
    check=True,
  ).stdout
