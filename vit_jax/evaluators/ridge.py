"""Ridge regression in closed form, for every penalty at once.

Dimension letters: N examples, D features, C classes, R = min(N, D), P
penalties.
"""

import functools
from collections.abc import Iterator, Sequence

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
# itself is decomposed; for exact results and for float32's.
_ROUNDING, _ROUNDING_32 = 1e-7, 1e-4
# The least `d`, below, at which r / d is more than rounding, in float64 and in
# float32.
_LEAST_D, _LEAST_D_32 = 1e-10, 1e-2
# Singular values that are left out of products in float32, relatively.
_TOLERANCE = 1e-4
# Values that such a product has at a time, which stay in the cache.
_BLOCK_VALUES = 2**20
# Rows and columns that are added to an unlucky matrix.
_PADDING = 8
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
  count = len(x_ND)
  blocks = range(0, count, _BLOCK)

  def block(start: int) -> np.ndarray:
    return np.asarray(x_ND[start : start + _BLOCK], np.float64)

  mean_D = np.sum([block(i).sum(axis=0) for i in blocks], axis=0) / count
  squares_D = np.zeros_like(mean_D)
  for i in blocks:
    centred_BD = block(i) - mean_D
    squares_D += np.einsum('bd,bd->d', centred_BD, centred_BD)
  std_D = np.sqrt(squares_D / count)
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
    """Args:

    x_ND: finite features; computed with in float64.
    y_NC: targets.
    svd: whether to decompose X itself, which takes ten times as long. Features
      of very different scales ask for it; it is then done without being told.
    """
    self._given = x_ND, y_NC
    x_ND = np.asarray(x_ND, np.float64)
    self._x_mean_D, self._y_mean_C = x_ND.mean(axis=0), y_NC.mean(axis=0)
    self._x_ND, self._y_NC = x_ND - self._x_mean_D, y_NC - self._y_mean_C
    self._is_dual = len(x_ND) <= x_ND.shape[1]
    # The eigenvalues, the directions in feature space that they belong to, and
    # the examples in terms of these or, in the dual form, of XX's eigenvectors.
    self._values_R: np.ndarray
    self._directions_DR: np.ndarray | None = None
    self._basis_NR: np.ndarray | None = None
    if svd:
      u_NR, s_R, v_RD = np.linalg.svd(self._x_ND, full_matrices=False)
      self._values_R, self._directions_DR = np.square(s_R), v_RD.T
      self._basis_NR = u_NR if self._is_dual else u_NR * s_R
    elif self._is_dual:
      self._values_R, self._basis_NR = _eigh(self._x_ND @ self._x_ND.T)
    else:
      self._values_R, self._directions_DR = _eigh(self._x_ND.T @ self._x_ND)
    if self._basis_NR is None:
      assert self._directions_DR is not None
      self._target_RC = self._directions_DR.T @ (self._x_ND.T @ self._y_NC)
    else:
      # Changes nothing but in the dual form, where the constant vector is among
      # the eigenvectors of eigenvalue 0: as it is the intercept's, it is taken
      # out here, so that r and d need no differences of nearly equal numbers.
      self._basis_NR -= self._basis_NR.mean(axis=0)
      self._target_RC = self._basis_NR.T @ self._y_NC
    self._is_svd = svd

  def _for(self, l2: float, rounding: float) -> 'Ridge':
    """Returns this fit, or the one that is exact for a penalty so small."""
    _check_l2(l2)
    error = np.finfo(np.float64).eps * self._values_R.max()
    return self if self._is_svd or error <= rounding * l2 else self._by_svd

  @functools.cached_property
  def _by_svd(self) -> 'Ridge':
    return Ridge(*self._given, svd=True)

  def fit(self, l2: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights W, float64 DC, and the intercept b, float64 C.

    Raises:
      ValueError: unless l2 is positive.
    """
    return self._for(l2, _ROUNDING)._fit(l2)

  def _fit(self, l2: float) -> tuple[np.ndarray, np.ndarray]:
    scaled_RC = self._target_RC / (self._values_R[:, None] + l2)
    if self._directions_DR is None:
      w_DC = self._x_ND.T @ (self._basis_NR @ scaled_RC)
    elif self._is_dual:
      w_DC = self._directions_DR @ (
        np.sqrt(self._values_R)[:, None] * scaled_RC
      )
    else:
      w_DC = self._directions_DR @ scaled_RC
    return w_DC, self._y_mean_C - self._x_mean_D @ w_DC

  def leave_one_out(self, l2: float) -> np.ndarray:
    """Returns what a fit of all others predicts for each example, float64 NC.

    Raises:
      ValueError: unless l2 is positive.
    """
    rows_N = np.arange(len(self._x_ND))
    fit = self._for(l2, _ROUNDING)
    r_NC, d_N = fit._residuals(rows_N, fit._basis(rows_N), l2)
    return self._given[1] - r_NC / d_N[:, None]

  def _basis(
    self, rows_B: np.ndarray | slice, dtype: type[np.floating] = np.float64
  ) -> np.ndarray:
    """Returns examples in terms of the eigenvectors, BR."""
    if self._basis_NR is None:
      assert self._directions_DR is not None
      directions_DR = self._directions_DR.astype(dtype, copy=False)
      return self._x_ND[rows_B].astype(dtype, copy=False) @ directions_DR
    return self._basis_NR[rows_B].astype(dtype, copy=False)

  def _d(self, basis_BR: np.ndarray, l2_P: np.ndarray) -> np.ndarray:
    """Returns d, of shape BP; as for r, l2 d in the dual form."""
    inverse_RP = 1 / (self._values_R[:, None] + l2_P)
    h_BP = np.square(basis_BR) @ inverse_RP.astype(basis_BR.dtype)
    return h_BP if self._is_dual else 1 - 1 / len(self._x_ND) - h_BP

  def _residuals(
    self, rows_B: np.ndarray, basis_BR: np.ndarray, l2: float
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns r_BC and d_B of some examples, both over l2 in the dual form."""
    target_RC = self._target_RC / (self._values_R[:, None] + l2)
    r_BC, d_B = basis_BR @ target_RC, self._d(basis_BR, np.array([l2]))[:, 0]
    if self._is_dual:
      return r_BC, d_B
    r_BC = self._y_NC[rows_B] - r_BC
    x_ND, y_NC = self._given
    # Where nothing is left to divide by, it takes a fit of the others.
    for i in np.flatnonzero(d_B < _LEAST_D):
      row = rows_B[i]
      others = Ridge(np.delete(x_ND, row, 0), np.delete(y_NC, row, 0))
      w_DC, b_C = others.fit(l2)
      r_BC[i], d_B[i] = y_NC[row] - x_ND[row] @ w_DC - b_C, 1.0
    return r_BC, d_B

  def residual_blocks(
    self, l2_grid: Sequence[float], rows_M: np.ndarray
  ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns, by turns, indices_B, r_PBC and d_PB, for M examples once each.

    Made for all penalties at once, and for choosing among them: of float32, and
    r / d is good to three digits of the targets.

    Raises:
      ValueError: unless the penalties are positive.
    """
    for l2 in l2_grid:
      _check_l2(l2)
    return self._for(min(l2_grid), _ROUNDING_32)._blocks(l2_grid, rows_M)

  def _blocks(
    self, l2_grid: Sequence[float], rows_M: np.ndarray
  ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    l2_P = np.asarray(l2_grid)
    basis_MR = self._basis(rows_M, np.float32)
    d_PM = np.ascontiguousarray(self._d(basis_MR, l2_P).T)
    mix_PQ, part_QRC = self._factors(basis_MR, l2_P)
    # The lowest penalty leaves the least.
    is_near_M = (d_PM.min(axis=0) < _LEAST_D_32) & (not self._is_dual)
    block = max(1, _BLOCK_VALUES // (len(l2_P) * part_QRC.shape[-1]))
    for start in range(0, len(rows_M), block):
      part = slice(start, start + block)
      rows_B, d_PB = rows_M[part], d_PM[:, part]
      r_PBC = np.tensordot(mix_PQ, basis_MR[part] @ part_QRC, 1)
      if not self._is_dual:
        y_BC = self._y_NC[rows_B].astype(np.float32)
        np.subtract(y_BC, r_PBC, out=r_PBC)
      near = np.flatnonzero(is_near_M[part])
      if near.size:
        basis = self._basis(rows_B[near])
        for p, l2 in enumerate(l2_grid):
          r_PBC[p, near], d_PB[p, near] = self._residuals(
            rows_B[near], basis, l2
          )
      yield rows_B, r_PBC, d_PB

  def _factors(
    self, basis_MR: np.ndarray, l2_P: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns what the products for all penalties are mixed from.

    1 / (values + l2) as a matrix over eigenvalues and penalties is smooth in
    both, so few of its singular values matter: Q of them in place of P.

    Returns:
      mix_PQ and part_QRC, float32: basis (target / (values + l2_p)) is the sum
      over q of mix_pq basis part_q.
    """
    # How much an eigenvector adds to the products.
    size_R = np.linalg.norm(basis_MR, axis=0) * np.linalg.norm(
      self._target_RC, axis=1
    )
    # None may be 0 below, even where all examples are the same.
    least = max(size_R.max() * np.finfo(np.float64).eps, 1e-38)
    size_R = np.maximum(size_R, least)
    inverse_RP = 1 / (self._values_R[:, None] + l2_P)
    scale_P = np.max(size_R[:, None] * inverse_RP, axis=0)
    u_RQ, s_Q, v_QP = np.linalg.svd(
      size_R[:, None] * inverse_RP / scale_P, full_matrices=False
    )
    count = int(np.sum(s_Q > _TOLERANCE * s_Q[0]))
    u_RQ = u_RQ[:, :count] * s_Q[:count] / size_R[:, None]
    mix_PQ = (v_QP[:count] * scale_P).T.astype(np.float32)
    part_QRC = u_RQ.T[:, :, None] * self._target_RC
    return mix_PQ, part_QRC.astype(np.float32)


def choose_l2(
  ridge: Ridge, labels_N: np.ndarray, l2_grid: Sequence[float] = L2_GRID
) -> float:
  """Returns the penalty with the best leave-one-out accuracy.

  Ties go to the lower squared error, which is leave-one-out as well. Of more
  than `LEFT_OUT` examples so many are left out, evenly spread over them.

  Args:
    ridge: of targets from `one_vs_rest`.
    labels_N: the classes of its examples.
    l2_grid: to choose from.
  """
  correct_P = np.zeros(len(l2_grid), np.int64)
  squared_P = np.zeros(len(l2_grid))
  count = len(labels_N)
  rows_M = np.arange(min(count, LEFT_OUT)) * count // min(count, LEFT_OUT)
  for rows_B, r_PBC, d_PB in ridge.residual_blocks(l2_grid, rows_M):
    squared_PB = np.einsum('pbc,pbc->pb', r_PBC, r_PBC) / np.square(d_PB)
    squared_P += squared_PB.sum(axis=1)
    # Of the prediction y - r / d the largest is wanted, in units of d: y is 1
    # for the example's class, which is 2 more than for the others.
    labels_B = labels_N[rows_B]
    r_PBC[:, np.arange(len(rows_B)), labels_B] -= 2 * d_PB
    correct_P += np.sum(r_PBC.argmin(axis=2) == labels_B, axis=1)
  return l2_grid[np.lexsort((squared_P, -correct_P))[0]]


def _eigh(gram_RR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  # Columns that are a power of two apart share cache lines, which takes a third
  # more time at 1,024. The few that are added have an eigenvalue far below all
  # others, and are then left out again.
  extra = _PADDING if len(gram_RR) % 256 == 0 else 0
  padded = np.pad(gram_RR, (0, extra))
  padded[-extra:, -extra:][np.diag_indices(extra)] = -np.trace(gram_RR) - 1
  values_R, vectors_RR = np.linalg.eigh(padded)
  return np.maximum(values_R[extra:], 0), vectors_RR[: len(gram_RR), extra:]


def _check_l2(l2: float) -> None:
  if not l2 > 0:
    raise ValueError(f'l2 is {l2}: the penalty has to be positive.')
