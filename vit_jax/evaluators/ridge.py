"""Ridge regression in closed form, for every penalty at once.

Dimension letters: N examples, M of them left out, D features, C classes, R =
min(N, D).
"""

import functools
from collections.abc import Sequence

import numpy as np

# Penalties that are tried on standardised features. The squared singular values
# of those sum to N D, which is 2^21 for 25 shots of 100 classes at D = 1024:
# the upper end leaves of nearly all directions only X'y, with which a still
# higher one changes no ranking of the classes. The lower end is below any
# direction that float32 features can tell from rounding, so that in practice
# nothing is penalised.
L2_GRID = tuple(2.0**power for power in range(-10, 21))

# Examples that a penalty is chosen by. An accuracy of 75 % is off by 1.4 % with
# so few, the differences between penalties by far less.
LEFT_OUT = 1000

# Rounding of the eigenvalues of X'X, relative to the penalty, from which on X
# itself is decomposed.
_ROUNDING = 1e-5
# The least `d`, below, at which r / d is more than rounding.
_LEAST_D = 1e-10
# Rows of features that are brought to float64 at a time.
_BLOCK = 4096


def check_labels(split: str, labels_N: np.ndarray, num_classes: int) -> None:
  """Raises ValueError unless all labels are in [0, num_classes)."""
  is_wrong_N = (labels_N < 0) | (labels_N >= num_classes)
  if is_wrong_N.any():
    raise ValueError(
      f'The {split} example {is_wrong_N.argmax()} has the label '
      f'{labels_N[is_wrong_N.argmax()]}: labels of {num_classes} classes are 0 '
      f'to {num_classes - 1}. Is this a split without labels?'
    )


def check_finite(split: str, x_ND: np.ndarray) -> None:
  """Raises ValueError unless all features are finite numbers."""
  is_wrong_N = ~np.isfinite(x_ND).all(axis=1)
  if is_wrong_N.any():
    raise ValueError(
      f'The features of {is_wrong_N.sum()} of {len(x_ND)} {split} images are '
      f'not finite, first those of row {is_wrong_N.argmax()}. Has the model '
      'diverged?'
    )


def one_vs_rest(labels_N: np.ndarray, num_classes: int) -> np.ndarray:
  """Returns float64 NC, 1 for an example's class and -1 for the others."""
  y_NC = np.full((len(labels_N), num_classes), -1.0)
  y_NC[np.arange(len(labels_N)), labels_N] = 1.0
  return y_NC


