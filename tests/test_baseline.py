"""The recipe of "Better plain ViT baselines" against big_vision's formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import baseline
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.models import flops
from vit_jax.objectives.objective import Facts
from vit_jax.training import optim

CLASSES = tuple(map(str, range(1000)))
# big_vision's vit_s16_i1k.py: the peak rate, and its decay by the schedule.
LR, WD = 1e-3, 1e-4


@functools.cache
def experiment(argument='s16', examples=1_268_355):
  config = baseline.get_config(argument)
  return Experiment(CheckedConfig(config), Facts(CLASSES, examples))


def original_schedule(step, total, warmup=10_000):
  """The factor of the rate and of the decay, between 0 and 1."""
  p = np.clip((step - warmup) / (total - warmup), 0, 1)
  return (1 + np.cos(np.pi * p)) / 2 * np.minimum(1, step / warmup)


# 99 % of 1,281,167 images, in rounded steps of 1,024.
@pytest.mark.parametrize(
  ('argument', 'total'), [('s16', 111_477), ('s16,epochs=150', 185_794)]
)
def test_length_and_rates(argument, total):
  made = experiment(argument)
  assert made.durations.total == total
  assert made.durations.warmup == 10_000
  warm = np.array([0, 1, 4_999, 9_999])
  np.testing.assert_allclose(
    made.lr(warm), LR * original_schedule(warm + 1, total), rtol=1e-6
  )
  later = np.linspace(10_000, total, 50).astype(int)
  np.testing.assert_allclose(
    made.lr(later), LR * original_schedule(later, total), rtol=1e-5, atol=1e-10
  )


def test_the_model_has_the_originals_number_of_parameters():
  """As "ViT Baseline Revisited" counts it, with one linear layer as head."""
  for argument, hidden in (('s16,model.representation_size=0', 0), ('s16', 1)):
    model = experiment(argument).objective.model
    params = flops.count_params(model, (224, 224))
    assert params == 21_974_632 + hidden * (384 * 384 + 384)


@pytest.mark.parametrize('step', [3_000, 60_000])
def test_updates_are_the_originals(step):
  """Three of them, with kernels that decay and biases that do not."""
  made = experiment()
  # The original counts warm-up steps from 0.
  factor = float(original_schedule(step + (step < 10_000), 111_477))
  original = optax.chain(
    optax.clip_by_global_norm(1.0),
    # In float32, where the original's 0.9 becomes 0.8984.
    optax.scale_by_adam(b1=np.float32(0.9), mu_dtype='bfloat16'),
    optax.scale(LR),
    optax.add_decayed_weights(WD, mask=optim.kernels),
    optax.scale(-factor),
  )
  ours = optim.make(
    made.config.optimizer, lambda _: made.lr(step), made.objective.model
  )
  rng = np.random.default_rng(0)

  def draw(scale):
    tree = {'kernel': (5, 3), 'bias': (3,)}
    return {k: jnp.float32(scale * rng.normal(size=v)) for k, v in tree.items()}

  params = {'head': draw(10)}
  runs = [(tx, params, tx.init(params)) for tx in (original, ours)]
  for scale in (1, 0.01, 1):  # clipped and not
    grads = {'head': draw(scale)}
    for i, (tx, at, state) in enumerate(runs):
      updates, state = tx.update(grads, state, at)
      runs[i] = tx, optax.apply_updates(at, updates), state
  moved = [
    jax.tree.map(lambda a, b: np.array(a - b), at, params) for _, at, _ in runs
  ]
  # Of parameters around 10, float32 resolves moves of 1e-3 to 1e-3.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=3e-6), *moved
  )


def test_other_data_has_a_warm_up_that_fits():
  made = experiment('ti16,/data/photos,epochs=2', 51_200)
  assert made.config.data.name == '/data/photos'
  assert (made.config.data.split, made.durations.total) == ('train', 100)
  assert made.durations.warmup == 10
