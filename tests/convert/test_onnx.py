"""What onnxruntime makes of a written file."""

import collections
import dataclasses
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoints.random_weights import (
  logits_of,
  random_checkpoint,
  random_images,
  relative_difference,
)
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.convert import onnx as onnx_format
from vit_jax.tools.serve import board
from vit_jax.visualize import rollout
from vit_jax.visualize.attention_maps import Layers
from vit_jax.visualize.rollout import FUSIONS, fuse

REASON = 'needs the extra `peers`, see requirements.txt'
onnx = pytest.importorskip('onnx', reason=REASON)
onnxruntime = pytest.importorskip('onnxruntime', reason=REASON)
onnx_graph = pytest.importorskip('vit_jax.convert.onnx_graph')
onnx_patterns = pytest.importorskip('vit_jax.convert.onnx_patterns')
onnx_trace = pytest.importorskip('vit_jax.convert.onnx_trace')

VIT = {'patch_size': 8, 'width': 32, 'depth': 2, 'mlp_dim': 48, 'heads': 4}
STEM = VIT | {'patch_size': 1, 'stem_width': 32, 'stem_layers': (1, 2)}
RESNET = {'name': 'resnet', 'layers': (2, 1), 'width': 32}
AXIAL = {'axial': True, 'pool': 'gap'}
SMALL, LARGE = (32, 32), (64, 64)
INPUTS = {'images': ((2, 2, 3), np.float32)}

# Both sides round float32 in another order.
TOLERANCE = 1e-5

CASES = {
  'map': (VIT | {'pool': 'map'}, SMALL),
  'exact GELU': (VIT | {'gelu': 'exact', 'layer_norm_epsilon': 1e-3}, SMALL),
  'sincos2d': (
    VIT | {'posemb': 'sincos2d', 'posemb_at': 'every_layer'},
    SMALL,
  ),
  'RMSNorm, registers, rotary': (
    VIT
    | {
      'norm': 'rms',
      'layer_scale': 0.1,
      'qkv_bias': False,
      'qk_norm': True,
      'attention_norm': True,
      'mlp_norm': True,
      'registers': 4,
      'rope': 1e4,
      'rope_side': 4,
      'rope_registers': 100.0,
    },
    (32, 48),
  ),
  'gated, more norms': (
    VIT | {'swiglu': True, 'pre_norm': True, 'norm_pooled': True},
    SMALL,
  ),
  'quick GELU': (VIT | {'gelu': 'quick'}, SMALL),
  'distilled': (VIT | {'name': 'deit'}, SMALL),
  'axial, relative, map': (
    VIT | {'axial': True, 'pool': 'map', 'posemb': 'relative'},
    (32, 48),
  ),
  'hybrid': (STEM, LARGE),
  'bit of odd size': (RESNET, (57, 70)),
  'axial resnet': (RESNET | {'version': 1, 'axial': True}, (57, 70)),
}


def write(tmp_path, checkpoint, dtype='float32', **options):
  """Returns the path of a checkpoint as an .onnx file."""
  path = str(tmp_path / 'model.onnx')
  assert onnx_format.write(checkpoint, path, dtype, **options) == []
  return path


def check_logits(peer, checkpoint):
  """Of a batch of any size, whose images do not mix in our model."""
  images = random_images(checkpoint.image_size, 3)
  want = logits_of(checkpoint, images)
  for count in (1, 3):
    got = peer.run(images[:count])
    assert got.dtype == np.float32
    assert relative_difference(got, want[:count]) < TOLERANCE


def operators(path):
  return collections.Counter(n.op_type for n in onnx.load(path).graph.node)


@pytest.mark.fast(
  'map', 'RMSNorm, registers, rotary', 'gated, more norms', 'hybrid'
)
@pytest.mark.parametrize(('fields', 'size'), CASES.values(), ids=CASES)
def test_onnxruntime_gives_our_logits(tmp_path, fields, size):
  checkpoint = random_checkpoint(None, size, **fields)
  path = write(tmp_path, checkpoint)
  onnx.checker.check_model(path, full_check=True)
  peer = onnx_format.open_peer(path)
  assert peer.image_size == size
  assert peer.framework == f'onnxruntime {onnxruntime.__version__}'
  check_logits(peer, checkpoint)


@pytest.mark.slow
def test_a_model_of_the_paper_gives_our_logits(tmp_path):
  checkpoint = random_checkpoint('r+ti16')
  check_logits(onnx_format.open_peer(write(tmp_path, checkpoint)), checkpoint)


