"""Few-shot accuracy: least squares on frozen features of a few examples.

Dimension letters: N training examples, R examples in at least one draw, M
test examples, K examples of one draw, D features, C classes.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.evaluators import ridge

# The penalty of big_vision's protocol, also used for one shot per class.
FIXED_L2 = 2.0**10
# big_vision's value of the constant feature, and its epsilon for standard
# deviations.
_BIAS = 100.0
_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Result:
  """Accuracy, from 0 to 1, of one draw of `shots` examples per class."""

  shots: int
  seed: int
  l2: float
  accuracy: float


def plan(
  labels_N: np.ndarray,
  num_classes: int,
  shots: Sequence[int],
  seeds: int,
  class_names: Sequence[str] = (),
) -> dict[tuple[int, int], np.ndarray]:
  """Draws the shots: k random examples of each class, for each seed 0, 1, ...

  Every version of vit_jax makes the same draws. They depend only on the labels,
  k and the seed. The 5 shots of a seed are among its 10 shots. Returns the
  positions of k * C examples by (k, seed), int64, ordered by class.
  """
  if min(shots, default=0) < 1 or seeds < 1:
    raise ValueError(
      f'shots is {tuple(shots)} and seeds is {seeds}. Give one or more numbers '
      'of shots, each 1 or more, and 1 or more seeds.'
    )
  if num_classes == 1:
    raise ValueError(
      'All training examples have the same class. Give data with at least two '
      'classes.'
    )
  counts_C = np.bincount(labels_N, minlength=num_classes)
  fewest = int(counts_C.argmin())
  if counts_C[fewest] < max(shots):
    name = f' ({class_names[fewest]})' if class_names else ''
    raise ValueError(
      f'Class {fewest}{name} has {counts_C[fewest]} training examples, fewer '
      f'than {max(shots)} shots. Give fewer shots or a larger training split.'
    )
  by_class = [np.flatnonzero(labels_N == c) for c in range(num_classes)]
  drawn = {}
  for seed in range(seeds):
    # NumPy guarantees that the stream of RandomState never changes.
    rng = np.random.RandomState(seed)
    orders = [rng.permutation(indices) for indices in by_class]
    for k in shots:
      drawn[k, seed] = np.concatenate([order[:k] for order in orders])
  return drawn


class Shots:
  """Draws a few examples per class and measures classifiers fit to them.

  If `l2` is 'choose', features are standardised by the mean and deviation of
  the shots. Leave-one-out accuracy on the shots chooses the penalty from
  `ridge.L2_GRID`; the test set is not used. With one shot per class, leaving an
  example out removes its class, so the penalty is 2^10 instead.

  If `l2` is 'fixed', classifiers are fit as in big_vision's `fewshot_lsr.py`.
  Features are centred and divided by their deviation + 1e-5. A constant feature
  of 100 replaces the intercept. The penalty is always 2^10.

  `rows_R` are the positions of all shots without repeats, in ascending order.
  """

  def __init__(
    self,
    labels_N: np.ndarray,
    test_labels_M: np.ndarray,
    class_names: Sequence[str],
    *,
    shots: Sequence[int],
    seeds: int,
    l2: str,
  ):
    """Draws the shots.

    Raises ValueError if `l2` is unknown, there is a single class, a class has
    too few examples, `shots` is empty, or one of `shots` or `seeds` is below 1.
    """
    if l2 not in ('choose', 'fixed'):
      raise ValueError(f"l2 is {l2!r}. Use 'choose' or 'fixed'.")
    self._l2, self._num_classes = l2, len(class_names)
    self._labels_N, self._test_labels_M = labels_N, test_labels_M
    self._plan = plan(labels_N, self._num_classes, shots, seeds, class_names)
    self.rows_R = np.unique(np.concatenate(list(self._plan.values())))

  def evaluate(
    self, features_RD: np.ndarray, test_MD: np.ndarray
  ) -> list[Result]:
    """Fits a linear classifier to every draw and measures its accuracy.

    `features_RD` has the features of the images `rows_R`. Raises ValueError if
    a feature is not finite.
    """
    ridge.check_finite('training', features_RD)
    ridge.check_finite('test', test_MD)
    results = []
    for draw, indices_K in self._plan.items():
      x_KD = features_RD[np.searchsorted(self.rows_R, indices_K)]
      labels_K = self._labels_N[indices_K]
      penalty, *classifier = fit(x_KD, labels_K, self._num_classes, self._l2)
      accuracy = ridge.accuracy(test_MD, self._test_labels_M, *classifier)
      results.append(Result(*draw, penalty, accuracy))
    return results


def fit(
  x_KD: np.ndarray, labels_K: np.ndarray, num_classes: int, l2: str
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
  """Fits a classifier as `Shots` describes; `l2` is 'choose' or 'fixed'.

  Returns the penalty and the last three arguments of `ridge.accuracy`.
  """
  y_KC = ridge.one_vs_rest(labels_K, num_classes)
  if l2 == 'fixed':
    x_KD = x_KD.astype(np.float64)
    mean_D, std_D = x_KD.mean(axis=0), x_KD.std(axis=0) + _EPSILON
    x_KD = (x_KD - mean_D) / std_D
    # A single penalty does not need the eigendecomposition of `ridge.Ridge`,
    # which takes ten times as long.
    is_dual = len(x_KD) < x_KD.shape[1]
    gram, rhs = (
      (x_KD @ x_KD.T, y_KC) if is_dual else (x_KD.T @ x_KD, x_KD.T @ y_KC)
    )
    gram[np.diag_indices_from(gram)] += FIXED_L2
    w_DC = np.linalg.solve(gram, rhs)
    if is_dual:
      w_DC = x_KD.T @ w_DC
    # The constant feature has a penalty, which shrinks the intercept.
    b_C = y_KC.mean(axis=0) / (1 + FIXED_L2 / (len(x_KD) * _BIAS**2))
    return FIXED_L2, mean_D, w_DC / std_D[:, None], b_C
  mean_D, std_D = ridge.moments(x_KD)
  fitted = ridge.Ridge((x_KD - mean_D) / std_D, y_KC)
  penalty = FIXED_L2
  if len(labels_K) > num_classes:
    penalty = ridge.choose_l2(fitted, labels_K)
  w_DC, b_C = fitted.fit(penalty)
  return penalty, mean_D, w_DC / std_D[:, None], b_C
