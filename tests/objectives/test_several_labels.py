"""Measures of several labels an image against scikit-learn's."""

import warnings

import numpy as np
import pytest
from sklearn import metrics

from vit_jax.objectives import several_labels


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('empty', ['nothing', 'class', 'image', 'all'])
def test_equals_scikit_learn(seed, empty):
  """With ties, with a class nobody has, and without any positive."""
  rng = np.random.RandomState(seed)
  labels_NC = rng.random_sample((30, 5)) < 0.3
  labels_NC[:, 2] &= empty != 'class'
  labels_NC[:7] &= empty != 'image'
  labels_NC &= empty != 'all'
  scores_NC = np.round(rng.standard_normal((30, 5)), 1)  # many are equal
  found = several_labels.measures(labels_NC, scores_NC, 0.25)
  told_NC = scores_NC > 0.25
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # of classes without positives
    ap = metrics.average_precision_score
    f1 = metrics.f1_score
    wanted = {
      'ap_C': ap(labels_NC, scores_NC, average=None),
      'f1_C': f1(labels_NC, told_NC, average=None, zero_division=0),
      'mean_ap': ap(labels_NC, scores_NC, average='macro'),
      'mean_f1': f1(labels_NC, told_NC, average='macro', zero_division=0),
      'micro_ap': ap(labels_NC, scores_NC, average='micro'),
      'micro_f1': f1(labels_NC, told_NC, average='micro', zero_division=0),
    }
  for name, value in wanted.items():
    np.testing.assert_allclose(getattr(found, name), value, err_msg=name)
