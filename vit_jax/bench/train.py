"""Training steps, ours and those of others, on one device."""

import functools
import importlib.metadata
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import hardware
from vit_jax.bench import race, step
from vit_jax.bench.output import Output, grid, show
from vit_jax.bench.race import Contender
from vit_jax.models import flops
from vit_jax.report import bench as report

PEERS = ('flax', 'timm', 'timm-eager')


def bench_train(
  variants: Sequence[str],
  image_sizes: Sequence[int],
  batch_sizes: Sequence[int],
  dtype: str,
  versus: Sequence[str],
  overrides: Mapping[str, str],
  output: Output,
) -> None:
  """Measures every combination.

  Args:
    variants: of models, as in `ti16`.
    image_sizes: sides in pixels.
    batch_sizes: images a step.
    dtype: of the computation.
    versus: of `PEERS`.
    overrides: fields of the config of ours.
    output: takes the rows.

  Raises:
    ImportError: for a peer that is not installed.
    ValueError: for what cannot work, before anything is measured.
  """
  refuse_unknown(versus, PEERS)
  names = list(itertools.product(variants, image_sizes, batch_sizes))
  points = [step.config_of(*name, dtype, overrides) for name in names]
  for config, peer in itertools.product(points, versus):
    _check(peer, config)
  device = jax.devices()[0]
  packages = ['jax', 'flax', 'optax', *packages_of(versus)]
  print(race.machine(packages))
  print(f'{device.device_kind}, training, {dtype}')
  for name, config in grid(
    list(zip(names, points, strict=True)), lambda point: title(*point[0])
  ):
    makers = [functools.partial(ours, config, device)] + [
      functools.partial(_maker(peer), config) for peer in versus
    ]
    run_point(name, config, device, makers, output)
  output.finish(functools.partial(report.rates, title=f'training, {dtype}'))


def run_point(
  name: tuple[str, int, int],
  config: ConfigDict,
  device: jax.Device,
  makers: Sequence[Callable[[], Contender]],
  output: Output,
) -> None:
  """Races at one point of a grid, prints and keeps what came out."""
  rows, too_large = race.race(makers)
  show([*race.lines(rows), *too_large])
  keys = ('variant', 'image_size', 'batch_size')
  facts = {'device': device.device_kind, 'dtype': config.model.dtype}
  facts |= dict(zip(keys, name, strict=True))
  output.add([facts | row for row in rows])


def title(variant: str, image_size: int, batch_size: int) -> str:
  """Returns what a point of a grid is called."""
  return f'{variant} at {image_size}, batch {batch_size}'


def refuse_unknown(versus: Sequence[str], known: Sequence[str]) -> None:
  """Refuses names of peers that are none.

  Raises:
    ValueError: naming those that are.
  """
  for name in versus:
    if name not in known:
      raise ValueError(f'--vs={name} is none of {", ".join(known)}.')


def packages_of(versus: Sequence[str]) -> list[str]:
  """Returns the packages of peers whose versions are worth a line."""
  return ['timm', 'torch'] if {'timm', 'timm-eager'} & {*versus} else []


def _maker(name: str) -> Callable[[ConfigDict], Contender]:
  if name == 'flax':
    return plain_flax
  from vit_jax.bench import torch_peer

  return functools.partial(torch_peer.training, compiled=name == 'timm')


def _check(name: str, config: ConfigDict) -> None:
  """Refuses a model that a peer does not have.

  Raises:
    ValueError: saying so.
  """
  if name == 'flax':
    if (
      config.model.name != 'vit'
      or config.model.stem_width
      or (config.model.axial)
    ):
      raise ValueError(
        '--vs=flax has only plain ViTs to compare with, and one of --variants '
        'is none.'
      )
    return
  from vit_jax.bench import torch_peer

  torch_peer.arguments(config)


def ours(config: ConfigDict, device: jax.Device) -> Contender:
  """Returns the training step of `train`, with a batch that is there."""
  program = step.training(config, device)
  started_s = time.monotonic()
  compiled = program.compile()
  compile_s = time.monotonic() - started_s
  state = step.new_state(config, program)
  batch = jax.device_put(
    step.random_batch(config),
    jax.tree.map(lambda x: x.sharding, program.shapes[1]),
  )
  metrics: Any = None
  numbers = itertools.count()

  def start() -> None:
    nonlocal state, metrics
    state, metrics = compiled(state, batch, np.int32(next(numbers)))

  turn = race.paced(
    start, lambda: jax.block_until_ready((state, metrics)), config.batch_size
  )
  image_size = config_lib.image_size(config.data.image_size)
  peak = hardware.peak_flops(device)
  work = 3 * flops.forward_flops(step.model_of(config), image_size)
  return Contender(
    'ours',
    turn,
    {
      'compile_s': compile_s,
      'memory_gib': step.peak_bytes(compiled) / 2**30,
      'mfu_per_image_s': work / peak if peak else None,
    },
  )


def plain_flax(config: ConfigDict) -> Contender:
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

  started_s = time.monotonic()
  compiled = update.lower(*state).compile()
  compile_s = time.monotonic() - started_s

  def start() -> None:
    nonlocal state
    state = compiled(*state)

  return Contender(
    f'plain Flax {importlib.metadata.version("flax")}',
    race.paced(start, lambda: jax.block_until_ready(state), config.batch_size),
    {
      'compile_s': compile_s,
      'memory_gib': step.peak_bytes(compiled) / 2**30,
    },
  )
