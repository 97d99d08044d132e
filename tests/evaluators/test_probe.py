"""The linear probe against scikit-learn's logistic regression."""

import math

import jax
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from vit_jax.evaluators import probe
from vit_jax.training import sharding

CLASSES = 4


def examples(n=203, width=12, seed=0, spread=0.6):
  rng = np.random.default_rng(seed)
  centres = spread * np.random.default_rng(9).standard_normal((CLASSES, width))
  labels = rng.permutation(np.arange(n) % CLASSES)
  x = centres[labels] + rng.standard_normal((n, width))
  # Like a network's features, these are float32, and some are large.
  x = x * 10 ** np.linspace(-3, 3, width) + np.linspace(0, 1000, width)
  return x.astype(np.float32), labels


def mesh(devices=8, fsdp=2):
  fsdp = min(fsdp, devices)
  return sharding.make_mesh(
    {'data': -1, 'fsdp': fsdp, 'tensor': 1}, jax.devices()[:devices]
  )


def fit(devices=8, **kwargs):
  x, labels = examples()
  test, test_labels = examples(seed=1)
  return probe.fit_probe(
    **{
      'features_ND': x,
      'labels': labels,
      'test_MD': test,
      'test_labels': test_labels,
      'num_classes': CLASSES,
      'mesh': mesh(devices),
    }
    | kwargs
  )


def reference(x, labels, l2, weights=None):
  weights = np.ones(len(x)) if weights is None else weights
  # Newton's method, because scikit-learn's L-BFGS stops where the objective
  # hardly falls any more, a thousand times farther from the minimum.
  model = LogisticRegression(
    C=1 / (weights.sum() * l2), tol=1e-7, max_iter=1000, solver='newton-cg'
  )
  return model.fit(x, labels, sample_weight=weights)


def probabilities(found, x):
  logits = (x - found.mean_D) @ found.kernel_DC + found.bias_C
  exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
  return exponents / exponents.sum(axis=1, keepdims=True)


@pytest.mark.parametrize('l2', [2.0**-16, 0.1])
def test_minimum_is_that_of_scikit_learn(l2):
  x, labels = examples()
  test, test_labels = examples(seed=1)
  scaler = StandardScaler().fit(x.astype(np.float64))
  model = reference(scaler.transform(x), labels, l2)
  # The best tolerance that float32 reaches.
  found = fit(1, l2_grid=(l2,), tolerance=1e-7)
  np.testing.assert_allclose(
    probabilities(found, test),
    model.predict_proba(scaler.transform(test)),
    atol=2e-5,
  )
  kernel_DC = found.kernel_DC * scaler.scale_[:, None]
  np.testing.assert_allclose(
    kernel_DC, model.coef_.T, atol=2e-4 * np.abs(model.coef_).max()
  )
  assert found.accuracy == model.score(scaler.transform(test), test_labels)
  assert found.converged
  assert 5 < found.iterations < 200
  assert (found.l2, math.isnan(found.heldout_accuracy)) == (l2, True)


def test_eight_devices_are_one_device():
  """203 examples do not divide by eight."""
  one, eight = fit(1), fit(8)
  assert (one.l2, one.heldout_accuracy) == (eight.l2, eight.heldout_accuracy)
  assert one.accuracy == eight.accuracy
  test, _ = examples(seed=1)
  np.testing.assert_allclose(
    probabilities(one, test), probabilities(eight, test), atol=1e-4
  )


def test_penalty_is_the_best_on_the_held_out_tenth():
  x, labels = examples(seed=12, spread=0.4)
  grid = (1e-4, 1e-2, 0.1, 1.0)
  is_heldout = probe.hold_out(labels)
  z = StandardScaler().fit_transform(x.astype(np.float64))
  scores = {
    l2: reference(z, labels, l2, 1.0 * ~is_heldout).score(
      z[is_heldout], labels[is_heldout]
    )
    for l2 in grid
  }
  found = fit(features_ND=x, labels=labels, l2_grid=grid)
  best = max(scores.values())
  assert found.heldout_accuracy == pytest.approx(best, abs=1e-6)
  # Three penalties are equally good; the highest wins.
  assert found.l2 == max(l2 for l2 in grid if scores[l2] == best)
  # The last fit has all examples.
  model = reference(z, labels, found.l2)
  np.testing.assert_allclose(
    probabilities(found, x), model.predict_proba(z), atol=3e-4
  )


