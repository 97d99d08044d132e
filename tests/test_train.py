"""The training step against closed forms, and whole runs against each other."""

import dataclasses
import gc
import gzip
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


STATEFUL = {'optimizer.polyak': 0.9, 'model.dropout': 0.1, 'loss.mixup': 0.2}


@pytest.mark.slow
def test_rows_are_means_of_the_same_steps_after_a_resumption(
  tmp_path, preempt_at
):
  """Also where the newest checkpoint turns out to be damaged."""
  config = small_config(log_every='4 steps', checkpoint_every='2 steps')
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  train.train(config, str(whole))
  preempt_at(3)
  with pytest.raises(preemption.Preempted, match='saved step 3'):
    train.train(config, str(parts))
  preempt_at(None)
  # All of them, since one alone may be what merging has left and nobody reads.
  for array in (parts / 'checkpoints/3/params').rglob('d/*'):
    array.write_bytes(bytes(array.stat().st_size))
  train.train(config, str(parts))
  assert (parts / 'checkpoints/3.damaged').exists()
  assert read_metrics(parts) == read_metrics(whole)


@pytest.mark.slow
@pytest.mark.parametrize('seen', [3, 30])
def test_sigterm_ends_an_evaluation_which_is_done_again(
  reference, tmp_path, monkeypatch, seen
):
  """In the first evaluation, of 23 batches, or in the last one."""
  batches, count = loader.eval_batches, itertools.count()

  def told(*args, **kwargs):
    for batch in batches(*args, **kwargs):
      if next(count) == seen:
        signal.raise_signal(signal.SIGTERM)
      yield batch

  config = small_config(**STATEFUL)
  monkeypatch.setattr(loader, 'eval_batches', told)
  step = 6 if seen < 23 else 12
  with pytest.raises(preemption.Preempted, match=f'saved step {step}'):
    train.train(config, str(tmp_path))
  assert next(count) == seen + 1
  train.train(config, str(tmp_path))
  assert read_metrics(tmp_path) == read_metrics(reference)
  assert_equal(final_params(tmp_path), final_params(reference))
  for x in (6, 12):
    found, want = (
      saving.read_meta(epath.Path(place / f'checkpoints/{x}'))
      for place in (tmp_path, reference)
      if (place / f'checkpoints/{x}').exists()
    )
    for name in ('metrics', 'evaluated'):
      assert found[name] == want[name]


@pytest.mark.slow
@pytest.mark.parametrize(
  'changes',
  [{'best_metric': 'test/loss'}, {'extend': True, 'total': '13 steps'}],
  ids=str,
)
def test_patience_forgets_values_of_another_metric_or_length(
  tmp_path, preempt_at, changes
):
  config = small_config()
  preempt_at(8)
  with pytest.raises(preemption.Preempted, match='saved step 8'):
    train.train(config, str(tmp_path))
  preempt_at(None)
  config.update(changes)
  train.train(config, str(tmp_path))
  meta = saving.read_meta(epath.Path(tmp_path / 'checkpoints/12'))
  assert meta['evaluated'] == [meta['metrics'][config.best_metric]]


@pytest.mark.slow
def test_frozen_parts_stay_over_a_resumption(tmp_path, preempt_at):
  """Split over the mesh, without a state to save, and bit for bit."""
  config = small_config(
    **{
      'total': '4 steps',
      'mesh.fsdp': 2,
      'optimizer.frozen': ('^embedding/', 'encoderblock_0/'),
      'optimizer.lr_scales': (('^head/', 10.0),),
    }
  )
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  train.train(config, str(whole))
  preempt_at(2)
  with pytest.raises(preemption.Preempted, match='saved step 2'):
    train.train(config, str(parts))
  preempt_at(None)
  train.train(config, str(parts))
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


@pytest.mark.slow
def test_damaged_checkpoint_is_stepped_over(reference, tmp_path, caplog):
  workdir = tmp_path / 'run'
  shutil.copytree(reference, workdir)
  newest = workdir / 'checkpoints' / '12' / 'params' / 'manifest.ocdbt'
  newest.write_bytes(newest.read_bytes()[:20])
  train.train(small_config(**STATEFUL), str(workdir))
  assert 'checkpoints/12 is damaged (' in caplog.text
  assert_equal(final_params(workdir), final_params(reference))
  assert read_metrics(workdir) == read_metrics(reference)
  gc.collect()


@pytest.mark.slow
def test_only_when_told_a_run_starts_over(reference, tmp_path, caplog):
  workdir = tmp_path / 'run'
  shutil.copytree(reference, workdir)
  for params in workdir.glob('checkpoints/*/params'):
    shutil.rmtree(params)
  before = sorted(workdir.rglob('*'))
  config = small_config(**STATEFUL)
  for _ in range(2):
    with pytest.raises(ValueError, match='All checkpoints in .* --start_over'):
      train.train(config, str(workdir))
    assert read_metrics(workdir) == read_metrics(reference)
    assert set(workdir.rglob('*')) - set(before) <= {workdir / 'lock'}
  (workdir / 'metrics.csv').write_text('step,old\n1,2\n')
  train.train(config, str(workdir), start_over=True)
  assert_equal(final_params(workdir), final_params(reference))
  assert read_metrics(workdir) == read_metrics(reference)
  assert 'is damaged (' in caplog.text
  gc.collect()


