"""Training at several image sizes, of which each step has one."""

import contextlib
import csv
import functools
import importlib
import itertools
import json

import jax
import numpy as np
import pytest

from tests.test_train import assert_close, assert_equal, small_config
from vit_jax.checkpoints import opening, transfer
from vit_jax.data import images, loader, sources, transforms
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.objectives.objective import Facts
from vit_jax.training import preemption, run, sharding

train = importlib.import_module('vit_jax.train')

SIZES = ((8, 8), (12, 12), (8, 16))
DEPTH_ONE = {'model.depth': 1, 'total': '4 steps', 'eval_every': '4 steps'}
SEVERAL = DEPTH_ONE | {'data.image_size': '8,16'}


def drawn(seed, steps, count):
  """Returns which of so many sizes each step has, as NumPy draws them."""
  step_seed = np.random.SeedSequence(seed).generate_state(3)[2]
  return [
    int(np.random.default_rng((int(step_seed), step)).integers(count))
    for step in range(steps)
  ]


def batches(sizes, steps, **fields):
  stream = loader.train_batches(
    sources.open_source('digits', 'train[:100]'),
    transforms.OneOf(tuple(map(transforms.TrainTransform, sizes))),
    **{'batch_size': 6, 'seed': 3} | fields,
  )
  with contextlib.closing(stream):
    return list(itertools.islice(stream, steps))


def test_each_batch_is_that_of_its_size_alone():
  """Whatever the step it begins with and the processes that share it."""
  which = drawn(3, 24, len(SIZES))
  assert {*which} == {0, 1, 2}
  alone = [batches([size], 24) for size in SIZES]
  want = [alone[k][step] for step, k in enumerate(which)]
  assert_equal(batches(SIZES, 24), want)
  assert_equal(batches(SIZES, 4, start_step=20), want[20:])
  parts = [
    batches(SIZES, 24, process_index=p, process_count=2) for p in range(2)
  ]
  joined = [
    jax.tree.map(lambda *xs: np.concatenate(xs), *both)
    for both in zip(*parts, strict=True)
  ]
  assert_equal(joined, want)


def experiment_of(devices, **changes):
  config = small_config(
    **SEVERAL
    | {'optimizer.name': 'sgd', 'optimizer.warmup': '0 steps', 'batch_size': 8}
    | changes
  )
  facts = Facts(tuple(map(str, range(10))), 1437)
  return Experiment(CheckedConfig(config, jax.devices()[:devices]), facts)


def step_of(made, size):
  """Returns the parameters before and after the first step, and its batch."""
  (batch,) = batches([size], 1, batch_size=8)
  rng = np.random.default_rng(0)
  # As initialised, what the head multiplies has no gradient.
  before = jax.tree.map(
    lambda x: x + np.float32(0.1) * rng.standard_normal(x.shape, np.float32),
    jax.device_get(made.new_params()),
  )
  state, metrics = made.train_step()(
    made.start(made.place(before)),
    {},
    sharding.global_batch(batch, made.mesh),
    np.int32(0),
  )
  return before, jax.device_get(state.params), batch, metrics


def test_gradients_come_through_the_resized_positions():
  """Those of a model of the other size, whose positions NumPy resized."""
  lr = 0.1
  made = experiment_of(
    1,
    **{
      'data.image_size': '8,8x16',
      'optimizer.frozen': ('^embedding/',),
      'optimizer.lr': lr,
      'optimizer.decay': 'constant',
      'optimizer.momentum': 0.0,
      'optimizer.weight_decay': 0.0,
      'optimizer.clip_norm': 0.0,
    },
  )
  before, after, batch, metrics = step_of(made, (8, 16))
  objective = made.objectives[8, 16]
  resized = transfer.at_size(made.objective.model, before, (8, 8), (8, 16))
  key = jax.random.fold_in(jax.random.split(jax.random.key(0))[1], 0)
  key_augment, key_loss = jax.random.split(key)
  prepared = objective.augment(jax.tree.map(np.asarray, batch), key_augment)
  function = functools.partial(objective.loss, train=True)
  (loss, _), grads = jax.jit(jax.value_and_grad(function, has_aux=True))(
    resized, {}, prepared, key_loss
  )
  np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-5)
  # Each of 2 x 2 positions takes part in 2 x 4: by thirds along the rows, after
  # the class token's, which stays.
  share = np.array([[3, 0], [2, 1], [1, 2], [0, 3]]) / 3
  matrix = np.eye(9, 5)
  matrix[1:, 1:] = np.kron(np.eye(2), share)
  name = 'Transformer', 'posembed_input', 'pos_embedding'
  grads = jax.device_get(grads)
  # What is frozen has none, nor a part in their norm.
  grads['embedding'] = jax.tree.map(np.zeros_like, grads['embedding'])
  inner = grads[name[0]][name[1]]
  inner[name[2]] = np.einsum('LX,BLD->BXD', matrix, inner[name[2]])
  want = jax.tree.map(lambda x, g: x - lr * g, before, grads)
  assert_close(after, want, rtol=1e-5, atol=1e-6)
  for key, tree in (('grad_norm', grads), ('param_norm', want)):
    squares = [np.sum(np.square(x, dtype=float)) for x in jax.tree.leaves(tree)]
    assert metrics[key] == pytest.approx(np.sqrt(sum(squares)), rel=1e-5)
  assert metrics['lr'] == np.float32(lr)
  moved = after[name[0]][name[1]][name[2]] - before[name[0]][name[1]][name[2]]
  assert np.abs(moved).min(-1).max() > 1e-6


