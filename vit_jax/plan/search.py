"""Finds how to train a config fastest in the memory that there is: `plan`.

What is tried changes speed and memory but nothing that is learned: in how many
parts a batch is worked off, what a layer keeps for going back, whether layers
are looped over, and how parameters lie in the mesh. That makes hundreds of
combinations of which each takes a minute to compile, so three things are taken
for granted:

- More images at a time are faster, and so is keeping more and gathering
  parameters once a step. Hence each way of keeping is tried with the most
  images that fit, and gathering layer by layer, or more cores for a layer, only
  where few fit otherwise, and not all that there are.
- What keeps less fits as many images at least.
- Loops compile several times faster than the layers they stand for and take
  about as much memory: layers are unrolled for the best of them alone.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
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
# Of a trial: the whole batch at a time, and nothing that is computed twice.
ALL = {'accum_steps': 1, 'model.remat': 'none'}
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


@dataclasses.dataclass(frozen=True)
class Search:
  """Searches for one config and one number of devices.

  Attributes:
    config: what to train.
    devices: of the topology.
    compiled: gives of a config `step_s` and `step`; raises `TooLarge`.
  """

  config: ConfigDict
  devices: int
  compiled: Callable[[ConfigDict], tuple[float, Any]]

  def best(self) -> Trial | None:
    """Returns the fastest combination that fits, or None."""
    looped: list[Trial] = []
    for place in self._places():
      looped += self._looped(place)
      if any(
        trial.images >= ENOUGH or ALL.items() <= trial.fields.items()
        for trial in looped
      ):
        break
    if not looped:
      return None
    fastest = min(looped, key=lambda trial: trial.step_s)
    return min(self._unrolled(fastest), key=lambda trial: trial.step_s)

  def _places(self) -> Sequence[dict[str, Any]]:
    """Returns those that share out the batch evenly.

    Where none does it is the first, which is refused when it is tried.
    """
    batch_size = self.config.batch_size
    found = []
    for place in PLACES:
      shards, rest = divmod(self.devices, place['mesh.tensor'])
      if not rest and batch_size % shards == 0:
        found.append(place)
    return found or PLACES[:1]

  def _looped(self, place: dict[str, Any]) -> Iterator[Trial]:
    """Yields the trial with the most images for each way of keeping."""
    shards = self.devices // place['mesh.tensor']
    each = max(1, self.config.batch_size // shards)
    choices = [n for n in range(1, each + 1) if each % n == 0]
    for kept in KEPT:
      fields = place | {'model.scan': True, 'model.remat': kept}
      if trial := self._most_images(fields, choices):
        yield trial
        if trial.images == each:
          return
        choices = choices[choices.index(trial.images) :]

  def _most_images(
    self, fields: dict[str, Any], choices: list[int]
  ) -> Trial | None:
    fits, too_many = None, len(choices)
    low, probe = -1, len(choices) - 1
    while too_many - low > 1:
      if trial := self._try(fields, choices[probe]):
        fits, low = trial, probe
      else:
        too_many = probe
      probe = (low + too_many) // 2
    return fits

  def _unrolled(self, looped: Trial) -> Iterator[Trial]:
    """Yields a looped trial and the one without the loop that keeps most."""
    yield looped
    for kept in KEPT[: KEPT.index(looped.fields['model.remat']) + 1]:
      fields = looped.fields | {'model.scan': False, 'model.remat': kept}
      if trial := self._try(fields, looped.images):
        yield trial
        return

  def _try(self, fields: dict[str, Any], images: int) -> Trial | None:
    """Returns the trial, None where it does not fit."""
    shards = self.devices // fields['mesh.tensor']
    fields = fields | {
      'accum_steps': max(1, self.config.batch_size // shards // images),
      'mesh.data': -1,
      'mesh.fsdp': -1,
    }
    config = copy.deepcopy(self.config)
    axes.set_fields(config, fields)
    try:
      return Trial(fields, images, *self.compiled(config))
    except TooLarge:
      return None
