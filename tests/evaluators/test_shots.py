"""Few-shot accuracy against the same steps taken with scikit-learn."""

from unittest import mock

import numpy as np
import pytest
from ml_collections import ConfigDict
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from configs import digits
from tests.evaluators.small import parts_of
from vit_jax.data import sources
from vit_jax.evaluators import fewshot, ridge
from vit_jax.evaluators import shots as shots_lib
from vit_jax.evaluators.evaluator import Parts
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.objectives.objective import Facts

CLASSES = 5

DRAWS = {
  (1, 0): [22, 13, 2],
  (4, 0): [22, 28, 24, 29, 13, 15, 11, 12, 2, 3, 8, 4],
  (1, 1): [22, 19, 8],
  (4, 1): [22, 29, 26, 24, 19, 15, 13, 10, 8, 3, 5, 9],
}


NAMES = tuple('abcde')


def examples(n=80, width=12, seed=0, spread=0.8):
  rng = np.random.default_rng(seed)
  centres = spread * np.random.default_rng(9).standard_normal((CLASSES, width))
  labels = rng.permutation(np.arange(n) % CLASSES)
  x = centres[labels] + rng.standard_normal((n, width))
  # Like a network's features, these are float32, and some are large.
  x = x * 10 ** np.linspace(-2, 2, width) + np.linspace(0, 50, width)
  return x.astype(np.float32), labels


def evaluate(shots=(1, 5), seeds=2, l2='choose', width=12, **changes):
  """Evaluates the examples; `changes` replace features or labels."""
  x, labels = examples(width=width)
  test, test_labels = examples(seed=1, width=width)
  drawn = shots_lib.Shots(
    changes.get('labels_N', labels),
    changes.get('test_labels_M', test_labels),
    NAMES,
    shots=shots,
    seeds=seeds,
    l2=l2,
  )
  x = changes.get('features_ND', x)
  return drawn.evaluate(x[drawn.rows_R], changes.get('test_MD', test))


def test_draws_stay_the_same_for_ever():
  labels = np.repeat(np.arange(3), 10)[::-1]
  draws = shots_lib.plan(labels, 3, (1, 4), 2)
  assert list(draws) == [(1, 0), (4, 0), (1, 1), (4, 1)]
  # These are the draws of the first version; published results depend on them.
  assert {key: rows.tolist() for key, rows in draws.items()} == DRAWS


def test_rows_needed_are_all_shots_once():
  _, labels = examples()
  draws = shots_lib.plan(labels, CLASSES, (1, 3), 2)
  drawn = shots_lib.Shots(
    labels, labels, NAMES, shots=(1, 3), seeds=2, l2='fixed'
  )
  needed = drawn.rows_R
  assert needed.tolist() == sorted({i for rows in draws.values() for i in rows})
  assert 3 * CLASSES < len(needed) <= 6 * CLASSES


@pytest.mark.parametrize(
  ('shots', 'seeds', 'labels', 'message'),
  [
    ((1, 0), 1, [0, 1], r'shots is \(1, 0\).* 1 or more'),
    ((1,), 0, [0, 1], 'seeds is 0'),
    ((1, 3), 1, [0] * 3 + [1] * 2, r'Class 1 \(dog\) has 2 .* than 3 shots'),
  ],
)
def test_plan_refuses(shots, seeds, labels, message):
  with pytest.raises(ValueError, match=message):
    shots_lib.plan(np.array(labels), 2, shots, seeds, ('cat', 'dog'))


@pytest.mark.parametrize('width', [12, 40])
def test_fixed_is_the_protocol_of_big_vision(width):
  """Repeats its steps, with fewer and more shots (5 to 80) than features."""
  x, labels = examples(width=width)
  test, test_labels = examples(seed=1, width=width)
  shots = (1, 5, 16)
  draws = shots_lib.plan(labels, CLASSES, shots, 2)
  results = evaluate(shots, 2, 'fixed', width=width)
  for result, ((k, seed), rows) in zip(results, draws.items(), strict=True):
    assert (result.shots, result.seed, result.l2) == (k, seed, 1024)
    train = x[rows].astype(np.float64)
    mean, std = train.mean(axis=0), train.std(axis=0) + 1e-5
    train, tested = (
      np.hstack([(a - mean) / std, np.full((len(a), 1), 100.0)])
      for a in (train, test)
    )
    y = 2.0 * (labels[rows][:, None] == np.arange(CLASSES)) - 1
    gram = train.T @ train + 1024 * np.eye(width + 1)
    w = np.linalg.solve(gram, train.T @ y)
    expected = np.mean((tested @ w).argmax(axis=1) == test_labels)
    assert result.accuracy == expected
    _, centre, kernel, bias = shots_lib.fit(
      x[rows], labels[rows], CLASSES, 'fixed'
    )
    np.testing.assert_allclose(
      (test - centre) @ kernel + bias, tested @ w, atol=1e-9
    )


