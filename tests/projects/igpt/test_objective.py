"""Losses of pixels against NumPy, and that probabilities are some."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from tests.models.test_contract import random_params
from vit_jax import config as config_lib
from vit_jax.data.images import Images
from vit_jax.experiment import CheckedConfig
from vit_jax.models import variants
from vit_jax.objectives.objective import Facts
from vit_jax.projects.igpt import model as igpt
from vit_jax.projects.igpt.objective import Pixels

SIZE = (3, 4)
L = 12
COLOURS, N = 7, 4
PALETTE = tuple(np.random.default_rng(1).uniform(-1, 1, 21).tolist())
KEY = jax.random.key(0)


def make(causal=True, flip=False, size=SIZE, **fields):
  given = {'width': 8, 'depth': 2, 'mlp_dim': 20, 'heads': 2}
  model = variants.build(
    name='igpt',
    num_classes=0,
    image_size=size,
    causal=causal,
    **({'palette': PALETTE} | given | fields),
  )
  return Pixels(model, Images(size, flip=flip))


def images(n=N):
  rng = np.random.default_rng(2)
  return rng.integers(0, 256, (n, *SIZE, 3), np.uint8)


def norm(x, scale):
  return scale * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5)


def log_softmax(x):
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def in_numpy(params, batch, causal):
  """Returns the loss as the paper has it, one image and head at a time."""
  p, total = params, 0.0
  for b, image in enumerate(batch['image']):
    far = image.reshape(L, 1, 3) - np.reshape(PALETTE, (1, COLOURS, 3))
    colours = np.square(far).sum(-1).argmin(-1)
    x = p['pixel_embedding'][colours]
    if causal:
      x = np.vstack([p['start_embedding'][None], x[:-1]])
    else:
      x = x * (1 - batch['hidden'][b][:, None])
    x = x + p['pos_embedding'][0]
    for i in range(2):
      h = p[f'h{i}']
      y = norm(x, h['ln_1']['scale'])
      for n in range(2):
        q, k, v = (y @ h[s]['kernel'][:, n] for s in ('query', 'key', 'value'))
        logits = q @ k.T / np.sqrt(q.shape[-1])
        if causal:
          logits[np.triu_indices(L, 1)] = -np.inf
        x = x + np.exp(log_softmax(logits)) @ v @ h['out']['kernel'][n]
      y = norm(x, h['ln_2']['scale']) @ h['mlp']['Dense_0']['kernel']
      y = y / (1 + np.exp(-1.702 * y))
      x = x + y @ h['mlp']['Dense_1']['kernel']
    x = norm(x, p['ln_f']['scale'])
    nats = -log_softmax(x @ p['prediction']['kernel'])[np.arange(L), colours]
    total += nats.mean() if causal else nats[batch['hidden'][b]].mean()
  return total / len(batch['image'])


@pytest.mark.fast('False')
@pytest.mark.parametrize('causal', [True, False])
def test_loss_and_gradient_are_those_of_numpy(causal):
  made = make(causal)
  rng = np.random.default_rng(3)
  params = random_params(made.model, SIZE, rng)
  batch = made.augment({'image': images()}, KEY)
  if not causal:
    # Not none of an image's, which a mean over them has no value for.
    batch['hidden'] = batch['hidden'].at[:, 5].set(True)

  def loss(params):
    return made.loss(params, batch, KEY)[0]

  got, grads = jax.jit(jax.value_and_grad(loss))(params)
  numbers, exact = (
    jax.tree.map(np.asarray, batch),
    jax.tree.map(np.float64, params),
  )
  want = in_numpy(exact, numbers, causal)
  assert want > 1
  assert got == pytest.approx(want, rel=1e-5)
  # Central differences in float64 along a random direction of each array.
  leaves, structure = jax.tree.flatten(exact)
  for i, grad in enumerate(jax.tree.leaves(grads)):
    direction = rng.standard_normal(grad.shape)

    def moved(step, i=i, direction=direction):
      changed = list(leaves)
      changed[i] = changed[i] + step * direction
      return in_numpy(jax.tree.unflatten(structure, changed), numbers, causal)

    slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
    error = abs(np.sum(grad * direction) - slope)
    assert error < 1e-4 * max(np.linalg.norm(grad), 1e-2), structure


def test_probabilities_of_a_small_world_sum_to_one():
  """All images of two pixels in three colours."""
  made = make(size=(1, 2), palette=igpt.grey_palette(3))
  params = random_params(made.model, (1, 2), np.random.default_rng(4))
  worlds = [*itertools.product((0, 128, 255), repeat=2)]
  batch = np.uint8(worlds).reshape(9, 1, 2, 1).repeat(3, -1)
  nats = []
  for image in batch:
    prepared = made.augment({'image': image[None]}, KEY)
    loss, _ = made.loss(params, prepared, KEY)
    nats.append(2 * loss)
  assert np.ptp(nats) > 0.1
  assert np.sum(np.exp(-np.array(nats))) == pytest.approx(1, abs=1e-5)


def test_hidden_pixels_of_1000_images():
  made = make(causal=False)
  hidden = made.augment({'image': images(1000)}, KEY)['hidden']
  assert hidden.shape == (1000, L)
  # Five standard deviations of 12,000 draws.
  bound = 5 * np.sqrt(0.15 * 0.85 / (1000 * L))
  assert abs(hidden.mean() - 0.15) < bound
  other = made.augment({'image': images(1000)}, jax.random.key(1))['hidden']
  assert (np.asarray(hidden) != other).mean() > 0.2


def test_images_are_mirrored_where_that_is_asked_for():
  batch = {'image': jnp.asarray(images(64))}
  plain, flipped = (
    make(flip=flip).augment(batch, KEY) for flip in (False, True)
  )
  np.testing.assert_allclose(
    plain['image'], batch['image'] / 127.5 - 1, atol=1e-6
  )
  same = (flipped['image'] == plain['image']).all((1, 2, 3))
  mirrored = (flipped['image'] == plain['image'][:, :, ::-1]).all((1, 2, 3))
  assert (same ^ mirrored).all()
  # A binomial of 64 draws: 32 and a deviation of 4.
  assert abs(mirrored.sum() - 32) < 5 * 4


@pytest.mark.slow
def test_an_image_with_nothing_hidden_has_no_loss():
  made = make(causal=False)
  params = random_params(made.model, SIZE, np.random.default_rng(5))
  batch = made.augment({'image': images()}, KEY)
  batch['hidden'] = jnp.zeros((N, L), bool)
  loss_of = jax.jit(jax.value_and_grad(lambda p: made.loss(p, batch, KEY)[0]))
  loss, grads = loss_of(params)
  assert loss == 0
  assert not any(np.any(x) for x in jax.tree.leaves(grads))


@pytest.mark.slow
def test_evaluation_counts_each_image_once():
  """In whatever batch and order, and no padding."""
  made = make(causal=False)
  params = random_params(made.model, SIZE, np.random.default_rng(6))
  batch = {
    'image': images(),
    'index': np.int32([5, 6, 7, 8]),
    'mask': np.float32([1, 1, 0, 1]),
  }
  evaluate = jax.jit(made.evaluate)
  got = evaluate(params, batch)
  alone = [
    evaluate(params, {k: x[i : i + 1] for k, x in batch.items()})
    for i in (3, 0, 1)
  ]
  assert got.keys() == {'examples', *made.metrics}
  for name, x in got.items():
    want = float(sum(one[name] for one in alone))
    assert float(x) == pytest.approx(want, rel=1e-5), name
  assert got['examples'] == 3
  # What is hidden of an image follows from its place in the data, for ever.
  keys = [jax.random.fold_in(jax.random.key(0), i) for i in (5, 6, 8)]
  hidden = jnp.stack([jax.random.bernoulli(k, 0.15, (L,)) for k in keys])
  asked = {
    'image': made.images.normalize(batch['image'][[0, 1, 3]]),
    'hidden': hidden,
  }
  loss, _ = jax.jit(made.loss)(params, asked, KEY)
  assert got['loss'] == pytest.approx(3 * float(loss), rel=1e-5)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'objective.rate': 0.0}, 'objective.rate is 0.0'),
    ({'data.std': (0.5, 0.5, 0.4)}, 'data.std .*A palette needs images'),
    ({'data.image_size': '512'}, '262,144 pixels'),
  ],
)
def test_what_cannot_work_is_refused(changes, message):
  config = digits.get_config()
  config_lib.choose_objective(config, 'pixels')
  config_lib.choose_model(config, 'igpt_s')
  config.update_from_flattened_dict(changes)
  with pytest.raises(ValueError, match=message):
    CheckedConfig(config)


def test_a_config_says_the_share():
  config = digits.get_config()
  config_lib.choose_objective(config, 'pixels')
  config_lib.choose_model(config, 'igpt_s')
  config.objective.rate = 1.0
  made = Pixels.from_config(config, (8, 8)).on_data(config, Facts((), 10))
  assert (made.rate, made.class_names, made.model.num_classes) == (1.0, (), 0)


def test_other_models_are_refused():
  config = digits.get_config()
  config_lib.choose_objective(config, 'pixels')
  with pytest.raises(ValueError, match="model.name is 'vit'.*needs 'igpt'"):
    Pixels.from_config(config, (8, 8))
