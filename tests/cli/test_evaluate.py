"""Measures of a classifier beside scikit-learn's, and the command."""

import csv
import dataclasses
import importlib

import numpy as np
import pytest
from PIL import Image
from sklearn import metrics

from tests.checkpoints.random_weights import random_checkpoint
from vit_jax.checkpoints import classes
from vit_jax.convert import orbax
from vit_jax.data import sources
from vit_jax.evaluators import confusion

evaluate = importlib.import_module('vit_jax.evaluate')

TINY = {'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 20, 'heads': 2}
DIGITS = tuple(map(str, range(10)))


@pytest.mark.parametrize('C', [4, 7])
def test_measures_are_scikit_learns(C):
  rng = np.random.default_rng(0)
  labels_N = rng.integers(0, C, 50)
  # One class without images, and one with a single one.
  labels_N[(labels_N == 1) | (labels_N == 2)] = 0
  labels_N[7] = 2
  scores_NC = rng.standard_normal((50, C))
  k = min(5, C - 1)  # of all, every answer would be right
  likeliest_Nk = np.argsort(-scores_NC, axis=1)[:, :k]
  got = confusion.measures(labels_N, likeliest_Nk, 'abcdefg'[:C])
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


def test_the_command_measures_by_the_names_of_classes(
  tmp_path, capsys, monkeypatch, figures
):
  monkeypatch.setattr(evaluate, 'MAX_CLASSES', 10)
  checkpoint = save(tmp_path / 'x')
  monkeypatch.setenv('HOME', str(tmp_path))  # shells leave --output=~/new alone
  out = tmp_path / 'new' / 'out'
  status = evaluate.main([str(tmp_path / 'x'), 'digits', '--output=~/new/out'])
  assert status == 0
  source = sources.open_source('digits', 'test')
  transform = checkpoint.transform()
  images = np.stack([transform(source[i])['image'] for i in range(len(source))])
  scores_NC = np.asarray(checkpoint.logits(images))[:, ::-1]
  predicted_N = np.argmax(scores_NC, -1)
  labels_N = source.labels()
  accuracy = np.mean(predicted_N == labels_N)
  text = capsys.readouterr().out
  assert f'accuracy   {accuracy:.2%}\n' in text
  top5 = metrics.top_k_accuracy_score(labels_N, scores_NC, k=5)
  assert f'top-5      {top5:.2%}\n' in text and top5 < 1
  names = ('classes.csv', 'confusion.csv', 'confusion.png')
  assert text.endswith(''.join(f'written  {out}/{name}\n' for name in names))
  (figure,) = figures
  title = figure.axes[0].get_title()
  assert title == f'{tmp_path}/x\non digits test'
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
    assert int(rows[name]['images']) == want[i].sum()
    assert float(rows[name]['accuracy']) == want[i, i] / want[i].sum()
  assert (out / 'confusion.png').read_bytes().startswith(b'\x89PNG')


def test_other_classes_are_refused(tmp_path, capsys):
  save(tmp_path / 'x', class_names=(*DIGITS[:9], 'cat'))
  out = tmp_path / 'out'
  status = evaluate.main([str(tmp_path / 'x'), 'digits', f'--output={out}'])
  assert (status, out.exists()) == (2, False)
  message = (
    "lacks 1 of the 10 classes of the data ('9'). The first class of the "
    "checkpoint is '0'"
  )
  assert message in capsys.readouterr().err


@pytest.mark.parametrize('column', ['label', 'labels'])
def test_logits_that_are_not_finite_are_refused(tmp_path, column):
  images = np.zeros((4, 8, 8, 3), np.uint8)
  for i, image in enumerate(images):
    Image.fromarray(image).save(tmp_path / f'{i}.png')
  rows = [f'{i}.png,{3 + i},test' for i in range(4)]
  table = tmp_path / 'labels.csv'
  table.write_text('\n'.join([f'file,{column},split', *rows]))
  checkpoint = random_checkpoint(None, (8, 8), 10, **TINY)
  checkpoint.params['head']['bias'] = np.full(10, np.nan, np.float32)
  checkpoint = dataclasses.replace(checkpoint, class_names=DIGITS)
  with pytest.raises(ValueError, match='outputs that are not finite for'):
    confusion.evaluate(checkpoint, str(table))


def test_classes_of_one_name_are_told_apart_or_refused():
  """As ImageNet has two cranes."""
  names = ('tench', 'crane', 'lemon', 'crane')
  checkpoint = dataclasses.replace(
    random_checkpoint(None, (8, 8), 4, **TINY), class_names=names
  )
  np.testing.assert_array_equal(
    classes.same_classes(checkpoint, names), np.arange(4)
  )
  np.testing.assert_array_equal(
    classes.same_classes(checkpoint, names[:1]), [0]
  )
  with pytest.raises(ValueError, match="several classes named 'crane'"):
    classes.same_classes(checkpoint, names[:2])


def test_classes_without_names_are_told_by_their_number():
  checkpoint = random_checkpoint(None, (8, 8), 7, names=False, **TINY)
  np.testing.assert_array_equal(
    classes.same_classes(checkpoint, DIGITS[:7]), np.arange(7)
  )
  with pytest.raises(
    ValueError, match='has 7 classes without names, and .* 10'
  ):
    classes.same_classes(checkpoint, DIGITS)
  checkpoint = random_checkpoint(None, (8, 8), 0, **TINY)
  with pytest.raises(ValueError, match='has no head, so it cannot predict'):
    classes.same_classes(checkpoint, DIGITS)


NAMES = ('cat', '=dog', 'cow', 'a,b', 'hen')


def confused(names=NAMES):
  """Returns measures of five classes, one without images, one never told."""
  confusion_CC = np.zeros((5, 5), int)
  confusion_CC[0, :3] = 6, 1, 3
  confusion_CC[1, 1] = 4
  confusion_CC[3, 0] = 2
  return confusion.Measures(0.625, 0.75, 2 / 3, confusion_CC, names)


def test_classes_have_a_line_each_if_there_is_something_to_say():
  lines = evaluate.classes_csv(confused()).splitlines()
  assert lines == [
    'class,images,accuracy,precision,taken_for,times',
    'cat,10,0.6,0.75,cow,3',
    "'=dog,4,1.0,0.8,,0",
    'cow,0,,0.0,,0',
    '"a,b",2,0.0,,cat,2',
  ]
  assert evaluate.confusion_csv(confused()).splitlines() == [
    'class,cat,\'=dog,cow,"a,b",hen',
    'cat,6,1,3,0,0',
    "'=dog,0,4,0,0,0",
    'cow,0,0,0,0,0',
    '"a,b",2,0,0,0,0',
    'hen,0,0,0,0,0',
  ]


def test_what_is_confused_most_comes_first():
  assert evaluate.table(confused()).splitlines() == [
    'images     16',
    'accuracy   62.50%',
    'balanced   66.67%',
    'confused   cat taken for cow, 3 times',
    'confused   a,b taken for cat, 2 times',
    'confused   cat taken for =dog, 1 time',
  ]
  confusion_CC = np.arange(49).reshape(7, 7) * 1000
  names = ('a\n', *'bcdefg')
  found = confusion.Measures(0.5, 0.75, 0.25, confusion_CC, names)
  lines = evaluate.table(found).splitlines()
  assert lines[2] == 'top-5      75.00%'
  assert lines[4:] == [
    f'confused   {x}'
    for x in (
      'g taken for f, 47,000 times',
      'g taken for e, 46,000 times',
      'g taken for d, 45,000 times',
      'g taken for c, 44,000 times',
      'g taken for b, 43,000 times',
    )
  ]


@pytest.mark.parametrize(
  ('args', 'split'),
  [(['digits'], 'test'), (['imagenet2012', '--split=train'], 'train')],
)
def test_the_split_is_that_of_the_benchmark_unless_said(
  monkeypatch, args, split
):
  asked = []
  monkeypatch.setattr(evaluate, '_run', asked.append)
  assert evaluate.main(['x', *args]) == 0
  ((found),) = asked
  assert (found.checkpoint, found.dataset) == ('x', args[0])
  assert (found.split, found.output) == (split, 'runs/evaluate')
