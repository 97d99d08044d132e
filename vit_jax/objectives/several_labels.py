"""Average precision and F1 for several labels per image, as in scikit-learn."""

from typing import NamedTuple

import numpy as np


class Measures(NamedTuple):
  """Metrics for C classes, where an image may have any number of them.

  Attributes:
    ap_C: average precision of each class; 0 if no image has the class.
    f1_C: F1 of each class at the threshold; 0 if it is 0 / 0.
    images_C: number of images that have the class.
    mean_ap: mean of `ap_C` (scikit-learn's `macro`).
    mean_f1: mean of `f1_C`.
    micro_ap: average precision over all pairs of image and class.
    micro_f1: F1 over all pairs of image and class.
  """

  ap_C: np.ndarray
  f1_C: np.ndarray
  images_C: np.ndarray
  mean_ap: float
  mean_f1: float
  micro_ap: float
  micro_f1: float


def average_precision(labels_N: np.ndarray, scores_N: np.ndarray) -> float:
  """Returns the average precision: the sum of precision times gain in recall.

  Equal scores count as one threshold. Without positives it is 0.
  """
  order_N = np.argsort(-scores_N, kind='stable')
  labels_N, scores_N = labels_N[order_N] > 0, scores_N[order_N]
  if not labels_N.any():
    return 0.0
  last_T = np.append(np.flatnonzero(np.diff(scores_N)), len(scores_N) - 1)
  hits_T = np.cumsum(labels_N)[last_T]
  gains_T = np.diff(hits_T, prepend=0)
  return float(np.sum(gains_T * hits_T / (last_T + 1)) / labels_N.sum())


def _f1(labels: np.ndarray, told: np.ndarray) -> np.ndarray:
  """Returns F1 over the first axis; 0 if it is 0 / 0."""
  hits = np.sum(labels & told, axis=0)
  total = labels.sum(axis=0) + told.sum(axis=0)
  return 2 * hits / np.maximum(total, 1)


def measures(
  labels_NC: np.ndarray, scores_NC: np.ndarray, threshold: float
) -> Measures:
  """Compares labels, 0 or 1, with scores; above the threshold predicts 1."""
  labels_NC = np.asarray(labels_NC) > 0
  scores_NC = np.asarray(scores_NC)
  told_NC = scores_NC > threshold
  ap_C = np.array(
    [
      average_precision(labels_N, scores_N)
      for labels_N, scores_N in zip(labels_NC.T, scores_NC.T, strict=True)
    ]
  )
  f1_C = _f1(labels_NC, told_NC)
  return Measures(
    ap_C=ap_C,
    f1_C=f1_C,
    images_C=labels_NC.sum(axis=0),
    mean_ap=float(ap_C.mean()),
    mean_f1=float(f1_C.mean()),
    micro_ap=average_precision(labels_NC.ravel(), scores_NC.ravel()),
    micro_f1=float(_f1(labels_NC.ravel(), told_NC.ravel())),
  )
