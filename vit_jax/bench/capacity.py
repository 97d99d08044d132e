"""The largest batch that fits: figure 12, right.

Nothing runs: batches are compiled until the largest that fits is known to 1/32.
The memory is that of the first device; --topology takes a core of a TPU that is
not there, by its own compiler (pip install -e '.[plan]'), which also estimates
images/s, the left panel: the best of the batches that were tried.
A loop over layers compiles faster, but keeps more when it trains: less so with
--set=model.scan=True --set=model.remat=cheap.
"""

import argparse
import functools
import itertools
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from vit_jax.bench import charts, race, step
from vit_jax.bench.output import Output, grid
from vit_jax.plan import aot, costs, hlo
from vit_jax.training import hardware

MODES = ('inference', 'training')
GIB = 2**30
# The result is this near to the true one, relative to it.
PRECISION = 1 / 32
# Nobody asks for more, which is then reported as `at least`.
MAX_BATCH = 2**16

# Of a batch the bytes that it takes, and images/s where there is an estimate.
Cost = tuple[float, float | None]


class Machine(NamedTuple):
  """Where programs are to run.

  Attributes:
    device: at hand, or of a topology.
    memory_bytes: what programs may take of it.
    chip: of a topology, None for a device at hand.
  """

  device: jax.Device
  memory_bytes: float
  chip: hardware.TpuChip | None


def machine_of(topology: str, memory_gib: float | None) -> Machine:
  """Returns one core of a topology, or else the first device that is there.

  With so much memory as is given, or as it tells.

  Raises:
    ValueError: for a topology that is none, or if the memory is none or not
      known.
  """
  if memory_gib is not None and not memory_gib > 0:
    raise ValueError(f'--memory_gib is {memory_gib}: it must be above 0.')
  if topology:
    # Arrays of this process, of which there are few, belong on its own CPU.
    jax.config.update('jax_platforms', 'cpu')
    devices, chip = costs.devices_of(topology)
    per_chip = len(devices) // len({tuple(d.coords) for d in devices})
    # What the compiler itself leaves to programs comes out when it refuses one.
    gib = memory_gib or chip.hbm_gib / per_chip
    return Machine(devices[0], gib * GIB, chip)
  device = jax.devices()[0]
  stats = device.memory_stats() or {}
  limit = memory_gib * GIB if memory_gib else stats.get('bytes_limit')
  if not limit:
    raise ValueError(
      f'{device.device_kind} does not tell how much memory it has: give '
      '--memory_gib, or --topology.'
    )
  return Machine(device, limit, None)


def bench(args: argparse.Namespace, output: Output) -> None:
  """Looks for the largest batch of every combination.

  Raises:
    ValueError: for what cannot work, before anything is compiled.
  """
  machine = machine_of(args.topology, args.memory_gib)
  for mode in args.modes:
    if mode not in MODES:
      raise ValueError(f'--modes={mode} is none of {", ".join(MODES)}.')
  points = list(itertools.product(args.variants, args.image_sizes, args.modes))
  for variant, image_size, _ in points:
    step.config_of(variant, image_size, 1, args.dtype, args.set)
  print(race.machine(['jax', 'flax']))
  kind = machine.device.device_kind
  print(f'{kind}, {machine.memory_bytes / GIB:.2f} GiB, {args.dtype}')
  for variant, image_size, mode in grid(
    points, lambda point: '{} at {}, {}'.format(*point)
  ):
    started_s = time.monotonic()
    cost = functools.partial(_cost, args, machine, variant, image_size, mode)
    tried = search(cost, machine.memory_bytes)
    fitting = {b: c for b, c in tried.items() if c[0] <= machine.memory_bytes}
    row = {
      'device': kind,
      'dtype': args.dtype,
      'variant': variant,
      'image_size': image_size,
      'mode': mode,
      'batch_size': max(fitting, default=0),
      'limit_gib': machine.memory_bytes / GIB,
    }
    if fitting:
      row['memory_gib'] = fitting[max(fitting)][0] / GIB
    rates = {b: rate for b, (_, rate) in fitting.items() if rate}
    if rates:
      row['images_per_s'] = max(rates.values())
      row['at_batch_size'] = max(rates, key=lambda b: rates[b])
    row['compiled_times'] = len(tried)
    row['compile_s'] = time.monotonic() - started_s
    print(_line(row), flush=True)
    output.add([row])
  output.finish(charts.figure_12)


