"""The training step against closed forms, and whole runs against each other."""

import dataclasses
import gc
import importlib
import itertools
import json
import pathlib
import re
import shutil
import signal
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from flax import traverse_util
from PIL import Image

from configs import digits
from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import ROOT
from vit_jax.checkpoints import opening, saving
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.convert import orbax
from vit_jax.data import bad_images, loader, sources
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.models import variants
from vit_jax.objectives.objective import Facts
from vit_jax.training import optim, preemption, run, sharding

train = importlib.import_module('vit_jax.train')

pytestmark = pytest.mark.usefixtures('garbage_of_this_file')

GOLDEN = ROOT / 'tests/golden'


def small_config(**overrides):
  """Digits on a model that compiles in a second or two."""
  config = digits.get_config()
  config.model.update(width=16, depth=2, mlp_dim=32, heads=2)
  config.update_from_flattened_dict(
    {
      'total': '12 steps',
      'batch_size': 16,
      'log_every': '1 step',
      'eval_every': '6 steps',
      'checkpoint_every': '3 steps',
      'data.image_size': '8',
      'optimizer.warmup': '2 steps',
    }
    | overrides
  )
  return config


def final_params(workdir):
  return opening.open_checkpoint(str(workdir)).params


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b, rtol, atol):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b
  )


def read_metrics(workdir):
  lines = (pathlib.Path(workdir) / 'metrics.csv').read_text().splitlines()
  return lines[0], lines[1:]


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """An undisturbed run, with everything that has state in use."""
  workdir = tmp_path_factory.mktemp('reference')
  train.train(small_config(**STATEFUL), str(workdir))
  return workdir


STATEFUL = {
  'optimizer.polyak': 0.9,
  'model.dropout': 0.1,
  'loss.mixup': 0.2,
  'data.mean': (0.4, 0.5, 0.6),
  'keep_last': 4,  # all checkpoints
}


@pytest.mark.slow
def test_frozen_parts_and_rows_are_the_same_after_a_resumption(
  tmp_path, preempt_at
):
  """The newest checkpoint is damaged, so the run resumes from an older one.

  Frozen parts have no optimizer state. A row of metrics is the mean of two
  steps, and the checkpoints of steps 3 and 5 are saved between the two.
  """
  config = small_config(
    **{
      'total': '8 steps',
      'log_every': '2 steps',
      'eval_every': '8 steps',
      'mesh.fsdp': 2,
      'optimizer.frozen': ('^embedding/', 'encoderblock_0/'),
      'optimizer.lr_scales': (('^head/', 10.0),),
    }
  )
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  train.train(config, str(whole))
  preempt_at(5)
  with pytest.raises(preemption.Preempted, match='saved step 5'):
    train.train(config, str(parts))
  preempt_at(None)
  # All of them, since one alone may be what merging has left and nobody reads.
  for array in (parts / 'checkpoints/5/params').rglob('d/*'):
    array.write_bytes(bytes(array.stat().st_size))
  train.train(config, str(parts))
  assert (parts / 'checkpoints/5.damaged').exists()
  assert read_metrics(parts) == read_metrics(whole)
  assert [row.split(',')[0] for row in read_metrics(parts)[1]] == [*'2468']
  got = opening.open_checkpoint(str(parts))
  assert_equal(got.params, final_params(whole))
  key, _ = jax.random.split(jax.random.key(config.seed))
  fresh = variants.init(got.model, key, got.image_size)
  for (path, x), start in zip(
    jax.tree_util.tree_leaves_with_path(got.params),
    jax.tree.leaves(fresh),
    strict=True,
  ):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    frozen = name.startswith('embedding/') or 'encoderblock_0/' in name
    # Compiled or not, random numbers differ in their last digit.
    assert np.allclose(x, start, rtol=1e-6, atol=0) == frozen, name