@pytest.mark.slow
def test_eight_devices_are_one_at_another_size():
  _, want, *_ = step_of(experiment_of(1), (16, 16))
  mesh = {'mesh.data': 4, 'mesh.fsdp': 2}
  _, got, *_ = step_of(experiment_of(8, **mesh), (16, 16))
  assert_close(got, want, rtol=1e-4, atol=1e-5)


RUN = SEVERAL | {
  'seed': 1,
  'total': '8 steps',
  'log_every': '2 steps',
  'evaluators.test.other_sizes': '16',
}


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('whole')
  train.train(small_config(**RUN), str(workdir))
  return workdir


@pytest.mark.slow
def test_resumed_is_uninterrupted(whole, tmp_path, monkeypatch, preempt_at):
  """Cut between two steps of different sizes, which one row is of."""
  which = drawn(1, 8, 2)
  assert which[4] != which[5]

  before_s = []

  def spied(**given):
    before_s.append(given['meta']['elapsed_s'])
    return run.Run(**given)

  monkeypatch.setattr(train, 'Run', spied)
  config = small_config(**RUN)
  preempt_at(5)
  with pytest.raises(preemption.Preempted, match='saved step 5'):
    train.train(config, str(tmp_path))
  preempt_at(None)
  saved = json.loads((tmp_path / 'checkpoints/5/meta/metadata').read_text())
  train.train(config, str(tmp_path))
  assert before_s == [0, saved['meta']['elapsed_s']] and before_s[1] > 0
  got, want = (opening.open_checkpoint(str(x)) for x in (tmp_path, whole))
  assert_equal(got.params, want.params)
  metrics = [(x / 'metrics.csv').read_text() for x in (tmp_path, whole)]
  assert metrics[0] == metrics[1]


def test_a_crop_at_another_size_is_as_large_a_part():
  config = small_config(**{'data.image_size': '224', 'data.resize_small': 256})
  for size, want in (((224, 224), 256), ((160, 160), 183), ((288, 192), 329)):
    made = images.Images.from_config(config.data, size)
    assert (made.size, made.preprocessing.resize_small) == (size, want)


def test_checkpoints_are_of_the_first_and_measured_at_others(whole):
  checkpoint = opening.open_checkpoint(str(whole))
  assert checkpoint.image_size == (8, 8)
  with (whole / 'metrics.csv').open() as f:
    *_, row = csv.DictReader(f)
  source = sources.open_source('digits', 'test')
  for size, suffix in (((8, 8), ''), ((16, 16), '_16x16')):
    there = transfer.resized(checkpoint, size)
    transform = there.transform()
    found = [transform(source[i]) for i in range(len(source))]
    logits = there.logits(np.stack([x['image'] for x in found]))
    right = np.argmax(logits, -1) == np.array([x['label'] for x in found])
    # The last bits may decide about an image in a tie.
    assert float(row[f'test/accuracy{suffix}']) == pytest.approx(
      float(right.mean()), abs=1.5 / len(source)
    )
    assert float(row[f'test/examples{suffix}']) == len(source)
  assert row['test/loss'] != row['test/loss_16x16']


@pytest.mark.slow
def test_a_list_of_one_is_the_number():
  """As the parameters after a step, and as the batches."""
  finals = [
    step_of(experiment_of(1, **{'data.image_size': size}), (8, 8))[1]
    for size in ('8', '(8)')
  ]
  assert_equal(*finals)
  source = sources.open_source('digits', 'train[:100]')
  alone = loader.train_batches(
    source, transforms.TrainTransform((8, 8)), batch_size=6, seed=3
  )
  with contextlib.closing(alone):
    assert_equal(batches([(8, 8)], 3), list(itertools.islice(alone, 3)))


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'data.image_size': '8,1.5'}, ["image_size is '1.5': write the side in"]),
    ({'data.image_size': '8,8x8'}, ["is '8,8x8': give each size once"]),
    (
      {'data.image_size': '8,9,16,10x12'},
      ['9x9: Patches of 4x4', '10x12: Patches of 4x4', 'with invalid sizes'],
    ),
    (
      {'model.posemb': 'relative'},
      ['16x16: Relative position embeddings learned for 2x2 patches cannot be'],
    ),
  ],
)
def test_all_that_cannot_be_are_refused_in_one_message(
  tmp_path, changes, words
):
  with pytest.raises(ValueError) as e:
    train.train(small_config(**SEVERAL | changes), str(tmp_path / 'w'))
  assert all(word in str(e.value) for word in words)
  assert str(e.value).count('loss.name') <= 1
  assert not (tmp_path / 'w').exists()
