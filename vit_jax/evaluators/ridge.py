"""Closed-form ridge regression, with one decomposition for all penalties.

Dimension letters: N examples, M selected examples, D features, C classes,
R = min(N, D).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

# Penalties to try on standardised features. The squared singular values of the
# features sum to N D, about 2^21 for 25 shots of 100 classes at D = 1024.
# With equally many examples per class, penalties above this grid hardly change
# the ranking of the classes. Penalties below it rarely matter for features of
# networks.
L2_GRID = tuple(2.0**power for power in range(-10, 21))

# Maximum number of examples to leave out in turn. With 1,000 examples, an
# accuracy of 75 % has a standard error of 1.4 %. The difference
# between two penalties has a much smaller error, because both use the same
# examples.
LEFT_OUT = 1000

# Rows of features converted to float64 at a time.
_BLOCK = 4096


def check_finite(split: str, x_ND: np.ndarray) -> None:
  """Raises ValueError unless all features are finite numbers."""
  is_wrong_N = ~np.isfinite(x_ND).all(axis=1)
  if is_wrong_N.any():
    raise ValueError(
      f'The features of {is_wrong_N.sum()} of {len(x_ND)} {split} images are '
      f'not finite; the first is row {is_wrong_N.argmax()}. Check whether the '
      'model diverged, or images became unreadable.'
    )


def one_vs_rest(labels_N: np.ndarray, num_classes: int) -> np.ndarray:
  """Returns targets float64 NC: 1 for an example's class, -1 for others."""
  return np.where(labels_N[:, None] == np.arange(num_classes), 1.0, -1.0)


def moments(x_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns mean and standard deviation of features, float64 D.

  The deviation is 1 for a feature that varies by less than the rounding of its
  mean in float32. Such features count as constant.
  """
  mean_D = x_ND.mean(axis=0, dtype=np.float64)
  squares_D = np.zeros_like(mean_D)
  for i in range(0, len(x_ND), _BLOCK):
    squares_D += np.square(x_ND[i : i + _BLOCK] - mean_D).sum(axis=0)
  std_D = np.sqrt(squares_D / len(x_ND))
  is_constant_D = std_D <= np.finfo(np.float32).eps * np.abs(mean_D)
  return mean_D, np.where(is_constant_D, 1.0, std_D)


def hits(scores_NC: Any, labels: Any) -> Any:
  """Returns whether the label of each example has the highest score, N.

  If `labels` is 0/1 NC, a score above 0 predicts the label 1. The result is
  then the share of classes whose label is predicted correctly, N.
  """
  if labels.ndim == 2:
    return ((scores_NC > 0) == labels).mean(axis=1)
  return scores_NC.argmax(axis=1) == labels


def accuracy(
  x_ND: np.ndarray,
  labels: np.ndarray,
  mean_D: np.ndarray,
  w_DC: np.ndarray,
  b_C: np.ndarray,
) -> float:
  """Returns the mean of `hits` with the scores (x - mean) W + b.

  Computes in float64, because means may be large compared with differences
  between classes.
  """
  correct = 0
  for i in range(0, len(x_ND), _BLOCK):
    scores_BC = (x_ND[i : i + _BLOCK] - mean_D) @ w_DC + b_C
    correct += np.sum(hits(scores_BC, labels[i : i + _BLOCK]))
  return float(correct) / len(x_ND)


class Ridge:
  """Least squares with a penalty on the weights but not on the intercept.

  It minimises |Y - X W - b|^2 + l2 |W|^2 over W and b, like scikit-learn's
  `Ridge(alpha=l2)`. If X and Y are centred, b is 0, and

    W = (X'X + l2)^-1 X'Y = X' (X X' + l2)^-1 Y.

  One eigendecomposition of the smaller of X'X (primal) and X X' (dual) serves
  every l2. It has the eigenvalues v, and the eigenvectors A of X'X or B of
  X X'. Let B = X A (primal) or A = X'B (dual), and T = B'Y. Then
  W = A (T / (v + l2)). In the primal form, B (T / (v + l2)) are the fitted
  values; in the dual form, they are the residuals divided by l2.

  Leave-one-out predictions need no new fits (PRESS, Allen 1974). The residual
  of a left-out example x is r / d. Here r is its residual in the full fit, and
  d = 1 - 1/N - x' (X'X + l2)^-1 x. The term 1/N comes from the intercept.
  """

  def __init__(self, x_ND: np.ndarray, y_NC: np.ndarray):
    """Computes the decomposition of features and targets, in float64.

    Features must be standardised by `moments`. Otherwise rounding errors of
    large eigenvalues could exceed the penalty.
    """
    x_ND = np.asarray(x_ND, np.float64)
    self._x_mean_D, self._y_mean_C = x_ND.mean(axis=0), y_NC.mean(axis=0)
    x_ND = x_ND - self._x_mean_D
    self._y_NC = y_NC - self._y_mean_C
    self._is_dual = len(x_ND) <= x_ND.shape[1]
    if self._is_dual:
      v_R, b_NR = np.linalg.eigh(x_ND @ x_ND.T)
      a_DR = x_ND.T @ b_NR
    else:
      v_R, a_DR = np.linalg.eigh(x_ND.T @ x_ND)
      b_NR = x_ND @ a_DR
    # In the dual form, the constant vector (the intercept) is an eigenvector of
    # eigenvalue 0. Removing it avoids differences of nearly equal numbers in r
    # and d.
    b_NR -= b_NR.mean(axis=0)
    self._v_R, self._a_DR, self._b_NR = np.maximum(v_R, 0), a_DR, b_NR
    self._t_RC = b_NR.T @ self._y_NC

  def fit(self, l2: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights W, float64 DC, and the intercept b, float64 C."""
    w_DC = self._a_DR @ (self._t_RC / (self._v_R + l2)[:, None])
    return w_DC, self._y_mean_C - self._x_mean_D @ w_DC

  def leave_one_out(
    self, l2: float, rows_M: np.ndarray | slice = slice(None)
  ) -> np.ndarray:
    """Predicts each example from a fit to all other examples, float64 MC.

    `rows_M` are the examples to predict.
    """
    b_MR, y_MC = self._b_NR[rows_M], self._y_NC[rows_M]
    inverse_R = 1 / (self._v_R + l2)
    r_MC, d_M = b_MR @ (inverse_R[:, None] * self._t_RC), b_MR**2 @ inverse_R
    # In the dual form r and d both lack the factor l2, which cancels.
    if not self._is_dual:
      r_MC, d_M = y_MC - r_MC, 1 - 1 / len(self._b_NR) - d_M
    return self._y_mean_C + y_MC - r_MC / d_M[:, None]


def choose_l2(
  ridge: Ridge, labels_N: np.ndarray, l2_grid: Sequence[float] = L2_GRID
) -> float:
  """Returns the penalty with the best leave-one-out accuracy.

  Among penalties of equal accuracy, the lowest leave-one-out squared error
  decides. At most `LEFT_OUT` evenly spaced examples are left out in turn.
  `ridge` must have the targets of `one_vs_rest`.
  """
  count = len(labels_N)
  rows_M = np.arange(min(count, LEFT_OUT)) * count // min(count, LEFT_OUT)
  labels_M = labels_N[rows_M]

  def score(l2: float) -> tuple[int, float]:
    predicted_MC = ridge.leave_one_out(l2, rows_M)
    wrong = int(np.sum(predicted_MC.argmax(axis=1) != labels_M))
    y_MC = one_vs_rest(labels_M, predicted_MC.shape[1])
    return wrong, float(np.sum((predicted_MC - y_MC) ** 2))

  return min(l2_grid, key=score)
