"""Opening workdirs and golden checkpoints; names of classes."""

import dataclasses
import gc
import hashlib
import json
import shutil

import jax
import numpy as np
import pytest

from configs import digits
from tests.checkpoints.golden import ATOL, apply, open_golden
from tests.checkpoints.random_weights import logits_of, random_images
from vit_jax.checkpoints import opening, transfer
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.checkpoints.saving import Checkpoints
from vit_jax.models import variants

pytestmark = pytest.mark.usefixtures('garbage_of_this_file')


@pytest.mark.fast('tiny', 'tiny-gap')
@pytest.mark.parametrize('name', ['tiny', 'tiny-rep', 'tiny-gap', 'tiny-stem'])
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


@pytest.mark.parametrize('name', ['tiny-rep', 'tiny-stem'])
def test_scanned_layers_give_the_outputs_of_the_original(name):
  checkpoint, golden = open_golden(name)
  model = checkpoint.model.clone(scan=True)
  params = model.stack_layers(checkpoint.params)
  logits, _ = apply(model, params, golden['images'])
  np.testing.assert_allclose(logits, golden['logits'], rtol=0, atol=ATOL)


CLASS_NAMES = tuple(f'digit {i}' for i in range(10))


def save_workdir(workdir, steps, **fields):
  """Writes a workdir without training; returns its parameters by step.

  `fields` are fields of the config, such as 'optimizer.polyak'.
  """
  config = digits.get_config()
  config.model.update(width=16, depth=2, mlp_dim=32, heads=2)
  config.data.resize_small = 20
  config.update_from_flattened_dict(fields)
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
    state = {'params': init(jax.random.key(step))}
    if config.optimizer.polyak:
      state['average'] = init(jax.random.key(step + 100))
    store.save(step, state, meta, {})
    saved[step] = jax.device_get([*state.values()][-1])
  store.close()
  return saved


def edit(workdir, step, **changes):
  """Changes fields of a checkpoint's `meta` and its checksum.

  Fields of the config are changed there. The value `...` deletes a field.
  """
  place = workdir / f'checkpoints/{step}/meta/metadata'
  meta = json.loads(place.read_text())['meta']
  for name, value in changes.items():
    config = meta['config']
    group = next((x for x in (config['data'], config) if name in x), meta)
    group[name] = value
    if value is ...:
      del group[name]
  digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
  place.write_text(json.dumps({'meta': meta, 'sha256': digest}))


@pytest.fixture(scope='module')
def averaged(tmp_path_factory):
  """A workdir with averaged parameters, and the averages by step."""
  folder = tmp_path_factory.mktemp('averaged')
  return folder, save_workdir(folder, [8, 10], **{'optimizer.polyak': 0.9})


@pytest.fixture(scope='module')
def early(tmp_path_factory):
  """A workdir with early stopping and scanned layers; its parameters by step.

  No step has metrics.
  """
  folder = tmp_path_factory.mktemp('early')
  fields = {'early_stopping': True, 'model.scan': True}
  return folder, save_workdir(folder, [2, 4, 8, 10], **fields)


@pytest.fixture
def run(early, tmp_path):
  """A copy of `early` in `tmp_path`, and its parameters by step."""
  folder, saved = early
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  return tmp_path, saved


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_workdir_opens_at_its_newest_step(averaged, monkeypatch):
  folder, saved = averaged
  monkeypatch.chdir(folder.parent)
  checkpoint = opening.open_checkpoint(folder.name)
  assert checkpoint.path == str(folder / 'checkpoints' / '10')
  assert_equal(checkpoint.params, saved[10])
  assert all(type(x) is np.ndarray for x in jax.tree.leaves(checkpoint.params))
  assert checkpoint.class_names == CLASS_NAMES
  assert checkpoint.image_size == (16, 24)
  assert checkpoint.preprocessing.resize_small == 20
  assert checkpoint.model.width == 16


def test_any_step_opens_by_its_folder(averaged):
  folder, saved = averaged
  checkpoint = opening.open_checkpoint(str(folder / 'checkpoints' / '8'))
  assert_equal(checkpoint.params, saved[8])