@pytest.mark.slow
def test_half_written_checkpoint_is_ignored(reference, tmp_path):
  workdir = tmp_path / 'run'
  shutil.copytree(reference, workdir)
  folder = workdir / 'checkpoints'
  (folder / '12').rename(folder / '12.orbax-checkpoint-tmp-123')
  train.train(small_config(**STATEFUL), str(workdir))
  assert_equal(final_params(workdir), final_params(reference))
  assert not list(folder.glob('*tmp*'))


@pytest.mark.fast('model.depth-3')
@pytest.mark.parametrize(
  ('key', 'value'), [('optimizer.lr', 1e-4), ('model.depth', 3)]
)
def test_changes_that_cannot_be_resumed_are_refused(reference, key, value):
  config = small_config(**(STATEFUL | {key: value}))
  with pytest.raises(ValueError, match=f'(?s)cannot be resumed.*{key}: .*->'):
    train.train(config, str(reference))


@pytest.mark.slow
def test_an_extended_run_is_the_longer_one(tmp_path, caplog):
  """To the bit, where the rate does not depend on the length."""
  constant = {'optimizer.decay': 'constant', 'optimizer.warmup': '1 step'}
  short, longer = tmp_path / 'short', tmp_path / 'longer'
  train.train(small_config(**constant, total='4 steps'), str(short))
  config = small_config(**constant, total='6 steps')
  with pytest.raises(
    ValueError, match="(?s)total: '4 steps' -> '6 steps'.*extend"
  ):
    train.train(config, str(short))
  config.extend = True
  with pytest.raises(ValueError, match='3 steps, and the run .* has 4: set'):
    train.train(
      small_config(**constant, total='3 steps', extend=True), str(short)
    )
  train.train(config, str(short))
  assert 'total was 4 steps and is now 6 steps (6 steps). From' in caplog.text
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
    pytest.param({'data': 8}, 'step', marks=pytest.mark.slow),
    pytest.param({'fsdp': 8}, 'step', marks=pytest.mark.slow),
    pytest.param({'fsdp': 8}, 'layer', marks=pytest.mark.slow),
    pytest.param({'tensor': 2}, 'step', marks=pytest.mark.slow),
    pytest.param(
      {'data': 2, 'fsdp': 2, 'tensor': 2}, 'step', marks=pytest.mark.slow
    ),
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
@pytest.mark.parametrize(
  'gather', ['step', pytest.param('layer', marks=pytest.mark.slow)]
)
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
def test_fsdp_shards_parameters_optimizer_state_and_average():
  _, state, _ = one_step_setup({'fsdp': 8}, jax.devices())
  kernel = 'Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel'
  found = 0
  for path, x in jax.tree_util.tree_leaves_with_path(state):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if name.endswith(kernel):
      found += 1
      assert x.addressable_shards[0].data.size == x.size // 8, name
  assert found == 3  # parameters, momentum, average


