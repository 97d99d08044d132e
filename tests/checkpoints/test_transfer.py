"""Weights carried over to a new task, another size or another head."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import finetune
from tests.checkpoints.golden import ATOL, apply, open_golden
from tests.checkpoints.random_weights import random_checkpoint
from vit_jax.checkpoints import from_init, opening, transfer
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.convert import orbax
from vit_jax.experiment import CheckedConfig
from vit_jax.models import fields as model_fields
from vit_jax.models import flops, variants, vit
from vit_jax.projects.detr import layers as backbone


def model_like(model, image_size, **fields):
  """Returns the model and the parameters of its start, with a head of zeros."""
  model = model.clone(**fields)
  fresh = random_params(model, image_size, seed=1)
  fresh['head'] = jax.tree.map(np.zeros_like, fresh['head'])
  return model, fresh


def random_params(model, image_size, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.standard_normal(x.shape).astype(np.float32),
    flops.param_shapes(model, image_size),
  )


def test_transfer_to_a_larger_size_leaves_the_body_as_the_original_has_it():
  """The old head on the carried-over body gives the original's logits."""
  checkpoint, golden = open_golden('tiny')
  model, fresh = model_like(
    checkpoint.model, (48, 48), num_classes=7, scan=True
  )
  params = transfer.to_new_task(checkpoint, model, (48, 48), fresh)
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, fresh)
  np.testing.assert_array_equal(params['head']['kernel'], np.zeros((48, 7)))
  params['head'] = checkpoint.params['head']
  logits, _ = apply(
    model.clone(num_classes=10), params, golden['resized_images']
  )
  np.testing.assert_allclose(
    logits, golden['resized_logits'], rtol=0, atol=ATOL
  )


def test_transfer_leaves_the_representation_layer_behind():
  checkpoint, _ = open_golden('tiny-rep')
  model, fresh = model_like(
    checkpoint.model, (32, 32), representation_size=0, num_classes=3
  )
  params = transfer.to_new_task(checkpoint, model, (32, 32), fresh)
  assert 'pre_logits' not in params
  assert params['head']['kernel'].shape == (48, 3)
  # A model that has the layer starts it afresh, never from the old one.
  model, fresh = model_like(checkpoint.model, (32, 32))
  params = transfer.to_new_task(checkpoint, model, (32, 32), fresh)
  for name in ('pre_logits', 'head'):
    jax.tree.map(np.testing.assert_array_equal, params[name], fresh[name])


VIT = {'patch_size': 4, 'width': 8, 'depth': 2, 'mlp_dim': 12, 'heads': 2}
RESNET = {'name': 'resnet', 'layers': (2, 3), 'width': 32}
STEM = {'patch_size': 1, 'stem_width': 32, 'stem_layers': (1, 3)}
# Whether the old and the new model scan their layers.
LOOP, LOOP_TO_SCAN, SCAN_TO_LOOP = (False, False), (False, True), (True, False)


def untrained(image_size, seed, scan=False, **fields):
  """Returns a checkpoint with random parameters."""
  model = variants.build(
    num_classes=3, image_size=image_size, scan=scan, **fields
  )
  params = random_params(model, image_size, seed)
  return opening.Checkpoint('old', model, params, image_size)


def transfer_between(old_size, new_size, fields, scans):
  """Returns the parameters before and after, and the fresh, all unrolled."""
  old = untrained(old_size, 0, scans[0], **fields)
  new = untrained(new_size, 1, scans[1], **fields)
  got = transfer.to_new_task(old, new.model, new_size, new.params)
  assert jax.tree.map(np.shape, got) == jax.tree.map(np.shape, new.params)
  assert all(type(x) is np.ndarray for x in jax.tree.leaves(got))
  return tuple(
    flat(jax.device_get(new.model.unstack_layers(tree)))
    for tree in (old.params, got, new.params)
  )