def moments(x_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns mean and standard deviation of features, float64 D.

  A feature that varies by less than the rounding of its mean in float32 counts
  as constant. Its deviation is given as 1, so that it can be divided by.
  """
  mean_D = x_ND.mean(axis=0, dtype=np.float64)
  squares_D = np.zeros_like(mean_D)
  for i in range(0, len(x_ND), _BLOCK):
    squares_D += np.square(x_ND[i : i + _BLOCK] - mean_D).sum(axis=0)
  std_D = np.sqrt(squares_D / len(x_ND))
  is_constant_D = std_D <= np.finfo(np.float32).eps * np.abs(mean_D)
  return mean_D, np.where(is_constant_D, 1.0, std_D)


def accuracy(
  x_ND: np.ndarray,
  labels_N: np.ndarray,
  mean_D: np.ndarray,
  w_DC: np.ndarray,
  b_C: np.ndarray,
) -> float:
  """Returns how often the label is the argmax of (x - mean) W + b.

  In float64, a block of rows at a time: features may be many, and their means
  large beside what tells the classes apart.
  """
  correct = 0
  for i in range(0, len(x_ND), _BLOCK):
    scores_BC = (x_ND[i : i + _BLOCK] - mean_D) @ w_DC + b_C
    correct += np.sum(scores_BC.argmax(axis=1) == labels_N[i : i + _BLOCK])
  return float(correct) / len(x_ND)


class Ridge:
  """Least squares with a penalty on the weights, and none on the intercept.

  The minimum over W and b of |Y - X W - b|^2 + l2 |W|^2, as scikit-learn's
  `Ridge(alpha=l2)` finds it. With centred X and Y there is no b, and

    W = (X'X + l2)^-1 X'Y = X' (X X' + l2)^-1 Y.

  The eigenvectors of the smaller of X'X and X X' diagonalise it for every l2.
  Leaving one example out needs no new fit: the residual of its prediction by
  the others is r / d, with r its residual in the fit of all and d = 1 - 1/N -
  x' (X'X + l2)^-1 x (PRESS, Allen 1974), where 1/N belongs to the intercept.
  """

  def __init__(self, x_ND: np.ndarray, y_NC: np.ndarray, *, svd: bool = False):
    """Decomposes finite features for targets, in float64.

    With `svd` that is X itself, which takes ten times as long. Features of very
    different scales ask for it; it is then done without being told.
    """
    self._given, self._is_svd = (x_ND, y_NC), svd
    x_ND = np.asarray(x_ND, np.float64)
    self._x_mean_D, self._y_mean_C = x_ND.mean(axis=0), y_NC.mean(axis=0)
    x_ND, self._y_NC = x_ND - self._x_mean_D, y_NC - self._y_mean_C
    # In the dual form the examples are in terms of the eigenvectors of X X'.
    self._is_dual = len(x_ND) <= x_ND.shape[1]
    if svd:
      u_NR, s_R, v_RD = np.linalg.svd(x_ND, full_matrices=False)
      self._values_R = np.square(s_R)
      self._basis_NR = u_NR if self._is_dual else u_NR * s_R
      self._directions_DR = v_RD.T * s_R if self._is_dual else v_RD.T
    elif self._is_dual:
      self._values_R, self._basis_NR = np.linalg.eigh(x_ND @ x_ND.T)
      self._directions_DR = x_ND.T @ self._basis_NR
    else:
      self._values_R, self._directions_DR = np.linalg.eigh(x_ND.T @ x_ND)
      self._basis_NR = x_ND @ self._directions_DR
    self._values_R = np.maximum(self._values_R, 0)
    # Changes nothing but in the dual form, where the constant vector is among
    # the eigenvectors of eigenvalue 0: as it is the intercept's, it is taken
    # out here, so that r and d need no differences of nearly equal numbers.
    self._basis_NR -= self._basis_NR.mean(axis=0)
    self._target_RC = self._basis_NR.T @ self._y_NC

  def _for(self, l2: float) -> 'Ridge':
    """Returns this fit, or the one that is exact for a penalty so small."""
    if not l2 > 0:
      raise ValueError(f'l2 is {l2}: the penalty has to be positive.')
    error = np.finfo(np.float64).eps * self._values_R.max()
    return self if self._is_svd or error <= _ROUNDING * l2 else self._by_svd

  @functools.cached_property
  def _by_svd(self) -> 'Ridge':
    return Ridge(*self._given, svd=True)

  def fit(self, l2: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights W, float64 DC, and the intercept b, float64 C.

    Raises:
      ValueError: unless l2 is positive.
    """
    fit = self._for(l2)
    scaled_RC = fit._target_RC / (fit._values_R[:, None] + l2)
    w_DC = fit._directions_DR @ scaled_RC
    return w_DC, self._y_mean_C - self._x_mean_D @ w_DC

  def leave_one_out(self, l2: float, rows_M: np.ndarray) -> np.ndarray:
    """Returns what a fit of all others predicts for some examples, float64 MC.

    Raises:
      ValueError: unless l2 is positive.
    """
    fit, (x_ND, y_NC) = self._for(l2), self._given
    inverse_R, basis_MR = 1 / (fit._values_R + l2), fit._basis_NR[rows_M]
    r_MC = basis_MR @ (inverse_R[:, None] * fit._target_RC)
    d_M = np.square(basis_MR) @ inverse_R
    if not self._is_dual:  # where both are over l2
      r_MC, d_M = self._y_NC[rows_M] - r_MC, 1 - 1 / len(x_ND) - d_M
      # Where nothing is left to divide by, it takes a fit of the others.
      for i in np.flatnonzero(d_M < _LEAST_D):
        row = rows_M[i]
        others = Ridge(np.delete(x_ND, row, 0), np.delete(y_NC, row, 0))
        w_DC, b_C = others.fit(l2)
        r_MC[i], d_M[i] = y_NC[row] - x_ND[row] @ w_DC - b_C, 1.0
    return y_NC[rows_M] - r_MC / d_M[:, None]


def choose_l2(
  ridge: Ridge, labels_N: np.ndarray, l2_grid: Sequence[float] = L2_GRID
) -> float:
  """Returns the penalty with the best leave-one-out accuracy.

  Ties go to the lower squared error, which is leave-one-out as well. Of more
  than `LEFT_OUT` examples so many are left out, evenly spread over them.

  The targets of `ridge` are those of `one_vs_rest` for the labels.
  """
  count = min(len(labels_N), LEFT_OUT)
  rows_M = np.arange(count) * len(labels_N) // count
  labels_M = labels_N[rows_M]

  def loss(l2: float) -> tuple[int, float]:
    y_MC = ridge.leave_one_out(l2, rows_M)
    wrong = np.sum(y_MC.argmax(axis=1) != labels_M)
    return wrong, np.sum((y_MC - one_vs_rest(labels_M, y_MC.shape[1])) ** 2)

  return min(l2_grid, key=loss)