def test_scanned_and_rematerialised_layers_give_the_same_file(tmp_path):
  plain = random_checkpoint(None, SMALL, **VIT)
  other = dataclasses.replace(
    plain,
    model=plain.model.clone(scan=True, remat='nothing_saveable'),
    params=plain.model.stack_layers(plain.params),
  )
  for name, checkpoint in (('plain', plain), ('other', other)):
    (tmp_path / name).mkdir()
    write(tmp_path / name, checkpoint)
  names = [tmp_path / name / 'model.onnx' for name in ('plain', 'other')]
  assert names[0].read_bytes() == names[1].read_bytes()


def test_the_graph_has_the_nodes_that_runtimes_are_fast_at(tmp_path):
  """A node for each part, weights folded; hence a file of their size."""
  checkpoint = random_checkpoint(None, SMALL, **VIT)
  path = write(tmp_path, checkpoint)
  found = operators(path)
  depth = VIT['depth']
  # Of q, k and v one each, two of attention, one out, two of the MLP;
  # the patches and the head.
  assert found['MatMul'] == 8 * depth + 2
  assert found['LayerNormalization'] == 2 * depth + 1
  assert found['Gelu'] == found['Softmax'] == depth
  assert found['Shape'] == found['Expand'] == 1
  assert not found.keys() & {'Einsum', 'Dropout', 'Cast', 'Gather', 'Where'}
  used = sum(x.size for x in jax.tree.leaves(checkpoint.params))
  stored = sum(
    np.prod(x.dims, dtype=int)
    for x in onnx.load(path).graph.initializer
    if x.data_type == onnx.TensorProto.FLOAT
  )
  assert used <= stored < used + 10


@pytest.mark.slow
def test_an_axial_layer_has_them_for_rows_and_for_columns(tmp_path):
  """Attention and an MLP of each (appendix D.6), and one norm at the end."""
  path = write(tmp_path, random_checkpoint(None, (32, 48), **VIT | AXIAL))
  found = operators(path)
  blocks = 2 * VIT['depth']
  assert found['LayerNormalization'] == 2 * blocks + 1
  assert found['Gelu'] == found['Softmax'] == blocks


@pytest.mark.slow
def test_onnxruntime_cancels_a_resnets_transpositions(tmp_path):
  """One stays at its beginning, and one where the pixels are summed."""
  path = write(tmp_path, random_checkpoint(None, LARGE, **RESNET))
  options = onnxruntime.SessionOptions()
  options.optimized_model_filepath = str(tmp_path / 'optimized.onnx')
  onnxruntime.InferenceSession(
    path, options, providers=['CPUExecutionProvider']
  )
  assert operators(options.optimized_model_filepath)['Transpose'] <= 2
  found = operators(path)
  assert found['InstanceNormalization'] == 3 * 3 + 1
  assert not found.keys() & {'Where', 'Sqrt', 'Expand'}


