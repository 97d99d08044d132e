"""Layers as the original code has them, and every image in its row once."""

import types

import jax
import numpy as np
import pytest

from tests.conftest import ROOT
from tests.evaluators.small import SIZE, mesh_of, model_of
from vit_jax.checkpoints import opening
from vit_jax.data import decode, sources, transforms
from vit_jax.data.images import Images
from vit_jax.data.preprocessing import Preprocessing
from vit_jax.models import variants
from vit_jax.training import features

GOLDEN = ROOT / 'tests/golden'

# As in test_reader: the original code's own reruns differ by up to 4e-6.
ATOL = 1e-5


def run_layer(model, params, images, name):
  return np.asarray(jax.jit(features.layer(model, name))(params, images))


@pytest.mark.fast('tiny-rep')
@pytest.mark.parametrize('name', ['tiny-rep', 'tiny-gap'])
def test_layers_are_those_of_the_original(name):
  checkpoint = opening.open_checkpoint(str(GOLDEN / f'{name}_s7.npz'))
  golden = np.load(GOLDEN / f'{name}_s7_golden.npz')

  def one_of(tokens_BLD):
    """The class token, or where there is none the mean of all tokens."""
    return tokens_BLD.mean(1) if name == 'tiny-gap' else tokens_BLD[:, 0]

  for layer, want_BD in {
    'pre_logits': golden['pre_logits'],
    'logits': golden['logits'],
    'block_0': one_of(golden['block_00']),
    'block_1': one_of(golden['block_01']),
  }.items():
    got_BD = run_layer(
      checkpoint.model, checkpoint.params, golden['images'], layer
    )
    assert got_BD.dtype == np.float32
    np.testing.assert_allclose(got_BD, want_BD, rtol=0, atol=ATOL)


def test_patches_are_the_tokens_of_the_original_without_its_class_token():
  checkpoint = opening.open_checkpoint(str(GOLDEN / 'tiny_s7.npz'))
  golden = np.load(GOLDEN / 'tiny_s7_golden.npz')
  for layer, tokens in {
    'block_0': 'block_00',
    'block_1': 'block_01',
    'pre_logits': 'encoded',
  }.items():
    got_BhwD = jax.jit(features.layer(checkpoint.model, layer, patches=True))(
      checkpoint.params, golden['images']
    )
    want_BLD = golden[tokens][:, 1:]
    np.testing.assert_allclose(
      got_BhwD, want_BLD.reshape(got_BhwD.shape), rtol=0, atol=ATOL
    )


