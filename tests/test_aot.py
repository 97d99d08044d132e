"""The training step compiled ahead of time is that of training."""

import jax
import numpy as np
import optax
import pytest

from vit_jax import aot, train
from vit_jax.bench import step


def config(dtype='float32', **fields):
  fields = {'model.depth': '1', 'model.mlp_dim': '64', **fields}
  return step.config_of('ti16', 32, 4, dtype, fields)


def test_the_state_stays_in_float32_and_is_reused():
  chosen = config('bfloat16')
  program = aot.training(chosen, jax.devices()[:1], step.NUM_CLASSES)
  compiled = program.lower().compile()
  assert 'bf16' in compiled.as_text()
  state = aot.new_state(chosen, program, step.NUM_CLASSES)
  # Its memory counts once, though it goes in and comes out.
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  assert size < aot.peak_bytes(compiled) < 1.6 * size
  assert {str(x.dtype) for x in jax.tree.leaves(state)} <= {'float32', 'int32'}
  batch = step.random_batch(chosen)
  assert batch['image'].dtype == np.uint8
  after, metrics = compiled(state, batch, np.int32(0))
  assert all(x.is_deleted() for x in jax.tree.leaves(state['params']))
  assert {'loss', 'grad_norm', 'lr'} <= metrics.keys()
  jax.block_until_ready(after)


def test_devices_share_the_batch():
  program = aot.training(config(), jax.devices()[:2], step.NUM_CLASSES)
  parts = {
    x.sharding.shard_shape(x.shape)[0] for x in program.shapes[1].values()
  }
  assert parts == {2}


@pytest.mark.parametrize('count', [1, 2])
def test_steps_are_those_of_training(count):
  """The loss of three steps, by hand on one device."""
  chosen = config(**{'optimizer.decay': 'constant'})
  program = aot.training(chosen, jax.devices()[:count], step.NUM_CLASSES)
  state = aot.new_state(chosen, program, step.NUM_CLASSES)
  batch = step.random_batch(chosen)
  objective = train.make_objective(chosen, step.model_of(chosen))
  optimizer = train.make_optimizer(chosen, lambda count: 1e-3)
  params = jax.tree.map(np.asarray, state['params'])
  opt_state = optimizer.init(params)
  compiled = program.lower().compile()

  @jax.jit
  def by_hand(params, opt_state, i):
    key = jax.random.fold_in(train.random_keys(chosen)[1], i)
    key_augment, key_loss = jax.random.split(key)
    (loss, _), grads = jax.value_and_grad(objective.loss, has_aux=True)(
      params, objective.augment(batch, key_augment), key_loss, train=True
    )
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return loss, optax.apply_updates(params, updates), opt_state

  for i in range(3):
    loss, params, opt_state = by_hand(params, opt_state, np.int32(i))
    state, metrics = compiled(state, batch, np.int32(i))
    # Adam divides by what may be tiny: rounding grows over the steps.
    np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-3)