def test_several_labels_are_as_many_regressions():
  x, labels = examples()
  several = np.eye(CLASSES, dtype=np.uint8)[labels]
  several[::5, 0] = 1
  z = StandardScaler().fit_transform(x.astype(np.float64))
  found = fit(labels=several, test_MD=x, test_labels=several, l2_grid=(0.01,))
  logits = (x - found.mean_D) @ found.kernel_DC + found.bias_C
  models = [reference(z, y, 0.01) for y in several.T]
  expected = np.stack([m.decision_function(z) for m in models], axis=1)
  np.testing.assert_allclose(logits, expected, atol=3e-4)
  assert found.accuracy == np.mean((expected > 0) == several)


def test_order_of_the_grid_does_not_matter():
  assert fit(l2_grid=(0.01, 1.0, 0.1)).l2 == fit(l2_grid=(1.0, 0.1, 0.01)).l2


def test_a_tenth_of_each_class_is_held_out():
  labels = np.random.default_rng(0).permutation(np.repeat(np.arange(3), 50))
  is_heldout = probe.hold_out(labels)
  assert np.bincount(labels[is_heldout]).tolist() == [5, 5, 5]
  np.testing.assert_array_equal(is_heldout, probe.hold_out(labels))
  # The sixth of each ten, class by class, in the order of NumPy's permutation.
  # This must never change, so that figures stay comparable.
  order = np.random.RandomState(0).permutation(150)
  ordered = sorted(order, key=lambda i: labels[i])
  assert [*np.flatnonzero(is_heldout)] == sorted(ordered[5::10])


@pytest.mark.slow
def test_classes_that_are_rare_or_absent_do_no_harm():
  x, labels = examples()
  labels = np.where(labels == 3, 2, labels)
  labels[0] = 4
  found = fit(features_ND=x, labels=labels, num_classes=6, l2_grid=(0.01, 0.1))
  assert found.converged
  assert found.kernel_DC.shape == (12, 6)


def test_constant_features_change_nothing():
  x, test = examples()[0], examples(seed=1)[0]
  wide, wide_test = (
    np.pad(a, ((0, 0), (1, 1)), constant_values=0.1) for a in (x, test)
  )
  found = fit(features_ND=wide, test_MD=wide_test, l2_grid=(0.01,))
  expected = fit(l2_grid=(0.01,))
  assert found.accuracy == expected.accuracy
  np.testing.assert_allclose(
    probabilities(found, wide_test), probabilities(expected, test), atol=1e-4
  )
  np.testing.assert_array_equal(found.kernel_DC[[0, -1]], 0)


def test_blocks_change_nothing(monkeypatch):
  expected = fit(l2_grid=(0.01,))
  monkeypatch.setattr(probe, '_BLOCK', 7)
  found = fit(l2_grid=(0.01,))
  np.testing.assert_array_equal(found.kernel_DC, expected.kernel_DC)


def test_a_fit_ends_once_no_entry_of_its_gradient_is_larger():
  x, labels = examples()
  z = StandardScaler().fit_transform(x.astype(np.float64))
  first = fit(l2_grid=(0.01,), tolerance=0.01)
  errors = probabilities(first, x) - np.eye(CLASSES)[labels]
  kernel = first.kernel_DC * x.astype(np.float64).std(axis=0)[:, None]
  gradients = z.T @ errors / len(x) + 0.01 * kernel, errors.mean(axis=0)
  largest = max(np.abs(gradient).max() for gradient in gradients)
  assert first.converged and largest < 1.001 * 0.01
  # The norm of the gradient is larger, and does not matter.
  again = fit(l2_grid=(0.01,), tolerance=1.01 * float(largest))
  assert again.iterations <= first.iterations


def test_ten_examples_are_enough_to_hold_one_out_of():
  for n, count in ((10, 1), (15, 1), (16, 2)):
    assert probe.hold_out(np.zeros(n, int)).sum() == count
  with pytest.raises(ValueError, match='9 training examples are too few'):
    probe.hold_out(np.zeros(9, int))
