"""Detection: losses of the original, odd images, fields, and cells."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from configs import detr as detr_config
from tests.conftest import ROOT
from tests.objectives import test_every
from tests.projects.detr.conftest import objects_of
from vit_jax.checkpoints.formats import table
from vit_jax.data import sources
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.models import flops
from vit_jax.objectives import objective_type
from vit_jax.objectives.objective import Facts
from vit_jax.projects.detr import hf_format as detr_keys
from vit_jax.projects.detr import model as detr
from vit_jax.projects.detr import objective as detection
from vit_jax.projects.detr import set_losses
from vit_jax.train import train
from vit_jax.training import sharding

NAMES = tuple('abcdef')


def detected(config, facts, size=(32, 32)):
  made = detection.Detection.from_config(config, size)
  return made.on_data(config, facts)


def objective_of():
  """Returns an objective of the golden file's queries and classes."""
  model = detr.DETR(num_classes=6, num_queries=7, backbone='plain')
  config = test_every.config_of('detection')
  images = detected(config, Facts(NAMES, 1))
  return dataclasses.replace(images, model=model, dense=0.0)


def batch_of(golden):
  return jax.tree.map(jnp.asarray, objects_of(golden))


def test_all_layers_losses_are_the_originals(golden):
  objective = objective_of()
  batch = objective.augment(batch_of(golden), jax.random.key(0))
  names = ('logits', 'boxes', 'mask_logits')
  outputs = {k: jnp.asarray(golden[k]) for k in names}
  set_losses = jax.jit(objective.set_losses)
  losses_B, parts = set_losses(outputs, batch)
  total = golden['loss/total']
  np.testing.assert_allclose(jnp.mean(losses_B), total, rtol=1e-5)
  for name, theirs in {
    'cross_entropy': 'ce',
    'l1': 'bbox',
    'giou': 'giou',
    'mask': 'mask',
    'dice': 'dice',
  }.items():
    np.testing.assert_allclose(
      jnp.mean(parts[name]), golden[f'loss/loss_{theirs}'], rtol=1e-5
    )
  error = 100 * (1 - jnp.mean(parts['class_accuracy']))
  np.testing.assert_allclose(error, golden['loss/class_error'], rtol=1e-5)
  # Two an image; sums are divided by fewer as well.
  np.testing.assert_array_equal(batch['objects'], 2)
  _, few = set_losses(outputs, batch | {'objects': jnp.full(3, 0.5)})
  for name in ('l1', 'giou', 'class_accuracy', 'mask', 'dice'):
    np.testing.assert_allclose(few[name], 4 * parts[name], rtol=1e-5)


def test_masks_are_those_of_the_last_layers_matches(golden):
  """By the matches of the original, of masks that differ by query.

  Those of its random weights hardly do. The layer before matches others.
  """
  objective = objective_of()
  batch = objective.augment(batch_of(golden), jax.random.key(0))
  outputs = {k: jnp.asarray(golden[k]) for k in ('logits', 'boxes')}
  logits_BQHW = np.random.default_rng(0).normal(size=(3, 7, 40, 48))
  outputs['mask_logits'] = jnp.asarray(logits_BQHW, jnp.float32)
  _, parts = jax.jit(objective.set_losses)(outputs, batch)
  focal, dice = [], []
  for i in range(3):
    for query, target in golden[f'match{i}'].T:
      p = 1 / (1 + np.exp(-logits_BQHW[i, query]))
      mask = golden[f'target{i}/masks'][target]
      right = np.where(mask, p, 1 - p)
      weight = np.where(mask, 0.25, 0.75) * (1 - right) ** 2
      focal.append(np.mean(-weight * np.log(right)))
      both = 2 * np.sum(p * mask) + 1
      dice.append(1 - both / (np.sum(p) + np.sum(mask) + 1))
  for name, values in (('mask', focal), ('dice', dice)):
    np.testing.assert_allclose(
      jnp.mean(parts[name]), np.mean(values), rtol=1e-5
    )


def test_results_are_the_originals(golden):
  sizes = [(480, 640), (320, 640), (480, 213)]
  found = set_losses.likeliest(
    jnp.asarray(golden['logits'][-1]), {'boxes': jnp.asarray(golden['boxes'])}
  )
  for i, (height, width) in enumerate(sizes):
    scale_4 = np.float32([width, height] * 2)
    for name, got in {
      'scores': found['scores'][i],
      'labels': found['labels'][i],
      'boxes': np.asarray(found['boxes'][i]) * scale_4,
    }.items():
      np.testing.assert_allclose(got, golden[f'result{i}/{name}'], rtol=1e-5)


