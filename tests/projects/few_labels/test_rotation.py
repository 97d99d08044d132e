"""S4L's loss from its formula, and where its two streams come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy import special

from tests.objectives import test_every
from vit_jax.checkpoints import opening
from vit_jax.data import sources
from vit_jax.experiment import CheckedConfig
from vit_jax.train import train

CLASSES, TURNS = 10, 4


def objective_of(**changes):
  return test_every.experiment_of('rotation', **changes).objective


def log_softmax(x):
  return special.log_softmax(np.asarray(x, np.float64), -1)


def test_the_loss_is_that_of_the_formula():
  """Image by image, each turned by NumPy."""
  weight = 0.3
  objective = objective_of(**{'objective.weight': weight})
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32),
    jax.eval_shape(
      lambda: objective.model.init(
        jax.random.key(0), jnp.zeros((1, 16, 16, 3))
      )['params']
    ),
  )
  batch = {
    'image': rng.normal(0, 1, (3, 16, 16, 3)).astype(np.float32),
    'unlabelled': rng.normal(0, 1, (3, 16, 16, 3)).astype(np.float32),
    'label': rng.dirichlet(np.ones(CLASSES), 3).astype(np.float32),
  }
  apply = jax.jit(lambda x: objective.model.apply({'params': params}, x[None]))
  classes, turns, told, right = [], [], [], []
  for name in ('image', 'unlabelled'):
    for i, image in enumerate(batch[name]):
      for k in range(TURNS):
        # Rows become columns: counted from the top left, to the left.
        logits, aux = apply(np.ascontiguousarray(np.rot90(image, k)))
        turned = log_softmax(aux['logits_rotation'])[0]
        turns.append(-turned[k])
        told.append(turned.argmax() == k)
        if name == 'image':
          classes.append(-np.sum(batch['label'][i] * log_softmax(logits)[0]))
          if k == 0:
            right.append(logits.argmax() == batch['label'][i].argmax())
  loss, metrics = test_every.loss_of(objective, params, batch)
  np.testing.assert_allclose(
    metrics['rotation_loss'], np.mean(turns), rtol=1e-5
  )
  np.testing.assert_allclose(
    loss, np.mean(classes) + weight * np.mean(turns), rtol=1e-5
  )
  assert metrics['rotation_accuracy'] == np.mean(told)
  assert metrics['accuracy'] == np.mean(right)


def test_both_streams_come_from_their_splits():
  """The labelled from their own few, the others from all of the others."""
  names = {'data.split': 'train[:5]', 'objective.unlabelled': 'train[5:9]'}
  objective = objective_of(**names, **{'data.crop_min_area': 1.0})
  transform, make = (x.train_transform() for x in (objective, objective.images))
  few, others = (
    [make(x, None)['image'] for x in sources.open_source('digits', split)]
    for split in ('train[:5]', 'train[5:9]')
  )
  source, seen = sources.open_source('digits', 'train[:5]'), set()
  for seed in range(60):
    example = transform(source[seed % 5], np.random.default_rng(seed))
    assert np.array_equal(example['image'], few[seed % 5])
    assert example['label'] == source[seed % 5]['label']
    (which,) = [
      i
      for i, x in enumerate(others)
      if np.array_equal(x, example['unlabelled'])
    ]
    seen.add(which)
  assert seen == {0, 1, 2, 3}


def test_unlabelled_images_may_be_of_other_data():
  names = {
    'objective.unlabelled_data': 'digits_canvas',
    'objective.unlabelled': 'test',
  }
  made = test_every.experiment_of('rotation', **names)
  found, data = made.objective.data, made.config.data
  assert (found.name, found.split) == ('digits_canvas', 'test')
  assert (data.name, data.split) == ('digits', 'train')


def test_both_streams_are_mirrored_image_by_image():
  """By draws of their own: the two images of a row have nothing in common."""
  objective = objective_of(**{'data.flip': True})
  image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
  images = np.stack([image] * 64)
  batch = {'image': images, 'unlabelled': images, 'label': np.zeros(64, int)}
  augmented = objective.augment(batch, jax.random.key(0))
  plain = np.asarray(objective.images.normalize(image[None]))[0]
  found = []
  for name in ('image', 'unlabelled'):
    as_is, mirrored = (
      [np.array_equal(x, way) for x in augmented[name]]
      for way in (plain, plain[:, ::-1])
    )
    assert np.logical_xor(as_is, mirrored).all()
    assert 10 < sum(mirrored) < 54
    found.append(mirrored)
  assert found[0] != found[1]


@pytest.mark.slow
def test_it_trains_on_a_folder_without_classes(tmp_path):
  """What comes out opens, tells classes, and is what others begin with."""
  rng = np.random.default_rng(0)
  folder = tmp_path / 'photos'
  folder.mkdir()
  for i in range(20):
    pixels = rng.integers(0, 256, (20, 24, 3), np.uint8)
    Image.fromarray(pixels).save(folder / f'{i}.png')
  config = test_every.config_of(
    'rotation',
    **{'data.split': 'train[:100]', 'objective.unlabelled_data': str(folder)},
  )
  config.total, config.eval_every = '2 steps', '2 steps'
  train(config, str(tmp_path / 'run'))
  checkpoint = opening.open_checkpoint(str(tmp_path / 'run'))
  assert 'head_rotation' in checkpoint.params
  assert checkpoint.logits(np.zeros((2, 16, 16, 3), np.uint8)).shape == (2, 10)
  after = test_every.experiment_of('classification').params_from(checkpoint)
  assert 'head_rotation' not in after
  jax.tree.map(
    np.testing.assert_array_equal,
    after['Transformer'],
    checkpoint.params['Transformer'],
  )


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'model.name': 'deit'},
      "model.name is 'deit', and objective.name=rot",
    ),
    (
      {'data.image_size': '16x32'},
      'data.image_size is 16x32, and rotating',
    ),
    ({'objective.weight': float('inf')}, 'objective.weight is inf'),
  ],
)
def test_what_cannot_work_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    CheckedConfig(test_every.config_of('rotation', **changes))
