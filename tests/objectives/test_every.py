"""Properties of every registered objective."""

import atexit
import dataclasses
import functools
import json
import pathlib
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from configs import digits
from tests.checkpoints.random_weights import random_checkpoint
from vit_jax import config as config_lib
from vit_jax import objectives
from vit_jax.checkpoints.formats import table
from vit_jax.convert import orbax
from vit_jax.data import bad_images, loader, sources
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.models import flops
from vit_jax.objectives.objective import Facts
from vit_jax.projects.igpt import model as igpt
from vit_jax.training import sharding

BATCH = 16
# Maximum difference of sums in another order, relative to an array's largest
# entry. Differences seen are about 1e-6.
TOLERANCE = 1e-4

DETR = {
  'num_queries': 5,
  'encoder_layers': 1,
  'decoder_layers': 2,
  'backbone': 'plain',
  'backbone_layers': (1, 1, 1),
  'backbone_width': 32,
  'dropout': 0.0,
}


@pytest.fixture(params=objectives.OBJECTIVES)
def name(request):
  return request.param


def objectives_of(*names):
  """Chooses some objectives for a test, instead of all."""
  return pytest.mark.parametrize('name', names, indirect=True)


@functools.cache
def teacher():
  """Returns the path of a teacher with another image size and scaling."""
  folder = tempfile.mkdtemp()
  atexit.register(shutil.rmtree, folder)
  checkpoint = random_checkpoint(
    None, (24, 24), 10, patch_size=8, width=16, depth=1, mlp_dim=20, heads=2
  )
  checkpoint = dataclasses.replace(
    checkpoint,
    class_names=tuple(map(str, range(10))),
    preprocessing=table.Preprocessing(
      mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)
    ),
  )
  orbax.write(checkpoint, f'{folder}/teacher', 'float32')
  return f'{folder}/teacher'


@functools.cache
def clips():
  """Returns the path of a folder with 24 frames of each of four videos."""
  folder = pathlib.Path(tempfile.mkdtemp())
  atexit.register(shutil.rmtree, folder)
  rng = np.random.default_rng(0)
  for video in 'abcd':
    (folder / video).mkdir()
    for i in range(24):
      pixels = rng.integers(0, 256, (16, 16, 3), np.uint8)
      Image.fromarray(pixels).save(folder / video / f'{i:02}.png')
  return str(folder)


def config_of(name, **changes):
  config = digits.get_config()
  config_lib.choose_objective(config, name)
  if name.startswith('pixels'):
    config_lib.choose_model(config, 'igpt_s')
    config.model.palette = igpt.grey_palette(16)
  if name == 'detection':
    config_lib.choose_model(config, 'detr_r50')
    config.model.update(DETR)
    config.objective.update(max_objects=3, dense=0.5)
  else:
    config.model.update(depth=2)
  if name in ('detection', 'segmentation'):
    config.data.name = 'digits_canvas'
  config.model.update(width=32, mlp_dim=64, heads=4)
  if name in ('distillation', 'pseudo_labels'):
    config.teacher = teacher()
  if name == 'mae':
    config.objective.update(decoder_width=32, decoder_depth=1, decoder_heads=4)
  if name == 'dino':
    config.objective.update(
      prototypes=24, hidden=32, bottleneck=16, small_size='8', small_views=2
    )
  if name in ('exemplar', 'video'):
    config.objective.update(copies=2, group=4)
  if name == 'video':
    config.objective.videos = clips()
  if name == 'pseudo_labels':
    # A teacher with random parameters is never sure.
    config.objective.update(
      labels=f'{teacher()}.npz', threshold=0.0, ratio=2, unlabelled='train[:99]'
    )
  config.batch_size = BATCH
  sizes = {'igpt': '8', 'detr': '32'}
  config.data.image_size = sizes.get(config.model.name, '16')
  config.total = '20 steps'
  # Adam would scale up rounding errors of zero gradients.
  config.optimizer.update(name='sgd', lr=0.1, warmup='1 step')
  first, *_ = objectives.OBJECTIVES.load(name).metrics
  config.best_metric = f'test/{first}'
  config.update_from_flattened_dict(changes)
  return config


def experiment_of(name, devices=1, **changes):
  config = config_of(name, **changes)
  facts = Facts(tuple(map(str, range(10))), 1437)
  return Experiment(CheckedConfig(config, jax.devices()[:devices]), facts)


@functools.cache
def plain_experiment(name):
  return experiment_of(name)


@functools.cache
def batches(name, steps=3):
  """Returns the batches of the first steps, as training makes them."""
  made = plain_experiment(name)
  stream = loader.train_batches(
    sources.open_source(made.config.data.name, 'train'),
    made.objective.train_transform(),
    batch_size=BATCH,
    seed=0,
  )
  found = [next(stream) for _ in range(steps)]
  stream.close()
  return found