def flat(tree):
  """Returns {path: array}."""
  return {
    '/'.join(key.key for key in path): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def stretched(x, axis, new):
  """Linear interpolation that keeps the first and the last value."""
  old = x.shape[axis]
  places = np.linspace(0, old - 1, new)
  return np.apply_along_axis(
    lambda line: np.interp(places, np.arange(old), line), axis, x
  )


def stretched_grid(x, old, new):
  """The same on both axes of a raster, after a class token if there is one."""
  X, L, D = x.shape
  extra = L - old[0] * old[1]
  grid = x[:, extra:].reshape(X, *old, D)
  grid = stretched(stretched(grid, 1, new[0]), 2, new[1])
  return np.concatenate([x[:, :extra], grid.reshape(X, -1, D)], axis=1)


# Fields, whether layers are scanned, the names of the tables, and a function of
# the name that resizes a table. Grids of 2x3 patches become 3x5, so that no
# axis can be mistaken for the other.
RESIZED = {
  'learned1d': (
    VIT,
    LOOP,
    ('pos_embedding',),
    lambda name, x: stretched_grid(x, (2, 3), (3, 5)),
  ),
  'learned1d in every layer': (
    VIT | {'posemb_at': 'every_layer'},
    LOOP_TO_SCAN,
    ('pos_embedding',),
    lambda name, x: stretched_grid(x, (2, 3), (3, 5)),
  ),
  'learned2d in every layer': (
    VIT | {'posemb': 'learned2d', 'posemb_at': 'every_layer'},
    LOOP,
    ('x_embedding', 'y_embedding'),
    lambda name, x: stretched(x, 1, 5 if 'x_emb' in name else 3),
  ),
  'sincos2d': (VIT | {'posemb': 'sincos2d'}, SCAN_TO_LOOP, (), None),
  'axial relative': (
    VIT | {'posemb': 'relative', 'axial': True, 'pool': 'map'},
    LOOP_TO_SCAN,
    ('relative_embedding',),
    # 2 L - 1 offsets for rows of length L, then for columns.
    lambda name, x: stretched(x, 0, 9 if '/row/' in name else 5),
  ),
}


@pytest.mark.parametrize('kind', RESIZED)
def test_transfer_stretches_position_tables_and_nothing_else(kind):
  fields, scans, names, want = RESIZED[kind]
  old, got, fresh = transfer_between((8, 12), (12, 20), fields, scans)
  tables = {key for key in old if key.rpartition('/')[2] in names}
  assert bool(tables) == bool(names)
  for key in tables:
    assert got[key].shape != old[key].shape
    # One rounding to float32 of values up to 4.
    np.testing.assert_allclose(
      got[key], want(key, old[key]), rtol=0, atol=1e-6, err_msg=key
    )
  for key in got.keys() - tables:
    source = fresh if key.startswith('head/') else old
    np.testing.assert_array_equal(got[key], source[key], err_msg=key)


@pytest.mark.slow
def test_transfer_stretches_the_tables_of_an_axial_resnet():
  """The length of a table follows from the size of its stage's map."""
  fields = RESNET | {'axial': True, 'version': 1}
  old, got, fresh = transfer_between((16, 40), (32, 72), fields, LOOP_TO_SCAN)
  lengths = {
    ('block1', 'column'): (4, 8),
    ('block1', 'row'): (10, 18),
    ('block2', 'column'): (2, 4),
    ('block2', 'row'): (5, 9),
  }
  tables = 0
  for key, x in got.items():
    if '/relative_' not in key:
      source = fresh if key.startswith('head/') else old
      np.testing.assert_array_equal(x, source[key], err_msg=key)
      continue
    tables += 1
    block, unit, _, axis, _ = key.split('/')
    # The first unit of a stage pools only after it has attended.
    stage = block if unit != 'unit1' else 'block1'
    before, after = lengths[stage, axis]
    assert len(old[key]) == 2 * before - 1
    want = stretched(old[key], 0, 2 * after - 1)
    np.testing.assert_allclose(x, want, rtol=0, atol=1e-6, err_msg=key)
  assert tables == 5 * 2 * 3  # units, axes, and query, key and value


@pytest.mark.parametrize(
  ('fields', 'scans'),
  [
    ({'posemb': 'relative'}, LOOP_TO_SCAN),
    ({'pool': 'map', 'representation_size': 6}, SCAN_TO_LOOP),
  ],
)
def test_transfer_to_the_same_size_keeps_the_body_bit_for_bit(fields, scans):
  fields = VIT | fields
  old, got, fresh = transfer_between((32, 48), (32, 48), fields, scans)
  assert got.keys() == fresh.keys() == old.keys()
  for key, x in got.items():
    is_head = key.startswith(('head/', 'pre_logits/'))
    source = fresh if is_head else old
    np.testing.assert_array_equal(x, source[key], err_msg=key)
  assert ('MAPHead_0/probe' in got) == (fields.get('pool') == 'map')


@pytest.mark.parametrize(
  ('fields', 'folder'),
  [(VIT | STEM, 'block2'), (RESNET, 'block2')],
  ids=['hybrid', 'resnet'],
)
def test_units_after_the_first_of_a_stage_are_stacked_in_order(fields, folder):
  old = untrained((32, 48), 0, **fields)
  new = untrained((32, 48), 1, scan=True, **fields)
  got = transfer.to_new_task(old, new.model, (32, 48), new.params)[folder]
  assert got.keys() == {'unit1', 'units'}
  units = old.params[folder]
  np.testing.assert_array_equal(
    got['units']['conv2']['kernel'],
    np.stack([units[f'unit{i}']['conv2']['kernel'] for i in (2, 3)]),
  )
  np.testing.assert_array_equal(
    got['unit1']['conv2']['kernel'], units['unit1']['conv2']['kernel']
  )


def test_transfer_refuses_relative_positions_of_another_grid():
  """3x2 patches are as many as 2x3, but the next row is another offset."""
  old, new = (
    untrained(size, 0, posemb='relative', **VIT) for size in ((8, 12), (12, 8))
  )
  with pytest.raises(
    ValueError, match='learned for 2x3 patches cannot be resized to 3x2: keep'
  ):
    transfer.to_new_task(old, new.model, new.image_size, new.params)


@pytest.mark.parametrize(
  ('old_fields', 'new_fields', 'message'),
  [
    (VIT, RESNET, 'has a ViT; config.model is a ResNet.'),
    (
      VIT | {'pool': 'gap'},
      VIT | {'pool': 'map', 'width': 24},
      'has width 8; config.model.width is 24. It has pool gap; '
      'config.model.pool is map.',
    ),
  ],
  ids=['architecture', 'fields'],
)
def test_transfer_refuses_another_body(old_fields, new_fields, message):
  size = (32, 48)
  new = variants.build(num_classes=3, image_size=size, **new_fields)
  old = variants.build(num_classes=3, image_size=size, **old_fields)
  checkpoint = opening.Checkpoint('old', old, {}, size)
  with pytest.raises(ValueError) as error:
    transfer.to_new_task(checkpoint, new, size, {})
  assert f'{message} --config=configs/finetune.py:old,DATA' in str(error.value)


class OfPatches(vit.ViT):
  """Another task on the same body."""

  kind = 'of_patches'
  task_params = ('hint', 'patch_head')
  hint: float = 1.0

  @nn.compact
  def __call__(self, images_BHWC, *, train=False, capture=()):
    x_BhwD, x_BLD = self.embed(images_BHWC)
    hint_D = self.param('hint', nn.initializers.ones, (self.width,))
    x_BLD += self.hint * hint_D[None, None, :]
    aux = self.encode(x_BhwD, x_BLD, train=train)
    return nn.Dense(5, name='patch_head')(aux['tokens']), aux


def test_what_another_task_learned_is_carried_over():
  """The body alone, whose class is the ViT whatever the class of the whole."""
  old_size, new_size = (8, 12), (12, 20)
  model = OfPatches(num_classes=0, scan=True, **VIT)
  assert type(model.body()) is vit.ViT
  old = random_params(model, old_size, seed=0)
  checkpoint = opening.Checkpoint('old', model, old, old_size)
  plain = untrained(new_size, 1, **VIT)
  got = transfer.to_new_task(checkpoint, plain.model, new_size, plain.params)
  assert jax.tree.map(np.shape, got) == jax.tree.map(np.shape, plain.params)
  jax.tree.map(np.testing.assert_array_equal, got['head'], plain.params['head'])
  np.testing.assert_array_equal(
    got['embedding']['kernel'], old['embedding']['kernel']
  )
  dropped = transfer.with_head(checkpoint, 'drop')
  assert dropped.model == model.body()
  wanted = flops.param_shapes(dropped.model, old_size)
  assert jax.tree.map(np.shape, dropped.params) == jax.tree.map(
    np.shape, wanted
  )

  # And back: what belongs to the task starts afresh.
  fresh = random_params(model, old_size, seed=1)
  small = untrained(old_size, 1, **VIT)
  back = transfer.to_new_task(small, model, old_size, fresh)
  assert jax.tree.map(np.shape, back) == jax.tree.map(np.shape, fresh)
  for name in ('hint', 'patch_head'):
    jax.tree.map(np.testing.assert_array_equal, back[name], fresh[name])


def test_bodies_of_another_task_are_compared_too():
  model = OfPatches(num_classes=0, **VIT)
  checkpoint = opening.Checkpoint('old', model, {}, (8, 8))
  with pytest.raises(ValueError, match='has depth 2; config.model.depth is 3'):
    transfer.to_new_task(checkpoint, model.clone(depth=3), (8, 8), {})


def test_two_tokens_before_the_patches_stay_before_them():
  new_size = (12, 20)
  checkpoint = untrained((8, 12), 0, name='deit', **VIT)
  resized = transfer.resized(checkpoint, new_size)
  table, got = (
    x.params['Transformer']['posembed_input']['pos_embedding']
    for x in (checkpoint, resized)
  )
  assert table.shape == (1, 2 + 6, 8)
  want = stretched_grid(table, (2, 3), (3, 5))
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

  # Onto another task, with positions from the checkpoint and heads afresh.
  model = resized.model.clone(num_classes=4)
  fresh = random_params(model, new_size, seed=1)
  params = transfer.to_new_task(checkpoint, model, new_size, fresh)
  np.testing.assert_array_equal(params['dist'], checkpoint.params['dist'])
  for name in ('head', 'head_dist'):
    jax.tree.map(np.testing.assert_array_equal, params[name], fresh[name])


def outputs(checkpoint, images):
  return apply(checkpoint.model, checkpoint.params, images)


def test_resized_gives_the_logits_of_the_original_at_the_new_size():
  checkpoint, golden = open_golden('tiny')
  checkpoint = dataclasses.replace(
    checkpoint,
    model=checkpoint.model.clone(scan=True),
    params=checkpoint.model.stack_layers(checkpoint.params),
  )
  larger = transfer.resized(checkpoint, (48, 48))
  assert larger.image_size == (48, 48)
  logits, _ = outputs(larger, golden['resized_images'])
  np.testing.assert_allclose(logits, golden['resized_logits'], atol=ATOL)
  np.testing.assert_allclose(
    larger.params['Transformer']['posembed_input']['pos_embedding'],
    golden['resized_posemb'].reshape(1, -1, 48),
    atol=ATOL,
  )


def test_resized_scales_the_resize_before_the_crop():
  checkpoint, _ = open_golden('tiny')
  checkpoint = dataclasses.replace(
    checkpoint, preprocessing=Preprocessing(resize_small=36)
  )
  # As much as the side that grows more, here from 32 to 64.
  for size in ((40, 64), (64, 40)):
    longer = transfer.resized(checkpoint, size)
    assert longer.preprocessing.resize_small == 72
  # A squashed crop keeps its share of each side.
  squashed = Preprocessing(resize_small=36, squash=True)
  checkpoint = dataclasses.replace(checkpoint, preprocessing=squashed)
  for size, side in (((32, 64), 36), ((64, 48), 54)):
    longer = transfer.resized(checkpoint, size)
    assert longer.preprocessing.resize_small == side
  assert transfer.resized(checkpoint, 48).image_size == (48, 48)


def test_less_of_the_head_gives_the_intermediates_of_the_original():
  checkpoint, golden = open_golden('tiny-rep')
  checkpoint = dataclasses.replace(
    checkpoint,
    class_names=tuple('abcdefghij'),
    preprocessing=Preprocessing(resize_small=36),
  )
  representation = transfer.with_head(checkpoint, 'representation')
  got, _ = outputs(representation, golden['images'])
  np.testing.assert_allclose(got, golden['pre_logits'], atol=ATOL)
  body = transfer.with_head(checkpoint, 'drop')
  got, _ = outputs(body, golden['images'])
  np.testing.assert_allclose(got, golden['encoded'][:, 0], atol=ATOL)
  assert body.model.representation_size == 0
  for less in (representation, body):
    assert less.class_names == ()
    assert less.preprocessing == checkpoint.preprocessing
    expected = flops.param_shapes(less.model, less.image_size)
    assert jax.tree.structure(less.params) == jax.tree.structure(expected)
  assert transfer.with_head(checkpoint, 'keep') is checkpoint
  assert 'head' in checkpoint.params
  # Heads beside the classifier go too, such as that of rotations.
  params = checkpoint.params | {'head_rotation': checkpoint.params['head']}
  checkpoint = dataclasses.replace(checkpoint, params=params)
  less = transfer.with_head(checkpoint, 'representation')
  assert less.params.keys() == representation.params.keys()


def test_a_representation_that_is_not_there_cannot_be_kept():
  checkpoint, _ = open_golden('tiny')
  with pytest.raises(ValueError, match='no representation layer to keep'):
    transfer.with_head(checkpoint, 'representation')


@pytest.mark.parametrize(
  ('fields', 'extra'),
  [
    ({'posemb': 'none'}, 1),
    ({'posemb': 'learned2d', 'name': 'deit'}, 2),
    ({'posemb': 'sincos2d', 'pool': 'gap'}, 0),
  ],
)
def test_learned_positions_give_the_same_logits(fields, extra):
  size, sizes = (24, 32), {'patch_size': 8, 'width': 16, 'depth': 1}
  sizes |= {'mlp_dim': 20, 'heads': 2}
  checkpoint = random_checkpoint(None, size, **sizes | fields)
  learned = transfer.with_learned_positions(checkpoint)
  assert learned.model.posemb == 'learned1d'
  images = np.random.default_rng(0).uniform(-1, 1, (2, *size, 3))
  want, _ = outputs(checkpoint, images)
  got, _ = outputs(learned, images)
  np.testing.assert_array_equal(got, want)
  expected = flops.param_shapes(learned.model, size)
  assert jax.tree.map(jnp.shape, learned.params) == jax.tree.map(
    jnp.shape, expected
  )
  assert {x.dtype.name for x in jax.tree.leaves(learned.params)} == {'float32'}
  table = learned.params['Transformer']['posembed_input']['pos_embedding']
  assert table.shape[1] == extra + 3 * 4 and not table[:, :extra].any()


@pytest.mark.parametrize(
  'fields',
  [{'posemb': 'relative'}, {'posemb': 'learned2d', 'posemb_at': 'shared'}],
  ids=str,
)
def test_positions_that_are_no_table_at_the_input_stay(fields):
  fields |= {'patch_size': 8, 'width': 16, 'depth': 1, 'mlp_dim': 20}
  checkpoint = random_checkpoint(None, (16, 16), heads=2, **fields)
  assert transfer.with_learned_positions(checkpoint) is checkpoint


DETR = {
  'name': 'detr',
  'num_classes': 2,
  'num_queries': 3,
  'width': 128,
  'heads': 8,
  'mlp_dim': 32,
  'encoder_layers': 1,
  'decoder_layers': 1,
  'backbone_layers': (1, 3, 1, 1),
  'backbone_width': 32,
  'backbone_version': 1,
}


@pytest.mark.slow
def test_a_classifier_becomes_the_backbone_of_a_detector():
  """Its stages put the same out there, scanned or not; the rest is new."""
  size = (32, 48)
  old = random_checkpoint(
    None, size, 5, name='resnet', layers=(1, 3, 1, 1), width=32, version=1
  )
  model = variants.build(image_size=size, scan=True, **DETR)
  fresh = random_params(model, size, seed=0)
  params = transfer.to_new_task(old, model, size, fresh)
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, fresh)
  images = np.random.default_rng(0).normal(size=(2, *size, 3))
  images = images.astype(np.float32)
  _, want = outputs(old, images)
  stages = backbone.Backbone(model_fields.frozen(model))
  maps = jax.jit(stages.apply)({'params': params['backbone']}, images)
  for got, x_BhwC in zip(maps, want['blocks'], strict=True):
    np.testing.assert_allclose(got, x_BhwC, rtol=1e-4, atol=1e-4)
  for name in fresh.keys() - {'backbone'}:
    jax.tree.map(np.testing.assert_array_equal, params[name], fresh[name])
  other = model.clone(backbone_version=0)
  with pytest.raises(
    ValueError, match='version 1; config.model.backbone_version is 0. Set'
  ):
    transfer.to_new_task(old, other, size, fresh)


