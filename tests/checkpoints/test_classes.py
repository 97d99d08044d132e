"""Numbered classes, and a checkpoint without class names."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from PIL import Image
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from configs import digits
from tests.checkpoints.random_weights import random_checkpoint
from vit_jax.checkpoints import classes, opening
from vit_jax.convert import orbax
from vit_jax.convert.convert import convert
from vit_jax.data import sources
from vit_jax.evaluators.confusion import evaluate
from vit_jax.experiment import facts_of
from vit_jax.train import evaluate_only
from vit_jax.training import features

WIDE = {'patch_size': 4, 'width': 128, 'depth': 1, 'mlp_dim': 8, 'heads': 2}
BY_TEXT = ('1', '10', *'23456789')
BY_VALUE = (*'123456789', '10')


def images_of(split, count):
  source = sources.open_source('digits', split)
  records = [source[i] for i in range(count)]
  return np.stack([x['image'] for x in records]), [x['label'] for x in records]


@pytest.fixture(scope='module')
def nameless(tmp_path_factory):
  """Random features and a fitted head, whose classes have no names."""
  checkpoint = random_checkpoint(None, (8, 8), 10, names=False, **WIDE)
  images, labels = images_of('train', 1000)
  run = jax.jit(features.layer(checkpoint.model, 'pre_logits'))
  x = np.asarray(run(checkpoint.params, checkpoint.normalize(images)))
  fit = LinearDiscriminantAnalysis().fit(x, labels)
  head = {'kernel': fit.coef_.T, 'bias': fit.intercept_}
  params = checkpoint.params | {'head': jax.tree.map(np.float32, head)}
  folder = tmp_path_factory.mktemp('nameless')
  workdir = str(folder / 'run')
  fitted = dataclasses.replace(checkpoint, params=params)
  orbax.write(fitted, workdir, 'float32')
  path = str(folder / 'nameless.npz')
  convert(workdir, path, to='npz')
  return path


def accuracy_of(path, numbers, order):
  """Of a checkpoint on digits, by their place among the names in an order."""
  images, labels = (x[numbers] for x in map(np.array, images_of('test', 200)))
  likeliest = opening.open_checkpoint(path).logits(images).argmax(-1)
  right = [order.index(str(label + 1)) for label in labels]
  return np.mean(np.equal(likeliest, right))


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  """A folder of digits whose classes are 1 to 10."""
  folder = tmp_path_factory.mktemp('numbered')
  for i, (image, label) in enumerate(zip(*images_of('test', 200), strict=True)):
    place = folder / str(label + 1)
    place.mkdir(exist_ok=True)
    Image.fromarray(image).save(place / f'{i}.png')
  return f'{folder}/'


@pytest.mark.slow
def test_the_order_is_chosen_or_the_comparison_refused(nameless, data, caplog):
  caplog.set_level('INFO')
  with pytest.raises(ValueError, match='1, 10, 2, 3, .*1, 2, 3, 4.*class_orde'):
    evaluate(nameless, data, 'train+test')
  for order, names in (('number', BY_VALUE), ('text', BY_TEXT)):
    given = {'name': data, 'class_order': order}
    found = evaluate(nameless, given, 'train+test').accuracy
    assert found == accuracy_of(nameless, range(200), names)
  assert "9 is '10'" in caplog.text and "1 is '10'" in caplog.text


def test_eval_only_and_teachers_ask_too(nameless, data):
  config = digits.get_config()
  config.update(init=nameless, eval_only=True)
  config.data.update(name=data, image_size='8')
  with pytest.raises(ValueError, match='data.class_order'):
    evaluate_only(config, '')
  config.data.class_order = 'number'
  tested = sources.open_source(data, 'test').paths
  numbers = [int(pathlib.Path(path).stem) for path in tested]
  found = evaluate_only(config, '')['test/accuracy']
  assert found == pytest.approx(accuracy_of(nameless, numbers, BY_VALUE))
  teacher = opening.open_checkpoint(nameless)
  classes.check_same(teacher, BY_VALUE, '')
  classes.check_same(teacher, BY_TEXT, 'text')
  first = ', '.join(BY_VALUE[:4])
  message = f'by value {first}, .*--class_order=text or number'
  with pytest.raises(ValueError, match=message):
    classes.check_same(teacher, BY_TEXT, '')


def test_folders_of_imagenet_have_the_classes_that_words_name():
  def named(names):
    checkpoint = random_checkpoint(None, (8, 8), len(names), **WIDE)
    return dataclasses.replace(checkpoint, class_names=tuple(names))

  words = [f'word {i}' for i in range(1000)]
  ids = tuple(f'n{i:08}' for i in range(1000))
  assert classes.same_classes(named(words), ids).tolist() == [*range(1000)]
  others = [f'n1{i:07}' for i in range(1000)]
  for checkpoint, data in (
    (named(words[:10]), ids[:10]),  # another task with ten classes
    (named(others), ids),
    (named(words), tuple(others[:999])),
  ):
    with pytest.raises(ValueError, match='lacks'):
      classes.same_classes(checkpoint, data)


def test_training_says_which_order_it_took(data, caplog):
  config = digits.get_config()
  config.data.name = data
  for order, names in (('', BY_TEXT), ('text', BY_TEXT), ('number', BY_VALUE)):
    config.data.class_order = order
    source = sources.open_config(config.data, 'train')
    caplog.clear()
    assert facts_of(config, source).class_names == names
    assert ('data.class_order=number' in caplog.text) == (order == '')
    for i in range(0, len(source), 17):
      folder = source[i]['name'].split('/')[-2]
      assert names[source[i]['label']] == names[source.labels()[i]] == folder


def test_several_labels_are_not_asked_for_an_order(tmp_path, caplog):
  for i in range(3):
    Image.new('RGB', (8, 8)).save(tmp_path / f'{i}.png')
  table = tmp_path / 'all.csv'
  table.write_text('file,labels\n0.png,1;2\n1.png,10\n2.png,2;10\n')
  config = digits.get_config()
  config.data.name = str(table)
  source = sources.open_config(config.data, 'all')
  assert facts_of(config, source).several_labels
  assert 'class_order' not in caplog.text
  config.data.class_order = 'text'  # which they have
  assert sources.open_config(config.data, 'all').class_names == ('1', '10', '2')
  config.data.class_order = 'number'
  with pytest.raises(ValueError, match='one class per image'):
    sources.open_config(config.data, 'all')


def test_an_invalid_order_is_refused(tmp_path):
  for name in ('a', '1'):
    (tmp_path / name).mkdir()
    for i in range(2):
      Image.new('RGB', (8, 8)).save(tmp_path / name / f'{i}.png')
  config = sources.data_config(
    {'name': f'{tmp_path}/', 'class_order': 'number'}
  )
  with pytest.raises(ValueError, match="'number'.*has the class 'a'"):
    sources.open_config(config, 'train')
  config.class_order = 'value'
  with pytest.raises(ValueError, match="'value': use text or number"):
    sources.open_config(config, 'train')