def test_functions_that_are_not_recognised_are_written_out(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(onnx_patterns, 'of', lambda model: [])
  checkpoint = random_checkpoint(None, SMALL, **VIT)
  path = write(tmp_path, checkpoint)
  known = {'Gelu', 'Softmax', 'LayerNormalization', 'InstanceNormalization'}
  assert not operators(path).keys() & known
  images = random_images(SMALL)
  got = onnx_format.open_peer(path).run(images)
  assert relative_difference(got, logits_of(checkpoint, images)) < TOLERANCE


@pytest.mark.parametrize('epsilon', [1e-6, 1e-3])
def test_a_pattern_with_another_number_is_no_match(epsilon):
  def function(params, images):
    return {'y': onnx_patterns.layer_norm(1e-6).function(images, *params)}

  params = [np.zeros(3, np.float32), np.ones(3, np.float32)]
  graph, outputs = onnx_trace.trace(
    function, params, INPUTS, [onnx_patterns.layer_norm(epsilon)]
  )
  model = graph.to_model(outputs, {})
  found = {node.op_type for node in model.graph.node}
  assert ('LayerNormalization' in found) == (epsilon == 1e-6)


@pytest.mark.parametrize('same', [True, False])
def test_a_pattern_of_other_variables_is_no_match(same):
  pattern = onnx_trace.Pattern(
    lambda x: x * jnp.tanh(x),
    0,
    lambda graph, x: graph.elementwise('Mish', x),
  )

  def function(params, images):
    return {'y': (images if same else images + params) * jnp.tanh(images)}

  graph, outputs = onnx_trace.trace(
    function, np.ones((1, 1, 1, 3), np.float32), INPUTS, [pattern]
  )
  nodes = graph.to_model(outputs, {}).graph.node
  assert ('Mish' in {node.op_type for node in nodes}) == same


def test_rollout_is_an_output(tmp_path):
  size = (64, 32)
  checkpoint = random_checkpoint(None, size, **VIT | {'pool': 'map'})
  path = write(tmp_path, checkpoint, rollout=True)
  session = onnxruntime.InferenceSession(path)
  assert [x.name for x in session.get_outputs()] == ['logits', 'rollout']
  for count in (1, 3):
    x = random_images(size, count).astype(np.float32) / 127.5 - 1
    logits, got = session.run(None, {'images': x})
    layers = Layers(checkpoint.model, checkpoint.params, x)
    want = layers.logits_BC
    maps = np.asarray(rollout.rollout(layers))
    assert got.shape == (count, *checkpoint.model.grid(size))
    assert relative_difference(got, maps) < TOLERANCE
    assert relative_difference(logits, np.asarray(want)) < TOLERANCE


def test_fused_attention_is_an_output(tmp_path):
  """What rollout is computed of, as `Layers` gives it layer by layer."""
  size = (64, 32)
  fields = VIT | {'pool': 'map', 'registers': 2}
  checkpoint = random_checkpoint(None, size, **fields)
  session = onnxruntime.InferenceSession(
    write(tmp_path, checkpoint, served=True)
  )
  names = [x.name for x in session.get_outputs()]
  x = random_images(size, 3).astype(np.float32) / 127.5 - 1
  got = dict(zip(names, session.run(None, {'images': x}), strict=True))
  layers = Layers(checkpoint.model, checkpoint.params, x)
  assert relative_difference(got.pop('logits'), layers.logits_BC) < TOLERANCE
  assert relative_difference(got.pop('read'), layers.read_BL) < TOLERANCE
  assert got.keys() == {f'attention_{name}' for name in FUSIONS}
  for i, weights in enumerate(layers.attention()):
    for name in FUSIONS:
      want = np.asarray(fuse(weights, name))
      found = got[f'attention_{name}'][:, i]
      assert relative_difference(found, want) < TOLERANCE


def test_a_machine_with_a_gpu_writes_the_same_file(tmp_path, monkeypatch):
  checkpoint = random_checkpoint(None, (16, 16), 3, **VIT)
  paths = []
  for name in ('cpu', 'gpu'):
    monkeypatch.setattr(jax, 'default_backend', lambda name=name: name)
    (tmp_path / name).mkdir()
    paths.append(pathlib.Path(write(tmp_path / name, checkpoint)))
  assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_file_says_how_to_use_it(tmp_path):
  checkpoint = random_checkpoint(None, SMALL, **VIT)
  preprocessing = Preprocessing(
    40, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 'bicubic'
  )
  names = ('cat', 'dog', '', 'Löwe', '象', 'a, "b"', 'x')
  checkpoint = dataclasses.replace(
    checkpoint, preprocessing=preprocessing, class_names=names
  )
  path = write(tmp_path, checkpoint)
  session = onnxruntime.InferenceSession(path)
  saved = session.get_modelmeta().custom_metadata_map
  assert json.loads(saved['class_names']) == list(names)
  assert json.loads(saved['mean']) == list(preprocessing.mean)
  assert json.loads(saved['std']) == list(preprocessing.std)
  assert json.loads(saved['resize_small']) == 40
  assert saved['interpolation'] == 'bicubic'
  assert '(x / 255 - mean) / std' in saved['input']
  assert jax.__version__ in saved['source']
  (images,), (logits,) = session.get_inputs(), session.get_outputs()
  assert (images.name, images.shape) == ('images', ['batch', 32, 32, 3])
  assert (logits.name, logits.shape) == ('logits', ['batch', 7])
  assert images.type == logits.type == 'tensor(float)'
  # The peer scales by what the file says.
  images = random_images(SMALL)
  got = onnx_format.open_peer(path).run(images)
  assert relative_difference(got, logits_of(checkpoint, images)) < TOLERANCE


def test_without_a_head_the_output_is_the_features(tmp_path):
  checkpoint = random_checkpoint(None, SMALL, **VIT | {'num_classes': 0})
  session = onnxruntime.InferenceSession(write(tmp_path, checkpoint))
  (output,) = session.get_outputs()
  assert (output.name, output.shape) == ('pre_logits', ['batch', 32])


def test_what_masked_patches_show_is_called_predictions(tmp_path):
  fields = VIT | {'name': 'masked_vit', 'num_classes': 0}
  checkpoint = random_checkpoint(None, SMALL, **fields)
  path = write(tmp_path, checkpoint)
  (output,) = onnxruntime.InferenceSession(path).get_outputs()
  assert (output.name, output.shape) == ('predictions', ['batch', 16, 512])
  images = random_images(SMALL)
  got = onnx_format.open_peer(path).run(images)
  assert relative_difference(got, logits_of(checkpoint, images)) < TOLERANCE


WIDE = VIT | {'width': 128, 'mlp_dim': 512}


def test_int8_is_smaller_and_close(tmp_path, caplog):
  checkpoint = random_checkpoint(None, SMALL, **WIDE)
  (tmp_path / 'int8').mkdir()
  whole = write(tmp_path, checkpoint)
  path = write(tmp_path / 'int8', checkpoint, 'int8')
  assert caplog.text == ''
  constant = {
    x.name for x in onnx.load(whole).graph.initializer if len(x.dims) == 2
  }
  weights = sum(
    len(constant & set(node.input)) > 0
    for node in onnx.load(whole).graph.node
    if node.op_type == 'MatMul'
  )
  assert operators(path)['MatMulInteger'] == weights
  sizes = [(tmp_path / name).stat().st_size for name in (whole, path)]
  assert sizes[0] / sizes[1] > 2.5
  images = random_images(SMALL, 64)
  got = onnx_format.open_peer(path).run(images)
  want = logits_of(checkpoint, images)
  # Seven bits have steps of 1 %, and errors of several layers add up.
  assert 1e-4 < relative_difference(got, want) < 0.1
  saved = onnxruntime.InferenceSession(path).get_modelmeta()
  assert len(json.loads(saved.custom_metadata_map['class_names'])) == 7


@pytest.mark.slow
def test_int8_weights_have_seven_bits(tmp_path):
  """Pairs of products, 2 * 255 * 64 at most, fit in 16 bits everywhere."""
  path = write(tmp_path, random_checkpoint(None, SMALL, **WIDE), 'int8')
  stored = [
    onnx.numpy_helper.to_array(x)
    for x in onnx.load(path).graph.initializer
    if x.data_type == onnx.TensorProto.INT8 and len(x.dims) == 2
  ]
  assert len(stored) == 6 * VIT['depth'] + 2
  assert {np.abs(x.astype(int)).max() for x in stored} == {64}
  # A scale for every output: each uses the range.
  assert all((np.abs(x.astype(int)).max(0) >= 63).all() for x in stored)


@pytest.mark.fast('map')
@pytest.mark.parametrize(
  'kind', ['map', 'hybrid', 'RMSNorm, registers, rotary']
)
def test_float16_computes_as_jax_does_in_float16(tmp_path, kind):
  fields, size = CASES[kind]
  checkpoint = random_checkpoint(None, size, **fields)
  (tmp_path / 'half').mkdir()
  whole = write(tmp_path, checkpoint)
  path = write(tmp_path / 'half', checkpoint, 'float16')
  # All but small constants, and the names of the nodes, are half as large.
  names = (onnx.load(path).ByteSize() - sum(weights_of(path).values())) * 2
  assert (tmp_path / 'half/model.onnx').stat().st_size < (
    (tmp_path / 'model.onnx').stat().st_size / 2 + names
  )
  assert sum(weights_of(path).values()) < 0.55 * sum(weights_of(whole).values())
  session = onnxruntime.InferenceSession(path)
  for x in (*session.get_inputs(), *session.get_outputs()):
    assert x.type == 'tensor(float)'
  images = random_images(size, 3)
  half = checkpoint.model.clone(dtype=jnp.dtype('float16'))
  want = logits_of(dataclasses.replace(checkpoint, model=half), images)
  got = onnx_format.open_peer(path).run(images)
  assert got.dtype == np.float32
  # float16 has steps of 1e-3; the sides round in other places.
  assert relative_difference(got, want.astype(np.float32)) < 4e-3
  assert 1e-5 < relative_difference(got, logits_of(checkpoint, images)) < 4e-3


def weights_of(path):
  """Returns the bytes of each large constant of a file."""
  found = {x.name: len(x.raw_data) for x in onnx.load(path).graph.initializer}
  return {name: size for name, size in found.items() if size > 500}


@pytest.mark.fast('map-20-9', 'quick GELU-17-8')
# What each needs beside the operators that are in every opset.
@pytest.mark.parametrize(
  ('kind', 'opset', 'ir_version'),
  [
    ('map', 20, 9),  # Gelu
    ('quick GELU', 17, 8),  # LayerNormalization
    ('bit of odd size', 13, 7),
  ],
)
def test_files_have_the_oldest_versions_that_hold_them(
  tmp_path, kind, opset, ir_version
):
  fields, size = CASES[kind]
  checkpoint = random_checkpoint(None, size, **fields)
  model = onnx.load(write(tmp_path, checkpoint))
  assert [(x.domain, x.version) for x in model.opset_import] == [('', opset)]
  assert model.ir_version == ir_version
  # One version less lacks an operator: the checker of ONNX says so, too.
  if opset > onnx_graph.OLDEST:
    model.opset_import[0].version -= 1
    with pytest.raises(onnx.checker.ValidationError):
      onnx.checker.check_model(model)


def test_a_later_opset_gives_the_same_numbers(tmp_path):
  checkpoint = random_checkpoint(None, SMALL, **VIT)
  path = write(tmp_path, checkpoint, opset=22)
  assert onnx.load(path).opset_import[0].version == 22
  check_logits(onnx_format.open_peer(path), checkpoint)


@pytest.mark.fast(
  '19---opset=19 must be from 20 to .*: the model needs Gelu 20'
)
@pytest.mark.parametrize(
  ('opset', 'message'),
  [
    (19, '--opset=19 must be from 20 to .*: the model needs Gelu 20'),
    (99, '--opset=99 must be .* onnx is too old'),
  ],
)
def test_an_opset_without_an_operator_is_refused(tmp_path, opset, message):
  checkpoint = random_checkpoint(None, SMALL, **VIT)
  with pytest.raises(ValueError, match=message):
    write(tmp_path, checkpoint, opset=opset)
  assert list(tmp_path.iterdir()) == []


def test_bfloat16_models_compute_in_float32_and_that_is_said(tmp_path):
  plain = random_checkpoint(None, SMALL, **VIT)
  model = plain.model.clone(dtype=jnp.dtype('bfloat16'))
  path = str(tmp_path / 'model.onnx')
  (sentence,) = onnx_format.write(
    dataclasses.replace(plain, model=model), path, 'float32'
  )
  assert 'computes in bfloat16' in sentence
  images = random_images(SMALL)
  got = onnx_format.open_peer(path).run(images)
  assert relative_difference(got, logits_of(plain, images)) < TOLERANCE


@pytest.mark.edge
@pytest.mark.parametrize(
  ('fields', 'size', 'dtype', 'rollout', 'message'),
  [
    (VIT | AXIAL, SMALL, 'float32', True, 'this ViT lacks'),
    (RESNET, LARGE, 'int8', False, 'Use --dtype=float32'),
  ],
  ids=['axial rollout', 'resnet int8'],
)
def test_what_cannot_be_is_refused(
  tmp_path, fields, size, dtype, rollout, message
):
  checkpoint = random_checkpoint(None, size, **fields)
  path = str(tmp_path / 'model.onnx')
  with pytest.raises(ValueError, match=message):
    onnx_format.write(checkpoint, path, dtype, rollout)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('module', [onnx_format, board])
def test_int8_needs_onnxruntime_before_the_export(
  tmp_path, monkeypatch, module
):
  checkpoint = random_checkpoint(None, SMALL, **VIT)
  monkeypatch.setitem(sys.modules, 'onnxruntime', None)
  monkeypatch.delattr(onnx_trace, 'trace')
  with pytest.raises(ImportError, match='onnxruntime'):
    module.write(checkpoint, str(tmp_path / 'x'), 'int8')
  assert list(tmp_path.iterdir()) == []


@pytest.mark.edge
def test_what_is_no_file_of_ours_is_refused(tmp_path):
  path = tmp_path / 'text.onnx'
  path.write_text('not ONNX')
  with pytest.raises(ValueError, match='text.onnx is not an ONNX file'):
    onnx_format.open_peer(str(path))
  checkpoint = random_checkpoint(None, SMALL, **VIT)
  model = onnx.load(write(tmp_path, checkpoint))
  del model.metadata_props[:]
  other = tmp_path / 'other.onnx'
  other.write_bytes(model.SerializeToString())
  with pytest.raises(
    ValueError, match="other.onnx is not an ONNX file.*'mean'"
  ):
    onnx_format.open_peer(str(other))
