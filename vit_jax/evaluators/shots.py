"""Few-shot accuracy: least squares on frozen features of a few examples.

Dimension letters: N training examples, R those of them that are in any draw, M
test examples, K shots of all classes, D features, C classes.
"""

import dataclasses
from collections.abc import Sequence
from concurrent import futures

import numpy as np
import threadpoolctl

from vit_jax.data.cores import usable_cores
from vit_jax.evaluators import ridge
from vit_jax.training import features

# The penalty of big_vision's protocol, and of one shot a class.
FIXED_L2 = 2.0**10
_BIAS = 100.0
_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Result:
  """Accuracy in [0, 1] of one draw of so many shots a class."""

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

  The draws never change between versions. The 5 shots of a seed are among its
  10 shots, and a draw does not depend on the other draws.
  `class_names` are for messages.

  Returns:
    By (k, seed) the positions of k C examples, int64, k of class 0 first.

  Raises:
    ValueError: if there is a single class, a class has too few examples, or
      `shots` or `seeds` is below 1.
  """
  if min(shots, default=0) < 1 or seeds < 1:
    raise ValueError(
      f'shots is {tuple(shots)} and seeds is {seeds}: it takes at least 1 '
      'number of examples a class, each at least 1, and 1 draw.'
    )
  if num_classes == 1:
    raise ValueError(
      'All examples are of one class: there is nothing to tell it from. Give '
      'at least two.'
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
    # NumPy promises that the numbers of a RandomState never change.
    rng = np.random.RandomState(seed)
    orders = [rng.permutation(indices) for indices in by_class]
    for k in shots:
      drawn[k, seed] = np.concatenate([order[:k] for order in orders])
  return drawn


class Shots:
  """Draws a few examples of each class, and measures classifiers of them.

  With 'choose' for `l2` features are standardised by the shots' own mean and
  deviation, and the penalty is the one of `ridge.L2_GRID` with the best
  leave-one-out accuracy on the shots; the test set has no say. One shot a class
  allows no such choice, because a class without its example is unknown, so the
  penalty is 2^10 there.

  'fixed' is the protocol of big_vision's `fewshot_lsr.py`: features are less
  their mean, over their deviation + 1e-5, beside a constant feature of 100 in
  place of an intercept, with the penalty 2^10 for any number of shots.

  Attributes:
    rows_R: the positions of all shots, each once, ascending.
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
    """Draws the shots as `plan` does."""
    if l2 not in FITS:
      raise ValueError(f"l2 is {l2!r}: use 'choose' or 'fixed'.")
    self._fit, self._num_classes = FITS[l2], len(class_names)
    self._labels_N, self._test_labels_M = labels_N, test_labels_M
    self._plan = plan(labels_N, self._num_classes, shots, seeds, class_names)
    self.rows_R = np.unique(np.concatenate(list(self._plan.values())))

  def evaluate(
    self, features_RD: np.ndarray, test_MD: np.ndarray
  ) -> list[Result]:
    """Fits a linear classifier to every draw and returns their results.

    Leaves out rows that an `Extractor` could not read.
    """
    is_read_R, is_read_M = map(features.is_read, (features_RD, test_MD))
    rows_R, x_RD = self.rows_R[is_read_R], features_RD[is_read_R]
    x_MD, labels_M = test_MD[is_read_M], self._test_labels_M[is_read_M]
    ridge.check_finite('training', x_RD)
    ridge.check_finite('test', x_MD)

    def run(draw: tuple[int, int]) -> Result:
      indices_K = self._plan[draw]
      indices_K = indices_K[np.isin(indices_K, rows_R)]
      x_KD = x_RD[np.searchsorted(rows_R, indices_K)]
      labels_K = self._labels_N[indices_K]
      penalty, *classifier = self._fit(x_KD, labels_K, self._num_classes)
      accuracy = ridge.accuracy(x_MD, labels_M, *classifier)
      return Result(*draw, penalty, accuracy)

    # An eigendecomposition on one core beside another takes less time than
    # both with all cores, one after the other.
    cores = usable_cores()
    workers = min(cores, len(self._plan))
    with (
      threadpoolctl.threadpool_limits(cores // workers, user_api='blas'),
      futures.ThreadPoolExecutor(workers) as pool,
    ):
      return list(pool.map(run, self._plan))


def _fit_chosen(
  x_KD: np.ndarray, labels_K: np.ndarray, num_classes: int
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
  mean_D, std_D = ridge.moments(x_KD)
  x_KD = x_KD - mean_D
  x_KD /= std_D
  fit = ridge.Ridge(x_KD, ridge.one_vs_rest(labels_K, num_classes))
  l2 = FIXED_L2
  if len(labels_K) > num_classes:
    l2 = ridge.choose_l2(fit, labels_K)
  w_DC, b_C = fit.fit(l2)
  return l2, mean_D, w_DC / std_D[:, None], b_C


def _fit_fixed(
  x_KD: np.ndarray, labels_K: np.ndarray, num_classes: int
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
  x_KD = x_KD.astype(np.float64)
  mean_D, std_D = x_KD.mean(axis=0), x_KD.std(axis=0) + _EPSILON
  x_KE = np.pad((x_KD - mean_D) / std_D, ((0, 0), (0, 1)))
  x_KE[:, -1] = _BIAS
  y_KC = ridge.one_vs_rest(labels_K, num_classes)

  def solve(gram: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    gram[np.diag_indices_from(gram)] += FIXED_L2
    return np.linalg.solve(gram, rhs)

  if len(x_KE) < x_KE.shape[1]:
    w_EC = x_KE.T @ solve(x_KE @ x_KE.T, y_KC)
  else:
    w_EC = solve(x_KE.T @ x_KE, x_KE.T @ y_KC)
  return FIXED_L2, mean_D, w_EC[:-1] / std_D[:, None], _BIAS * w_EC[-1]


# By the rule for the penalty: from shots, labels and the number of classes to
# the penalty and the classifier that `ridge.accuracy` takes.
FITS = {'choose': _fit_chosen, 'fixed': _fit_fixed}
