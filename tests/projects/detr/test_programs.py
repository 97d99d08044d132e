"""DETR as a program: ONNX and StableHLO."""

import pathlib

import jax
import numpy as np
import pytest

from tests.conftest import PEERS
from tests.projects.detr.conftest import random_detr
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


def outputs(checkpoint, x):
  logits, aux = jax.jit(
    lambda params, x: checkpoint.model.apply({'params': params}, x)
  )(checkpoint.params, x)
  found = {'logits': logits, 'boxes': aux['boxes'][-1]}
  if checkpoint.model.masks:
    found['mask_logits'] = aux['mask_logits']
  return found


@pytest.mark.parametrize(
  ('format_name', 'fields'),
  [
    pytest.param('stablehlo', PLAIN, id='boxes'),
    pytest.param('onnx', MASKS, id='masks', marks=pytest.mark.slow),
  ],
)
def test_programs_put_out_classes_boxes_and_masks(
  tmp_path, format_name, fields
):
  checkpoint, path = random_detr(SIZE, **fields), str(tmp_path / 'x')
  pixels = np.random.default_rng(0).integers(0, 256, (2, *SIZE, 3), np.uint8)
  x = np.asarray(checkpoint.normalize(pixels))
  if format_name == 'onnx':
    library = pytest.importorskip('onnx', reason=PEERS)
    runtime = pytest.importorskip('onnxruntime', reason=PEERS)
    onnx.write(checkpoint, path, 'float32')
    nodes = [node.op_type for node in library.load(path).graph.node]
    # Two norms of the encoder's layer, three of each of the decoder's, and the
    # one at its end, of both.
    assert nodes.count('LayerNormalization') == 2 + 2 * 3 + 1
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
  both = np.concatenate([want['logits'], want['boxes']], -1)
  assert peer.boxes == 4
  difference = np.abs(peer.run(pixels) - both).max()
  assert difference < TOLERANCE * np.abs(both).max()


@pytest.mark.slow
def test_a_served_program_takes_padded_images(tmp_path):
  """Of several sizes at once; also where 1/4 of the side is no whole number."""
  pytest.importorskip('onnx', reason=PEERS)
  runtime = pytest.importorskip('onnxruntime', reason=PEERS)
  size = (30, 40)
  checkpoint = random_detr(size, **PLAIN)
  path = str(tmp_path / 'x')
  onnx.write(checkpoint, path, 'float32', served=True)
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (3, *size, 3), np.uint8)
  sizes = np.array([size, (17, 40), (30, 11)], np.int32)
  x = np.asarray(checkpoint.normalize(pixels))
  session = runtime.InferenceSession(path)
  assert [x.name for x in session.get_outputs()] == ['boxes', 'logits']
  boxes, logits = session.run(None, {'images': x, 'sizes': sizes})
  is_padding = np.ones((3, *size), bool)
  for i, (h, w) in enumerate(sizes):
    is_padding[i, :h, :w] = False
  y, aux = jax.jit(checkpoint.model.apply)(
    {'params': checkpoint.params},
    np.where(is_padding[..., None], np.float32(0), x),
    is_padding,
  )
  assert np.abs(logits - y).max() < TOLERANCE * np.abs(y).max()
  assert np.abs(boxes - aux['boxes'][-1]).max() < TOLERANCE
  # As `convert --check` runs it, without padding.
  want = outputs(checkpoint, x)
  want = np.concatenate([want['logits'], want['boxes']], -1)
  got = onnx.open_peer(path).run(pixels)
  assert np.abs(got - want).max() < TOLERANCE * np.abs(want).max()
