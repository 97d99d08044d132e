"""Training steps.

Ours is the step of the training loop: uint8 images in, flipped and normalised
on the device, cross-entropy, Adam with decoupled weight decay, the norms that
training watches. The batch is on the device already. Printed are images/s, the
seconds that compiling took, memory as the compiler has planned it (for torch:
as it was, on GPUs) and, where the device's peak is known, MFU: 3 x forward
FLOPs x images/s of the peak in bfloat16.

Steps run on the first device, or on as many as --devices says, which share the
batch; images/s are of all together, memory is of each. XLA uses the cores of a
CPU best with a device on each, unless steps take but a few milliseconds.

--vs names what runs in turns with it, on the same images:

  flax        the same ViT written plainly with Flax's own layers, and AdamW
  timm        timm's model of the same architecture with torch.compile, fused
              AdamW, autocast if --dtype=bfloat16
  timm-eager  the same without torch.compile

A device that cannot hold a batch says so, and the grid goes on.
"""

import functools
import importlib.metadata
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.tools.bench import race, speed, step, torch_peer
from vit_jax.tools.bench.race import Contender
from vit_jax.tools.plan import aot
from vit_jax.training import sharding


def _ours(config: ConfigDict, devices: Sequence[jax.Device]) -> Contender:
  """Returns the training step of `train`, its batch on the device."""
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
  mfu = speed.mfu_per_image_s(experiment.forward_flops, devices, passes=3)
  return Contender('ours', turn, **facts, mfu_per_image_s=mfu)


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
    **facts,
  )


_timm = functools.partial(torch_peer.contender, training=True)
PEERS: dict[str, Callable[[ConfigDict], Contender]] = {
  'flax': _plain_flax,
  'timm': functools.partial(_timm, compiled=True),
  'timm-eager': functools.partial(_timm, compiled=False),
}
bench = functools.partial(
  speed.bench, 'training', ('jax', 'flax', 'optax'), _ours, PEERS
)
