"""Accuracy and loss over a whole split, each example counted once."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

Batches = Iterable[dict[str, jax.Array]]


class ClassificationEvaluator:
  """Measures top-1 accuracy and mean loss.

  Attributes:
    name: prefix of the metrics, as in `test/accuracy`.
  """

  def __init__(
    self,
    name: str,
    evaluate: Callable[[Any, dict[str, jax.Array]], dict[str, jax.Array]],
    batches: Callable[[], Batches],
  ):
    """Args:

    name: prefix of the metrics.
    evaluate: from parameters and a batch to sums over its unmasked examples.
    batches: starts one pass over the split, as global device arrays.
    """
    self.name = name
    self._evaluate = evaluate
    self._batches = batches

  def run(self, params: Any) -> dict[str, float]:
    """Returns `accuracy`, `loss` and `examples` under this evaluator's name."""
    # The sums stay on the device until the last batch is under way; Python
    # floats then add up millions of examples without float32's rounding.
    sums = [self._evaluate(params, batch) for batch in self._batches()]
    sums = jax.device_get(sums)
    total = {k: sum(float(s[k]) for s in sums) for k in sums[0]}
    return {
      f'{self.name}/accuracy': total['correct'] / total['examples'],
      f'{self.name}/loss': total['loss'] / total['examples'],
      f'{self.name}/examples': total['examples'],
    }
