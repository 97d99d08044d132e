"""Small checkpoints of the original code, and its outputs."""

import functools

import jax
import numpy as np

from tests.conftest import ROOT
from vit_jax.checkpoints import opening

GOLDEN = ROOT / 'tests/golden'

# The original code's own reruns differ by up to 4e-6 of values around 1; an
# exact GELU, or an epsilon of 1e-5 in LayerNorm, differs by more than this.
ATOL = 1e-5


def open_golden(name):
  """Returns a checkpoint, and arrays of images and outputs by name."""
  checkpoint = opening.open_checkpoint(str(GOLDEN / f'{name}_s7.npz'))
  return checkpoint, np.load(GOLDEN / f'{name}_s7_golden.npz')


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, images):
  return model.apply({'params': params}, images, capture=('blocks',))
