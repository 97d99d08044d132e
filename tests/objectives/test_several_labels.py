"""Measures of several labels per image, by hand."""

import warnings

import numpy as np
import pytest

from vit_jax import config as config_lib
from vit_jax.objectives import several_labels


def test_by_hand():
  """With ties, a class that no image has, and an image without a class."""
  labels_NC = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0]])
  scores_NC = np.array(
    [[0.9, 0.1, 0.1], [0.8, 0.7, 0.1], [0.3, 0.7, 0.2], [0.1, 0.7, 0.9]]
  )
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    found = several_labels.measures(labels_NC, scores_NC, 0.5)
  # Class 0: precision 1 at recall 1/2, 2/3 at 1. Class 1: 2/3 at once.
  np.testing.assert_allclose(found.ap_C, [(1 + 2 / 3) / 2, 2 / 3, 0])
  np.testing.assert_allclose(found.f1_C, [1 / 2, 4 / 5, 0])
  np.testing.assert_array_equal(found.images_C, [2, 2, 0])
  assert found.mean_ap == pytest.approx(found.ap_C.mean())
  assert found.mean_f1 == pytest.approx(found.f1_C.mean())
  # Of all pairs, 6 are predicted, 3 of them rightly, of 4 that are true.
  assert found.micro_f1 == pytest.approx(6 / 10)
  # Scores .9 (one of two right), .8, .7 (3 of 6), .3 (4 of 7).
  assert found.micro_ap == pytest.approx(
    (1 / 4) * (1 / 2) + (2 / 4) * (3 / 6) + (1 / 4) * (4 / 7)
  )


def test_nothing_is_positive():
  found = several_labels.measures(np.zeros((3, 2)), np.ones((3, 2)), 2.0)
  assert found.mean_ap == found.micro_ap == found.mean_f1 == 0


def test_only_means_over_images_have_map_for_accuracy():
  evaluators = config_lib.base().evaluators
  names = [
    'test/accuracy',
    'test/loss',
    'knn/accuracy',
    'fewshot/5shot_accuracy',
  ]
  got = [several_labels.metric_for(evaluators, name) for name in names]
  assert got == ['test/map', *names[1:]]
