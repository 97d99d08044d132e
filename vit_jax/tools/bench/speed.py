"""Measures images/s over a grid of models, image sizes and batch sizes."""

import argparse
import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from vit_jax.experiment import Experiment
from vit_jax.tools.bench import race, step, torch_peer
from vit_jax.tools.bench.race import Contender
from vit_jax.tools.plan import aot
from vit_jax.training import hardware, sharding


def bench(
  what: Literal['training', 'inference'],
  packages: Sequence[str],
  peers: Mapping[str, Callable[[Experiment], Contender]],
  args: argparse.Namespace,
) -> None:
  """Measures every combination of the grid.

  Raises:
    ImportError: if a peer is not installed.
    ValueError: if a flag or a combination is invalid, which is checked before
      any measurement; or if a peer cannot run a combination.
  """
  count = args.devices
  for peer in args.vs:
    if peer not in peers:
      raise ValueError(f'--vs={peer} is unknown. Use {", ".join(peers)}.')
  torch = ['timm', 'torch'] if {'timm', 'timm-eager'} & {*args.vs} else []
  if torch:
    # Leaves 53 % of GPU memory to PyTorch. By default, JAX takes 3/4.
    os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '.47')
  if count > 1 and 'JAX_NUM_CPU_DEVICES' not in os.environ:
    jax.config.update('jax_num_cpu_devices', count)
    # XLA uses one thread per core. A simulated device that waits for the others
    # blocks a thread, so too few threads would cause a deadlock.
    threads = max(os.cpu_count() or 1, 2 * count)
    os.environ.setdefault('PJRT_NPROC', str(threads))
  names = list(
    itertools.product(args.variants, args.image_sizes, args.batch_sizes)
  )
  configs = [step.config_of(*name, args.dtype, args.set) for name in names]
  devices = _devices(count, args.vs)
  kind = devices[0].device_kind
  experiments = [step.experiment_of(config, devices) for config in configs]
  if torch:
    torch_peer.libraries()
    for experiment in experiments:
      torch_peer.arguments(experiment)  # raises if timm lacks the model
  print(race.machine([*packages, *torch]))
  print(f'{count} x {kind}, {what}, {args.dtype}')
  for i, (name, experiment) in enumerate(
    zip(names, experiments, strict=True), 1
  ):
    print(f'[{i} of {len(names)}]', '{} at {}, batch {}'.format(*name))
    makers = [functools.partial(ours, experiment, devices, what == 'training')]
    makers += [functools.partial(peers[peer], experiment) for peer in args.vs]
    print(*race.race(makers), sep='\n', flush=True)


def _devices(count: int, versus: Sequence[str]) -> list[jax.Device]:
  """Returns the first `count` devices, which share the batch."""
  devices = jax.devices()
  kind = devices[0].device_kind
  if not 1 <= count <= len(devices):
    raise ValueError(
      f'--devices is {count}; it must be from 1 to {len(devices)}, the number '
      f'of {kind} devices.'
    )
  if count > 1 and versus and devices[0].platform != 'cpu':
    raise ValueError(
      f'--devices is {count}, but --vs={",".join(versus)} runs on one {kind}. '
      'Use --devices=1.'
    )
  return devices[:count]


def ours(
  experiment: Experiment, devices: Sequence[jax.Device], training: bool
) -> Contender:
  """Returns our training step or our inference as a contender.

  The batch of a training step is already on the devices. Inference copies its
  images from host memory.
  """
  batch = step.random_batch(experiment)
  if training:
    program = aot.training(experiment)
  else:
    program = aot.inference(experiment, devices[0])
  started_s = time.monotonic()
  compiled = program.lower().compile()
  compile_s = time.monotonic() - started_s
  params = experiment.new_params()
  latest: Any = None
  if training:
    fixed = experiment.all_fixed(
      experiment.place(experiment.objective.fixed()), params
    )
    state = experiment.start(params)
    placed = sharding.global_batch(batch, experiment.mesh)
    numbers = itertools.count()
  else:
    params = jax.device_put(params, devices[0])

  def learn() -> None:
    nonlocal state, latest
    latest = compiled(state, fixed, placed, np.int32(next(numbers)))
    state = latest[0]

  def infer() -> None:
    nonlocal latest
    latest = compiled(params, jax.device_put(batch['image'], devices[0]))

  peak = hardware.peak_flops(devices[0])
  passes = 3 if training else 1  # the backward pass costs two forward passes
  return Contender(
    'ours',
    race.paced(
      learn if training else infer,
      lambda: jax.block_until_ready(latest),
      len(batch['image']),
    ),
    compile_s,
    aot.peak_bytes(compiled) / 2**30,
    passes * experiment.forward_flops / (peak * len(devices)) if peak else None,
  )