@pytest.mark.slow
def test_gradients_of_the_original():
  """Of all losses of all layers, masks included, back to four kernels."""
  path = ROOT.parent / 'shared' / 'golden' / 'detr-tiny_s7.npz'
  if not path.exists():
    pytest.skip(f'needs {path.name}, which is too large to lie here')
  with np.load(path) as file:
    golden = dict(file)
  model = detr.DETR(
    num_classes=6,
    num_queries=7,
    width=128,
    mlp_dim=64,
    encoder_layers=2,
    decoder_layers=2,
    masks=True,
  )
  maps = [golden[f'feature{i}'].transpose(0, 2, 3, 1) for i in range(4)]
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), maps))['params']
  shapes = traverse_util.flatten_dict(shapes, sep='/')
  names = {
    key.removeprefix('param/'): x
    for key, x in golden.items()
    if key.startswith('param/')
  }
  named = detr_keys.table_of(detr_keys.ORIGINAL, 'detr.')
  params = table.file_to_ours(
    table.File(str(path), names, {}, named),
    {name: x.shape for name, x in shapes.items()},
  )
  objective = dataclasses.replace(objective_of(), model=model)
  batch = objective.augment(batch_of(golden), jax.random.key(0))

  @jax.jit
  def loss(params):
    params = traverse_util.unflatten_dict(params, sep='/')
    _, aux = model.apply({'params': params}, maps, golden['mask0'])
    losses_B, parts = objective.set_losses(aux, batch)
    return jnp.mean(losses_B), parts

  (value, parts), grads = jax.value_and_grad(loss, has_aux=True)(params)
  np.testing.assert_allclose(value, golden['loss/total'], rtol=1e-5)
  for name in ('mask', 'dice'):
    np.testing.assert_allclose(
      jnp.mean(parts[name]), golden[f'loss/loss_{name}'], rtol=1e-5
    )
  for name, theirs in {
    'class_embed/kernel': 'detr.class_embed.weight',
    'input_proj/kernel': 'detr.input_proj.weight',
    'query_embed': 'detr.query_embed.weight',
    'mask_head/lay1/kernel': 'mask_head.lay1.weight',
  }.items():
    want = golden[f'gradient/{theirs}']
    if name.endswith('kernel'):
      want = np.moveaxis(want, (0, 1), (-1, -2))
    np.testing.assert_allclose(
      grads[name], want, rtol=0, atol=1e-4 * np.abs(want).max(), err_msg=name
    )


@pytest.mark.slow
def test_images_without_objects_or_pixels_have_finite_gradients():
  made = test_every.experiment_of('detection')
  objective, params = made.objective, made.new_params()
  batch = jax.tree.map(jnp.asarray, test_every.batches('detection')[0])
  batch['labels'] = jnp.full_like(batch['labels'], -1)
  batch['size'] = batch['size'].at[3].set(0)

  def loss(params, batch):
    batch = objective.augment(batch, jax.random.key(0))
    return objective.loss(params, batch, jax.random.key(1))

  step = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (learned, metrics), grads = step(params, batch)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
  assert all(np.isfinite(x) for x in metrics.values())
  assert metrics['loss'] == pytest.approx(float(learned), rel=1e-5)
  # The mean over images and queries; a new head gives all classes alike.
  logits = objective.model.num_classes + 1
  assert metrics['cross_entropy'] == pytest.approx(np.log(logits), rel=0.2)


