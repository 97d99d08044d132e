"""Every kind of checkpoint through the one reader; weights carried over."""

import gc
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from configs import digits
from vit_jax import reader
from vit_jax.checkpoint import Checkpoints
from vit_jax.models import posemb, variants

GOLDEN = pathlib.Path(__file__).parent / 'golden'
NAMES = ('tiny', 'tiny-rep', 'tiny-gap', 'tiny-stem')

# The original code's own reruns differ by up to 4e-6 of values around 1; an
# exact GELU, or an epsilon of 1e-5 in LayerNorm, differs by more than this.
ATOL = 1e-5


def open_golden(name):
  checkpoint = reader.open_checkpoint(str(GOLDEN / f'{name}_s7.npz'))
  return checkpoint, np.load(GOLDEN / f'{name}_s7_golden.npz')


def apply(model, params, images):
  return jax.jit(
    lambda p, x: model.apply({'params': p}, x, capture=('blocks',))
  )(params, images)


@pytest.mark.parametrize('name', NAMES)
def test_outputs_are_those_of_the_original(name):
  checkpoint, golden = open_golden(name)
  logits, aux = apply(checkpoint.model, checkpoint.params, golden['images'])
  got = {
    'logits': logits,
    'pre_logits': aux['pre_logits'],
    'stem': aux['stem'],
    'encoded': aux['tokens'],
    'block_00': aux['blocks'][0],
    'block_01': aux['blocks'][1],
  }
  assert len(aux['blocks']) == 2
  assert got.keys() == {
    k for k in golden if k.partition('_')[0] != 'resized'
  } - {'images'}
  for key, x in got.items():
    np.testing.assert_allclose(x, golden[key], rtol=0, atol=ATOL, err_msg=key)


@pytest.mark.parametrize('name', NAMES)
def test_scanned_layers_give_the_outputs_of_the_original(name):
  checkpoint, golden = open_golden(name)
  model = checkpoint.model.clone(scan=True)
  params = variants.stack_layers(checkpoint.params)
  logits, _ = apply(model, params, golden['images'])
  np.testing.assert_allclose(logits, golden['logits'], rtol=0, atol=ATOL)


def test_resized_to_48_pixels_equals_the_original():
  checkpoint, golden = open_golden('tiny')
  params = dict(checkpoint.params)
  encoder = dict(params['Transformer'])
  table = encoder['posembed_input']['pos_embedding']
  resized = posemb.resize(table, (4, 4), (6, 6))
  np.testing.assert_allclose(
    resized, golden['resized_posemb'], rtol=0, atol=ATOL
  )
  encoder['posembed_input'] = {'pos_embedding': resized}
  params['Transformer'] = encoder
  logits, _ = apply(checkpoint.model, params, golden['resized_images'])
  np.testing.assert_allclose(
    logits, golden['resized_logits'], rtol=0, atol=ATOL
  )


def test_published_files_have_no_names_and_are_resized_straight():
  checkpoint, _ = open_golden('tiny-stem')
  assert checkpoint.class_names == ()
  assert checkpoint.image_size == (64, 64)
  assert checkpoint.resize_small == 0
  assert checkpoint.path.endswith('tiny-stem_s7.npz')


def model_like(model, image_size, **fields):
  model = model.clone(**fields)
  init = jax.jit(lambda key: variants.init(model, key, image_size))
  fresh = init(jax.random.key(1))
  return model, fresh


@pytest.mark.parametrize('scan', [False, True], ids=['loop', 'scan'])
def test_transfer_to_a_larger_size_leaves_the_body_as_the_original_has_it(scan):
  """The old head on the carried-over body gives the original's logits."""
  checkpoint, golden = open_golden('tiny')
  model, fresh = model_like(
    checkpoint.model, (48, 48), num_classes=7, scan=scan
  )
  params = reader.transfer(checkpoint, model, (48, 48), fresh)
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, fresh)
  np.testing.assert_array_equal(params['head']['kernel'], np.zeros((48, 7)))
  params['head'] = checkpoint.params['head']
  logits, _ = apply(
    model.clone(num_classes=10), params, golden['resized_images']
  )
  np.testing.assert_allclose(
    logits, golden['resized_logits'], rtol=0, atol=ATOL
  )


