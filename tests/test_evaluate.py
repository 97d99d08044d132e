"""Measures of a classifier beside scikit-learn's, and the command."""

import csv
import dataclasses

import numpy as np
import pytest
from sklearn import metrics

from tests.checkpoints.random_weights import random_checkpoint
from vit_jax import evaluate
from vit_jax.convert import orbax
from vit_jax.data import sources
from vit_jax.training import features

TINY = {'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 20, 'heads': 2}
DIGITS = tuple(map(str, range(10)))


@pytest.mark.parametrize('C', [4, 7])
def test_measures_are_scikit_learns(C):
  rng = np.random.default_rng(0)
  labels_N = rng.integers(0, C, 50)
  labels_N[labels_N == 1] = 0  # a class without images
  scores_NC = rng.standard_normal((50, C))
  k = min(5, C - 1)  # of all, every answer would be right
  likeliest_Nk = np.argsort(-scores_NC, axis=1)[:, :k]
  got = evaluate.measures(labels_N, likeliest_Nk, C)
  predicted_N = likeliest_Nk[:, 0]
  every = range(C)
  np.testing.assert_array_equal(
    got.confusion_CC,
    metrics.confusion_matrix(labels_N, predicted_N, labels=every),
  )
  assert got.accuracy == metrics.accuracy_score(labels_N, predicted_N)
  there = np.isin(predicted_N, labels_N)  # which scikit-learn warns of
  want = metrics.recall_score(
    labels_N, predicted_N, labels=np.unique(labels_N), average='macro'
  )
  assert not there.all() and np.isclose(got.balanced, want)
  want = metrics.top_k_accuracy_score(labels_N, scores_NC, k=k, labels=every)
  assert np.isclose(got.top5, want)


def save(path, **changes):
  checkpoint = random_checkpoint(None, (8, 8), 10, **TINY)
  checkpoint = dataclasses.replace(
    checkpoint, **{'class_names': DIGITS[::-1]} | changes
  )
  orbax.write(checkpoint, str(path), 'float32')
  return checkpoint


def test_the_command_measures_by_the_names_of_classes(tmp_path, capsys):
  checkpoint = save(tmp_path / 'x')
  out = tmp_path / 'out'
  status = evaluate.main([str(tmp_path / 'x'), 'digits', f'--output={out}'])
  assert status == 0
  source = sources.open_source('digits', 'test')
  transform = checkpoint.transform()
  images = np.stack([transform(source[i])['image'] for i in range(len(source))])
  predicted_N = 9 - np.argmax(checkpoint.logits(images), -1)
  labels_N = source.labels()
  accuracy = np.mean(predicted_N == labels_N)
  text = capsys.readouterr().out
  assert f'accuracy           {accuracy:.2%}\n' in text
  with (out / 'confusion.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [row['class'] for row in rows] == [*DIGITS[::-1]]
  want = metrics.confusion_matrix(labels_N, predicted_N)
  for row in rows:
    for name in DIGITS:
      assert int(row[name]) == want[int(row['class']), int(name)]
  with (out / 'classes.csv').open() as file:
    rows = {row['class']: row for row in csv.DictReader(file)}
  for i, name in enumerate(DIGITS):
    row = rows[name]
    assert int(row['images']) == want[i].sum()
    assert float(row['accuracy']) == want[i, i] / want[i].sum()
    wrong = np.where(np.arange(10) == i, 0, want[i])
    assert int(row['times']) == wrong.max()
    if wrong.max():
      assert wrong[int(row['taken_for'])] == wrong.max()
    if want[:, i].sum():
      assert float(row['precision']) == want[i, i] / want[:, i].sum()
  assert (out / 'confusion.png').read_bytes().startswith(b'\x89PNG')


def test_images_that_went_are_not_measured(tmp_path, capsys, monkeypatch):
  save(tmp_path / 'x')
  extract = features.Extractor.__call__

  def some(self, params, source, description):
    top_Nk = extract(self, params, source, description)
    top_Nk[5:] = -1
    return top_Nk

  monkeypatch.setattr(features.Extractor, '__call__', some)
  out = tmp_path / 'out'
  evaluate.main([str(tmp_path / 'x'), 'digits', f'--output={out}'])
  assert 'images             5\n' in capsys.readouterr().out
  with (out / 'confusion.csv').open() as file:
    rows = [[*map(int, row[1:])] for row in [*csv.reader(file)][1:]]
  assert np.sum(rows) == 5


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'class_names': (*DIGITS[:9], 'cat')},
      "does not know 1 of the 10 classes, such as '9'; it knows '0' and",
    ),
    ({'class_names': ()}, None),
  ],
)
def test_other_classes_are_refused(tmp_path, capsys, changes, message):
  save(tmp_path / 'x', **changes)
  out = tmp_path / 'out'
  status = evaluate.main([str(tmp_path / 'x'), 'digits', f'--output={out}'])
  err = capsys.readouterr().err
  assert (status, out.exists()) == ((2, False) if message else (0, True))
  assert (message or '') in err


def test_classes_of_one_name_are_told_apart_or_refused():
  """As ImageNet has two cranes."""
  names = ('tench', 'crane', 'lemon', 'crane')
  checkpoint = dataclasses.replace(
    random_checkpoint(None, (8, 8), 4, **TINY), class_names=names
  )
  np.testing.assert_array_equal(
    evaluate.same_classes(checkpoint, names), np.arange(4)
  )
  np.testing.assert_array_equal(
    evaluate.same_classes(checkpoint, names[:1]), [0]
  )
  with pytest.raises(ValueError, match="several classes named 'crane'"):
    evaluate.same_classes(checkpoint, names[:2])


def test_classes_without_names_are_told_by_their_number():
  checkpoint = random_checkpoint(None, (8, 8), 7, names=False, **TINY)
  np.testing.assert_array_equal(
    evaluate.same_classes(checkpoint, DIGITS[:7]), np.arange(7)
  )
  with pytest.raises(
    ValueError, match='has 7 classes without names, and .* 10'
  ):
    evaluate.same_classes(checkpoint, DIGITS)
  checkpoint = random_checkpoint(None, (8, 8), 0, **TINY)
  with pytest.raises(ValueError, match='has no head: it predicts nothing'):
    evaluate.same_classes(checkpoint, DIGITS)