@pytest.mark.slow
def test_sigterm_ends_an_evaluation_which_is_done_again(
  reference, tmp_path, monkeypatch
):
  """In the first evaluation, after 3 of its 23 batches."""
  batches, count = loader.eval_batches, itertools.count()

  def told(*args, **kwargs):
    for batch in batches(*args, **kwargs):
      if next(count) == 3:
        signal.raise_signal(signal.SIGTERM)
      yield batch

  config = small_config(**STATEFUL)
  monkeypatch.setattr(loader, 'eval_batches', told)
  with pytest.raises(preemption.Preempted, match='saved step 6'):
    train.train(config, str(tmp_path))
  assert next(count) == 4
  train.train(config, str(tmp_path))
  assert read_metrics(tmp_path) == read_metrics(reference)
  assert_equal(final_params(tmp_path), final_params(reference))
  for x in (6, 12):
    found, want = (
      saving.read_meta(epath.Path(place / f'checkpoints/{x}'))
      for place in (tmp_path, reference)
    )
    for name in ('metrics', 'evaluated'):
      assert found[name] == want[name]


@pytest.mark.slow
def test_patience_forgets_values_of_another_metric(tmp_path, preempt_at):
  config = small_config(total='4 steps', eval_every='2 steps')
  preempt_at(3)
  with pytest.raises(preemption.Preempted, match='saved step 3'):
    train.train(config, str(tmp_path))
  preempt_at(None)
  config.best_metric = 'test/loss'
  train.train(config, str(tmp_path))
  meta = saving.read_meta(epath.Path(tmp_path / 'checkpoints/4'))
  assert meta['evaluated'] == [meta['metrics']['test/loss']]


def test_a_pattern_that_matches_nothing_ends_before_the_first_step(tmp_path):
  config = small_config(**{'optimizer.frozen': ('encoderblock_7/',)})
  with pytest.raises(
    ValueError, match="'encoderblock_7/' of .* no trainable parameter"
  ):
    train.train(config, str(tmp_path))


@pytest.mark.slow
def test_finished_run_has_nothing_left_to_do(reference, tmp_path, capsys):
  shutil.copytree(reference, tmp_path / 'run')
  train.train(small_config(**STATEFUL), str(tmp_path / 'run'))
  assert 'final test/accuracy' in capsys.readouterr().out
  assert read_metrics(tmp_path / 'run') == read_metrics(reference)


def test_changes_that_cannot_be_resumed_are_refused(reference):
  config = small_config(**(STATEFUL | {'model.depth': 3}))
  with pytest.raises(
    ValueError, match='(?s)cannot be resumed.*model.depth: 2 -> 3'
  ):
    train.train(config, str(reference))


@pytest.mark.slow
def test_an_extended_run_is_the_longer_one(tmp_path):
  """To the bit, where the rate does not depend on the length."""
  constant = {'optimizer.decay': 'constant', 'optimizer.warmup': '1 step'}
  short, longer = tmp_path / 'short', tmp_path / 'longer'
  train.train(small_config(**constant, total='4 steps'), str(short))
  config = small_config(**constant, total='6 steps')
  config.extend = True
  train.train(config, str(short))
  # Patience does not count evaluations of the shorter run.
  meta = saving.read_meta(epath.Path(short / 'checkpoints/6'))
  assert meta['evaluated'] == [meta['metrics']['test/accuracy']]
  config.extend = False
  train.train(config, str(longer))
  assert_equal(final_params(short), final_params(longer))


@pytest.mark.slow
def test_changes_that_do_not_matter_are_resumed(
  reference, tmp_path, preempt_at
):
  preempt_at(5)
  with pytest.raises(preemption.Preempted):
    config = small_config(**STATEFUL, **{'mesh.slice': 2, 'mesh.fsdp': 2})
    train.train(config, str(tmp_path))
  preempt_at(None)
  changes = {
    'mesh.slice': 1,
    'log_every': '3 steps',
    'mesh.data': 4,
    'mesh.fsdp': 2,
    'model.remat': 'nothing_saveable',
  }
  train.train(small_config(**(STATEFUL | changes)), str(tmp_path))
  got, want = (
    traverse_util.flatten_dict(final_params(path), sep='/')
    for path in (tmp_path, reference)
  )
  # The gradient of the keys' biases is zero but for rounding, which Adam
  # scales up.
  compared = [name for name in want if not name.endswith('key/bias')]
  assert len(compared) == len(got) - 2
  # Other devices sum in another order.
  assert_close(
    *({name: params[name] for name in compared} for params in (got, want)),
    rtol=1e-3,
    atol=1e-4,
  )