def test_transfer_to_the_same_size_changes_no_bit_and_not_the_checkpoint():
  checkpoint, _ = open_golden('tiny')
  before = jax.tree.map(np.copy, checkpoint.params)
  model, fresh = model_like(checkpoint.model, (32, 32))
  params = reader.transfer(checkpoint, model, (32, 32), fresh)
  params['head'] = checkpoint.params['head']
  jax.tree.map(np.testing.assert_array_equal, params, before)
  jax.tree.map(np.testing.assert_array_equal, checkpoint.params, before)


def test_transfer_leaves_the_representation_layer_behind():
  checkpoint, _ = open_golden('tiny-rep')
  model, fresh = model_like(
    checkpoint.model, (32, 32), representation_size=0, num_classes=3
  )
  params = reader.transfer(checkpoint, model, (32, 32), fresh)
  assert 'pre_logits' not in params
  assert params['head']['kernel'].shape == (48, 3)
  # A model that has the layer starts it afresh, never from the old one.
  model, fresh = model_like(checkpoint.model, (32, 32))
  params = reader.transfer(checkpoint, model, (32, 32), fresh)
  for name in ('pre_logits', 'head'):
    jax.tree.map(np.testing.assert_array_equal, params[name], fresh[name])


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('width', 24),
    ('depth', 3),
    ('mlp_dim', 48),
    ('heads', 6),
    ('patch_size', 16),
    ('pool', 'gap'),
    ('stem_width', 64),
  ],
)
def test_transfer_names_the_field_in_which_bodies_differ(field, value):
  checkpoint, _ = open_golden('tiny')
  model = checkpoint.model.clone(**{field: value})
  with pytest.raises(ValueError, match=f'tiny_s7.npz has {field} .*{value}'):
    reader.transfer(checkpoint, model, (32, 32), {})


VIT = {'patch_size': 4, 'width': 8, 'depth': 2, 'mlp_dim': 12, 'heads': 2}
RESNET = {'name': 'resnet', 'layers': (2, 3), 'width': 32}
AXIAL_RESNET = RESNET | {'axial': True, 'version': 1}
STEM = {'patch_size': 1, 'stem_width': 32, 'stem_layers': (1, 3)}


def untrained(image_size, seed, scan=False, **fields):
  """Returns a checkpoint that no training made: every number is random."""
  model = variants.build(
    num_classes=3, image_size=image_size, scan=scan, **fields
  )
  rng = np.random.default_rng(seed)
  params = jax.tree.map(
    lambda x: rng.standard_normal(x.shape).astype(np.float32),
    jax.eval_shape(
      lambda key: variants.init(model, key, image_size), jax.random.key(0)
    ),
  )
  return reader.Checkpoint('old', model, params, image_size)


