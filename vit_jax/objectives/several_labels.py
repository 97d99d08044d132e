"""Average precision and F1 for several labels per image, by scikit-learn."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Measures(NamedTuple):
  """Metrics for C classes, where an image may have any number of classes.

  Attributes:
    ap_C: average precision of each class; 0 if no image has the class.
    f1_C: F1 of each class at the threshold; 0 if F1 is undefined (0 / 0).
    images_C: number of images that have the class.
    mean_ap, mean_f1: means of `ap_C` and `f1_C` (scikit-learn's `macro`).
    micro_ap, micro_f1: metrics over all pairs of image and class.
  """

  ap_C: np.ndarray
  f1_C: np.ndarray
  images_C: np.ndarray
  mean_ap: float
  mean_f1: float
  micro_ap: float
  micro_f1: float


def measures(
  labels_NC: np.ndarray, scores_NC: np.ndarray, threshold: float
) -> Measures:
  """Compares 0/1 labels with scores; a score above `threshold` predicts 1."""
  from sklearn import metrics  # takes a second to import

  labels_NC, scores_NC = np.asarray(labels_NC) > 0, np.asarray(scores_NC)
  told_NC = scores_NC > threshold

  def ap(labels_X: np.ndarray, scores_X: np.ndarray) -> float:
    if not labels_X.any():  # scikit-learn would warn
      return 0.0
    return float(metrics.average_precision_score(labels_X, scores_X))

  def f1(average: str | None) -> Any:
    return metrics.f1_score(
      labels_NC, told_NC, average=average, zero_division=0
    )

  ap_C = np.array([*map(ap, labels_NC.T, scores_NC.T)])
  return Measures(
    ap_C=ap_C,
    f1_C=f1(None),
    images_C=labels_NC.sum(axis=0),
    mean_ap=float(ap_C.mean()),
    mean_f1=float(f1('macro')),
    micro_ap=ap(labels_NC.ravel(), scores_NC.ravel()),
    micro_f1=float(f1('micro')),
  )


def metric_for(evaluators: Mapping[str, Any], name: str) -> str:
  """Returns the multi-label counterpart of a single-label metric.

  `evaluators` is `config.evaluators`. If most images lack most classes,
  predicting no class at all has a high accuracy, so in evaluators of type
  'mean', mean average precision replaces accuracy.
  """
  evaluator, _, metric = name.partition('/')
  replaced = metric == 'accuracy' and evaluators[evaluator].type == 'mean'
  return f'{evaluator}/map' if replaced else name
