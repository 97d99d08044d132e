"""k-NN equals scikit-learn's for any blocks and devices."""

import importlib

import jax
import numpy as np
import pytest
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from configs import digits
from tests.evaluators.small import SIZE, mesh_of, model_of
from vit_jax.data.images import Images
from vit_jax.evaluators import fewshot, knn
from vit_jax.evaluators import fewshot_report as report
from vit_jax.evaluators.evaluator import Parts
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Facts

train = importlib.import_module('vit_jax.train')


def data(count=700, classes=7, D=16):
  rng = np.random.default_rng(0)
  labels = rng.integers(classes, size=count)
  centres = rng.standard_normal((classes, D))
  x = centres[labels] + 1.5 * rng.standard_normal((count, D))
  return x.astype(np.float32), labels


def theirs(train, labels, test, k):
  peer = KNeighborsClassifier(
    k, metric='cosine', weights=lambda far: np.exp((1 - far) / 0.07)
  )
  return peer.fit(train, labels).predict(test)


@pytest.mark.parametrize(
  ('k', 'devices', 'block'), [(20, 1, 600), (20, 4, 7), (1, 8, 64)]
)
def test_it_is_that_of_scikit_learn(k, devices, block):
  x, labels = data()
  train, test = np.split(x, [600])
  found = theirs(train, labels[:600], test, k)
  assert 0.4 < np.mean(found == labels[600:]) < 0.95
  blocks = [
    (train[i : i + block], labels[i : min(i + block, 600)])
    for i in range(0, 600, block)
  ]
  # With their predictions as labels, the accuracy is 1 if ours are equal.
  got = knn.accuracy(
    blocks,
    test,
    found,
    num_classes=7,
    mesh=mesh_of(devices),
    k=k,
  )
  assert got == 1


def test_padding_has_no_vote():
  x, labels = data(100)
  i = int(np.flatnonzero(labels)[0])  # without a vote, class 0 wins
  bank = np.concatenate([x[i : i + 1], x]), np.append(-1, labels)
  query = x[i : i + 1], labels[i : i + 1]
  assert knn.accuracy([bank], *query, num_classes=7, mesh=mesh_of(1), k=1) == 1


@pytest.mark.slow
def test_training_and_the_command_measure_the_same(tmp_path):
  config = digits.get_config()
  config.model.update(depth=1, width=32, mlp_dim=32, heads=2)
  config.update(total='5 steps', eval_every='5 steps')
  config.evaluators.knn.update(on=True, data='digits')
  metrics = train.train(config, str(tmp_path))
  curve = fewshot.fewshot(str(tmp_path), 'digits', shots=[1], seeds=1, knn=True)
  assert 0.2 < curve.knn < 1
  assert metrics['knn/accuracy'] == pytest.approx(curve.knn, abs=1 / 360)
  file = tmp_path / report.CSV
  file.write_text(report.csv_text(curve))
  assert report.read_csv(str(file), '').knn == curve.knn
  assert '(20 nearest neighbours)' in report.table(curve)
  assert report.plot([curve])


def test_images_that_became_unreadable_are_refused(tmp_path, monkeypatch):
  """As by other evaluators of features, also among the training images."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  rng = np.random.default_rng(0)
  for i in range(24):
    folder = tmp_path / 'data' / ('train', 'test')[i % 2] / 'ab'[i // 12]
    folder.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 256, (*SIZE, 3), np.uint8)
    Image.fromarray(pixels).save(folder / f'{i}.png')
  first, second = (tmp_path / 'data/train/a' / f'{i}.png' for i in (0, 2))
  first.write_bytes(b'')
  config = digits.get_config()
  config.data.on_bad_image = 'skip'
  config.evaluators.knn.update(on=True, data=str(tmp_path / 'data'))
  model, params = model_of()
  objective = Classification(model, Images(SIZE))
  parts = Parts(config, objective, mesh_of(1), Facts((), 9))
  found = fewshot.KNNEvaluator(parts, 'knn', config.evaluators.knn)
  assert 0 <= found.run(params)['knn/accuracy'] <= 1
  second.write_bytes(b'')
  with pytest.raises(ValueError, match='1 of 11 images have become unreadable'):
    found.run(params)


def test_features_that_are_not_finite_are_refused():
  x, labels = data(50)
  bad = x.copy()
  bad[3, 2] = np.nan
  for train, test, message in (
    (bad, x, '1 of 50 training .* row 3'),
    (x, bad, '1 of 50 test .* row 3'),
  ):
    with pytest.raises(ValueError, match=message):
      knn.accuracy(
        [(train, labels)], test, labels, num_classes=7, mesh=mesh_of(1)
      )


def test_of_fewer_training_images_than_k_all_vote():
  x, labels = data(60)
  found = knn.accuracy(
    [(x[:19], labels[:19])], x, labels, num_classes=7, mesh=mesh_of(1)
  )
  assert found == np.mean(theirs(x[:19], labels[:19], x, 19) == labels)


def test_memory_stays_that_of_a_block():
  """No array has an entry for each pair of training and test images."""
  x, labels = data(4096)
  merge = jax.jit(knn._merge).lower(
    (np.zeros((64, 20), np.float32), np.zeros((64, 20), np.int32)),
    x[:64],
    x[:512],
    labels[:512].astype(np.int32),
  )
  assert merge.compile().memory_analysis().temp_size_in_bytes < 4 * 64 * 4096
