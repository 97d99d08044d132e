"""What is kept, and what a damaged checkpoint does."""

import gc
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import sharding
from vit_jax.checkpoint import Checkpoints

METRIC = 'test/accuracy'


def state(value, devices=8):
  """Two items, sharded and not; incompressible, so that every byte counts."""
  mesh = sharding.make_mesh(
    {'data': 1, 'fsdp': -1, 'tensor': 1}, jax.devices()[:devices]
  )
  rng = np.random.default_rng(value)
  params = {
    'a': {'kernel': rng.standard_normal((16, 64)).astype(np.float32)},
    'bias': rng.standard_normal(5).astype(jnp.bfloat16),
  }
  tree = {'params': params, 'opt_state': {'count': np.int32(value)}}
  return jax.device_put(tree, sharding.tree_shardings(tree, mesh))


def shapes_of(tree):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
  )


def assert_is_state(got, value):
  jax.tree.map(np.testing.assert_array_equal, got, state(value))


def open_checkpoints(folder):
  return Checkpoints(str(folder), keep_last=2, best_metric=METRIC)


@pytest.fixture(scope='module')
def two_steps(tmp_path_factory):
  """A run saved at steps 1 and 2."""
  folder = tmp_path_factory.mktemp('run')
  store = open_checkpoints(folder)
  for step in (1, 2):
    store.save(step, state(step), {'step': step}, {METRIC: 0.5})
  store.close()
  return folder


def test_restores_what_was_saved(two_steps):
  store = open_checkpoints(two_steps)
  step, got = store.restore(shapes_of(state(0)))
  assert step == 2
  assert_is_state(got, 2)
  assert store.latest_meta() == {'step': 2}
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(state(0)), strict=True):
    assert x.sharding == y.sharding
  store.close()


@pytest.mark.parametrize('devices', [1, 2, 4])
def test_restores_onto_another_number_of_devices(two_steps, devices):
  store = open_checkpoints(two_steps)
  step, got = store.restore(shapes_of(state(0, devices)))
  store.close()
  assert step == 2
  assert_is_state(got, 2)
  kernel = got['params']['a']['kernel']
  assert len(kernel.sharding.device_set) == devices
  assert kernel.addressable_shards[0].data.size == kernel.size // devices


@pytest.mark.parametrize(
  'kind',
  [
    'remove',
    'flip',
    pytest.param('truncate', marks=pytest.mark.slow),
    pytest.param('empty', marks=pytest.mark.slow),
  ],
)
def test_damage_to_any_file_is_noticed_or_harmless(
  two_steps, tmp_path, kind, caplog
):
  """Whatever happens to a file of step 2: step 2 or step 1 come back whole."""
  newest = two_steps / 'checkpoints' / '2'
  names = [f.relative_to(newest) for f in newest.rglob('*') if f.is_file()]
  stepped_over = set()
  for i, name in enumerate(sorted(names)):
    folder = tmp_path / str(i)
    shutil.copytree(two_steps, folder)
    path = folder / 'checkpoints' / '2' / name
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    if kind == 'remove':
      path.unlink()
    elif kind == 'flip':
      data[middle : middle + 1] = bytes([data[middle] ^ 0x55] if data else [])
      path.write_bytes(data)
    else:
      path.write_bytes(data[:middle] if kind == 'truncate' else b'')
    store = open_checkpoints(folder)
    meta = store.latest_meta()
    step, got = store.restore(shapes_of(state(0)))
    assert_is_state(got, step)
    assert meta['step'] >= step
    store.close()
    if step == 1:
      stepped_over.add(name.parts[0])
      assert (folder / 'checkpoints' / '2.damaged').exists()
      assert 'checkpoints/2 is damaged and stepped over' in caplog.text
      caplog.clear()
  assert {'params', 'opt_state', 'checksums', 'meta'} <= stepped_over
  gc.collect()


def test_wrong_arrays_in_whole_files_are_noticed(two_steps, tmp_path):
  """The files of another run's step: readable, only not what was saved."""
  folder = tmp_path / 'run'
  shutil.copytree(two_steps, folder)
  checkpoints = folder / 'checkpoints'
  shutil.rmtree(checkpoints / '2' / 'params')
  shutil.copytree(checkpoints / '1' / 'params', checkpoints / '2' / 'params')
  store = open_checkpoints(folder)
  step, got = store.restore(shapes_of(state(0)))
  store.close()
  assert step == 1
  assert_is_state(got, 1)


def test_nothing_saved_restores_nothing(tmp_path):
  store = open_checkpoints(tmp_path)
  assert store.latest_meta() is None
  assert store.restore(shapes_of(state(0))) is None
  store.close()


def test_keeps_the_last_and_the_best(tmp_path):
  store = open_checkpoints(tmp_path)
  for step, accuracy in enumerate([0.1, 0.9, 0.3, None, 0.5, None]):
    metrics = {} if accuracy is None else {METRIC: accuracy}
    store.save(step, state(step), {}, metrics)
  store.wait()
  assert store.best_step() == 1
  store.close()
  kept = sorted(int(p.name) for p in (tmp_path / 'checkpoints').iterdir())
  assert kept == [1, 4, 5]
