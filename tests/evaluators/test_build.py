"""The evaluators of a config, their metrics and their splits."""

import importlib

import pytest
from PIL import Image

from configs import digits
from vit_jax.data.source import Source
from vit_jax.evaluators import build, evaluator
from vit_jax.objectives.objective import Facts

train = importlib.import_module('vit_jax.train')


def config_of(**changes):
  config = digits.get_config()
  config.update_from_flattened_dict(
    {f'evaluators.{key}': value for key, value in changes.items()}
  )
  return config


def test_entries_that_are_on_run():
  assert [*build.entries(config_of())] == ['test']
  on = {'fewshot.on': True, 'fewshot.data': 'digits', 'pictures.on': True}
  assert {*build.entries(config_of(**on))} == {'test', 'fewshot', 'pictures'}
  assert build.entries(config_of(**{'test.on': False})) == {}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'fewshot.on': True}, 'fewshot.data is empty, but .* is on'),
    ({'fewshot.data': 'digits'}, "fewshot.data is 'digits', but .* is off"),
    ({'test.type': 'men'}, "test.type is 'men'. Did you mean mean"),
  ],
)
def test_half_a_switch_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    build.entries(config_of(**changes))


def test_metrics_are_known_before_anything_is_built():
  fewshot = {'fewshot.on': True, 'fewshot.data': 'd', 'fewshot.shots': (2, 5)}
  config = config_of(**fewshot)
  assert build.metrics(config) == {
    'test/accuracy': 'highest',
    'test/loss': 'lowest',
    'fewshot/2shot_accuracy': 'highest',
    'fewshot/5shot_accuracy': 'highest',
  }
  config.best_metric = 'test/loss'
  assert build.shown(config)[config.best_metric] == 'lowest'
  assert [*build.shown(config).items()] == [
    ('fewshot/2shot_accuracy', 'highest'),
    ('test/accuracy', 'highest'),
    ('test/loss', 'lowest'),
  ]
  config.best_metric = 'fewshot/1shot_accuracy'
  with pytest.raises(ValueError, match="'fewshot/1shot_accuracy', which the"):
    build.shown(config)


def test_splits_are_those_of_the_runs_data():
  """Few-shot and ObjectNet have other data; pictures use the run's."""
  config = config_of(
    **{
      'test.split': 'test[:9]',
      'fewshot.on': True,
      'fewshot.data': 'digits',
      'pictures.on': True,
      'pictures.split': 'train[:3]',
      'objectnet.on': True,
      'objectnet.data': 'x/',
      'real.on': True,
      'real.labels': 'x',
      'real.split': 'other',
    }
  )
  with config.unlocked():
    config.evaluators.fewshot.split = 'of digits'
  assert sorted(build.splits(config)) == ['other', 'test[:9]', 'train[:3]']


def test_classes_of_another_split_have_to_be_the_same(monkeypatch):
  config = config_of()
  facts = Facts(('a', 'c'), 9)
  parts = evaluator.Parts(config, Learns(), None, facts)
  monkeypatch.setattr(
    evaluator.bad_images, 'open_checked', lambda data, split: Objects()
  )
  with pytest.raises(
    ValueError, match='digits other and train have different classes'
  ):
    parts.source('other')


def test_a_training_split_is_not_measured_under_another_name(tmp_path):
  for i, split in enumerate(['train', 'val']):
    (tmp_path / split / 'a').mkdir(parents=True)
    image = Image.new('RGB', (2, 2), (i, 0, 0))
    image.save(tmp_path / split / 'a/1.png')
  config = config_of()
  config.data.name = str(tmp_path)
  facts = Facts(('a',), 1)
  parts = evaluator.Parts(config, Learns(), None, facts)
  assert len(parts.source('test')) == 1
  config.data.split = 'train+val'
  with pytest.raises(ValueError, match="no split 'test'; it has train, val"):
    parts.source('test')
  assert len(parts.source('val')) == 1


class Objects(Source):
  """A source whose images have objects."""

  class_names = ('a', 'b')

  def __len__(self):
    return 1

  def __getitem__(self, i):
    raise NotImplementedError

  def objects(self, i):
    raise NotImplementedError


class Learns:
  def __init__(self, *names):
    self.class_names = names


def test_evaluation_batches_have_the_size_of_a_microbatch():
  config = config_of()
  config.update(batch_size=48, accum_steps=3)
  config.data.workers = 2
  parts = evaluator.Parts(config, None, 'mesh', Facts((), 9))
  assert parts.batches == {'batch_size': 16, 'mesh': 'mesh', 'workers': 2}
