"""The training step compiled ahead of time is that of training."""

import types

import jax
import numpy as np
import optax
import pytest

from vit_jax.models import attention
from vit_jax.tools.bench import step
from vit_jax.tools.plan import aot
from vit_jax.training import optim


def config(dtype='float32', *fields):
  fields = ('model.depth=1', 'model.mlp_dim=64', *fields)
  return step.config_of('ti16', 32, 4, dtype, fields)


@pytest.mark.slow
def test_the_state_stays_in_float32_and_is_reused():
  chosen = config('bfloat16')
  experiment = step.experiment_of(chosen, jax.devices()[:1])
  compiled = aot.training(experiment).lower().compile()
  assert 'bf16' in compiled.as_text()
  state = experiment.start(experiment.new_params())
  # Its memory counts once, though it goes in and comes out.
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  assert size < aot.peak_bytes(compiled) < 1.6 * size
  assert {str(x.dtype) for x in jax.tree.leaves(state)} <= {'float32', 'int32'}
  batch = step.random_batch(experiment)
  assert batch['image'].dtype == np.uint8
  after, metrics = compiled(state, {}, batch, np.int32(0))
  assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
  assert {'loss', 'grad_norm', 'lr'} <= metrics.keys()
  jax.block_until_ready(after)


@pytest.mark.parametrize(
  ('platform', 'want'), [('tpu', (False, ('tpu',))), ('gpu', (True, None))]
)
def test_a_gpus_own_kernels_stay_out_of_a_tpus_program(
  monkeypatch, platform, want
):
  class Function:
    def trace(self, shape):
      self.on_gpu = attention.on_gpu()
      return self

    def lower(self, *shapes, lowering_platforms=None):
      on_gpu = attention.on_gpu() if shapes else self.on_gpu
      return on_gpu, lowering_platforms

  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  device = types.SimpleNamespace(platform=platform)
  placed = types.SimpleNamespace(device_set=[device])
  shape = types.SimpleNamespace(sharding=placed)
  assert aot.Program(Function(), (shape,)).lower() == want


def test_devices_share_the_batch():
  program = aot.training(step.experiment_of(config(), jax.devices()[:2]))
  batch = program.shapes[2]
  parts = {x.sharding.shard_shape(x.shape)[0] for x in batch.values()}
  assert parts == {2}


@pytest.mark.slow
def test_steps_on_two_devices_are_those_of_training():
  """The loss of three steps, by hand on one device."""
  chosen = config(
    'float32', 'optimizer.decay=constant', 'optimizer.warmup=0 steps'
  )
  experiment = step.experiment_of(chosen, jax.devices()[:2])
  objective = experiment.objective
  state = experiment.start(experiment.new_params())
  batch = step.random_batch(experiment)
  o = chosen.optimizer
  optimizer = optax.adamw(
    o.lr, o.b1, o.b2, weight_decay=0.1, mask=optim.kernels
  )
  params = jax.tree.map(np.asarray, state.params)
  opt_state = optimizer.init(params)
  compiled = aot.training(experiment).lower().compile()

  @jax.jit
  def by_hand(params, opt_state, i):
    _, key = jax.random.split(jax.random.key(chosen.seed))
    key = jax.random.fold_in(key, i)
    key_augment, key_loss = jax.random.split(key)
    (loss, _), grads = jax.value_and_grad(objective.loss, has_aux=True)(
      params, objective.augment(batch, key_augment), key_loss
    )
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return loss, optax.apply_updates(params, updates), opt_state

  for i in range(3):
    loss, params, opt_state = by_hand(params, opt_state, np.int32(i))
    state, metrics = compiled(state, {}, batch, np.int32(i))
    # Adam divides by what may be tiny: rounding grows over the steps.
    np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-3)


def test_images_are_normalised_before_the_model():
  """With a mean and a deviation of each channel that nothing else has."""
  mean, std = (0.1, 0.2, 0.3), (0.7, 0.8, 0.9)
  chosen = config('float32', f'data.mean={mean}', f'data.std={std}')
  experiment = step.experiment_of(chosen, jax.devices()[:1])
  device = jax.devices()[1]
  program = aot.inference(experiment, device)
  placed = {
    d for x in jax.tree.leaves(program.shapes) for d in x.sharding.device_set
  }
  assert placed == {device}
  params = jax.tree.map(
    lambda x: 0.02 * np.random.default_rng(0).standard_normal(x.shape, 'f'),
    program.shapes[0],
  )
  images = step.random_batch(experiment)['image']
  normalised = (np.asarray(images) / 255 - mean) / std
  want = experiment.objective.model.apply(
    {'params': params}, normalised.astype(np.float32)
  )[0]
  got = program.lower().compile()(params, images)
  assert np.ptp(want) > 1e-3
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(('platform', 'peak'), [('tpu', 7), ('gpu', 1107)])
def test_only_tpus_know_when_each_array_is_needed(platform, peak):
  """Others take all of them, those that are reused once."""
  sizes = types.SimpleNamespace(
    argument_size_in_bytes=1000,
    output_size_in_bytes=100,
    temp_size_in_bytes=57,
    alias_size_in_bytes=50,
    peak_memory_in_bytes=7,
  )
  devices = [
    types.SimpleNamespace(device_set=[types.SimpleNamespace(platform=name)])
    for name in (platform, platform)
  ]
  compiled = types.SimpleNamespace(
    memory_analysis=lambda: sizes, input_shardings=(devices, {})
  )
  assert aot.peak_bytes(compiled) == peak