@pytest.mark.parametrize(
  ('accuracies', 'changes', 'opened'),
  [
    ({2: 0.5, 4: 0.8, 8: 0.8}, {}, 4),  # the first of two that are best
    ({2: 0.5, 4: 0.3, 8: 0.3, 10: 0.4}, {'best': 'lowest'}, 4),
    ({}, {}, 10),  # preempted before it was evaluated
    ({2: 0.9, 10: 0.1}, {'early_stopping': False}, 10),
  ],
)
def test_a_run_that_stops_early_opens_at_its_best_step(
  run, accuracies, changes, opened
):
  folder, saved = run
  for step, accuracy in accuracies.items():
    edit(folder, step, metrics={'test/accuracy': accuracy})
  edit(folder, 10, **changes)
  checkpoint = opening.open_checkpoint(str(folder))
  assert checkpoint.path == str(folder / 'checkpoints' / str(opened))
  assert checkpoint.model.scan
  assert_equal(checkpoint.params, saved[opened])


def test_metrics_of_earlier_versions_are_in_a_file_of_their_own(run):
  folder, _ = run
  step = folder / 'checkpoints' / '4'
  edit(folder, 2, metrics={'test/accuracy': 0.3})
  edit(folder, 4, metrics=None)
  (step / 'metrics').mkdir()
  (step / 'metrics' / 'metrics').write_text('{"test/accuracy": 0.9}')
  assert opening.open_checkpoint(str(folder)).path == str(step)
  (step / 'metrics' / 'metrics').write_text('{"test/accur')
  with pytest.raises(ValueError, match=f'The checkpoint {step} cannot be read'):
    opening.open_checkpoint(str(folder))


# Orbax abandons the reads beside one that failed, and asyncio complains.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_damage_to_a_step_is_one_error_or_harmless(averaged, tmp_path):
  folder, saved = averaged
  step = folder / 'checkpoints' / '10'
  files = sorted(f.relative_to(step) for f in step.rglob('*') if f.is_file())
  refused = set()
  for i, name in enumerate(files):
    copy = tmp_path / str(i) / '10'
    shutil.copytree(step, copy)
    data = bytearray((copy / name).read_bytes())
    middle = len(data) // 2
    data[middle : middle + 1] = bytes([data[middle] ^ 0x55] if data else [])
    (copy / name).write_bytes(data)
    try:
      checkpoint = opening.open_checkpoint(str(copy))
    except ValueError as e:
      assert str(copy) in str(e)
      refused.add(name.parts[0])
    else:
      assert_equal(checkpoint.params, saved[10])
      assert checkpoint.class_names == CLASS_NAMES
  assert {'average', 'meta', 'checksums'} <= refused
  gc.collect()  # what orbax abandoned, while the filter above is on


def test_arrays_of_another_step_or_config_are_refused(averaged, tmp_path):
  shutil.copytree(averaged[0], tmp_path, dirs_exist_ok=True)
  steps = tmp_path / 'checkpoints'
  shutil.rmtree(steps / '10' / 'average')
  shutil.copytree(steps / '8' / 'average', steps / '10' / 'average')
  with pytest.raises(ValueError, match='10 .*of average differ from their'):
    opening.open_checkpoint(str(tmp_path))
  meta = json.loads((steps / '8/meta/metadata').read_text())['meta']
  meta['config']['model']['mlp_dim'] = 40
  edit(tmp_path, 8, config=meta['config'])
  message = '8 .*the arrays of average do not fit the config'
  with pytest.raises(ValueError, match=message):
    opening.open_checkpoint(str(steps / '8'))


def test_images_have_the_shorter_side_that_was_trained_at(run):
  folder, _ = run
  # Early configs lack `loss`.
  edit(folder, 10, objective={'short_sides': [10, 12]}, loss=...)
  checkpoint = opening.open_checkpoint(str(folder))
  assert checkpoint.image_size == (12, 24)
  assert checkpoint.loss == 'softmax'


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'resize_small': 10**9}, 'resize_small is 1000000000'),
    ({'config': {}}, 'KeyError'),
  ],
)
def test_edited_metadata_are_refused(run, changes, message):
  folder, _ = run
  edit(folder, 10, **changes)
  with pytest.raises(ValueError, match=f'10 cannot be read: .*{message}'):
    opening.open_checkpoint(str(folder))


