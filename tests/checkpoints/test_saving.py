"""Saving, restoring, and damaged checkpoints."""

import errno
import gc
import json
import logging
import shutil
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from tests.conftest import ROOT, WITHOUT_ROOTS_RIGHTS
from vit_jax.checkpoints import saving
from vit_jax.checkpoints.saving import Checkpoints
from vit_jax.training import sharding

pytestmark = pytest.mark.usefixtures('garbage_of_this_file')

METRIC = 'test/accuracy'
MESH = {'data': 1, 'fsdp': -1, 'tensor': 1}


def state(value, devices=8):
  """Two items, sharded and not; incompressible, so that every byte counts."""
  mesh = sharding.make_mesh(MESH, jax.devices()[:devices])
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


def open_checkpoints(folder, **kwargs):
  return Checkpoints(str(folder), keep_last=2, best_metric=METRIC, **kwargs)


def restored_from(folder, **kwargs):
  """Returns the step that a run would resume from."""
  store = open_checkpoints(folder, **kwargs)
  try:
    store.latest_meta()
    found = store.restore(shapes_of(state(0)))
  finally:
    store.close()
  if found is None:
    return None
  assert_is_state(found[1], found[0])
  return found[0]


def names_in(folder):
  return sorted(str(p.relative_to(folder)) for p in folder.rglob('*'))


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
  assert store.latest_meta()['step'] == 2
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(state(0)), strict=True):
    assert x.sharding == y.sharding
  store.close()


def test_what_changes_while_it_is_saved_is_not_saved(tmp_path, monkeypatch):
  """Files are written in the background, after `save` has returned."""
  dumps, gate = json.dumps, threading.Event()

  def late(value, *args, **kwargs):
    if threading.current_thread() is not threading.main_thread():
      gate.wait(60)
    return dumps(value, *args, **kwargs)

  monkeypatch.setattr(json, 'dumps', late)
  store = open_checkpoints(tmp_path)
  rows = [1.5]
  store.save(1, state(1), {'rows': rows}, {METRIC: 0.5})
  rows.append(2.5)
  gate.set()
  store.wait()
  assert store.latest_meta()['rows'] == [1.5]
  store.close()


@pytest.mark.parametrize('devices', [1, 2])
def test_restores_onto_another_number_of_devices(
  two_steps, monkeypatch, devices
):
  restore, asked = ocp.CompositeCheckpointHandler.restore, []

  def spy(self, folder, args):
    asked.append(args)
    return restore(self, folder, args)

  monkeypatch.setattr(ocp.CompositeCheckpointHandler, 'restore', spy)
  store = open_checkpoints(two_steps)
  step, got = store.restore(shapes_of(state(0, devices)))
  store.close()
  assert step == 2
  assert_is_state(got, 2)
  kernel = got['params']['a']['kernel']
  assert len(kernel.sharding.device_set) == devices
  assert kernel.addressable_shards[0].data.size == kernel.size // devices
  # Nothing is put where it was saved, on devices that may be no more.
  wanted = jax.tree.leaves([part.item for part in asked[0].values()])
  assert {len(x.sharding.device_set) for x in wanted} == {devices}


@pytest.mark.slow
def test_damage_to_any_file_is_noticed_or_harmless(two_steps, tmp_path, caplog):
  """Whichever file of step 2 is damaged, step 2 or step 1 is restored."""
  newest = two_steps / 'checkpoints' / '2'
  names = [f.relative_to(newest) for f in newest.rglob('*') if f.is_file()]
  stepped_over = set()
  for i, name in enumerate(sorted(names)):
    folder = tmp_path / str(i)
    shutil.copytree(two_steps, folder)
    path = folder / 'checkpoints' / '2' / name
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 1] = bytes([data[middle] ^ 0x55] if data else [])
    path.write_bytes(data)
    store = open_checkpoints(folder)
    meta = store.latest_meta()
    step, got = store.restore(shapes_of(state(0)))
    assert_is_state(got, step)
    assert meta['step'] >= step
    store.close()
    if step == 1:
      stepped_over.add(name.parts[0])
      assert (folder / 'checkpoints' / '2.damaged').exists()
      assert 'checkpoints/2 is damaged (' in caplog.text
      caplog.clear()
  assert {'params', 'opt_state', 'checksums', 'meta'} <= stepped_over
  gc.collect()


def test_wrong_arrays_in_whole_files_are_noticed(two_steps, tmp_path):
  """The files of another step can be read, but are not the saved ones."""
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


