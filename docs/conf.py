"""Builds the site: `python -m sphinx -W docs docs/_build`."""

project = 'vit_jax'
extensions = ['myst_parser']
myst_heading_anchors = 3  # of links to sections, as on GitHub
html_theme = 'sphinx_book_theme'  # of JAX's and Optax's pages
html_theme_options = {'show_toc_level': 2}
exclude_patterns = ['_build']
