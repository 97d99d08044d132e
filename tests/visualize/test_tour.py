"""The notebook runs from top to bottom, and is kept without what came out."""

import os
import re

import pytest

from tests.conftest import ROOT

TOUR = ROOT / 'vit_jax/visualize/tour.ipynb'


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
  nbclient = pytest.importorskip('nbclient', reason='needs the extra `test`')
  pytest.importorskip('ipykernel', reason='needs the extra `test`')
  import nbformat

  # None of the user's settings for Jupyter, and one device.
  monkeypatch.setenv('JUPYTER_CONFIG_DIR', str(tmp_path))
  monkeypatch.setenv('TMPDIR', str(tmp_path))
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  path = [str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
  monkeypatch.setenv('PYTHONPATH', os.pathsep.join(path))
  notebook = nbformat.read(TOUR, as_version=4)
  nbclient.NotebookClient(
    notebook,
    timeout=None,
    kernel_name='python3',
    resources={'metadata': {'path': str(tmp_path)}},
  ).execute()
  outputs = [o for c in notebook.cells for o in c.get('outputs', [])]
  text = ''.join(o.get('text', '') for o in outputs)
  accuracy = re.search(r'test accuracy (.*)%', text)[1]
  # The digits' whole recipe reaches 98 to 99 %, in more epochs.
  assert float(accuracy) > 95
  difference = re.search(r'largest difference of a logit (.*)', text)[1]
  assert float(difference) < 1e-5
  pictures = [o for o in outputs if 'image/png' in o.get('data', {})]
  assert len(pictures) == 4