def test_a_run_goes_on_after_damage_and_meets_it_again(run, caplog):
  checkpoints, asyncio = run / 'checkpoints', logging.getLogger('asyncio')
  shutil.rmtree(checkpoints / '2' / 'params')
  asyncio.setLevel(logging.NOTSET)
  store = open_checkpoints(run)
  assert store.restore(shapes_of(state(0)))[0] == 1
  # Of the reads beside the first that failed.
  assert not asyncio.isEnabledFor(logging.ERROR)
  assert store.latest_step() == 1
  store.save(2, state(2), {}, {METRIC: 0.5})
  store.close()
  assert restored_from(run) == 2
  (file,) = (checkpoints / '2/params/d').iterdir()
  file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
  assert restored_from(run) == 1
  # Only the newer of the two is kept.
  assert (checkpoints / '2.damaged/params').exists()
  assert caplog.text.count('2 is damaged (') == 2
  assert caplog.text.count('renamed to 2.damaged,') == 2
  gc.collect()


def test_a_step_is_saved_once(tmp_path):
  store = open_checkpoints(tmp_path)
  assert store.latest_step() is None
  for value in (1, 2):
    store.save(1, state(value), {'value': value}, {METRIC: 0.5})
    assert store.latest_step() == 1
  store.wait()
  assert store.latest_meta()['value'] == 1
  store.save(2, state(2), {}, {METRIC: 0.1})
  assert store.latest_step() == 2
  store.close()
  shutil.rmtree(tmp_path / 'checkpoints' / '2')
  assert restored_from(tmp_path) == 1


def test_no_step_is_left_out_for_a_later_one(tmp_path):
  """orbax would leave it out if `force` were not set."""
  store = open_checkpoints(tmp_path)
  for step in (5, 3):
    store.save(step, state(step), {}, {})
  store.close()
  assert saving.steps(tmp_path / 'checkpoints') == [3, 5]


def test_nothing_saved_restores_nothing(tmp_path):
  store = open_checkpoints(tmp_path)
  assert store.latest_meta() is None
  assert store.restore(shapes_of(state(0))) is None
  store.close()


@pytest.mark.parametrize('hindered', [False, True])
def test_what_another_process_meets_is_met_by_all(run, monkeypatch, hindered):
  """The other process sets its flag for damage or for a failed read."""
  gathered = saving.multihost_utils.process_allgather
  others = [[not hindered, hindered]]

  def gather(x, **options):
    if np.shape(x) != (2,):  # orbax's
      return gathered(x, **options)
    return np.stack([x, others.pop() if others else [False, False]])

  before = names_in(run)
  store = open_checkpoints(run)
  monkeypatch.setattr(saving.multihost_utils, 'process_allgather', gather)
  if hindered:
    with pytest.raises(
      OSError, match='now: another process prints the reason'
    ) as e:
      store.restore(shapes_of(state(0)))
    assert e.value.errno == errno.EIO
    assert names_in(run) == before
  else:
    assert store.restore(shapes_of(state(0)))[0] == 1
    assert (run / 'checkpoints' / '2.damaged').exists()
  store.close()


@pytest.mark.parametrize(
  ('error', 'is_damage'),
  [
    (ValueError('DATA_LOSS: bytes'), True),
    (ValueError('UNAVAILABLE: HTTP'), False),
    (ValueError('Bytes: 3 of 4'), True),
    (KeyError('params'), True),
    (FileNotFoundError('params'), True),
    (RuntimeError('params'), False),
  ],
  ids=repr,
)
def test_damage_is_what_was_read_and_makes_no_sense(
  two_steps, tmp_path, error, is_damage
):
  folder = saving.absolute(str(two_steps)) / 'checkpoints' / '2'
  outer = Exception('outer')
  outer.__cause__ = Exception('between')
  outer.__cause__.__cause__ = error
  said = f'{type(error).__name__}: {error}'
  for given in (error, outer):
    damage, hindrance = saving.judge(folder, given)
    assert (damage, hindrance) == ((said, '') if is_damage else ('', said))
  # What cannot be read is not judged.
  damage, hindrance = saving.judge(folder / 'nowhere', error)
  assert not damage and hindrance.startswith('FileNotFoundError: ')