def ten_classes(*names):
  return dataclasses.replace(open_golden('tiny')[0], class_names=names)


def test_classes_are_called_by_their_names():
  checkpoint = ten_classes('crane', 'dog', 'crane', *'3045678')
  assert [checkpoint.class_name(i) for i in range(5)] == [
    'crane (0)',
    'dog',
    'crane (2)',
    '3',
    '0',
  ]
  found = {
    'dog': 1,
    'crane (2)': 2,
    '3': 3,
    '0': 4,  # which is a name
    0: 0,
    9: 9,
    '9': 9,
  }
  for text, index in found.items():
    assert checkpoint.class_index(text) == index
  message = r"no class 'crane'.* Did you mean crane \(.\) or crane \(.\)"
  with pytest.raises(ValueError, match=message):
    checkpoint.class_index('crane')
  for text in ('10', -1, '²'):
    with pytest.raises(ValueError, match='an index from 0 to 9') as e:
      checkpoint.class_index(text)
    assert f'has no class {text!r}. Give' in str(e.value)
  with pytest.raises(ValueError, match='from 0 to 9. Did you mean dog'):
    checkpoint.class_index('dogs')


def test_probabilities_are_those_of_the_loss():
  checkpoint = ten_classes()
  logits_BC = np.float32([[0, 1, -2], [3, 3, 5]])
  waves = np.exp(logits_BC)
  np.testing.assert_allclose(
    checkpoint.probabilities(logits_BC),
    waves / waves.sum(-1, keepdims=True),
    rtol=1e-6,
  )
  each = dataclasses.replace(checkpoint, loss='sigmoid')
  np.testing.assert_allclose(
    each.probabilities(logits_BC), waves / (1 + waves), rtol=1e-6
  )


@pytest.mark.parametrize(
  ('name', 'way_out'),
  [
    ('nowhere', 'Give a path that exists, timm://'),
    (
      'vit_tiny_patch16_224',
      r'Did you mean timm://vit_tiny_patch16_224\.TAG\?',
    ),
    (
      'google/vit-base-patch16-224',
      r'Did you mean hf://google/vit-base-patch16-224\?',
    ),
  ],
)
def test_a_missing_checkpoint_is_named_with_the_way_out(name, way_out):
  with pytest.raises(
    FileNotFoundError, match=f'No checkpoint at {name}. {way_out}'
  ):
    opening.open_checkpoint(name)


def test_a_folder_without_checkpoints_says_what_to_give(tmp_path):
  place = tmp_path / '7.damaged'
  (place / 'meta').mkdir(parents=True)  # as in a step
  with pytest.raises(ValueError, match=f'{place} is not a checkpoint. Give'):
    opening.open_checkpoint(str(place))


@pytest.mark.parametrize('name', ['x.onnx', 'x/serve.py'])
def test_an_exported_program_is_no_checkpoint(tmp_path, name):
  (tmp_path / name).parent.mkdir(exist_ok=True)
  (tmp_path / name).write_bytes(b'program')
  given = tmp_path / name.split('/')[0]
  with pytest.raises(ValueError, match=f'{given} is an exported program'):
    opening.open_checkpoint(str(given))


def test_a_checkpoint_labels_images_as_it_is_preprocessed():
  size = (32, 48)
  checkpoint = dataclasses.replace(
    open_golden('tiny')[0],
    preprocessing=Preprocessing(
      52, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), 'bicubic'
    ),
  )
  checkpoint = transfer.resized(checkpoint, size)
  images = random_images(size)
  want = logits_of(checkpoint, images)
  for given in (images, images.astype(np.float32)):
    got = checkpoint.logits(given)
    np.testing.assert_allclose(got, want, rtol=0, atol=ATOL)
  transform = checkpoint.transform()
  assert transform.image_size == size
  assert transform.preprocessing == checkpoint.preprocessing
  assert transform.preprocessing.interpolation == 'bicubic'