@pytest.mark.parametrize(
  ('bad_step', 'saved'),
  [
    pytest.param(8, [3, 6], id='between saves'),
    pytest.param(6, [3], id='at a save', marks=pytest.mark.slow),
  ],
)
def test_diverging_names_the_step_and_keeps_the_last_good(
  tmp_path, monkeypatch, bad_step, saved
):
  """One step so long that the parameters overflow, its loss still finite."""
  monkeypatch.setattr(
    optim,
    'schedule',
    lambda *_: lambda step: jnp.where(step == bad_step - 1, 1e38, 1e-3),
  )
  with pytest.raises(run.Diverged) as e:
    train.train(small_config(), str(tmp_path))
  assert f'Step {bad_step}: ' in str(e.value)
  assert f'checkpoints/{saved[-1]}.' in str(e.value)
  folders = (tmp_path / 'checkpoints').iterdir()
  assert sorted(int(p.name) for p in folders) == saved
  for leaf in jax.tree.leaves(final_params(tmp_path)):
    assert np.isfinite(leaf).all()


def one_step_setup(mesh_sizes, devices, **overrides):
  config = small_config(
    **({'loss.mixup': 0.2, 'optimizer.polyak': 0.75} | overrides)
  )
  # Not Adam: it scales up rounding errors where a true gradient is zero, as
  # that of the keys' biases is.
  config.optimizer.name = 'sgd'
  config.optimizer.update(lr=0.1, decay='linear', warmup='1 step')
  config.total = '100 steps'
  config.mesh = {'data': 1, 'fsdp': 1, 'tensor': 1} | mesh_sizes
  made = Experiment(
    CheckedConfig(config, devices), Facts(tuple(map(str, range(10))), 100)
  )
  return made.train_step(), made.start(made.new_params()), made.mesh