@pytest.mark.parametrize('to', [np.asarray, jnp.asarray])
def test_checksums_are_sums_of_bits(to):
  tree = {
    'a': np.full((3, 7), 1, np.float32),  # 3f800000 in hexadecimal
    'b': np.arange(6, dtype=np.int32).reshape(2, 3).T,
    'c': np.full(5, -2, jnp.bfloat16),  # c000
    'd': np.full(4, -1, np.int8),
    'e': np.float32(-0.0),
  }
  got = saving.checksums(jax.tree.map(to, tree))
  assert got.dtype == np.uint32
  wanted = [21 * 0x3F800000 % 2**32, 15, 5 * 0xC000, 4 * 255, 1 << 31]
  np.testing.assert_array_equal(got, wanted)


def test_steps_are_in_the_order_of_numbers():
  """File systems list folders in any order."""
  names = ('10', '9', '7.damaged', '100', '0')
  paths = [saving.absolute(f'/run/checkpoints/{name}') for name in names]
  for listed in (paths, paths[::-1]):
    folder = types.SimpleNamespace(iterdir=lambda listed=listed: listed)
    assert saving.steps(folder) == [0, 9, 10, 100]


def test_there_are_no_steps_where_there_is_nothing(tmp_path):
  assert saving.steps_in(str(tmp_path / 'nowhere')) == []
  (tmp_path / 'checkpoints').write_text('no folder')
  with pytest.raises(NotADirectoryError):
    saving.steps_in(str(tmp_path))


@pytest.fixture
def run(two_steps, tmp_path):
  """A copy of `two_steps`."""
  shutil.copytree(two_steps, tmp_path / 'run')
  return tmp_path / 'run'


def assert_only_unreadable(run, message):
  """Checks that restoring raises an error and leaves all files."""
  before = names_in(run)
  with pytest.raises(OSError, match=message) as e:
    restored_from(run)
  assert e.value.errno == errno.EIO
  assert names_in(run) == before
  gc.collect()


@pytest.mark.parametrize('name', ['meta/metadata', 'params/d/*'])
def test_a_disk_error_is_no_damage(run, name):
  """Reading /proc/self/mem fails like a bad disk, with EIO."""
  (file,) = (run / 'checkpoints' / '2').glob(name)
  whole = file.with_name('whole')
  file.rename(whole)
  file.symlink_to('/proc/self/mem')
  assert_only_unreadable(
    run,
    r'checkpoints/2 cannot be read now: OSError: \[Errno 5\].*same command',
  )
  whole.rename(file)
  assert restored_from(run) == 2


def test_a_failure_that_may_pass_is_no_damage(run, monkeypatch):
  def fail(*args):
    raise MemoryError

  with monkeypatch.context() as m:
    m.setattr(ocp.CompositeCheckpointHandler, 'restore', fail)
    assert_only_unreadable(run, 'checkpoints/2 cannot be read now: MemoryError')
  assert restored_from(run) == 2


PERMISSIONS = """
import pathlib
import sys
from tests.checkpoints.test_saving import names_in, restored_from
from vit_jax.checkpoints import opening
run = pathlib.Path(sys.argv[1])
for name, forbidden in [
  ('checkpoints', 0o777),
  ('checkpoints/2/params', 0o111),
  ('checkpoints/2/params/manifest.ocdbt', 0o777),
  ('checkpoints/2/meta/metadata', 0o777),
]:
  path, before = run / name, names_in(run)
  mode = path.stat().st_mode
  path.chmod(mode & ~forbidden)
  try:
    print(f'{name} opens at {restored_from(run)}')
  except OSError as e:
    print(e)
  path.chmod(mode)
  assert names_in(run) == before
step = run / 'checkpoints/2'
step.chmod(0)
try:
  opening.open_checkpoint(str(run))
except ValueError as e:
  print(e)
step.chmod(0o755)
"""