def test_fixed_whitens_with_a_small_number_added():
  """The number matters for features that hardly vary."""
  x = np.random.default_rng(0).standard_normal((20, 3)) * [1, 1e-5, 1e-7]
  labels = np.arange(20) % 2
  _, mean, w, _ = shots_lib.fit(x, labels, 2, 'fixed')
  z = (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-5)
  z = np.hstack([z, np.full((20, 1), 100.0)])
  y = np.where(labels[:, None] == [0, 1], 1.0, -1.0)
  expected = np.linalg.solve(z.T @ z + 1024 * np.eye(4), z.T @ y)[:3]
  np.testing.assert_allclose(
    w, expected / (x.std(axis=0) + 1e-5)[:, None], rtol=1e-9
  )
  np.testing.assert_allclose(mean, x.mean(axis=0), atol=1e-15)


@pytest.mark.slow
def test_chosen_is_standardise_leave_one_out_and_ridge():
  x, labels = examples()
  test, test_labels = examples(seed=1)
  draws = shots_lib.plan(labels, CLASSES, (5, 16), 2)
  results = evaluate((5, 16), 2)
  for result, rows in zip(results, draws.values(), strict=True):
    scaler = StandardScaler().fit(x[rows].astype(np.float64))
    z, y = scaler.transform(x[rows]), ridge.one_vs_rest(labels[rows], CLASSES)
    correct = {}
    for l2 in ridge.L2_GRID[::3] + (result.l2,):
      left_out = [
        Ridge(alpha=l2)
        .fit(np.delete(z, i, 0), np.delete(y, i, 0))
        .predict(z[[i]])
        .argmax()
        for i in range(len(z))
      ]
      correct[l2] = np.sum(left_out == labels[rows])
    assert correct[result.l2] == max(correct.values())
    assert result.l2 == ridge.choose_l2(ridge.Ridge(z, y), labels[rows])
    model = Ridge(alpha=result.l2).fit(z, y)
    predictions = model.predict(scaler.transform(test)).argmax(axis=1)
    assert result.accuracy == np.mean(predictions == test_labels)
  assert {r.l2 for r in results} != {shots_lib.FIXED_L2}


def test_one_shot_a_class_has_the_fixed_penalty():
  (result,) = evaluate((1,), 1)
  assert result.l2 == 1024
  x, labels = examples()
  test, test_labels = examples(seed=1)
  rows = shots_lib.plan(labels, CLASSES, (1,), 1)[1, 0]
  scaler = StandardScaler().fit(x[rows].astype(np.float64))
  model = Ridge(alpha=1024).fit(
    scaler.transform(x[rows]), ridge.one_vs_rest(labels[rows], CLASSES)
  )
  predictions = model.predict(scaler.transform(test)).argmax(axis=1)
  assert result.accuracy == np.mean(predictions == test_labels)


def test_the_scale_of_a_feature_does_not_matter():
  x, test = examples()[0], examples(seed=1)[0]
  factors = (10.0 ** np.arange(-3, 9)).astype(np.float32)
  results = evaluate((5,), 3, features_ND=x * factors, test_MD=test * factors)
  assert results == evaluate((5,), 3)


def test_the_test_set_has_no_say_in_the_penalty():
  test, test_labels = examples(seed=1)
  first = evaluate((5,), 3)
  second = evaluate((5,), 3, test_MD=test, test_labels_M=test_labels[::-1])
  assert [r.l2 for r in first] == [r.l2 for r in second]
  assert [r.accuracy for r in first] != [r.accuracy for r in second]


def test_features_that_are_not_finite_are_refused():
  x, _ = examples()
  x[:, 3] = np.nan
  message = r'features of (\d+) of \1 training images are not finite; .* row 0'
  with pytest.raises(ValueError, match=message):
    evaluate(features_ND=x)


