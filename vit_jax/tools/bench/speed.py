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

from vit_jax.models import variants
from vit_jax.tools.bench import race, step, torch_peer
from vit_jax.tools.bench.race import Contender, Row
from vit_jax.tools.plan import aot
from vit_jax.training import hardware

# What says how a model is computed, and not which it is.
_ANY_VIT = ('dtype', 'scan', 'remat')


def bench(
  what: str,
  packages: Sequence[str],
  ours: Callable[[ConfigDict, Sequence[jax.Device]], Contender],
  peers: Mapping[str, Callable[[ConfigDict], Contender]],
  args: argparse.Namespace,
) -> None:
  """Measures every combination.

  Args:
    what: is measured, for titles.
    packages: of ours, whose versions are worth a line.
    ours: makes our contender.
    peers: make those of `--vs`, by name.
    args: of the command.

  Raises:
    ImportError: for a peer that is not installed.
    ValueError: for what cannot work, before anything is measured.
  """
  count = args.devices  # which share the images
  for peer in args.vs:
    if peer not in peers:
      raise ValueError(f'--vs={peer} is none of {", ".join(peers)}.')
  torch = ['timm', 'torch'] if {'timm', 'timm-eager'} & {*args.vs} else []
  if torch:
    # Half of a GPU is PyTorch's, of which JAX takes 3/4 unless told.
    os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '.47')
  if count > 1 and 'JAX_NUM_CPU_DEVICES' not in os.environ:
    jax.config.update('jax_num_cpu_devices', count)
    # XLA has as many threads as cores, in which devices wait for one another:
    # for ever, where what one of them is still to do has no thread left.
    threads = max(os.cpu_count() or 1, 2 * count)
    os.environ.setdefault('PJRT_NPROC', str(threads))
  names = list(
    itertools.product(args.variants, args.image_sizes, args.batch_sizes)
  )
  points = [step.config_of(*name, args.dtype, args.set) for name in names]
  for config in points:
    if 'flax' in args.vs:
      _check_plain(config.model)
    if torch:
      torch_peer.libraries()
      torch_peer.arguments(config)  # refuses a model that timm has not
  devices = _devices(count, args.vs)
  kind = devices[0].device_kind
  for config in points:
    step.experiment_of(config, devices)  # refuses what cannot work
  print(race.machine([*packages, *torch]))
  print(f'{count} x {kind}, {what}, {args.dtype}')
  found: list[Row] = []
  for number, (name, config) in enumerate(zip(names, points, strict=True), 1):
    print(f'[{number} of {len(points)}]', '{} at {}, batch {}'.format(*name))
    makers = [functools.partial(ours, config, devices)]
    makers += [functools.partial(peers[peer], config) for peer in args.vs]
    rows, too_large = race.race(makers)
    print(*race.lines(rows), *too_large, sep='\n', flush=True)
    keys = ('variant', 'image_size', 'batch_size')
    facts = {'device': kind, 'devices': count, 'dtype': config.model.dtype}
    facts |= dict(zip(keys, name, strict=True))
    found += [facts | row for row in rows]
    race.write(found, args.csv)


def _check_plain(fields: ConfigDict) -> None:
  for name, plain in variants.defaults('vit').items():
    if name not in _ANY_VIT and (value := fields.get(name)) != plain:
      raise ValueError(
        '--vs=flax has only plain ViTs to compare with, and not one whose '
        f'model.{name} is {value!r}.'
      )


def _devices(count: int, versus: Sequence[str]) -> list[jax.Device]:
  """Returns the devices that share the images.

  Raises:
    ValueError: if there are fewer, or others could not have as many.
  """
  devices = jax.devices()
  kind = devices[0].device_kind
  if not 1 <= count <= len(devices):
    raise ValueError(f'--devices={count}: there are {len(devices)} x {kind}.')
  if count > 1 and versus and devices[0].platform != 'cpu':
    raise ValueError(
      f'--devices={count}: --vs={",".join(versus)} runs on one {kind} alone.'
    )
  return devices[:count]


def timed(make: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
  """Returns the compiled program, and the facts of it that a contender has."""
  started_s = time.monotonic()
  compiled = make()
  compile_s = time.monotonic() - started_s
  memory_gib = aot.peak_bytes(compiled) / 2**30
  return compiled, {'compile_s': compile_s, 'memory_gib': memory_gib}


def mfu_per_image_s(
  forward_flops: int, devices: Sequence[jax.Device], passes: int
) -> dict[str, float]:
  """Returns the fact of the MFU of one image/s, if the devices' peak is known.

  Args:
    forward_flops: of an image.
    devices: that share the images.
    passes: how many times the work of the forward pass is done: training takes
      3, because going back takes 2.
  """
  peak = hardware.peak_flops(devices[0])
  if not peak:
    return {}
  return {'mfu_per_image_s': passes * forward_flops / (peak * len(devices))}
