"""Measures an objective's metrics on all examples of a split."""

from collections.abc import Mapping

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.models.model import Params
from vit_jax.objectives.objective import Best, Objective


class MeanEvaluator(Evaluator):
  """Averages the sums of `evaluate`; adds the metrics of `measure_rows`."""

  def __post_init__(self) -> None:
    self._evaluate = self.parts.compiled(self.parts.objective.evaluate)
    self._batches = self.parts.passes(self.parts.source(self.entry.split))

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    return objective.metrics

  def run(self, params: Params) -> dict[str, float]:
    # The sums stay on the device until the last batch is dispatched. Adding
    # them as Python floats avoids the rounding of float32.
    sums, rows = [], []
    for batch in self._batches():
      of_batch = dict(self._evaluate(params, batch))
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
      means |= self.parts.objective.measure_rows(
        {k: x[is_image_N] for k, x in whole.items()}
      )
    means['examples'] = examples
    return {f'{self.name}/{k}': value for k, value in means.items()}