class Source(sources.Source):
  """Images that are their own index."""

  def __init__(self, labels, class_names):
    self.class_names = class_names
    self._labels = np.asarray(labels, np.int32)

  def __len__(self):
    return len(self._labels)

  def __getitem__(self, index):
    return {'image': index, 'label': int(self._labels[index]), 'name': ''}

  def labels(self):
    return self._labels


def evaluator_of(extract, splits, **entry):
  """Builds the evaluator of a training and a test source."""
  given = {'layer': 'pre_logits', 'l2': 'choose'} | entry
  with mock.patch.object(fewshot, '_splits_of', lambda *args: splits):
    return fewshot.FewShotEvaluator(
      parts_of(None, extract), 'few', ConfigDict(given)
    )


def test_evaluator_gives_the_mean_over_draws():
  (x, labels), (test, test_labels) = examples(), examples(seed=1)
  train_source, test_source = Source(labels, NAMES), Source(test_labels, NAMES)
  seen = {}

  def extract(params, source, description):
    indices = [source[i]['image'] for i in range(len(source))]
    seen['test' if source is test_source else 'train'] = indices
    return params[test if source is test_source else x][indices]

  class Params:
    def __getitem__(self, features):
      return features

  evaluator = evaluator_of(
    extract, (train_source, test_source), shots=(5, 1), seeds=3
  )
  results = evaluate((5, 1), 3)
  expected = {
    f'few/{k}shot_accuracy': np.mean(
      [r.accuracy for r in results if r.shots == k]
    )
    for k in (5, 1)
  }
  metrics = evaluator.run(Params())
  assert list(metrics) == ['few/5shot_accuracy', 'few/1shot_accuracy']
  assert metrics == pytest.approx(expected, abs=1e-12)
  assert seen['test'] == list(range(80))
  draws = shots_lib.plan(labels, CLASSES, (5, 1), 3)
  assert seen['train'] == sorted({i for rows in draws.values() for i in rows})


def test_splits_that_do_not_belong_together_are_refused(monkeypatch):
  found = {
    'train': Source(examples()[1], NAMES),
    'test': Source([0], ('a', 'x', 'c', 'd', 'e')),
  }
  monkeypatch.setattr(
    fewshot.bad_images, 'open_checked', lambda data, split: found[split]
  )
  data = digits.get_config().data
  data.name = 'mine'
  with pytest.raises(
    ValueError,
    match="mine test and train have different classes: class 1 is 'x' .* 'b'",
  ):
    fewshot.open_splits(data, 'train', 'test')


def test_digits_by_their_pixels():
  """Accuracy grows with the shots, to about 0.9 for 25 of each digit."""
  train, test = (sources.Digits(split, 0) for split in ('train', 'test'))

  def extract(params, source, description):
    images = [source[i]['image'][:, :, 0] for i in range(len(source))]
    return np.reshape(images, (len(images), -1)).astype(np.float32)

  evaluator = evaluator_of(
    extract, (train, test), shots=(1, 5, 10, 25), seeds=3
  )
  metrics = evaluator.run({})
  assert [*metrics] == [f'few/{k}shot_accuracy' for k in (1, 5, 10, 25)]
  accuracies = list(metrics.values())
  assert accuracies == sorted(accuracies)
  assert 0.4 < accuracies[0] < 0.7
  assert 0.85 < accuracies[-1] < 0.95


def parts_from(config):
  experiment = Experiment(
    CheckedConfig(config), Facts(tuple('0123456789'), 1000)
  )
  return Parts(config, experiment.objective, experiment.mesh, experiment.facts)


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('seeds', 0, 'seeds is 0'),
    ('l2', '1024', "l2 is '1024'"),
    ('layer', 'block_9', "layer is 'block_9'"),
  ],
)
def test_the_protocol_is_that_of_the_config(field, value, message):
  """A refusal shows that the value of the field arrived."""
  config = digits.get_config()
  entry = config.evaluators.fewshot
  entry.data = 'digits'
  parts = parts_from(config)
  fewshot.FewShotEvaluator(parts, 'fewshot', entry)
  entry[field] = value
  with pytest.raises(ValueError, match=message):
    fewshot.FewShotEvaluator(parts, 'fewshot', entry)
