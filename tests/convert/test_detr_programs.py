"""DETR as a program: ONNX and StableHLO."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import PEERS
from vit_jax.convert import onnx, stablehlo

# Of the largest output, float32 on both sides.
TOLERANCE = 1e-5
SIZE = (32, 48)
FIELDS = {
  'name': 'detr',
  'num_queries': 5,
  'width': 64,
  'heads': 8,
  'mlp_dim': 48,
  'encoder_layers': 1,
  'decoder_layers': 2,
  'backbone_width': 32,
}
PLAIN = FIELDS | {'backbone': 'plain', 'backbone_layers': (1, 1)}
MASKS = FIELDS | {'backbone_layers': (1, 1, 1, 1), 'masks': True}


def make(fields):
  checkpoint = random_checkpoint(None, SIZE, **fields)
  params = jax.tree_util.tree_map_with_path(
    # Variances are above 0.
    lambda path, x: np.exp(x) if path[-1].key == 'var' else x,
    checkpoint.params,
  )
  return dataclasses.replace(checkpoint, params=params)


def outputs(checkpoint, x):
  logits, aux = jax.jit(
    lambda params, x: checkpoint.model.apply({'params': params}, x)
  )(checkpoint.params, x)
  found = {'logits': logits, 'boxes': aux['boxes'][-1]}
  if checkpoint.model.masks:
    found['mask_logits'] = aux['mask_logits']
  return found


@pytest.mark.parametrize('format_name', ['onnx', 'stablehlo'])
@pytest.mark.parametrize(
  'fields',
  [
    pytest.param(PLAIN, id='boxes'),
    pytest.param(MASKS, id='masks', marks=pytest.mark.slow),
  ],
)
def test_programs_put_out_classes_boxes_and_masks(
  tmp_path, format_name, fields
):
  checkpoint, path = make(fields), str(tmp_path / 'x')
  pixels = np.random.default_rng(0).integers(0, 256, (2, *SIZE, 3), np.uint8)
  x = np.asarray(checkpoint.normalize(pixels))
  if format_name == 'onnx':
    pytest.importorskip('onnx', reason=PEERS)
    runtime = pytest.importorskip('onnxruntime', reason=PEERS)
    onnx.write(checkpoint, path, 'float32')
    session = runtime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    got = dict(zip(names, session.run(None, {'images': x}), strict=True))
    peer = onnx.open_peer(path)
  else:
    stablehlo.write(checkpoint, path, 'float32')
    folder = pathlib.Path(path)
    program = jax.export.deserialize(
      bytearray((folder / stablehlo.MODEL).read_bytes())
    )
    with np.load(folder / stablehlo.PARAMS) as file:
      got = program.call(dict(file), x)
    peer = stablehlo.open_peer(path)
  want = outputs(checkpoint, x)
  assert got.keys() == want.keys()
  for key, y in want.items():
    assert got[key].shape == y.shape, key
    assert np.abs(got[key] - y).max() < TOLERANCE * np.abs(y).max(), key
  logits = np.asarray(want['logits'])
  difference = np.abs(peer.run(pixels) - logits).max()
  assert difference < TOLERANCE * np.abs(logits).max()
