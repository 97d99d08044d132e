"""Images/s over a grid of models, sizes and batch sizes."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.bench import charts as report
from vit_jax.bench import race, step
from vit_jax.bench.output import Output, grid, show
from vit_jax.bench.race import Contender
from vit_jax.data import images
from vit_jax.models import flops
from vit_jax.plan import aot
from vit_jax.training import hardware


@dataclasses.dataclass(frozen=True)
class SpeedTask:
  """What is measured.

  Attributes:
    name: in titles.
    packages: of ours, whose versions are worth a line.
    ours: makes our contender.
    peers: make those of `--vs`, by name.
    check: takes the name of a peer and a config, and raises a ValueError or an
      ImportError where the peer has no such model or is not there.
  """

  name: str
  packages: tuple[str, ...]
  ours: Callable[[ConfigDict, Sequence[jax.Device]], Contender]
  peers: Mapping[str, Callable[[ConfigDict], Contender]]
  check: Callable[[str, ConfigDict], None]


def bench(
  task: SpeedTask,
  variants: Sequence[str],
  image_sizes: Sequence[int],
  batch_sizes: Sequence[int],
  dtype: str,
  versus: Sequence[str],
  overrides: Mapping[str, str],
  output: Output,
  count: int = 1,
) -> None:
  """Measures every combination.

  Args:
    task: training or inference.
    variants: of models, as in `b16`.
    image_sizes: sides in pixels.
    batch_sizes: images at once.
    dtype: of the computation.
    versus: names of the task's peers.
    overrides: fields of the config of ours.
    output: takes the rows.
    count: how many devices share the images.

  Raises:
    ImportError: for a peer that is not installed.
    ValueError: for what cannot work, before anything is measured.
  """
  for peer in versus:
    if peer not in task.peers:
      raise ValueError(f'--vs={peer} is none of {", ".join(task.peers)}.')
  names = list(itertools.product(variants, image_sizes, batch_sizes))
  points = [step.config_of(*name, dtype, overrides) for name in names]
  for config, peer in itertools.product(points, versus):
    task.check(peer, config)
  devices = _devices(count, versus)
  kind = devices[0].device_kind
  for config in points:
    step.experiment_of(config, devices)  # refuses what cannot work
  torch = ['timm', 'torch'] if {'timm', 'timm-eager'} & {*versus} else []
  print(race.machine([*task.packages, *torch]))
  print(f'{count} x {kind}, {task.name}, {dtype}')
  for name, config in grid(
    list(zip(names, points, strict=True)),
    lambda point: '{} at {}, batch {}'.format(*point[0]),
  ):
    makers = [functools.partial(task.ours, config, devices)]
    makers += [functools.partial(task.peers[peer], config) for peer in versus]
    rows, too_large = race.race(makers)
    show([*race.lines(rows), *too_large])
    keys = ('variant', 'image_size', 'batch_size')
    facts = {'device': kind, 'devices': count, 'dtype': config.model.dtype}
    facts |= dict(zip(keys, name, strict=True))
    output.add([facts | row for row in rows])
  output.finish(functools.partial(report.rates, title=f'{task.name}, {dtype}'))


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
  config: ConfigDict, devices: Sequence[jax.Device], passes: int
) -> float | None:
  """Returns the MFU of one image/s, where the devices' peak is known.

  Args:
    config: of the model.
    devices: that share the images.
    passes: how many times the work of the forward pass is done: training takes
      3, because going back takes 2.
  """
  peak = hardware.peak_flops(devices[0])
  image_size = images.size_of(config.data.image_size)
  work = passes * flops.forward_flops(step.model_of(config), image_size)
  return work / (peak * len(devices)) if peak else None