def _line(row: Mapping) -> str:
  if not row['batch_size']:
    return '  not even one image fits'
  at_least = 'at least ' if row['batch_size'] == MAX_BATCH else ''
  text = '  ' + at_least + '{batch_size:,} images, {memory_gib:.2f} GiB'
  if 'images_per_s' in row:
    text += '; {images_per_s:,.0f} images/s at {at_batch_size:,}, as '
    text += 'the compiler estimates'
  return (text + ' ({compiled_times} compilations)').format(**row)


def search(cost: Callable[[int], Cost], limit: float) -> dict[int, Cost]:
  """Tries batch sizes until the largest that fits is known to `PRECISION`.

  Memory grows about linearly with the batch, so that from two sizes the largest
  can be guessed; doubling and halving are for where the guesses go astray.

  Args:
    cost: of a batch size; infinite bytes where nobody knows how many it takes
      that do not fit.
    limit: bytes that there are.

  Returns:
    What each size tried takes.
  """
  tried: dict[int, Cost] = {}
  fits, too_large, batch = 0, MAX_BATCH + 1, 8
  while True:
    tried[batch] = cost(batch)
    if tried[batch][0] <= limit:
      fits = batch
    else:
      too_large = batch
    if too_large - fits <= max(1, PRECISION * fits):
      return tried
    batch = _next(tried, limit, fits, too_large)


def _next(
  tried: Mapping[int, Cost], limit: float, fits: int, too_large: int
) -> int:
  """Returns a size strictly between one that fits and one that does not."""
  known = sorted(b for b, (size, _) in tried.items() if size < math.inf)
  guess = 4 * fits if too_large > MAX_BATCH else (fits + too_large) // 2
  # Every third time the middle after all.
  if len(known) > 1 and len(tried) % 3:
    # The two nearest to the limit.
    a, b = sorted(known, key=lambda n: abs(tried[n][0] - limit))[:2]
    slope = (tried[b][0] - tried[a][0]) / (b - a)
    if slope > 0:
      guess = int(min(a + (limit - tried[a][0]) / slope, MAX_BATCH))
      # One step beside what is known closes the bracket, if the guess is right.
      width = max(1, int(PRECISION * fits))
      guess = max(min(guess, too_large - width), fits + width)
  return min(max(guess, fits + 1), too_large - 1, MAX_BATCH)


def _cost(
  args: argparse.Namespace,
  machine: Machine,
  variant: str,
  image_size: int,
  mode: str,
  batch: int,
) -> Cost:
  """Compiles a program and returns what it takes."""
  config = step.config_of(variant, image_size, batch, args.dtype, args.set)
  program = program_of(config, mode, machine.device)
  try:
    compiled = program.lower().compile()
  except jax.errors.JaxRuntimeError as e:
    if 'RESOURCE_EXHAUSTED' not in str(e):
      raise
    return needed_bytes(str(e)), None
  rate = None
  if machine.chip:
    cycles = hlo.read(compiled.as_text() or '').total_cycles
    rate = batch * machine.chip.clock_hz / cycles
  return float(aot.peak_bytes(compiled)), rate


def program_of(
  config: ConfigDict, mode: str, device: jax.Device
) -> aot.Program:
  """Returns the program of a mode of `MODES` for one device."""
  experiment = step.experiment_of(config, [device])
  if mode == 'training':
    return aot.training(experiment)
  return aot.inference(experiment, device)


def needed_bytes(message: str) -> float:
  """Returns what a TPU's compiler says a program takes that does not fit."""
  match = re.search(r'\(([\d.]+)([GTM])\) exceeds available', message)
  if not match:
    return math.inf
  unit = {'M': 2**20, 'G': 2**30, 'T': 2**40}[match[2]]
  return float(match[1]) * unit
