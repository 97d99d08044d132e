"""Averages an objective's metrics over all examples of a split."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.evaluators.evaluator import Evaluator, Parts
from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives.objective import Best, Objective


@dataclasses.dataclass(frozen=True)
class MeanEvaluator(Evaluator):
  """Divides the sums of an objective's `evaluate` by the number of examples."""

  name: str
  evaluate: Callable[[Params, Batch], Metrics]  # see `Objective.evaluate`
  batches: Callable[[], Iterable[Batch]]  # of global device arrays
  measure_rows: Callable[[Any], dict[str, float]] = lambda rows: {}

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    del entry
    return objective.metrics

  @classmethod
  def from_entry(cls, parts: Parts, name: str, entry: ConfigDict) -> Self:
    evaluate = parts.compiled(parts.objective.evaluate)
    return cls(
      name,
      lambda params, batch: evaluate(params, parts.fixed, batch),
      parts.passes(parts.source(entry.split)),
      parts.objective.measure_rows,
    )

  def run(self, params: Params) -> dict[str, float]:
    # The sums stay on the device until the last batch is dispatched. Adding
    # them as Python floats avoids the rounding of float32.
    sums, rows = [], []
    for batch in self.batches():
      of_batch = dict(self.evaluate(params, batch))
      if 'rows' in of_batch:
        rows.append(of_batch.pop('rows'))
      sums.append(of_batch)
    sums, rows = jax.device_get((sums, rows))
    totals = {k: sum(float(s[k]) for s in sums) for k in sums[0]}
    examples = totals.pop('examples')
    means = {k: total / examples for k, total in totals.items()}
    if rows:
      whole = {k: np.concatenate([r[k] for r in rows]) for k in rows[0]}
      is_image_N = whole.pop('mask') > 0
      means |= self.measure_rows({k: x[is_image_N] for k, x in whole.items()})
    means['examples'] = examples
    return {f'{self.name}/{k}': value for k, value in means.items()}
