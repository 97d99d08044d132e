"""iGPT as a program: ONNX and StableHLO."""

import numpy as np
import pytest

from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import PEERS
from vit_jax.convert import onnx, stablehlo
from vit_jax.projects.igpt import model as igpt

# Of the largest output, float32 on both sides.
TOLERANCE = 1e-5


def make(**fields):
  given = {'width': 16, 'depth': 2, 'mlp_dim': 24, 'heads': 4}
  given |= {'name': 'igpt', 'palette': igpt.even_palette(3)}
  # Of more pixels than a causal model works off at once.
  return random_checkpoint(None, (20, 24), **(given | fields))


@pytest.mark.fast('stablehlo-fields0')
@pytest.mark.parametrize(
  ('format_name', 'fields'),
  [
    ('stablehlo', {}),
    ('onnx', {'causal': False, 'bias': True, 'num_classes': 0}),
  ],
)
def test_programs_give_the_same(tmp_path, format_name, fields):
  checkpoint = make(**fields)
  if format_name == 'onnx':
    pytest.importorskip('onnx', reason=PEERS)
    pytest.importorskip('onnxruntime', reason=PEERS)
  module = {'onnx': onnx, 'stablehlo': stablehlo}[format_name]
  path = str(tmp_path / ('x.onnx' if format_name == 'onnx' else 'x'))
  module.write(checkpoint, path, 'float32')
  peer = module.open_peer(path)
  assert peer.image_size == (20, 24)
  rng = np.random.default_rng(0)
  # Of 1 and of 3 images: any batch size runs.
  images = rng.integers(0, 256, (3, 20, 24, 3), np.uint8)
  all_three = np.asarray(checkpoint.logits(images))
  for batch in (1, 3):
    got, want = peer.run(images[:batch]), all_three[:batch]
    assert got.shape == want.shape
    assert np.abs(got - want).max() < TOLERANCE * np.abs(want).max()


def test_a_rollout_is_refused(tmp_path):
  pytest.importorskip('onnx', reason=PEERS)
  with pytest.raises(ValueError, match='--rollout .* IGPT lacks'):
    onnx.write(make(), str(tmp_path / 'x.onnx'), 'float32', rollout=True)