@pytest.mark.slow
def test_masks_on_eight_devices_are_those_on_one():
  """Losses of images with one, two and three objects, and the head's slopes.

  Each device has one image.
  """
  changes = {
    'model.masks': True,
    'model.width': 128,
    'model.heads': 8,
    'model.backbone_layers': (1, 1, 1, 1),
    'batch_size': 8,
  }
  source = sources.open_source('digits_canvas', 'train')
  found = []
  for devices in (1, 8):
    made = test_every.experiment_of('detection', devices, **changes)
    transform = made.objective.train_transform()
    rng = np.random.default_rng(0)
    examples = [transform(source[i], rng) for i in range(8)]
    batch = jax.tree.map(lambda *x: np.stack(x), *examples)
    assert len({*np.sum(batch['labels'] >= 0, axis=1)}) > 1
    shapes = made.objective.batch_shapes(8)
    assert {k: (x.shape, x.dtype) for k, x in batch.items()} == {
      k: (x.shape, x.dtype) for k, x in shapes.items()
    }
    params = jax.device_get(made.new_params())
    heads = {name: params.pop(name) for name in ('mask_head', 'bbox_attention')}

    def loss(heads, params, batch, made=made):
      with sharding.activations(made.mesh):
        batch = made.objective.augment(batch, jax.random.key(0))
        return made.objective.loss(params | heads, batch, jax.random.key(0))

    slopes, metrics = jax.jit(jax.grad(loss, has_aux=True))(
      made.place(heads),
      made.place(params),
      sharding.global_batch(batch, made.mesh),
    )
    found.append(jax.device_get((slopes, metrics)))
  assert {'mask', 'dice'} <= found[0][1].keys()
  test_every.assert_close(found[1:], found[:1])


def test_padding_is_right_of_and_below_an_image():
  is_padding_BHW = detr.padding(jnp.array([[2, 3], [4, 5]]), (4, 5))
  want_HW = np.ones((4, 5), bool)
  want_HW[:2, :3] = False
  np.testing.assert_array_equal(is_padding_BHW[0], want_HW)
  assert not is_padding_BHW[1].any()


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'model.name': 'vit'}, "objective.name=detection needs 'detr'"),
    ({'objective.mask_stride': 0}, 'objective.mask_stride is 0'),
    ({'objective.dice': -1.0}, 'objective.dice is -1.0'),
    (
      {'objective.max_objects': 6},
      'max_objects is 6 and model.num_queries is 5',
    ),
    ({'objective.no_object': 0.0}, 'objective.no_object is 0'),
    ({'objective.buckets': 2}, 'buckets is 2 and objective.short_sides has 0'),
    ({'objective.crop': (600, 384)}, r'crop is \(600, 384\). Give the small'),
    ({'objective.crop': (384,)}, r'crop is \(384,\). Give the smallest'),
  ],
)
def test_fields_that_cannot_work(changes, message):
  config = test_every.config_of('detection', **changes)
  with pytest.raises(ValueError, match=message):
    objective_type(config).from_config(config, (32, 32))


def test_data_without_classes():
  config = test_every.config_of('detection')
  with pytest.raises(ValueError, match='has no classes, and detection'):
    detected(config, Facts((), 1))


@pytest.mark.slow
def test_the_originals_recipe():
  """300 epochs, the last 100 at a tenth; the backbone's root stays."""
  config = detr_config.get_config('r50,./coco')
  names = tuple(str(i) for i in range(91))
  made = Experiment(CheckedConfig(config), Facts(names, 118_287))
  step = 118_287 / 64
  assert made.durations.total == pytest.approx(300 * step, abs=1)
  for epoch, lr in ((0, 1e-4), (199, 1e-4), (201, 1e-5)):
    assert float(made.lr(round(epoch * step))) == pytest.approx(lr)
  # What published counts say of R50's DETR with 91 classes.
  leaves = jax.tree.leaves(made.state_shapes.params)
  assert sum(x.size for x in leaves) == pytest.approx(41.5e6, rel=0.01)


def test_operations_are_the_mean_over_the_buckets():
  made = test_every.experiment_of(
    'detection',
    **{
      'objective.short_sides': (8, 16, 32),
      'objective.buckets': 2,
      'data.image_size': '64',
    },
  )
  small, large = (
    flops.forward_flops(made.objective.model, (side, side)) for side in (32, 64)
  )
  # Two of the three short sides are in the bucket of small images.
  assert made.forward_flops == (2 * small + large) // 3
  assert '32x32, 64x64 pixels' in made.summary()


def test_the_original_is_not_trained_from_nothing(tmp_path):
  """Its BatchNorm would have no statistics, and its root stay as it fell."""
  pytest.importorskip('hotcoco', reason='needs the extra `detection`')
  config = detr_config.get_config('r50,digits_canvas')
  with pytest.raises(ValueError, match='model.backbone_version is 0, .*init='):
    train(config, str(tmp_path))
  assert list(tmp_path.iterdir()) == []