def test_what_a_run_starts_from_takes_no_room_beside_its_state():
  config = small_config(**{'optimizer.polyak': 0.5})
  made = Experiment(
    CheckedConfig(config), Facts(tuple(map(str, range(10))), 100)
  )
  params = made.new_params()
  state = made.start(params)
  assert all(x.is_deleted() for x in jax.tree.leaves(params))
  assert not any(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.fixture
def begun(tmp_path, monkeypatch):
  """Gives a config that starts from a checkpoint, and what training gets."""
  checkpoint = random_checkpoint(
    None, (8, 8), 10, patch_size=4, width=16, depth=2, mlp_dim=32, heads=2
  )
  orbax.write(checkpoint, str(tmp_path / 'init'), 'float32')
  alive, got, original = [], [], opening.open_checkpoint

  def opened(path):
    found = original(path)
    alive.append(weakref.ref(found))
    return found

  def stub(experiment, source, fixed, evaluators, params, *_):
    gc.collect()
    got.append((params, [ref() for ref in alive]))

  monkeypatch.setattr(opening, 'open_checkpoint', opened)
  monkeypatch.setattr(train, '_train', stub)
  return small_config(init=str(tmp_path / 'init')), got


@pytest.mark.slow
def test_a_run_begins_with_another_checkpoint_or_goes_on(begun, tmp_path):
  """And does not keep what it began with for as long as it trains."""
  config, got = begun
  train.train(config, str(tmp_path / 'new'))
  (tmp_path / 'old/checkpoints/3').mkdir(parents=True)
  train.train(config, str(tmp_path / 'old'))
  train.train(config, str(tmp_path / 'old'), start_over=True)
  assert [params is None for params, _ in got] == [False, True, False]
  assert [alive for _, alive in got] == [[None], [None], [None, None]]


def test_statistics_come_from_a_checkpoint_or_are_refused(
  tmp_path, monkeypatch
):
  """Also where a run starts over, and not where it goes on."""
  monkeypatch.setattr(bad_images, 'open_checked', lambda *_: 1 / 0)
  config = digits.get_config('resnet')
  config.model.version = 0
  with pytest.raises(ValueError, match='model.version is 0'):
    train.train(config, str(tmp_path))
  (tmp_path / 'checkpoints/3').mkdir(parents=True)
  with pytest.raises(ZeroDivisionError):
    train.train(config, str(tmp_path))
  with pytest.raises(ValueError, match='model.version is 0'):
    train.train(config, str(tmp_path), start_over=True)


def batch_of(n=16):
  rng = np.random.default_rng(0)
  return {
    'image': rng.integers(0, 256, (n, 8, 8, 3), np.uint8),
    'label': rng.integers(0, 10, n, np.int32),
  }


def run_steps(mesh_sizes, n_devices, steps=20, **overrides):
  step, state, mesh = one_step_setup(
    mesh_sizes, jax.devices()[:n_devices], **overrides
  )
  history = [jax.device_get(state.params)]
  for i in range(steps):
    batch = sharding.global_batch(batch_of(), mesh)
    state, metrics = step(state, {}, batch, np.int32(i))
    history.append(jax.device_get(state.params))
  return history, jax.device_get(state), jax.device_get(metrics)


@pytest.fixture(scope='module')
def one_device():
  return run_steps({}, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('mesh', 'gather'),
  [
    ({'fsdp': 8}, 'step'),
    ({'data': 2, 'fsdp': 2, 'tensor': 2}, 'layer'),
  ],
  ids=str,
)
def test_any_mesh_equals_one_device(one_device, mesh, gather):
  """After 20 steps; float32 sums of other orders differ by this much."""
  _, want, want_metrics = one_device
  devices = int(np.prod(list(mesh.values())))
  _, got, got_metrics = run_steps(mesh, devices, gather=gather)
  assert_close(got.params, want.params, rtol=1e-4, atol=1e-5)
  assert_close(got_metrics, want_metrics, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('gather', ['step', 'layer'])
def test_state_over_fsdp_and_data_trains_as_on_one_device(gather):
  sizes = {'model.width': 64, 'model.depth': 1, 'gather': gather}
  _, want, want_metrics = run_steps({}, 1, steps=3, **sizes)
  mesh = {'data': 2, 'fsdp': 2}
  _, got, got_metrics = run_steps(mesh, 4, steps=3, **sizes)
  assert_close(got.params, want.params, rtol=1e-4, atol=1e-5)
  assert_close(got.average, want.average, rtol=1e-4, atol=1e-5)
  assert_close(got_metrics, want_metrics, rtol=1e-4, atol=1e-5)
  step, state, made = one_step_setup(mesh, jax.devices()[:4], **sizes)
  head = state.params['head']['kernel'].addressable_shards[0].data
  assert head.shape == (16, 10)
  # What is summed or gathered is of the model: nothing has all of the batch.
  batch = sharding.global_batch(batch_of(48), made)
  text = step.lower(state, {}, batch, np.int32(0)).compile().as_text()
  sent = re.findall(r'\w+\[([\d,]+)\][^=]* all-(?:gather|reduce)\(', text)
  assert '64,10' in sent
  assert not [x for x in sent if '48' in x.split(',')]


@pytest.mark.slow
def test_fsdp_shards_the_state_and_frozen_parts_have_none():
  _, state, _ = one_step_setup(
    {'fsdp': 8}, jax.devices(), **{'optimizer.frozen': ('encoderblock_1/',)}
  )
  shards = {
    jax.tree_util.keystr(path, simple=True, separator='/'): (
      x.addressable_shards[0].data.size / x.size
    )
    for path, x in jax.tree_util.tree_leaves_with_path(state)
  }
  kernel = 'encoderblock_0/MlpBlock_3/Dense_0/kernel'
  # One share each of the parameters, the momentum and the average.
  found = [share for name, share in shards.items() if name.endswith(kernel)]
  assert found == [1 / 8] * 3
  frozen = {name.split('/')[0] for name in shards if 'encoderblock_1/' in name}
  assert frozen == {'params', 'average'}


@pytest.mark.slow
def test_batches_are_split_and_their_rows_never_travel():
  """Nor where each device works off its own in parts."""
  step, state, mesh = one_step_setup(
    {'data': 8}, jax.devices(), **{'loss.mixup': 0.0, 'accum_steps': 2}
  )
  batch = sharding.global_batch(batch_of(), mesh)
  assert batch['image'].addressable_shards[0].data.shape[0] == 2
  text = step.lower(state, {}, batch, np.int32(0)).compile().as_text()
  assert 'all-reduce' in text
  moves = re.findall(r'.* (?:all-gather|all-to-all|collective-permute)\(', text)
  assert not any('8,8,3]' in line for line in moves)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('gather', 'scan'), [('step', False), ('layer', False), ('layer', True)]
)
def test_fsdp_gathers_weights_and_sums_no_activations(gather, scan):
  """Every kernel is gathered; nothing with the whole batch is gathered or
  summed, which is what the partitioner prefers where it is left to itself.
  """
  step, state, mesh = one_step_setup(
    {'fsdp': 8},
    jax.devices(),
    gather=gather,
    **{'model.scan': scan, 'model.remat': 'cheap', 'batch_size': 48},
  )
  batch = sharding.global_batch(batch_of(48), mesh)
  text = step.lower(state, {}, batch, np.int32(0)).compile().as_text()
  shapes = {
    kind: re.findall(rf'(\w+\[[\d,]*\])[^=]* {kind}\(', text)
    for kind in ('all-gather', 'all-reduce')
  }
  kernels = ['f32[16,32]', 'f32[32,16]', 'f32[16,10]']
  assert set(kernels) <= set(shapes['all-gather']) | {
    x.replace('2,16,32', '16,32').replace('2,32,16', '32,16')
    for x in shapes['all-gather']
  }
  if not scan:
    # Once for both passes, or in each of them.
    times = {'step': 1, 'layer': 2}[gather]
    assert shapes['all-gather'].count('f32[16,32]') == 2 * times
  for kind, found in shapes.items():
    for shape in found:
      sizes = shape.partition('[')[2].strip(']').split(',')
      assert '48' not in sizes, (kind, shape)


@pytest.mark.slow
def test_polyak_average_is_the_closed_form(one_device):
  history, state, _ = one_device
  want = history[0]
  for t, params in enumerate(history[1:]):
    decay = min(0.75, (1 + t) / (10 + t))
    want = jax.tree.map(lambda a, p, d=decay: d * a + (1 - d) * p, want, params)
  assert_close(state.average, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_fine_tuning_keeps_the_body_and_replaces_the_head(tmp_path):
  """From the original's 32 px checkpoint to 48 px, at learning rate 0."""
  config = small_config(
    **{
      'init': str(GOLDEN / 'tiny-rep_s7.npz'),
      'total': '2 steps',
      'optimizer.warmup': '0 steps',
      'optimizer.lr': 0.0,
      'data.image_size': '48',
    }
  )
  config.model.update(patch_size=8, width=48, mlp_dim=96, heads=3, depth=2)
  train.train(config, str(tmp_path))
  params = final_params(tmp_path)
  old = opening.open_checkpoint(config.init).params
  assert 'pre_logits' not in params
  assert not params['head']['kernel'].any()
  assert params['head']['kernel'].shape == (48, 10)
  assert_equal(params['embedding'], old['embedding'])
  old['Transformer'].pop('posembed_input')
  posemb = params['Transformer'].pop('posembed_input')['pos_embedding']
  assert posemb.shape == (1, 37, 48)
  assert_equal(params['Transformer'], old['Transformer'])


@pytest.mark.slow
def test_folder_with_unreadable_images(tmp_path, monkeypatch, caplog):
  """Found before training: refused, or left out and counted."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  rng = np.random.default_rng(0)
  for split in ('train', 'test'):
    for name in ('cat', 'dog'):
      folder = tmp_path / 'data' / split / name
      folder.mkdir(parents=True)
      for i in range(9):
        pixels = rng.integers(0, 256, (12, 9, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f'{i}.png')
  broken = tmp_path / 'data' / 'train' / 'cat' / '3.png'
  broken.write_bytes(broken.read_bytes()[:50])
  overrides = {'data.name': str(tmp_path / 'data'), 'total': '3 steps'}
  with pytest.raises(ValueError, match=r'(?s)1 of 18 .*cat/3\.png.*=skip'):
    train.train(small_config(**overrides), str(tmp_path / 'run'))
  overrides['data.on_bad_image'] = 'skip'
  train.train(small_config(**overrides), str(tmp_path / 'run'))
  checkpoint = opening.open_checkpoint(str(tmp_path / 'run'))
  assert checkpoint.class_names == ('cat', 'dog')
  # An image that is gone when the run resumes.
  (tmp_path / 'data' / 'train' / 'dog' / '0.png').unlink()
  train.train(small_config(**overrides), str(tmp_path / 'run'))
  assert 'had 17 images and now have 16' in caplog.text


def test_evaluating_alone_gives_the_accuracy_of_training(reference):
  header, rows = read_metrics(reference)
  column = header.split(',').index('test/accuracy')
  config = small_config(**STATEFUL)
  config.eval_only = True
  got = train.evaluate_only(config, str(reference))
  assert got['test/accuracy'] == pytest.approx(
    float(rows[-1].split(',')[column])
  )
  assert got['test/examples'] == 360


def test_evaluating_alone_needs_an_evaluator(tmp_path):
  pictures = {'evaluators.test.on': False, 'evaluators.pictures.on': True}
  config = small_config(eval_only=True, **pictures)
  with pytest.raises(ValueError, match='eval_only needs .*test.on=True'):
    train.evaluate_only(config, str(tmp_path))


def test_evaluating_alone_scales_images_as_the_checkpoint_says(tmp_path):
  """Against its own logits of the images, scaled by hand."""
  mean, std = (0.2, 0.5, 0.7), (0.3, 0.1, 0.4)
  checkpoint = random_checkpoint(
    None, (8, 8), 10, patch_size=4, width=16, depth=1, mlp_dim=20, heads=2
  )
  checkpoint = dataclasses.replace(
    checkpoint, preprocessing=Preprocessing(mean=mean, std=std)
  )
  orbax.write(checkpoint, str(tmp_path / 'init'), 'float32')
  config = small_config(init=str(tmp_path / 'init'))
  given = config.to_json()
  got = train.evaluate_only(config, '')
  assert config.to_json() == given

  source = sources.open_source('digits', 'test')
  images = np.stack([source[i]['image'] for i in range(len(source))])
  labels = np.array([source[i]['label'] for i in range(len(source))])
  scaled = (images / 255 - np.array(mean)) / np.array(std)
  logits, _ = jax.jit(checkpoint.model.apply)(
    {'params': checkpoint.params}, scaled
  )
  assert got['test/accuracy'] == np.mean(np.argmax(logits, -1) == labels)
  losses = -jax.nn.log_softmax(logits)[np.arange(len(labels)), labels]
  assert got['test/loss'] == pytest.approx(float(losses.mean()), rel=1e-5)


def test_checkpoint_carries_what_it_takes_to_use_it(reference):
  checkpoint = opening.open_checkpoint(str(reference))
  assert checkpoint.class_names == tuple('0123456789')
  assert checkpoint.image_size == (8, 8)
  assert checkpoint.preprocessing.mean == (0.4, 0.5, 0.6)
  meta = ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(
    pathlib.Path(checkpoint.path) / 'meta'
  )
  assert meta['meta']['config'] == json.loads(
    small_config(**STATEFUL).to_json()
  )


@pytest.mark.parametrize(
  ('overrides', 'message'),
  [
    ({'eval_only': True}, 'eval_only is set, and vit_jax.train trains'),
    ({'evaluators.test.on': False}, 'none is on.*test.on=True'),
    ({'init': str(GOLDEN / 'tiny_s7.npz')}, 'patch_size 8; .* is 4'),
  ],
)
def test_configs_that_cannot_work_are_refused(tmp_path, overrides, message):
  with pytest.raises(ValueError, match=message):
    train.train(small_config(**overrides), str(tmp_path))
  assert not (tmp_path / 'metrics.csv').exists()


@pytest.mark.slow
def test_a_step_copies_nothing_to_the_devices(tmp_path, monkeypatch):
  monkeypatch.setattr(train.sharding, 'replicate', lambda x, mesh: x)
  with pytest.raises(Exception, match='Disallowed host-to-device transfer'):
    train.train(small_config(), str(tmp_path))