@pytest.mark.slow
def test_a_resnet_gives_the_mean_and_the_cells_of_each_stage():
  model = variants.build(
    num_classes=3, image_size=SIZE, name='resnet', layers=(1, 1), width=32
  )
  params = jax.jit(lambda key: variants.init(model, key, (32, 32)))(
    jax.random.key(0)
  )
  images = np.random.default_rng(0).normal(size=(2, 32, 32, 3))

  @jax.jit
  def stages_means_and_cells(params, images):
    _, aux = model.apply({'params': params}, images, capture=('blocks',))
    of_patches = [
      [
        features.layer(model, f'block_{i}', patches)(params, images)
        for i in range(2)
      ]
      for patches in (False, True)
    ]
    return aux['blocks'], *of_patches

  stages, means, cells = stages_means_and_cells(params, images)
  assert len(stages) == 2
  for stage_BhwC, got_BD, cells_BhwC in zip(stages, means, cells, strict=True):
    # float32 sums in another order.
    np.testing.assert_allclose(
      got_BD, np.mean(stage_BhwC, (1, 2)), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(cells_BhwC, stage_BhwC, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_mean_in_bfloat16_is_not_rounded_again():
  """It is as exact as the tokens it is of."""
  model, params = model_of(pool='gap', dtype='bfloat16')
  images = np.random.default_rng(0).normal(size=(3, *SIZE, 3))
  function = features.layer(model, 'block_0')
  got_BD = np.asarray(function(params, images))
  assert got_BD.dtype == np.float32
  _, aux = model.apply({'params': params}, images, capture=('blocks',))
  tokens_BLD = np.asarray(aux['blocks'][0], np.float32)
  np.testing.assert_allclose(got_BD, tokens_BLD.mean(1), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_scanned_layers_are_the_unrolled_ones():
  model, params = model_of(depth=2)
  images = np.random.default_rng(0).normal(size=(3, *SIZE, 3))
  scanned, stacked = model.clone(scan=True), model.stack_layers(params)
  for name in ('pre_logits', 'block_1'):
    np.testing.assert_allclose(
      run_layer(scanned, stacked, images, name),
      run_layer(model, params, images, name),
      rtol=0,
      atol=ATOL,
    )


def test_a_layer_that_there_is_not_is_refused():
  model, _ = model_of(0, depth=2)
  with pytest.raises(
    ValueError, match="layer is 'logits'.*of pre_logits, block_0 to block_1"
  ):
    features.layer(model, 'logits')


def test_what_gives_an_image_no_class_is_refused():
  detr = variants.build(
    name='detr',
    num_classes=4,
    image_size=(64, 64),
    backbone_layers=(1, 1),
    encoder_layers=1,
    decoder_layers=1,
  )
  with pytest.raises(ValueError, match='a DETR, predicts objects and does not'):
    features.top_k(detr, 5)
  for name in ('pre_logits', 'logits'):
    with pytest.raises(ValueError, match=f"'{name}'. For a DETR use .*block_0"):
      features.layer(detr, name)
  features.layer(detr, 'block_0')
  headless, _ = model_of(0)
  with pytest.raises(ValueError, match='a ViT, has no head and does not cla'):
    features.top_k(headless, 5)


def test_a_resnet_has_as_many_blocks_as_stages():
  model = variants.build(
    num_classes=3, image_size=SIZE, name='resnet', layers=(2, 3), width=32
  )
  features.layer(model, 'block_1')
  with pytest.raises(ValueError, match='block_0 to block_1'):
    features.layer(model, 'block_2')


@pytest.mark.slow
def test_top_k_is_in_the_order_of_the_logits():
  model, params = model_of(depth=2)
  images = np.random.default_rng(0).normal(size=(5, *SIZE, 3))
  logits_BC, _ = jax.jit(model.apply)({'params': params}, images)
  got = np.asarray(jax.jit(features.top_k(model, 4))(params, images))
  np.testing.assert_array_equal(
    got, np.argsort(-np.asarray(logits_BC), 1)[:, :4]
  )


class Seven(sources.LabelledSubset):
  """Seven digits, so that no batch of them is full."""

  def __init__(self):
    super().__init__(sources.open_source('digits', 'test'), range(20, 27))


def extract(source, batch_size, devices=8, description='', **images):
  model, params = model_of(depth=2)
  extractor = features.Extractor(
    features.layer(model, 'pre_logits'),
    Images(SIZE, Preprocessing(**images)),
    batch_size=batch_size,
    mesh=mesh_of(devices),
  )
  return extractor(params, source, description)


def one_by_one(source, mean=0.5, std=0.5):
  """A plain loop over the images."""
  model, params = model_of(depth=2)
  transform = transforms.EvalTransform(SIZE)
  run = jax.jit(lambda x: model.apply({'params': params}, x)[1]['pre_logits'])
  return np.concatenate(
    [
      run((transform(source[i])['image'][None] / np.float32(255) - mean) / std)
      for i in range(len(source))
    ]
  )


@pytest.mark.parametrize(('batch_size', 'devices'), [(8, 8), (3, 1)])
def test_rows_are_in_the_order_of_the_source(batch_size, devices):
  """Whatever the padding, and with more batches than are in flight."""
  source = Seven()
  np.testing.assert_allclose(
    extract(source, batch_size, devices),
    one_by_one(source),
    rtol=0,
    atol=ATOL,
  )


def test_processes_that_share_rows_read_the_same_images(monkeypatch):
  """Four with a mesh of two rows, each of two processes."""
  devices = [types.SimpleNamespace(process_index=i // 2) for i in range(8)]
  mesh = types.SimpleNamespace(
    devices=np.array(devices).reshape(1, 2, 1, 4),
    size=8,
    shape={'slice': 1, 'data': 2, 'fsdp': 1, 'tensor': 4},
  )
  monkeypatch.setattr(jax, 'process_count', lambda: 4)
  monkeypatch.setattr(features.sharding, 'global_batch', lambda batch, _: batch)
  wanted = [[0, 1, 4, 5], [0, 1, 4, 5], [2, 3, 6, -1], [2, 3, 6, -1]]
  for process, want in enumerate(wanted):
    monkeypatch.setattr(jax, 'process_index', lambda p=process: p)
    batches = features.global_batches(
      Seven(), Images(SIZE).eval_transform(), mesh=mesh, batch_size=4
    )
    assert [i for batch in batches for i in batch['index'].tolist()] == want


def test_images_that_went_are_refused():
  """Other images in their places would be measured twice."""

  class Gone(Seven):
    def __init__(self):
      super().__init__()
      self.skips_unreadable = True

    def __getitem__(self, index):
      if index in (2, 6):
        raise decode.UnreadableImage(f'{index}.png', 'gone')
      return super().__getitem__(index)

  with pytest.raises(ValueError, match='2 of 7 images have become unreadable'):
    extract(Gone(), 8)


def test_results_are_fetched_while_two_more_are_computed():
  begun = []
  got = features.fetched((begun.append(i) or i for i in range(5)), ahead=2)
  seen = [(result, len(begun)) for result in got]
  assert seen == [(0, 3), (1, 4), (2, 5), (3, 5), (4, 5)]


def test_images_are_scaled_as_the_checkpoint_says():
  source = Seven()
  got = extract(source, 8, mean=(0.4, 0.4, 0.4), std=(0.2, 0.2, 0.2))
  np.testing.assert_allclose(
    got, one_by_one(source, 0.4, 0.2), rtol=0, atol=ATOL
  )
  assert np.abs(got - one_by_one(source)).max() > 0.01