@pytest.mark.slow
def test_files_of_somebody_else_are_no_damage(run):
  """The kernel refuses to list or enter folders and to read files."""
  if WITHOUT_ROOTS_RIGHTS is None:
    pytest.skip('root may read everything, and there is no setpriv')
  done = subprocess.run(
    [*WITHOUT_ROOTS_RIGHTS, sys.executable, '-c', PERMISSIONS, str(run)],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert len(lines) == 5
  assert all('Permission denied' in line for line in lines), lines


def damage_all(run):
  for params in run.glob('checkpoints/*/params'):
    shutil.rmtree(params)


@pytest.mark.parametrize('already_renamed', [False, True])
def test_a_run_never_starts_over_by_itself(run, already_renamed):
  damage_all(run)
  checkpoints = run / 'checkpoints'
  if already_renamed:
    for step in (1, 2):
      (checkpoints / str(step)).rename(checkpoints / f'{step}.damaged')
  before = names_in(run)
  for _ in range(2):
    with pytest.raises(ValueError) as e:
      restored_from(run)
    assert f'All checkpoints in {checkpoints} are damaged: ' in str(e.value)
    for name in (
      ('1.damaged', '2.damaged') if already_renamed else ('1 (', '2 (')
    ):
      assert name in str(e.value)
    assert '--start_over' in str(e.value)
    assert names_in(run) == before
  assert restored_from(run, start_over=True) is None
  assert {p.name for p in checkpoints.iterdir()} == {'1.damaged', '2.damaged'}
  gc.collect()


def test_starting_over_is_for_runs_without_a_whole_checkpoint(run):
  assert restored_from(run, start_over=True) == 2


def edit_meta(step_dir, change):
  file = step_dir / 'meta' / 'metadata'
  meta = json.loads(file.read_text())['meta']
  change(meta)
  file.write_text(json.dumps({'meta': meta, 'sha256': saving._digest(meta)}))


@pytest.mark.slow
def test_a_checkpoint_with_damaged_metrics_is_not_the_best(tmp_path, caplog):
  """The metrics are in `meta`, or in a file of their own (old versions)."""
  store = open_checkpoints(tmp_path)
  for step, accuracy in enumerate([0.1, 0.9, 0.3, 0.2]):
    store.save(step, state(step), {}, {METRIC: accuracy})
  store.close()
  folder = tmp_path / 'checkpoints'
  assert saving.steps(folder) == [1, 2, 3]
  edit_meta(folder / '2', lambda meta: meta.pop('metrics'))
  (folder / '2/metrics').mkdir()
  old = folder / '2/metrics/metrics'
  meta = folder / '1/meta/metadata'
  for text in (json.dumps({METRIC: 0.7}), '{"test/acc'):
    old.write_text(text)
    store = open_checkpoints(tmp_path)
    assert store._metrics[1] == {METRIC: 0.9}
    assert store._metrics[2] == ({METRIC: 0.7} if text[-1] == '}' else {})
    store.close()
  meta.write_text(meta.read_text().replace('0.9', '0.8'))
  store = open_checkpoints(tmp_path)
  assert store._metrics[1] == {}
  store.save(4, state(4), {}, {METRIC: 0.2})
  store.save(5, state(5), {}, {METRIC: 0.1})
  store.close()
  assert saving.steps(folder) == [3, 4, 5]
  assert caplog.text.count('so it cannot be the best') == 3


@pytest.mark.parametrize(
  ('best', 'values', 'kept'),
  [
    # The first of two equal values; NaN does not count.
    ('highest', [0.5, 0.9, 0.9, float('nan'), None], [1, 3, 4]),
    ('lowest', [0.5, 0.1, 0.9, 0.7, 0.8], [1, 3, 4]),
    ('lowest', [None] * 3, [1, 2]),
  ],
)
def test_keeps_the_last_two_and_the_best(tmp_path, best, values, kept):
  store = open_checkpoints(tmp_path, best=best)
  for step, value in enumerate(values):
    metrics = {} if value is None else {METRIC: value}
    store.save(step, state(step), {}, metrics)
  store.close()
  assert saving.steps(tmp_path / 'checkpoints') == kept


def test_a_renamed_folder_is_no_other_step(tmp_path, caplog):
  store = open_checkpoints(tmp_path)
  for step in (1, 2):
    store.save(step, state(step), {}, {})
  store.close()
  folder = tmp_path / 'checkpoints'
  (folder / '2').rename(folder / '40')
  with pytest.raises(ValueError, match='saved as step 2, but its folder is 40'):
    saving.read_meta(epath.Path(folder / '40'))
  store = open_checkpoints(tmp_path)
  store.latest_meta()
  store.close()
  assert saving.steps(folder) == [1]
  assert 'saved as step 2' in caplog.text and (folder / '40.damaged').is_dir()


def test_what_a_killed_run_was_saving_is_removed(tmp_path):
  store = open_checkpoints(tmp_path)
  store.save(1, state(1), {}, {})
  store.close()
  half = tmp_path / 'checkpoints/2.orbax-checkpoint-tmp-1'
  (half / 'params').mkdir(parents=True)
  # In the background, for which the next save waits and closing does not.
  store = open_checkpoints(tmp_path)
  store.save(3, state(3), {}, {})
  store.close()
  assert not half.exists()
