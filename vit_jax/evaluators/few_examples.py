"""Few-shot accuracy: least squares on frozen features of a few examples.

Dimension letters: N training examples, R those of them that are shots of any
draw, M test examples, K shots of all classes, D features, C classes.
"""

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import threadpoolctl
from ml_collections import ConfigDict

from vit_jax.data import bad_images, benchmarks
from vit_jax.data.cores import usable_cores
from vit_jax.data.sources import LabelledSource, Source, labelled, subset
from vit_jax.evaluators import ridge
from vit_jax.evaluators.evaluator import Evaluator, Parts
from vit_jax.objectives.objective import Best, Objective
from vit_jax.training import features

# Of the protocol of big_vision, and of one shot a class.
FIXED_L2 = 2.0**10
_BIAS = 100.0
_EPSILON = 1e-5

_T = TypeVar('_T')

# From (shots, seed) to the positions of the shots among the training examples.
Plan = Mapping[tuple[int, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Result:
  """What one draw of so many shots a class gave: accuracy in [0, 1]."""

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

  The draws are the same for ever, those of one seed contain one another (the
  5 shots are among the 10), and they do not depend on what else is drawn.
  `class_names` are for messages.

  Returns:
    By (k, seed) the positions of k C examples, int64, k of class 0 first.

  Raises:
    ValueError: if a class has too few examples, there is but one, or one of the
      numbers makes no sense.
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
  ridge.check_labels('training', labels_N, num_classes)
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
  """Draws of a few examples of each class, and what classifiers of them give.

  With 'choose' for `l2` features are standardised by the shots' own mean and
  deviation, and the penalty is the one of `ridge.L2_GRID` with which most of
  the shots (of at most `ridge.LEFT_OUT`) are classified right by a fit of the
  others; the test set has no say. With one shot a class there is no such
  choice: without an example its class is unknown. Nor does any other function
  of the shots tell penalties apart by the labels, if it treats classes alike,
  since one example each of classes in another order is the same data. So the
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
    ridge.check_labels('test', test_labels_M, self._num_classes)
    self._plan = plan(labels_N, self._num_classes, shots, seeds, class_names)
    self.rows_R = np.unique(np.concatenate(list(self._plan.values())))

  def evaluate(
    self, features_RD: np.ndarray, test_MD: np.ndarray
  ) -> list[Result]:
    """Returns what a linear classifier of every draw gives, in their order.

    Rows that an `Extractor` could not read are left out.
    """
    is_read_R, is_read_M = map(features.is_read, (features_RD, test_MD))
    rows_R, x_RD = self.rows_R[is_read_R], features_RD[is_read_R]
    x_MD, labels_M = test_MD[is_read_M], self._test_labels_M[is_read_M]
    ridge.check_finite('training', x_RD)
    ridge.check_finite('test', x_MD)

    def run(shots: int, seed: int) -> Result:
      indices_K = self._plan[shots, seed]
      indices_K = indices_K[np.isin(indices_K, rows_R)]
      x_KD = x_RD[np.searchsorted(rows_R, indices_K)]
      labels_K = self._labels_N[indices_K]
      penalty, *classifier = self._fit(x_KD, labels_K, self._num_classes)
      accuracy = ridge.accuracy(x_MD, labels_M, *classifier)
      return Result(shots, seed, penalty, accuracy)

    return in_threads(run, self._plan)


def in_threads(function: Callable[[int, int], _T], plan: Plan) -> list[_T]:
  """Returns what a function of shots and seed gives for each draw.

  The cores are shared out among the draws: an eigendecomposition on one core
  beside another takes less time than both with all cores, one after the other.
  """
  cores = usable_cores()
  workers = min(cores, len(plan))
  # The largest first, so that no core is left with one of those at the end.
  order = sorted(plan, key=lambda draw: -len(plan[draw]))
  with (
    threadpoolctl.threadpool_limits(cores // workers, user_api='blas'),
    concurrent.futures.ThreadPoolExecutor(workers) as pool,
  ):
    results = dict(
      zip(order, pool.map(lambda draw: function(*draw), order), strict=True)
    )
  return [results[draw] for draw in plan]


def _fit_chosen(
  x_KD: np.ndarray, labels_K: np.ndarray, num_classes: int
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
  """Returns the penalty chosen, and what `ridge.accuracy` takes."""
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
  """Returns the fixed penalty, and what `ridge.accuracy` takes."""
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
# the penalty and what `ridge.accuracy` takes.
FITS = {'choose': _fit_chosen, 'fixed': _fit_fixed}


class FewShotEvaluator(Evaluator):
  """Measures the accuracy of classifiers on a few examples of each class."""

  def __init__(
    self,
    name: str,
    extract: Callable[[Any, Source], np.ndarray],
    train: LabelledSource,
    test: LabelledSource,
    *,
    shots: Sequence[int],
    seeds: int,
    l2: str,
  ):
    """Draws the shots from `train`; other options are those of `Shots`.

    `extract` returns the features of a source's images, in its order, from
    parameters and the source. Only the label is read of other training images.
    """
    self.name = name
    self._extract = extract
    labels = train.labels(), test.labels()
    self._shots = Shots(
      *labels, train.class_names, shots=shots, seeds=seeds, l2=l2
    )
    self._sources = subset(train, self._shots.rows_R.tolist()), test

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    """Returns the accuracy for each number of shots."""
    del objective
    return {f'{k}shot_accuracy': 'highest' for k in entry.shots}

  @classmethod
  def from_entry(cls, parts: Parts, name: str, entry: ConfigDict) -> Self:
    """Returns the evaluator of any data."""
    data = parts.config.data.copy_and_resolve_references()
    data.update(name=entry.data, class_order='')
    train, test = usual_splits(entry.data)
    return cls(
      name,
      parts.extractor(name, features.layer(parts.objective.model, entry.layer)),
      *open_splits(data, entry.train_split or train, entry.test_split or test),
      shots=entry.shots,
      seeds=entry.seeds,
      l2=entry.l2,
    )

  def run(self, params: Any) -> dict[str, float]:
    """Returns the mean accuracy over draws as `NAME/5shot_accuracy`."""
    extracted = (self._extract(params, source) for source in self._sources)
    results = self._shots.evaluate(*extracted)
    return {
      f'{self.name}/{k}shot_accuracy': float(
        np.mean([r.accuracy for r in results if r.shots == k])
      )
      for k in dict.fromkeys(r.shots for r in results)
    }


def usual_splits(name: str) -> tuple[str, str]:
  """Returns the splits that shots are drawn from, and that are measured on."""
  usual = benchmarks.BENCHMARKS.get(name)
  return (usual.train, usual.test) if usual else ('train', 'test')


def open_splits(
  data: ConfigDict, train_split: str, test_split: str
) -> tuple[LabelledSource, LabelledSource]:
  """Opens two splits with the same classes, their images checked."""
  train, test = (
    labelled(bad_images.open_checked(data, split), f'{data.name} {split}')
    for split in (train_split, test_split)
  )
  both = (train.class_names, test.class_names)
  for i, (a, b) in enumerate(itertools.zip_longest(*both)):
    if a != b:
      raise ValueError(
        f'The classes of {data.name} {test_split} are not those of '
        f'{train_split}: class {i} is {b!r} and not {a!r}.'
      )
  return train, test