@pytest.mark.slow
def test_fsdp_shards_the_state_of_what_is_not_frozen():
  _, state, _ = one_step_setup(
    {'fsdp': 8}, jax.devices(), **{'optimizer.frozen': ('encoderblock_1/',)}
  )
  sizes = {
    jax.tree_util.keystr(path, simple=True, separator='/'): (
      x.addressable_shards[0].data.size / x.size
    )
    for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
  }
  kernel = 'encoderblock_{}/MlpBlock_3/Dense_0/kernel'
  assert [size for name, size in sizes.items() if kernel.format(0) in name] == [
    1 / 8
  ]
  assert not any('encoderblock_1/' in name for name in sizes)


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
  'scan',
  [False, pytest.param(True, marks=pytest.mark.slow)],
  ids=['loop', 'scan'],
)
@pytest.mark.parametrize(
  'gather', [pytest.param('step', marks=pytest.mark.slow), 'layer']
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
  dogs = tmp_path / 'data' / 'train' / 'dog'
  (dogs / '0.png').unlink()
  train.train(small_config(**overrides), str(tmp_path / 'run'))
  assert 'had 17 images and now have 16' in caplog.text
  for i in range(3):
    shutil.copy(dogs / '1.png', dogs / f'more{i}.png')
  # As images do that could not be read once and are back.
  train.train(small_config(**overrides), str(tmp_path / 'run'))
  assert 'had 17 images and now have 19' in caplog.text


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


@pytest.mark.slow
def test_training_warns_where_the_start_saw_other_values(tmp_path, caplog):
  checkpoint = random_checkpoint(
    None, (8, 8), 10, patch_size=4, width=16, depth=2, mlp_dim=32, heads=2
  )
  checkpoint = dataclasses.replace(
    checkpoint, preprocessing=Preprocessing(mean=(0.4, 0.5, 0.6))
  )
  orbax.write(checkpoint, str(tmp_path / 'init'), 'float32')
  config = small_config(init=str(tmp_path / 'init'))
  train.train(config, str(tmp_path / 'run'))
  assert 'mean (0.4, 0.5, 0.6)' in caplog.text
  caplog.clear()
  config.data.mean = (0.4, 0.5, 0.6)
  train.train(config, str(tmp_path / 'same'))
  assert 'was trained on images' not in caplog.text
  saved = opening.open_checkpoint(str(tmp_path / 'same')).preprocessing
  assert saved.mean == (0.4, 0.5, 0.6)


def test_checkpoint_carries_what_it_takes_to_use_it(reference):
  checkpoint = opening.open_checkpoint(str(reference))
  assert checkpoint.class_names == tuple('0123456789')
  assert checkpoint.image_size == (8, 8)
  meta = ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(
    pathlib.Path(checkpoint.path) / 'meta'
  )
  assert meta['meta']['config'] == json.loads(
    small_config(**STATEFUL).to_json()
  )


@pytest.mark.parametrize(
  ('overrides', 'message'),
  [
    ({'total': '3 weeks'}, "'3 weeks' is not a duration"),
    ({'optimizer.warmup': '12 steps'}, 'warm-up of 12 steps does not fit'),
    ({'batch_size': 16, 'accum_steps': 4}, 'use a multiple of 32, such as 32'),
    ({'mesh.data': 3}, 'does not multiply to the 8 devices'),
    ({'loss.name': 'hinge'}, "loss.name is 'hinge'"),
    ({'evaluators.test.on': False}, 'none is on.*test.on=True'),
    (
      {'best_metric': 'val/accuracy'},
      'the evaluators do not measure.*test/accuracy',
    ),
    ({'data.mean': (0.5,)}, 'give a number for red'),
    ({'data.interpolation': 'cubic'}, "'cubic'; it must be one of"),
    ({'data.image_size': '9'}, 'do not tile an image of 9x9'),
    ({'batch_size': 12}, 'batch_size 12 .* 8 devices .* such as 16'),
    ({'init': '/nowhere.npz'}, 'No checkpoint at /nowhere.npz'),
    (
      {'eval_only': True},
      'eval_only is set, and vit_jax.train trains',
    ),
    ({'stages': (('first', {}),)}, 'stages is set'),
    ({'init': str(GOLDEN / 'tiny_s7.npz')}, 'patch_size 8; .* is 4'),
  ],
)
def test_configs_that_cannot_work_are_refused(tmp_path, overrides, message):
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    train.train(small_config(**overrides), str(tmp_path))
  assert not (tmp_path / 'metrics.csv').exists()


def test_misspelt_fields_are_refused(tmp_path):
  config = small_config()
  with config.unlocked():
    config.optimizer.learning_rate = 0.1
  with pytest.raises(ValueError, match="No config field 'optimizer.learning_r"):
    train.train(config, str(tmp_path))


@pytest.mark.slow
def test_a_step_copies_nothing_to_the_devices(tmp_path, monkeypatch):
  monkeypatch.setattr(train.sharding, 'replicate', lambda x, mesh: x)
  with pytest.raises(Exception, match='Disallowed host-to-device transfer'):
    train.train(small_config(), str(tmp_path))


@pytest.mark.slow
def test_rates_leave_out_the_step_that_compiles(
  tmp_path, monkeypatch, preempt_at
):
  """The first one of a process, which after a resumption is not step 1."""
  steps = []
  done = run.progress.Progress.first_step_done

  def first_step_done(self, step):
    steps.append(step)
    done(self, step)

  monkeypatch.setattr(run.progress.Progress, 'first_step_done', first_step_done)
  preempt_at(6)
  with pytest.raises(preemption.Preempted):
    train.train(small_config(), str(tmp_path))
  preempt_at(None)
  train.train(small_config(), str(tmp_path))
  assert steps == [1, 7]


@pytest.mark.slow
def test_a_profile_has_the_steps_that_were_asked_for(tmp_path, monkeypatch):
  monkeypatch.setattr(run.Run, 'profiled', range(2, 4))
  train.train(
    small_config(total='4 steps', eval_every='4 steps'), str(tmp_path)
  )
  (trace,) = tmp_path.glob('profile/plugins/profile/*/*.trace.json.gz')
  with gzip.open(trace) as f:
    calls = [event.get('name', '') for event in json.load(f)['traceEvents']]
  # Once a step, and in no other place.
  assert sum(name.endswith(' is_checkpoint_step') for name in calls) == 2