def transfer_between(old_size, new_size, fields, scans=(False, False)):
  """Returns the parameters before and after, and the fresh, all unrolled."""
  old = untrained(old_size, 0, scans[0], **fields)
  new = untrained(new_size, 1, scans[1], **fields)
  got = reader.transfer(old, new.model, new_size, new.params)
  assert jax.tree.map(np.shape, got) == jax.tree.map(np.shape, new.params)
  assert all(type(x) is np.ndarray for x in jax.tree.leaves(got))
  return tuple(
    flat(jax.device_get(variants.unstack_layers(tree)))
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


# Fields, the names of the tables, and what becomes of one by its name; grids of
# 2x3 patches become 3x5, so that no axis can be mistaken for the other.
RESIZED = {
  'learned1d-input': (
    VIT,
    ('pos_embedding',),
    lambda name, x: stretched_grid(x, (2, 3), (3, 5)),
  ),
  'learned1d-every_layer': (
    VIT | {'posemb_at': 'every_layer'},
    ('pos_embedding',),
    lambda name, x: stretched_grid(x, (2, 3), (3, 5)),
  ),
  'learned2d-every_layer': (
    VIT | {'posemb': 'learned2d', 'posemb_at': 'every_layer'},
    ('x_embedding', 'y_embedding'),
    lambda name, x: stretched(x, 1, 5 if 'x_emb' in name else 3),
  ),
  'sincos2d': (VIT | {'posemb': 'sincos2d'}, (), None),
  'none': (VIT | {'posemb': 'none'}, (), None),
  'axial-relative': (
    VIT | {'posemb': 'relative', 'axial': True, 'pool': 'map'},
    ('relative_embedding',),
    # 2 L - 1 offsets for rows of length L, then for columns.
    lambda name, x: stretched(x, 0, 9 if '/row/' in name else 5),
  ),
}


@pytest.mark.parametrize('scans', [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize('kind', RESIZED)
def test_transfer_stretches_position_tables_and_nothing_else(kind, scans):
  fields, names, want = RESIZED[kind]
  scans = tuple(map(bool, scans))
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


@pytest.mark.parametrize('scans', [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_transfer_stretches_the_tables_of_an_axial_resnet(scans):
  """Each is as long as the map of its stage, on which the image size acts."""
  scans = tuple(map(bool, scans))
  old, got, fresh = transfer_between((16, 40), (32, 72), AXIAL_RESNET, scans)
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


def test_a_stretched_offset_keeps_its_share_of_the_side():
  """A table of shares, from -1 for the left end to 1 for the right one."""
  fields = VIT | {'posemb': 'relative', 'axial': True, 'pool': 'gap'}
  old, new = (untrained(size, 0, **fields) for size in ((8, 12), (12, 20)))

  def shares(L):
    return np.linspace(-1, 1, 2 * L - 1, dtype=np.float32)[:, None, None]

  def table(params, axis):
    layer = params['Transformer']['encoderblock_1'][axis]
    return layer['MultiHeadDotProductAttention_1']['relative']

  table(old.params, 'row')['relative_embedding'][:] = shares(3)
  table(old.params, 'column')['relative_embedding'][:] = shares(2)
  got = reader.transfer(old, new.model, new.image_size, new.params)
  for axis, L in (('row', 5), ('column', 3)):
    got_table = table(got, axis)['relative_embedding']
    assert got_table.shape == (2 * L - 1, 2, 4)
    want = np.broadcast_to(shares(L), got_table.shape)
    np.testing.assert_allclose(got_table, want, rtol=0, atol=1e-6)


BODIES = {
  'every_layer': VIT | {'posemb_at': 'every_layer'},
  'learned2d': VIT | {'posemb': 'learned2d'},
  'relative': VIT | {'posemb': 'relative'},
  'map': VIT | {'pool': 'map', 'representation_size': 6},
  'hybrid': VIT | STEM,
  'resnet': RESNET,
  'axial-resnet': AXIAL_RESNET,
}


@pytest.mark.parametrize('scans', [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize('body', BODIES)
def test_transfer_to_the_same_size_keeps_every_body_bit_for_bit(body, scans):
  """Whichever of the two stacks its layers, attention pooling included."""
  scans = tuple(map(bool, scans))
  old, got, fresh = transfer_between((32, 48), (32, 48), BODIES[body], scans)
  assert got.keys() == fresh.keys() == old.keys()
  for key, x in got.items():
    is_head = key.startswith(('head/', 'pre_logits/'))
    source = fresh if is_head else old
    np.testing.assert_array_equal(x, source[key], err_msg=key)
  assert ('MAPHead_0/probe' in got) == (BODIES[body].get('pool') == 'map')


@pytest.mark.parametrize(
  ('fields', 'folder'),
  [(VIT | STEM, 'block2'), (RESNET, 'block2')],
  ids=['hybrid', 'resnet'],
)
def test_units_after_the_first_of_a_stage_are_stacked_in_order(fields, folder):
  old = untrained((32, 48), 0, **fields)
  new = untrained((32, 48), 1, scan=True, **fields)
  got = reader.transfer(old, new.model, (32, 48), new.params)[folder]
  assert got.keys() == {'unit1', 'units'}
  units = old.params[folder]
  np.testing.assert_array_equal(
    got['units']['conv2']['kernel'],
    np.stack([units[f'unit{i}']['conv2']['kernel'] for i in (2, 3)]),
  )
  np.testing.assert_array_equal(
    got['unit1']['conv2']['kernel'], units['unit1']['conv2']['kernel']
  )


@pytest.mark.parametrize(
  ('new_size', 'grid'), [((12, 20), '3x5'), ((12, 8), '3x2')]
)
@pytest.mark.parametrize('scan', [False, True], ids=['loop', 'scan'])
def test_transfer_refuses_relative_positions_of_another_grid(
  new_size, grid, scan
):
  """3x2 patches are as many as 2x3, but the next row is another offset."""
  fields = VIT | {'posemb': 'relative'}
  old = untrained((8, 12), 0, scan, **fields)
  new = untrained(new_size, 1, scan, **fields)
  with pytest.raises(
    ValueError,
    match=f'learned for 2x3 patches cannot be resized to {grid}: keep the '
    'image size',
  ):
    reader.transfer(old, new.model, new_size, new.params)


@pytest.mark.parametrize(
  ('old_fields', 'new_fields', 'message'),
  [
    (VIT, RESNET, 'old is a ViT and config.model a ResNet: choose'),
    (RESNET, VIT, 'old is a ResNet and config.model a ViT: choose'),
    (
      VIT,
      VIT | {'posemb': 'sincos2d'},
      'old has posemb learned1d and config.model.posemb is sincos2d: choose',
    ),
    (
      VIT,
      VIT | {'posemb_at': 'shared'},
      'old has posemb_at input and config.model.posemb_at is shared: choose',
    ),
    (
      VIT | {'pool': 'gap'},
      VIT | {'pool': 'gap', 'axial': True},
      'old has axial False and config.model.axial is True: choose',
    ),
    (
      VIT | {'pool': 'gap'},
      VIT | {'pool': 'map'},
      'old has pool gap and config.model.pool is map: choose',
    ),
    (
      VIT | STEM,
      VIT | STEM | {'stem_layers': (2, 3)},
      r'old has stem_layers \(1, 3\) and config.model.stem_layers is '
      r'\(2, 3\): choose',
    ),
    (
      RESNET,
      RESNET | {'layers': (2, 2)},
      r'old has layers \(2, 3\) and config.model.layers is \(2, 2\): choose',
    ),
    (
      RESNET,
      RESNET | {'version': 1},
      'old has version 2 and config.model.version is 1: choose',
    ),
  ],
  ids=[
    'resnet',
    'vit',
    'posemb',
    'posemb_at',
    'axial',
    'pool',
    'stem_layers',
    'layers',
    'version',
  ],
)
def test_transfer_refuses_another_body(old_fields, new_fields, message):
  size = (32, 48)
  new = variants.build(num_classes=3, image_size=size, **new_fields)
  old = variants.build(num_classes=3, image_size=size, **old_fields)
  checkpoint = reader.Checkpoint('old', old, {}, size)
  with pytest.raises(ValueError, match=message):
    reader.transfer(checkpoint, new, size, {})


CLASS_NAMES = tuple(f'digit {i}' for i in range(10))


def save_workdir(workdir, steps, polyak, scan=False):
  """Writes what training would, without training."""
  config = digits.get_config()
  config.model.update(width=16, depth=2, mlp_dim=32, heads=2, scan=scan)
  config.optimizer.polyak = polyak
  config.data.resize_small = 20
  size = (16, 24)
  model = variants.build(num_classes=10, image_size=size, **config.model)
  meta = {
    'config': json.loads(config.to_json()),
    'class_names': list(CLASS_NAMES),
    'image_size': list(size),
    'elapsed_s': 1.0,
  }
  store = Checkpoints(str(workdir), keep_last=9, best_metric='test/accuracy')
  init = jax.jit(lambda key: variants.init(model, key, size))
  saved = {}
  for step in steps:
    params = init(jax.random.key(step))
    average = init(jax.random.key(step + 100))
    state = {'params': params, 'average': average if polyak else {}}
    store.save(step, state, meta, {})
    saved[step] = jax.device_get(average if polyak else params)
  store.close()
  return saved


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  folder = tmp_path_factory.mktemp('run')
  return folder, save_workdir(folder, [8, 10], polyak=0.9)


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_workdir_opens_at_its_newest_step(workdir):
  folder, saved = workdir
  checkpoint = reader.open_checkpoint(str(folder))
  assert checkpoint.path == str(folder / 'checkpoints' / '10')
  assert_equal(checkpoint.params, saved[10])
  assert all(type(x) is np.ndarray for x in jax.tree.leaves(checkpoint.params))
  assert checkpoint.class_names == CLASS_NAMES
  assert checkpoint.image_size == (16, 24)
  assert checkpoint.resize_small == 20
  assert checkpoint.model.width == 16


def test_any_step_opens_by_its_folder(workdir):
  folder, saved = workdir
  checkpoint = reader.open_checkpoint(str(folder / 'checkpoints' / '8'))
  assert_equal(checkpoint.params, saved[8])


def test_a_relative_path_opens_too(workdir, monkeypatch):
  folder, saved = workdir
  monkeypatch.chdir(folder.parent)
  assert_equal(reader.open_checkpoint(folder.name).params, saved[10])


def test_without_an_average_the_parameters_open(tmp_path):
  saved = save_workdir(tmp_path, [3], polyak=0.0, scan=True)
  checkpoint = reader.open_checkpoint(str(tmp_path))
  assert checkpoint.model.scan
  assert_equal(checkpoint.params, saved[3])


def test_what_training_sets_aside_is_not_opened(workdir, tmp_path):
  folder, saved = workdir
  copy = tmp_path / 'run'
  shutil.copytree(folder, copy)
  checkpoints = copy / 'checkpoints'
  shutil.copytree(checkpoints / '10', checkpoints / '12.damaged')
  shutil.copytree(checkpoints / '10', checkpoints / '14.orbax-checkpoint-tmp-1')
  checkpoint = reader.open_checkpoint(str(copy))
  assert checkpoint.path.endswith('/10')
  assert_equal(checkpoint.params, saved[10])


# Orbax abandons the reads beside one that failed, and asyncio complains.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('kind', ['remove', 'truncate', 'flip', 'empty'])
def test_damage_to_a_step_is_one_error_or_harmless(workdir, tmp_path, kind):
  folder, saved = workdir
  step = folder / 'checkpoints' / '10'
  files = sorted(f.relative_to(step) for f in step.rglob('*') if f.is_file())
  refused = set()
  for i, name in enumerate(files):
    copy = tmp_path / str(i) / '10'
    shutil.copytree(step, copy)
    data = bytearray((copy / name).read_bytes())
    middle = len(data) // 2
    if kind == 'remove':
      (copy / name).unlink()
    elif kind == 'flip':
      data[middle : middle + 1] = bytes([data[middle] ^ 0x55] if data else [])
      (copy / name).write_bytes(data)
    else:
      (copy / name).write_bytes(data[:middle] if kind == 'truncate' else b'')
    try:
      checkpoint = reader.open_checkpoint(str(copy))
    except ValueError as e:
      assert str(copy) in str(e)
      refused.add(name.parts[0])
    else:
      assert_equal(checkpoint.params, saved[10])
      assert checkpoint.class_names == CLASS_NAMES
  assert {'average', 'meta', 'checksums'} <= refused
  gc.collect()  # what orbax abandoned, while the filter above is on


def test_nothing_there(tmp_path):
  with pytest.raises(FileNotFoundError, match='No checkpoint at .*nowhere'):
    reader.open_checkpoint(str(tmp_path / 'nowhere'))


@pytest.mark.parametrize(
  'inside', [(), ('checkpoints',), ('checkpoints', 'checkpoints/x')]
)
def test_a_folder_without_checkpoints_says_what_to_give(tmp_path, inside):
  for name in inside:
    (tmp_path / name).mkdir()
  with pytest.raises(ValueError, match=f'{tmp_path} holds no checkpoint: give'):
    reader.open_checkpoint(str(tmp_path))
