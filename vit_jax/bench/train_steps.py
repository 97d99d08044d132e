"""Training steps, ours and those of others."""

import functools
import importlib.metadata
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.bench import race, speed, step
from vit_jax.bench.race import Contender
from vit_jax.plan import aot
from vit_jax.training import sharding


def _ours(config: ConfigDict, devices: Sequence[jax.Device]) -> Contender:
  """Returns the training step of `train`, with a batch that is there."""
  experiment = step.experiment_of(config, devices)
  program = aot.training(experiment)
  compiled, facts = speed.timed(lambda: program.lower().compile())
  state = experiment.start(experiment.new_params())
  fixed = experiment.place(experiment.objective.fixed())
  batch = sharding.global_batch(step.random_batch(config), experiment.mesh)
  metrics: Any = None
  numbers = itertools.count()

  def start() -> None:
    nonlocal state, metrics
    state, metrics = compiled(state, fixed, batch, np.int32(next(numbers)))

  turn = race.paced(
    start, lambda: jax.block_until_ready((state, metrics)), config.batch_size
  )
  mfu = speed.mfu_per_image_s(config, devices, passes=3)
  return Contender('ours', turn, {**facts, 'mfu_per_image_s': mfu})


def _plain_flax(config: ConfigDict) -> Contender:
  """Returns one step of AdamW of the same ViT, as Flax's layers have it."""
  import flax.linen as nn
  import jax.numpy as jnp
  import optax

  fields, dtype = config.model, jnp.dtype(config.model.dtype)
  D, P = fields.width, fields.patch_size

  class PlainViT(nn.Module):
    @nn.compact
    def __call__(self, images):
      x = nn.Conv(D, (P, P), strides=P, padding='VALID', dtype=dtype)(images)
      x = x.reshape(len(x), -1, D)
      cls = self.param('cls', nn.initializers.zeros, (1, 1, D))
      x = jnp.concatenate([jnp.tile(cls, (len(x), 1, 1)), x], axis=1)
      x += self.param('pos', nn.initializers.normal(0.02), (1, *x.shape[1:]))
      x = x.astype(dtype)
      for _ in range(fields.depth):
        y = nn.LayerNorm(dtype=dtype)(x)
        x += nn.MultiHeadDotProductAttention(fields.heads, dtype=dtype)(y)
        y = nn.LayerNorm(dtype=dtype)(x)
        y = nn.gelu(nn.Dense(fields.mlp_dim, dtype=dtype)(y))
        x += nn.Dense(D, dtype=dtype)(y)
      return nn.Dense(step.NUM_CLASSES)(nn.LayerNorm(dtype=dtype)(x)[:, 0])

  model, optimizer = PlainViT(), optax.adamw(1e-3)
  batch = step.random_batch(config)
  images = jnp.asarray(batch['image'] / np.float32(127.5) - 1)
  labels = jnp.asarray(batch['label'])
  params = jax.jit(model.init)(jax.random.key(0), images[:1])
  state = (params, optimizer.init(params))

  def loss(params: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(
      model.apply(params, images), labels
    )
    return losses.mean()

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def update(params: Any, optimizer_state: Any) -> Any:
    updates, optimizer_state = optimizer.update(
      jax.grad(loss)(params), optimizer_state, params
    )
    return optax.apply_updates(params, updates), optimizer_state

  compiled, facts = speed.timed(lambda: update.lower(*state).compile())

  def start() -> None:
    nonlocal state
    state = compiled(*state)

  return Contender(
    f'plain Flax {importlib.metadata.version("flax")}',
    race.paced(start, lambda: jax.block_until_ready(state), config.batch_size),
    facts,
  )


def _timm(config: ConfigDict, compiled: bool) -> Contender:
  from vit_jax.bench import torch_peer

  return torch_peer.training(config, compiled)


def _check(peer: str, config: ConfigDict) -> None:
  fields = config.model
  plain = fields.name == 'vit' and not fields.stem_width and not fields.axial
  if peer == 'flax' and not plain:
    raise ValueError(
      '--vs=flax has only plain ViTs to compare with, and one of --variants '
      'is none.'
    )
  if peer != 'flax':
    from vit_jax.bench import torch_peer

    torch_peer.check(config)


TASK = speed.SpeedTask(
  'training',
  ('jax', 'flax', 'optax'),
  _ours,
  {
    'flax': _plain_flax,
    'timm': functools.partial(_timm, compiled=True),
    'timm-eager': functools.partial(_timm, compiled=False),
  },
  _check,
)
