"""What `import vit_jax` gives, in fresh processes as programs import it."""

import subprocess
import sys

import pytest

import vit_jax
from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import ROOT

TINY = {'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 20, 'heads': 2}


def run(code, *args, cwd=ROOT):
  done = subprocess.run(
    [sys.executable, *(args or ('-c', code))],
    cwd=cwd,
    env={'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stderr) == (0, '')
  return done.stdout


def test_importing_is_quick_and_installs_nothing(tmp_path):
  """Also in a program that is started as `python -m app`."""
  (tmp_path / 'app.py').write_text(
    'import signal, sys\n'
    'before = signal.getsignal(signal.SIGINT), sys.unraisablehook\n'
    'import vit_jax\n'
    'assert before == (signal.getsignal(signal.SIGINT), sys.unraisablehook)\n'
    'assert "jax" not in sys.modules\n'
    'assert {*vit_jax.__all__, "__version__"} <= {*dir(vit_jax)}\n'
  )
  run('', '-m', 'app', cwd=tmp_path)


@pytest.mark.slow
def test_a_function_wins_over_the_module_of_its_name():
  """Whichever is imported first, and by whatever form."""
  module = (
    'import vit_jax.convert, sys; sys.modules["vit_jax.convert"].__name__'
  )
  function = 'from vit_jax import convert; assert callable(convert)'
  for first, then in ((module, function), (function, module)):
    run(
      f'{first}\n{then}\nimport types, vit_jax\n'
      'assert isinstance(vit_jax.convert, types.FunctionType)\n'
      'assert vit_jax.convert is convert\n'
    )


def test_every_export_is_there_and_no_other():
  for name in vit_jax.__all__:
    assert getattr(vit_jax, name).__name__ == name
  with pytest.raises(AttributeError, match="no attribute 'trian'"):
    _ = vit_jax.trian


def test_a_named_model_is_built():
  model = vit_jax.build_model('s16', num_classes=7, depth=2)
  assert (model.width, model.depth, model.num_classes) == (384, 2, 7)
  with pytest.raises(ValueError, match='100'):
    vit_jax.build_model('s16', image_size=100)


def test_checkpoints_are_equal_to_themselves_and_short_to_print():
  one, other = (random_checkpoint(None, (8, 8), 7, **TINY) for _ in range(2))
  assert one == one and one != other and len({one, other}) == 2
  assert '\n' not in repr(one) and len(repr(one)) < 200
  for part in (one.path, 'ViT', '7 classes', '8x8 pixels', 'parameters'):
    assert part in repr(one)
