"""S4L's triplets from their formula, and where the copies come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from tests.objectives import test_every
from vit_jax.data import sources, transforms
from vit_jax.experiment import CheckedConfig
from vit_jax.objectives import objective_type
from vit_jax.objectives.objective import Facts
from vit_jax.projects.few_labels import s4l as exemplar

B, K, GROUP = 6, 3, 3


def objective_of(**changes):
  return test_every.experiment_of('exemplar', **changes).objective


@pytest.mark.slow
def test_the_loss_is_that_of_the_formula():
  """Copy by copy, each against all others of its group."""
  margin, weight = 0.3, 0.7
  made = test_every.experiment_of(
    'exemplar',
    batch_size=B,
    **{
      'objective.copies': K,
      'objective.group': GROUP,
      'objective.margin': margin,
      'objective.weight': weight,
      'loss.label_smoothing': 0.1,
    },
  )
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), made.new_params()
  )
  raw = {
    'image': rng.integers(0, 256, (B, K, 16, 16, 3), np.uint8),
    'label': rng.integers(0, 10, B, np.int32),
    'unlabelled': rng.integers(0, 256, (B, K, 16, 16, 3), np.uint8),
    'owner': np.arange(2 * B, dtype=np.int32).reshape(B, 2),
  }
  # An image of both streams is no other to itself.
  raw['owner'][1, 1] = raw['owner'][0, 0]
  apply = jax.jit(lambda x: made.objective.model.apply({'params': params}, x))
  classes, triplets, apart, hits = [], [], [], []
  for first in range(0, B, GROUP):
    rows = range(first, first + GROUP)
    points = []
    for stream, name in enumerate(('image', 'unlabelled')):
      for row in rows:
        logits, aux = apply((raw[name][row] - 127.5) / np.float32(127.5))
        z = np.asarray(aux['pre_logits'], np.float64)
        z /= np.linalg.norm(z, axis=-1, keepdims=True)
        owner = raw['owner'][row, stream]
        points += [((name, row), owner, x) for x in z]
        if name == 'image':
          told = special.log_softmax(np.asarray(logits, np.float64), -1)
          wanted_C = 0.9 * np.eye(10)[raw['label'][row]] + 0.01
          classes += list(-told @ wanted_C)
          hits += list(told.argmax(-1) == raw['label'][row])
    for image, owner, z in points:
      far = [(i, o, np.sum((z - x) ** 2)) for i, o, x in points]
      gap = max(d for i, _, d in far if i == image) - min(
        d for _, o, d in far if o != owner
      )
      triplets.append(max(0, margin + gap))
      apart.append(gap < 0)
  batch = made.objective.augment(raw, jax.random.key(1))
  loss, metrics = test_every.loss_of(made.objective, params, batch)
  # Distances of nearly equal directions are differences of float32.
  np.testing.assert_allclose(
    metrics['triplet_loss'], np.mean(triplets), rtol=1e-4
  )
  np.testing.assert_allclose(
    loss, np.mean(classes) + weight * np.mean(triplets), rtol=1e-4
  )
  assert metrics['accuracy'] == np.float32(np.mean(hits))
  assert metrics['told_apart'] == np.float32(np.mean(apart))


def test_nothing_has_no_direction_and_a_gradient():
  x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
  x[1, 2] = 0
  lengths = np.linalg.norm(exemplar.unit_vectors(x), axis=-1)
  want = np.ones((2, 3))
  want[1, 2] = 0
  np.testing.assert_allclose(lengths, want, atol=1e-6)
  assert exemplar.unit_vectors(jnp.bfloat16(x)).dtype == np.float32
  # As of an image whose copies are all nothing.
  points, owners = np.stack([x, 0 * x], 1), np.array([[0, 1]] * 2)
  grads = jax.grad(lambda x: exemplar.triplet_gaps(x, owners).sum())(points)
  assert np.isfinite(grads).all() and np.any(grads)


def test_copies_are_of_one_image_each():
  """The labelled and the others from their splits, each copy a crop anew."""
  objective = objective_of(
    **{'objective.copies': 4, 'objective.unlabelled': 'train[5:7]'}
  )
  transform = objective.train_transform()
  source = sources.open_source('digits', 'train[:5]')
  example = transform(source[2], np.random.default_rng(0))
  assert example['label'] == source[2]['label']
  unlabelled = sources.open_source('digits', 'train[5:7]')
  owners = {transforms.seed_of(x['name']) for x in unlabelled}
  ours, others = example['owner'].view(np.uint32)
  assert ours == transforms.seed_of(source[2]['name']) and others in owners
  assert len({x.tobytes() for x in example['image']}) > 1
  changes = {'objective.unlabelled': 'train[5:7]', 'data.crop_min_area': 1.0}
  objective = objective_of(**changes)
  whole, make = objective.train_transform(), objective.images.train_transform()
  known = [make(x, None)['image'] for x in unlabelled]
  seen = set()
  for seed in range(30):
    example = whole(source[seed % 5], np.random.default_rng(seed))
    assert len({x.tobytes() for x in example['unlabelled']}) == 1
    seen |= {
      i
      for i, x in enumerate(known)
      if np.array_equal(x, example['unlabelled'][0])
    }
  assert seen == {0, 1}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'objective.copies': 1}, 'objective.copies is 1'),
    ({'objective.group': 0}, 'objective.group is 0'),
    (
      {'objective.group': 16, 'accum_steps': 2},
      'with accum_steps 2 does not divide',
    ),
    ({'objective.margin': float('inf')}, 'objective.margin is inf'),
  ],
)
def test_what_cannot_work_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    CheckedConfig(test_every.config_of('exemplar', **changes))


@pytest.mark.parametrize(
  ('name', 'changes'),
  [
    ('exemplar', {'objective.margin': 0.0, 'objective.weight': 0.0}),
    # A labelled image and another are enough to be told apart.
    ('exemplar', {'objective.group': 1}),
    ('pseudo_labels', {'objective.ratio': 1, 'objective.threshold': 1.0}),
    ('rotation', {'objective.weight': 0.0}),
    # An image that is twice in a batch is no other to itself.
    ('exemplar', {'data.repeats': 2}),
    # The labelled images of VIVI are no others to each other.
    ('video', {'data.repeats': 2}),
  ],
)
def test_what_works_is_taken(name, changes):
  CheckedConfig(test_every.config_of(name, **changes))


@pytest.mark.parametrize('name', ['exemplar', 'distillation'])
def test_several_classes_an_image_are_refused(name):
  config = test_every.config_of(name, **{'loss.name': 'softmax'})
  facts = Facts(('cat', 'dog'), 9, several_labels=True)
  made = objective_type(config).from_config(config, (16, 16))
  with pytest.raises(ValueError, match=f'several classes .*={name} learns one'):
    made.on_data(config, facts)