@functools.cache
def new_params(name):
  """Returns the initial parameters of every run, perturbed, on the host.

  New heads are zero, so that layers below them would get no gradient.
  """
  params = jax.device_get(plain_experiment(name).new_params())
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: x + np.float32(0.02 * rng.standard_normal(x.shape)), params
  )


def run(name, devices=1, **changes):
  """Returns the parameters after each of a few steps, and the metrics."""
  made = experiment_of(name, devices, **changes)
  params = new_params(name)
  scan = made.config.model.scan
  if scan:
    params = made.objective.model.stack_layers(params)
  state = made.start(made.place(params))
  fixed = made.place(made.objective.fixed())
  step = made.train_step()
  history = []
  for i, batch in enumerate(batches(name)):
    batch = sharding.global_batch(batch, made.mesh)
    state, metrics = step(state, fixed, batch, np.int32(i))
    params, metrics = jax.device_get((state.params, metrics))
    if scan:
      params = made.objective.model.unstack_layers(params)
    history.append((params, metrics))
  return history


@functools.cache
def plain(name):
  return run(name)


def loss_of(objective, params, batch):
  """Returns the loss and the metrics of a batch, compiled as one program."""
  return jax.jit(objective.loss)(params, batch, jax.random.key(0))


def assert_close(got, want):
  for (got_params, got_metrics), (params, metrics) in zip(
    got, want, strict=True
  ):
    assert got_metrics.keys() == metrics.keys()
    for key, x in metrics.items():
      np.testing.assert_allclose(
        got_metrics[key], x, rtol=TOLERANCE, atol=1e-5, err_msg=key
      )

    def compare(path, a, b):
      scale = max(np.abs(b).max(), 1e-2)
      np.testing.assert_allclose(
        a,
        b,
        rtol=0,
        atol=TOLERANCE * scale,
        err_msg=jax.tree_util.keystr(path),
      )

    jax.tree_util.tree_map_with_path(compare, got_params, params)


def test_an_unknown_name_is_told_what_is_near():
  config = digits.get_config()
  config.objective.name = 'Pixels'
  with pytest.raises(ValueError, match="'Pixels'. Did you mean pixels"):
    objectives.objective_type(config)


def test_a_name_alone_chooses_no_objective():
  config = digits.get_config()
  config.objective.name = 'masked'
  with pytest.raises(ValueError, match='objective.mask is missing'):
    objectives.objective_type(config)


@pytest.mark.fast(
  'classification',
  'detection',
  'dino',
  'distillation',
  'exemplar',
  'mae',
  'masked',
  'pixels',
)
def test_batches_are_as_it_says(name):
  shapes = plain_experiment(name).objective.batch_shapes(BATCH)
  (batch, *_) = batches(name)
  assert {k: (x.shape, x.dtype) for k, x in batch.items()} == {
    k: (x.shape, x.dtype) for k, x in shapes.items()
  }


@objectives_of('classification', 'pseudo_labels', 'video')
def test_the_summary_opens_no_data(name, monkeypatch):
  """Only the first of several processes prints it."""
  made = experiment_of(name)
  monkeypatch.setattr(bad_images, 'open_checked', lambda *_: 1 / 0)
  assert 'images' in made.summary()


# Values that an objective refuses if it does not use the field.
VALUES = {
  'data.augment': '3augment',
  'data.crop_resize': 1.2,
  'data.erasing': 0.5,
  'data.train_size': '8',
  'data.wrong_labels': 0.5,
  'loss.class_weights': 'balanced',
  'loss.cutmix': 1.0,
  'loss.label_smoothing': 0.1,
  'loss.mixup': 0.8,
  'loss.name': 'sigmoid',
  'optimizer.polyak': 0.9,
  'teacher': 'path',
}


# Without class labels and with a momentum teacher; and with a loss of its own.
@objectives_of('dino', 'rotation')
def test_unused_fields_are_refused_and_may_be_switched_off(name):
  """A run from before the refusal can be resumed without the field."""
  config = config_of(name)
  off = json.loads(config.to_json())
  meta = {'examples': 1, 'class_names': []}
  CheckedConfig(config)
  unused = objectives.OBJECTIVES.load(name).unused
  own = {'data.train_size', 'loss.class_weights', 'teacher'}
  assert unused.keys() == (VALUES.keys() if name == 'dino' else own)
  for field in unused:
    on = config.copy_and_resolve_references()
    config_lib.override(on, {field: str(VALUES[field])})
    with pytest.raises(ValueError, match=f'={name} ignores {field}='):
      CheckedConfig(on)
    on = json.loads(on.to_json())
    config_lib.check_resumable({'config': on} | meta, {'config': off} | meta)
    with pytest.raises(ValueError, match=f'{field}: .* -> '):
      config_lib.check_resumable({'config': off} | meta, {'config': on} | meta)


