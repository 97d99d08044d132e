"""Official .npz files as timm's own loader reads them."""

import numpy as np
import pytest

from tests.checkpoints import npz_peer
from tests.checkpoints.random_weights import (
  logits_of,
  random_checkpoint,
  random_images,
  relative_difference,
)
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import npz

VIT = {'patch_size': 4, 'width': 48, 'depth': 2, 'mlp_dim': 80, 'heads': 3}
SIZE = (32, 32)

load_module = pytest.mark.filterwarnings('ignore:the load_module:')


def written(tmp_path, checkpoint):
  """Returns the path of a checkpoint as an .npz file."""
  path = str(tmp_path / 'written.npz')
  assert npz.write(checkpoint.weights(), path, 'float32') == []
  return path


HYBRID = VIT | {'patch_size': 1, 'stem_width': 64, 'stem_layers': (3, 4, 9)}
# timm's GroupNorm has the epsilon 1e-5 and the original's 1e-6; with these
# weights that makes 1e-5, and float32 rounding in ViTs 1e-6.
TIMM = {
  'cls': (VIT, SIZE, 3e-6),
  'gap': (VIT | {'pool': 'gap'}, SIZE, 3e-6),
  'root': (VIT | {'patch_size': 2, 'stem_width': 64}, (64, 64), 3e-5),
  # Of 16 units.
  'hybrid': (HYBRID, (64, 64), 1e-3),
}


@pytest.mark.fast('cls', 'gap')
@load_module
@pytest.mark.parametrize(
  ('fields', 'size', 'tolerance'), TIMM.values(), ids=TIMM
)
def test_timm_gives_our_logits(timm, tmp_path, fields, size, tolerance):
  checkpoint = random_checkpoint(None, size, names=False, **fields)
  path = written(tmp_path, checkpoint)
  peer = npz_peer.open_peer(path)
  assert peer.framework == f'timm {timm.__version__}'
  assert peer.image_size == size
  images = random_images(size)
  want = logits_of(checkpoint, images)
  got = peer.run(images)
  assert got.dtype == np.float32
  assert relative_difference(got, want) < tolerance
  again = opening.open_checkpoint(path)
  assert again.model == checkpoint.model and again.image_size == size
  np.testing.assert_array_equal(logits_of(again, images), want)
