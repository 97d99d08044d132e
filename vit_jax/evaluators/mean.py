"""Means of an objective's measures over a split, each example once."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Self

import jax
from ml_collections import ConfigDict

from vit_jax.checkpoints import transfer
from vit_jax.data import images
from vit_jax.evaluators.evaluator import Evaluator, Parts
from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives.objective import Best, Objective
from vit_jax.training import features, sharding


@dataclasses.dataclass(frozen=True)
class MeanEvaluator(Evaluator):
  """Divides the sums of an objective's `evaluate` by the examples.

  Attributes:
    name: prefix of the metrics, as in `test/loss`.
    evaluate: from parameters and a batch to sums over its unmasked examples,
      `examples` among them.
    batches: starts one pass over the split, as global device arrays.
    suffix: of the metrics, as in `test/loss_96x96`.
    others: evaluators of the same at other image sizes.
  """

  name: str
  evaluate: Callable[[Params, Batch], Metrics]
  batches: Callable[[], Iterable[Batch]]
  suffix: str = ''
  others: tuple[Self, ...] = ()

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    """Returns the objective's metrics, at its size and at other sizes."""
    suffixes = '', *map(_suffix, _other_sizes(entry))
    return {
      f'{metric}{suffix}': best
      for suffix in suffixes
      for metric, best in objective.metrics.items()
    }

  @classmethod
  def from_entry(cls, parts: Parts, name: str, entry: ConfigDict) -> Self:
    """Builds the evaluator of the objective on a split."""
    sizes = parts.image_size, *_other_sizes(entry)
    batches = functools.partial(
      features.global_batches, parts.source(entry.split), **parts.batches
    )
    own, *others = (cls._at(size, parts, name, batches) for size in sizes)
    return dataclasses.replace(own, suffix='', others=tuple(others))

  @classmethod
  def _at(
    cls,
    size: tuple[int, int],
    parts: Parts,
    name: str,
    batches: Callable[..., Iterable[Batch]],
  ) -> Self:
    """Builds the evaluator for images of a size (H, W)."""
    own, objective = parts.image_size, parts.objective
    if size != own:
      objective = type(objective).from_config(parts.config, size)
      objective = objective.on_data(parts.config, parts.facts)

    def sums(params: Params, fixed: Params, batch: Batch) -> Metrics:
      if size != own:
        params = transfer.at_size(objective.model, params, own, size)
      return objective.evaluate(params, fixed, batch)

    evaluate = jax.jit(sums, out_shardings=sharding.replicated(parts.mesh))
    return cls(
      name,
      lambda params, batch: evaluate(params, parts.fixed, batch),
      functools.partial(batches, transform=objective.eval_transform()),
      _suffix(size),
    )

  def run(self, params: Params) -> dict[str, float]:
    """Returns the means and `examples` under this evaluator's name."""
    # The sums stay on the device until the last batch is under way; Python
    # floats then add up millions of examples without float32's rounding.
    sums = [self.evaluate(params, batch) for batch in self.batches()]
    sums = jax.device_get(sums)
    totals = {k: sum(float(s[k]) for s in sums) for k in sums[0]}
    examples = totals.pop('examples')
    means = {k: total / examples for k, total in totals.items()}
    found = {
      f'{self.name}/{k}{self.suffix}': value
      for k, value in (means | {'examples': examples}).items()
    }
    for other in self.others:
      found |= other.run(params)
    return found


def _other_sizes(entry: ConfigDict) -> tuple[tuple[int, int], ...]:
  given = entry.get('other_sizes', '')
  return images.sizes_of(given, 'other_sizes') if given else ()


def _suffix(size: tuple[int, int]) -> str:
  return f'_{size[0]}x{size[1]}'
