"""What measured numbers say of a claim, by a rule that is fixed beforehand.

A rule is a quantity, one number of each seed, and the bounds that the claim
sets its mean: a difference above 0, or one between -0.01 and 0.01. Student's t
gives the interval that holds the mean, but for 5 % on either side. Where that
lies wholly within the bounds the claim is supported, where it lies wholly
outside it is not, and where it reaches over a bound nothing is decided. Nor is
it with fewer seeds than `MIN_SEEDS`, or of models that have not learned.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

SUPPORTED = 'supported'
NOT_SUPPORTED = 'not supported'
UNDECIDED = 'not decided at this budget'

MIN_SEEDS = 3
# One-sided error: what is said to lie above may lie below in 5 % of the cases.
ERROR = 0.05

# The metrics of one seed's runs, by their variant.
SeedRuns = Mapping[str, Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Rule:
  """What has to be found for a claim to be supported.

  Attributes:
    text: the quantity and its bounds, for readers.
    quantity: a number of one seed's runs.
    low: the quantity's mean has to be above it,
    high: and below it.
  """

  text: str
  quantity: Callable[[SeedRuns], float]
  low: float = -math.inf
  high: float = math.inf

  def verdict(self, values: Sequence[float]) -> str:
    """Returns what the quantity of some seeds says: one of the three."""
    if len(values) < MIN_SEEDS:
      return UNDECIDED
    low, high = interval(values)
    if self.low < low and high < self.high:
      return SUPPORTED
    if high < self.low or low > self.high:
      return NOT_SUPPORTED
    return UNDECIDED


def interval(values: Sequence[float]) -> tuple[float, float]:
  """Returns the bounds of the mean of two values or more, by Student's t."""
  # Here, because it is slow to import.
  from scipy import stats

  n, mean = len(values), statistics.mean(values)
  t = float(stats.t.ppf(1 - ERROR, n - 1))
  half = t * statistics.stdev(values) / math.sqrt(n)
  return mean - half, mean + half


def difference(
  metric: str, more: Sequence[str], less: Sequence[str]
) -> Callable[[SeedRuns], float]:
  """Returns the quantity: the best of some variants less the best of others."""

  def quantity(runs: SeedRuns) -> float:
    best = [max(runs[v][metric] for v in names) for names in (more, less)]
    return best[0] - best[1]

  return quantity


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
  """Returns Spearman's, with equal values sharing their ranks.

  0 where one of them is the same everywhere.
  """
  ranks = [_ranks(values) for values in (first, second)]
  if any(len(set(found)) == 1 for found in ranks):
    return 0.0
  return statistics.correlation(*ranks)


def _ranks(values: Sequence[float]) -> list[float]:
  below = [sum(other < value for other in values) for value in values]
  equal = [sum(other == value for other in values) for value in values]
  return [b + (e - 1) / 2 for b, e in zip(below, equal, strict=True)]