@pytest.mark.fast('False')
@pytest.mark.parametrize('masks', [True, False])
def test_a_detector_gains_masks_or_loses_them(masks):
  size = (32, 32)
  fields = {k: x for k, x in DETR.items() if k != 'num_classes'}
  old = random_checkpoint(None, size, 2, masks=not masks, **fields)
  model = variants.build(image_size=size, masks=masks, **DETR)
  shapes = flops.param_shapes(model, size)
  fresh = jax.tree.map(lambda x: np.full(x.shape, 7, x.dtype), shapes)
  params = transfer.to_new_task(old, model, size, fresh)
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, fresh)
  new = {'class_embed', 'bbox_attention', 'mask_head'}
  for name, found in params.items():
    want = fresh if name in new else old.params
    jax.tree.map(np.testing.assert_array_equal, found, want[name])


def test_a_config_takes_the_body_of_a_model_of_another_task(tmp_path):
  fields = {'name': 'dino_vit', 'prototypes': 4, 'hidden': 8, 'bottleneck': 4}
  made = random_checkpoint(
    None, (32, 32), num_classes=0, pool='gap', **VIT | fields
  )
  orbax.write(made, str(tmp_path / 'start'), 'float32')
  config = finetune.get_config(f'{tmp_path}/start,digits')
  from_init.resolve(config)
  assert config.model.name == 'vit'
  assert (config.model.pool, config.model.width) == ('gap', 8)
  CheckedConfig(config)
