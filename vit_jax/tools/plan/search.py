"""Find the fastest way to train a config in the memory that there is: `plan`.

The search changes speed and memory, not the result: the number of microbatches,
what a layer keeps for the backward pass, loops over layers, and how parameters
lie in the mesh. That makes hundreds of combinations, and each takes a minute to
compile. So the search assumes three things:

- More images at a time are faster, and so is keeping more and gathering
  parameters once a step. Hence it tries each way of keeping with the most
  images that fit. It gathers layer by layer, or splits a layer over more cores,
  only where few images fit otherwise, and not the whole batch.
- A way that keeps less fits at least as many images.
- Loops compile several times faster than the layers they stand for and take
  about as much memory. Hence it unrolls the layers of the best loop only.
"""

import bisect
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.sweeps import axes

PLACES: tuple[dict[str, Any], ...] = (
  {'gather': 'step', 'mesh.tensor': 1},
  {'gather': 'layer', 'mesh.tensor': 1},
  {'gather': 'layer', 'mesh.tensor': 2},
  {'gather': 'layer', 'mesh.tensor': 4},
)
# Images at a time beyond which a core is hardly faster for more.
ENOUGH = 8
KEPT = ('none', 'cheap', 'nothing_saveable')


class TooLarge(Exception):
  """The step does not fit into the memory of a core."""


class Trial(NamedTuple):
  """A combination that was compiled.

  Attributes:
    fields: of the config, by name.
    images: at a time in each of the devices along data and fsdp.
    step_s: of the whole batch.
    step: what the compiler made of it.
  """

  fields: dict[str, Any]
  images: int
  step_s: float
  step: Any


# Compiles a config: seconds of a step and the step; raises `TooLarge`.
Compile = Callable[[ConfigDict], tuple[float, Any]]


def best(config: ConfigDict, devices: int, compiled: Compile) -> Trial | None:
  """Returns the fastest combination that fits, or None."""
  looped: list[Trial] = []
  for place in _places(config.batch_size, devices):
    shards = devices // place['mesh.tensor']
    each = max(1, config.batch_size // shards)
    trying = functools.partial(_try, config, each, compiled)
    looped += _looped(trying, each, place)
    if any(
      trial.images >= ENOUGH
      or (trial.images == each and trial.fields['model.remat'] == 'none')
      for trial in looped
    ):
      break
  if not looped:
    return None
  fastest = min(looped, key=lambda trial: trial.step_s)
  for kept in KEPT[: KEPT.index(fastest.fields['model.remat']) + 1]:
    fields = fastest.fields | {'model.scan': False, 'model.remat': kept}
    each = fastest.images * fields['accum_steps']
    if trial := _try(config, each, compiled, fields, fields['accum_steps']):
      return min(fastest, trial, key=lambda trial: trial.step_s)
  return fastest


def _places(batch_size: int, devices: int) -> Sequence[dict[str, Any]]:
  """Returns the places that share out the batch evenly.

  If there is none, returns the first, which is refused when it is tried.
  """
  found = []
  for place in PLACES:
    shards, rest = divmod(devices, place['mesh.tensor'])
    if not rest and batch_size % shards == 0:
      found.append(place)
  return found or PLACES[:1]


def _looped(
  trying: Callable[[dict[str, Any], int], Trial | None],
  each: int,
  place: dict[str, Any],
) -> list[Trial]:
  """Returns the trial with the most images for each way of keeping."""
  parts = [n for n in range(1, each + 1) if each % n == 0]
  found = []
  for kept in KEPT:
    fields = place | {'model.scan': True, 'model.remat': kept}
    trial = functools.cache(functools.partial(trying, fields))
    first = 0
    if not trial(1):
      first = bisect.bisect_left(parts, True, 1, key=lambda n: bool(trial(n)))
    parts = parts[: first + 1]
    if made := trial(parts[-1]):
      found.append(made)
      if first == 0:
        break
  return found


def _try(
  config: ConfigDict,
  each: int,
  compiled: Compile,
  fields: dict[str, Any],
  parts: int,
) -> Trial | None:
  """Returns the trial in so many parts of a batch, None if it does not fit."""
  mesh = {'mesh.data': -1, 'mesh.fsdp': -1}
  fields = fields | {'accum_steps': parts} | mesh
  config = config.copy_and_resolve_references()
  axes.set_fields(config, fields)
  try:
    return Trial(fields, each // parts, *compiled(config))
  except TooLarge:
    return None
