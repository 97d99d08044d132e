"""What the runs of a study say of a claim."""

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

from vit_jax.paper import rules
from vit_jax.paper.claims import CLAIMS, STUDIES, Claim
from vit_jax.paper.evidence import RunRow, by_seed


@dataclasses.dataclass(frozen=True)
class Finding:
  """A claim after the runs that there are.

  Attributes:
    name: of `CLAIMS`.
    verdict: one of the three of `rules`.
    reason: the numbers behind it, for readers.
  """

  name: str
  verdict: str
  reason: str

  @property
  def claim(self) -> Claim:
    return CLAIMS[self.name]


def find(name: str, rows: Sequence[RunRow], variants: Sequence[str]) -> Finding:
  """Returns what the runs of a claim's study say.

  Args:
    name: of `CLAIMS`.
    rows: of its study.
    variants: that a seed needs to be complete.
  """
  claim = CLAIMS[name]
  seeds = [
    (claim.rule.quantity(runs), runs)
    for runs in by_seed(rows, variants).values()
  ]
  seeds = [seed for seed in seeds if np.isfinite(seed[0]).all()]
  values = [value for value, _ in seeds]
  lost = [row.key for row in rows if row.texts['status'] != 'done']
  reason = f'{len(values)} of {rules.MIN_SEEDS} seeds'
  if lost:
    reason += f', {len(lost)} {"run" if len(lost) == 1 else "runs"} diverged'
  if values:
    reason += ': ' + ', '.join(f'{rules.mean([v]):.3g}' for v in values)
  if len(values) >= 2:
    mean, (low, high) = rules.mean(values), rules.interval(values)
    reason += f'; mean {mean:.3g}, between {low:.3g} and {high:.3g}'
  if values:
    metric, least = STUDIES[claim.study].learned
    best = np.max(
      [
        statistics.mean(runs[variant][metric] for _, runs in seeds)
        for variant in variants
      ]
    )
    if not best >= least:  # NaN too
      reason += f'; the best {metric} is {best:.3g}, below {least:g}'
      return Finding(name, rules.UNDECIDED, reason)
  return Finding(name, claim.rule.verdict(values), reason)