def test_dinos_small_views_are_fractions_of_an_image():
  """The teacher's forward pass costs a third of a forward and backward."""
  objective = plain_experiment('dino').objective
  small, large = (
    flops.forward_flops(objective.model, size) for size in ((8, 8), (16, 16))
  )
  assert objective.images_seen == 2 + 2 * small / large + 2 / 3


@pytest.mark.fast('classification')
@objectives_of(
  *('classification', 'exemplar', 'mae', 'pseudo_labels', 'rotation', 'video')
)
def test_it_says_how_many_images_the_model_sees(name):
  """Compares with the operations of its loss."""
  made = plain_experiment(name)
  loss = jax.make_jaxpr(
    lambda params, batch: made.objective.loss(
      params,
      made.objective.augment(batch, jax.random.key(0)),
      jax.random.key(0),
    )[0]
  )(new_params(name), batches(name)[0])
  counted = flops._count(loss.jaxpr) / BATCH / made.forward_flops
  assert 0.8 < counted / made.objective.images_seen < 1.25


@pytest.mark.parametrize('name', ['exemplar', 'video', 'pseudo_labels'])
def test_each_of_several_images_is_mirrored_by_itself(name):
  batch, key = batches(name)[0], jax.random.key(0)
  plain, mirrored = (
    experiment_of(name, **{'data.flip': flip}).objective.augment(batch, key)
    for flip in (False, True)
  )
  before, after = (
    np.asarray(x['image']).reshape(-1, 16, 16, 3) for x in (plain, mirrored)
  )
  same = (after == before).all((1, 2, 3))
  turned = (after == before[:, :, ::-1]).all((1, 2, 3))
  assert (same | turned).all()
  rows = turned.reshape(plain['image'].shape[:-3])
  assert np.any(rows.any(-1) & ~rows.all(-1))


@pytest.mark.slow
def test_steps_learn_and_say_their_loss(name):
  history = plain(name)
  assert {'loss', 'grad_norm', 'param_norm', 'lr'} <= history[0][1].keys()
  for params, metrics in history:
    assert all(np.isfinite(x) for x in metrics.values())
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
  first, last = history[0][0], history[-1][0]
  changed = jax.tree.map(lambda a, b: np.abs(a - b).max() > 0, first, last)
  assert np.mean(jax.tree.leaves(changed)) > 0.9


MESH = {'mesh.slice': 2, 'mesh.fsdp': 2, 'mesh.tensor': 2}


@pytest.mark.slow
def test_parts_of_a_batch_on_eight_devices_are_one_batch_on_one(name):
  # A loop around the matching of objects takes 12 seconds to compile.
  changes = {'accum_steps': 1 if name == 'detection' else 2}
  if name == 'classification':
    # One program shows that none of these changes a number.
    changes |= {'model.scan': True, 'model.remat': 'cheap', 'gather': 'layer'}
  assert_close(run(name, devices=8, **changes, **MESH), plain(name))


@pytest.mark.slow
@objectives_of('mae', 'segmentation')
def test_a_scan_is_the_loop(name):
  assert_close(run(name, **{'model.scan': True}), plain(name))


@pytest.mark.slow
def test_bfloat16_is_near_float32():
  got = run('classification', **{'model.dtype': 'bfloat16'})
  for (_, metrics), (_, want) in zip(got, plain('classification'), strict=True):
    assert metrics['loss'] == pytest.approx(want['loss'], rel=0.03)


@pytest.mark.fast('distillation')
def test_evaluation_counts_what_is_not_masked(name):
  made = plain_experiment(name)
  params, objective = made.place(new_params(name)), made.objective
  source = sources.open_source(made.config.data.name, 'test')
  stream = loader.eval_batches(source, objective.eval_transform(), batch_size=8)
  batch = jax.tree.map(jnp.asarray, next(stream))
  stream.close()
  evaluate = jax.jit(objective.evaluate)
  whole = evaluate(params, batch)
  assert whole.keys() == {'examples', *objective.metrics}
  assert whole['examples'] == 8
  one_by_one = [
    evaluate(params, batch | {'mask': (np.arange(8) == i).astype(np.float32)})
    for i in range(8)
  ]
  for key, total in whole.items():
    np.testing.assert_allclose(
      sum(float(x[key]) for x in one_by_one), total, rtol=1e-4, err_msg=key
    )
  # Rows of padding may have any values.
  noise = {
    k: jnp.asarray(x).at[5:].set(jnp.zeros_like(x[5:]))
    for k, x in batch.items()
  }
  mask = {'mask': (np.arange(8) < 5).astype(np.float32)}
  got, want = (evaluate(params, b | mask) for b in (noise, batch))
  for key in want:
    np.testing.assert_allclose(got[key], want[key], rtol=1e-5, err_msg=key)
