"""Ridge regression against scikit-learn, refitted for every example."""

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from vit_jax.evaluators import ridge

CLASSES = 4


def problem(n, d, scales='even', seed=0):
  """Float32 features, classes, and targets of 1 and -1."""
  rng = np.random.default_rng(seed)
  labels = np.arange(n) % CLASSES
  x = rng.standard_normal((n, d)) + rng.standard_normal((CLASSES, d))[labels]
  if scales == 'bad':
    x = x * 10 ** rng.uniform(-6, 6, d)
  x = x.astype(np.float32)
  if scales != 'even':
    x = standardised(x)
  return x, labels, ridge.one_vs_rest(labels, CLASSES)


def standardised(x):
  mean, std = ridge.moments(x)
  return (x - mean) / std


def reference(x, y, l2):
  # Not our algorithm; this one is exact for bad scales.
  model = Ridge(alpha=l2, fit_intercept=True, solver='svd')
  return model.fit(x.astype(np.float64), y)


def left_out(x, y, l2):
  """Predicts each example from a fit to the others."""
  rows = np.arange(len(x))
  return np.concatenate(
    [
      reference(x[rows != i], y[rows != i], l2).predict(
        x[[i]].astype(np.float64)
      )
      for i in rows
    ]
  )


def predict(model, x, l2):
  w, b = model.fit(l2)
  return x.astype(np.float64) @ w + b


# Fewer and more examples than features, and as many.
@pytest.mark.parametrize(
  ('n', 'd', 'scales'),
  [(20, 30, 'even'), (30, 30, 'bad'), (31, 30, 'even'), (80, 30, 'bad')],
)
def test_predictions_are_those_of_scikit_learn(n, d, scales):
  x, _, y = problem(n + 50, d, scales)
  model = ridge.Ridge(x[:n], y[:n])
  for l2 in (ridge.L2_GRID[0], 1.0, 2.0**10, ridge.L2_GRID[-1]):
    expected = reference(x[:n], y[:n], l2).predict(x.astype(np.float64))
    # Targets are of size 1.
    np.testing.assert_allclose(
      predict(model, x, l2)[:n], expected[:n], atol=1e-5, rtol=0
    )
    # New examples may get predictions far beyond 1 if penalties are small.
    np.testing.assert_allclose(
      predict(model, x, l2)[n:], expected[n:], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
  ('n', 'd', 'scales'),
  [(20, 30, 'even'), (30, 30, 'bad'), (31, 30, 'bad'), (80, 30, 'bad')],
)
def test_leaving_one_out_is_refitting_without_it(n, d, scales):
  x, _, y = problem(n, d, scales)
  model = ridge.Ridge(x, y)
  for l2 in (2.0**-10, 1.0, 2.0**10):
    np.testing.assert_allclose(
      model.leave_one_out(l2), left_out(x, y, l2), atol=1e-5, rtol=1e-5
    )


def test_an_example_with_a_feature_of_its_own():
  """A fit without this example knows nothing of the feature."""
  x, _, y = problem(60, 10)
  x = np.pad(x, ((0, 0), (0, 1)))
  x[7, -1] = 1e8
  x, l2 = standardised(x), 2.0**-10
  np.testing.assert_allclose(
    ridge.Ridge(x, y).leave_one_out(l2), left_out(x, y, l2), atol=1e-5
  )


def test_equal_examples_and_constant_features():
  x, _, y = problem(24, 30)
  x[12:], y[12:], x[:, :5] = x[:12], y[:12], 3.0
  model = ridge.Ridge(x, y)
  for l2 in (2.0**-10, 1.0):
    np.testing.assert_allclose(
      model.leave_one_out(l2), left_out(x, y, l2), atol=1e-6
    )


@pytest.mark.fast('20-30')
@pytest.mark.parametrize(('n', 'd'), [(20, 30), (60, 30)])
def test_choice_is_that_of_refitting(n, d):
  """Three penalties are equally good for 20 examples."""
  rng = np.random.default_rng(0)
  labels = rng.integers(0, CLASSES, n)  # classes of unequal sizes
  centres = 0.5 * rng.standard_normal((CLASSES, d))
  x = centres[labels] + rng.standard_normal((n, d))
  # Three examples are far out: they dominate the squared errors.
  x[:3] *= 20
  y = ridge.one_vs_rest(labels, CLASSES)
  grid = [2.0**power for power in range(-10, 21, 3)]
  correct, squared = [], []
  for l2 in grid:
    predictions = left_out(x, y, l2)
    correct.append(np.sum(predictions.argmax(axis=1) == labels))
    squared.append(np.sum((predictions - y) ** 2))
  best = [i for i in range(len(grid)) if correct[i] == max(correct)]
  expected = min(best, key=lambda i: squared[i])
  assert ridge.choose_l2(ridge.Ridge(x, y), labels, grid) == grid[expected]
  assert expected != np.argmin(squared)


def test_some_of_many_examples_are_left_out(monkeypatch):
  x, labels, y = problem(47, 30, seed=1)
  model = ridge.Ridge(x, y)

  def best(rows):
    def score(l2):
      predictions = model.leave_one_out(l2)[rows]
      correct = np.sum(predictions.argmax(axis=1) == labels[rows])
      return -correct, np.sum((predictions - y[rows]) ** 2)

    return min(ridge.L2_GRID, key=score)

  rows = [0, 4, 9, 14, 18, 23, 28, 32, 37, 42]  # 4.7 apart
  assert best(rows) != best(range(47))
  assert ridge.choose_l2(model, labels) == best(range(47))
  monkeypatch.setattr(ridge, 'LEFT_OUT', 10)
  assert ridge.choose_l2(model, labels) == best(rows)


def test_one_vs_rest():
  np.testing.assert_array_equal(
    ridge.one_vs_rest(np.array([1, 0]), 3), [[-1, 1, -1], [1, -1, -1]]
  )


def test_accuracy_counts_every_row_once(monkeypatch):
  monkeypatch.setattr(ridge, '_BLOCK', 4)
  x = np.float32([[0], [1], [2], [3], [4], [5], [6], [7], [8], [9]])
  # Class 1 from x = 6 up: less the mean 4, the weight 1 beats the bias 1.5.
  mean, w, b = np.array([4.0]), np.array([[0.0, 1.0]]), np.array([1.5, 0.0])
  labels = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 0])
  assert ridge.accuracy(x, labels, mean, w, b) == 0.9
  assert ridge.accuracy(x[:5], labels[:5], mean, w, b) == 1


def test_accuracy_of_small_differences_beside_large_means():
  x = np.float32(1e5 + np.arange(16)[:, None] / 128)
  classifier = np.array([1e5 + 7.5 / 128]), np.array([[0, 1e6]]), np.zeros(2)
  assert ridge.accuracy(x, np.arange(16) // 8, *classifier) == 1
