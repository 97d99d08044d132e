"""Images/s over a grid of models, sizes and batch sizes."""

import argparse
import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.tools.bench import race, step, torch_peer
from vit_jax.tools.bench.race import Contender
from vit_jax.tools.plan import aot
from vit_jax.training import hardware


def bench(
  what: str,
  packages: Sequence[str],
  ours: Callable[[ConfigDict, Sequence[jax.Device]], Contender],
  peers: Mapping[str, Callable[[ConfigDict], Contender]],
  args: argparse.Namespace,
) -> None:
  """Measures every combination of the grid.

  Args:
    what: for titles, such as 'training'.
    packages: whose versions are printed.
    ours: makes our contender.
    peers: functions that make the contenders of `--vs`, by name.
    args: of the command.

  Raises:
    ImportError: if a peer is not installed.
    ValueError: if a combination cannot work, before anything is measured.
  """
  count = args.devices
  for peer in args.vs:
    if peer not in peers:
      raise ValueError(f'--vs={peer} is unknown. Use {", ".join(peers)}.')
  torch = ['timm', 'torch'] if {'timm', 'timm-eager'} & {*args.vs} else []
  if torch:
    # Leaves half of a GPU's memory to PyTorch; JAX's default is 3/4.
    os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '.47')
  if count > 1 and 'JAX_NUM_CPU_DEVICES' not in os.environ:
    jax.config.update('jax_num_cpu_devices', count)
    # XLA uses one thread per core. Simulated devices block threads while they
    # wait for each other, and deadlock if the last one finds none free.
    threads = max(os.cpu_count() or 1, 2 * count)
    os.environ.setdefault('PJRT_NPROC', str(threads))
  names = list(
    itertools.product(args.variants, args.image_sizes, args.batch_sizes)
  )
  points = [step.config_of(*name, args.dtype, args.set) for name in names]
  for config in points:
    if torch:
      torch_peer.libraries()
      torch_peer.arguments(config)  # raises if timm lacks the model
  devices = _devices(count, args.vs)
  kind = devices[0].device_kind
  for config in points:
    step.experiment_of(config, devices)  # raises if it cannot work
  print(race.machine([*packages, *torch]))
  print(f'{count} x {kind}, {what}, {args.dtype}')
  for number, (name, config) in enumerate(zip(names, points, strict=True), 1):
    print(f'[{number} of {len(points)}]', '{} at {}, batch {}'.format(*name))
    makers = [functools.partial(ours, config, devices)]
    makers += [functools.partial(peers[peer], config) for peer in args.vs]
    print(*race.race(makers), sep='\n', flush=True)


def _devices(count: int, versus: Sequence[str]) -> list[jax.Device]:
  """Returns the devices that share the images.

  Raises:
    ValueError: if there are fewer devices, or a peer supports only one.
  """
  devices = jax.devices()
  kind = devices[0].device_kind
  if not 1 <= count <= len(devices):
    raise ValueError(
      f'--devices is {count}; it must be from 1 to {len(devices)}, the number '
      f'of {kind} devices.'
    )
  if count > 1 and versus and devices[0].platform != 'cpu':
    raise ValueError(
      f'--devices is {count}, and --vs={",".join(versus)} runs on one {kind}. '
      'Use --devices=1.'
    )
  return devices[:count]


def timed(make: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
  """Returns a compiled program, its compile time and its memory."""
  started_s = time.monotonic()
  compiled = make()
  compile_s = time.monotonic() - started_s
  memory_gib = aot.peak_bytes(compiled) / 2**30
  return compiled, {'compile_s': compile_s, 'memory_gib': memory_gib}


def mfu_per_image_s(
  forward_flops: int, devices: Sequence[jax.Device], passes: int
) -> float | None:
  """Returns the MFU of one image/s, if the devices' peak is known.

  Args:
    forward_flops: per image.
    devices: devices that share the images.
    passes: cost of a step in forward passes; 3 for training, since the backward
      pass costs 2.
  """
  peak = hardware.peak_flops(devices[0])
  return passes * forward_flops / (peak * len(devices)) if peak else None