def test_fields_reach_what_makes_examples():
  """At the ends of what they may be."""
  changes = {
    'objective.short_sides': (16, 24),
    'objective.crop_sides': (40, 50),
    'objective.crop': (7, 7),
    'objective.buckets': 2,
    'objective.max_objects': 5,
    'objective.l1': 0.0,
  }
  facts = Facts(NAMES, 1)
  for flip in (False, True):
    config = test_every.config_of('detection', **changes | {'data.flip': flip})
    made = detected(config, facts, (32, 48))
    assert made.train_transform().flip == flip
  assert (made.l1, made.max_objects) == (0.0, config.model.num_queries)
  for stride, masks, want in ((3, True, 3), (3, False, 0)):
    model = dataclasses.replace(made.model, masks=masks)
    one = dataclasses.replace(made, model=model, mask_stride=stride)
    train_of, eval_of = one.train_transform(), one.eval_transform()
    for transform in (train_of, eval_of):
      assert transform.image_size == (32, 48)
      assert transform.max_objects == 5
      assert transform.short_sides == (16, 24)
      assert transform.mask_stride == want
    assert train_of.crop_sides == (40, 50) and train_of.crop == (7, 7)
    assert train_of.buckets == 2
    shapes = one.batch_shapes(4)
    assert ('masks' in shapes) == masks
    if masks:  # every third pixel, the last ones too
      assert shapes['masks'].shape == (4, 5, 11, 16)
    assert shapes['size'].shape == (4, 2)
    assert shapes['boxes'].shape == (4, 5, 4)


def test_fields_may_be_as_little_as_one():
  fields = {
    'short_sides': (1,),
    'crop_sides': (1,),
    'crop': (1, 1),
    'max_objects': 1,
    'mask_stride': 1,
  }
  config = test_every.config_of(
    'detection', **{f'objective.{k}': x for k, x in fields.items()}
  )
  made = detected(config, Facts(NAMES, 1))
  assert {k: getattr(made, k) for k in fields} == fields


def test_places_learn_the_class_of_the_box_around_their_middle():
  """Place by place, of images of other shapes than their arrays.

  The last has one place, and the middle of another on its border.
  """
  made = test_every.experiment_of('detection')
  objective = dataclasses.replace(made.objective, no_object=0.3)
  model = objective.model
  h, w = model.grid((32, 48))
  rng = np.random.default_rng(0)
  head = {
    'kernel': rng.standard_normal((32, 11)),
    'bias': rng.standard_normal(11),
  }
  tokens_BLD = rng.standard_normal((3, h * w, 32))
  sizes, labels = [(24, 40), (32, 20), (12, 8)], [[3, 7], [9, -1], [-1, -1]]
  boxes_BM4 = np.array(
    [
      [[0.4, 0.5, 0.7, 0.6], [0.6, 0.4, 0.3, 0.5]],
      [[0.3, 0.7, 0.7, 0.5], [0.5, 0.5, 1.0, 1.0]],
      [[0.5, 0.5, 1.0, 1.0], [0.5, 0.5, 1.0, 1.0]],
    ]
  )
  got_B = objective._dense(
    {'class_embed': head},
    {
      'image': jnp.zeros((3, 32, 48, 3)),
      'size': jnp.array(sizes),
      'boxes': jnp.asarray(boxes_BM4),
      'labels': jnp.array(labels),
    },
    jnp.asarray(tokens_BLD),
  )
  stride = model.stride
  for b, (height, width) in enumerate(sizes):
    total = weights = 0.0
    seen = set()
    for i, (row, column) in enumerate(np.ndindex(h, w)):
      y, x = (row + 0.5) * stride / height, (column + 0.5) * stride / width
      if y >= 1 or x >= 1:
        continue
      around = [
        (bw * bh, label)
        for (cx, cy, bw, bh), label in zip(boxes_BM4[b], labels[b], strict=True)
        if label >= 0 and abs(x - cx) < bw / 2 and abs(y - cy) < bh / 2
      ]
      label = min(around)[1] if around else 10
      seen.add(label)
      logits_C = tokens_BLD[b, i] @ head['kernel'] + head['bias']
      nats = np.log(np.exp(logits_C).sum()) - logits_C[label]
      weight = 1.0 if around else 0.3
      total, weights = total + weight * nats, weights + weight
    assert seen == {*labels[b], 10} - {-1}
    np.testing.assert_allclose(got_B[b], total / weights, rtol=1e-5)
