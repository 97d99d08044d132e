"""What measured numbers say of a claim, by a rule that is fixed beforehand.

A rule is a quantity, measured with each seed, and the bounds that the claim
sets its mean: a difference above 0, or one between -0.01 and 0.01. Student's t
gives the interval that holds the mean, but for 5 % on either side. Where that
lies wholly within the bounds the claim is supported, where it lies wholly
outside it is not, and where it reaches over a bound nothing is decided. Nor is
it with fewer seeds than `MIN_SEEDS`, or of models that have not learned.

A choice, as of the best of several variants, is made of the means over the
seeds: with each seed's own, luck would count as a difference. Each number that
could have been chosen has an interval of its own.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

SUPPORTED = 'supported'
NOT_SUPPORTED = 'not supported'
UNDECIDED = 'not decided at this budget'

MIN_SEEDS = 3
# One-sided error: what is said to lie above may lie below in 5 % of the cases.
ERROR = 0.05

# The metrics of one seed's runs, by their variant.
SeedRuns = Mapping[str, Mapping[str, float]]
# One number, or numbers in rows: the highest over the rows of the lowest of a
# row is meant.
Quantity = float | Sequence[Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Rule:
  """What has to be found for a claim to be supported.

  Attributes:
    text: the quantity and its bounds, for readers.
    quantity: of one seed's runs.
    low: the quantity's mean has to be above it,
    high: and below it.
  """

  text: str
  quantity: Callable[[SeedRuns], Quantity]
  low: float = -math.inf
  high: float = math.inf

  def verdict(self, values: Sequence[Quantity]) -> str:
    """Returns what the quantity of some seeds says: one of the three."""
    if len(values) < MIN_SEEDS:
      return UNDECIDED
    low, high = interval(values)
    if self.low < low and high < self.high:
      return SUPPORTED
    if high < self.low or low > self.high:
      return NOT_SUPPORTED
    return UNDECIDED


def mean(values: Sequence[Quantity]) -> float:
  """Returns a quantity's mean over seeds."""
  return _chosen(statistics.fmean, values)


def interval(values: Sequence[Quantity]) -> tuple[float, float]:
  """Returns the bounds of the mean of two values or more, by Student's t.

  Each is exceeded in 5 % of the cases at the most. The highest of several lower
  bounds holds if all of them do, so that they share the 5 %; the lowest of
  several holds if that of the lowest mean does. With upper bounds it is the
  other way about.
  """
  # Here, because it is slow to import.
  from scipy import stats

  rows, columns = np.shape(np.atleast_2d(values[0]))

  def bound(sign: int, sharing: int) -> Callable[[Sequence[float]], float]:
    t = sign * float(stats.t.ppf(1 - ERROR / sharing, len(values) - 1))
    return lambda x: (
      statistics.fmean(x) + t * statistics.stdev(x) / math.sqrt(len(x))
    )

  return (
    _chosen(bound(-1, sharing=rows), values),
    _chosen(bound(1, sharing=columns), values),
  )


def _chosen(
  of_seeds: Callable[[Sequence[float]], float], values: Sequence[Quantity]
) -> float:
  """Returns the chosen of what a function finds of each number's seeds."""
  numbers_RCN = np.stack([np.atleast_2d(value) for value in values], axis=-1)
  return max(
    min(of_seeds(numbers_N.tolist()) for numbers_N in numbers_CN)
    for numbers_CN in numbers_RCN
  )


def difference(
  metric: str, more: Sequence[str], less: Sequence[str]
) -> Callable[[SeedRuns], Quantity]:
  """Returns the quantity: the best of some variants less the best of others."""

  def quantity(runs: SeedRuns) -> Quantity:
    return [[runs[a][metric] - runs[b][metric] for b in less] for a in more]

  return quantity


def worst_difference(
  metric: str, more: Sequence[str], less: str
) -> Callable[[SeedRuns], Quantity]:
  """Returns the quantity: the worst of some variants less another."""
  return lambda runs: [[runs[a][metric] - runs[less][metric] for a in more]]


def spread(
  metric: str, variants: Sequence[str]
) -> Callable[[SeedRuns], Quantity]:
  """Returns the quantity: the best of some variants less the worst of them."""

  def quantity(runs: SeedRuns) -> Quantity:
    pairs = itertools.permutations(variants, 2)
    return [[runs[a][metric] - runs[b][metric]] for a, b in pairs]

  return quantity


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
  """Returns Spearman's, with equal values sharing their ranks.

  0 where one of them is the same everywhere.
  """
  # Here, because it is slow to import.
  from scipy import stats

  if 1 in (len(set(first)), len(set(second))):
    return 0.0
  return float(stats.spearmanr(first, second).statistic)
