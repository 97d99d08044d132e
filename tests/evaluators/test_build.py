"""Which evaluators run, and what a run may be chosen by."""

import pytest

from configs import digits
from vit_jax import train
from vit_jax.evaluators import build


def config_of(**changes):
  config = digits.get_config()
  config.update_from_flattened_dict(
    {f'evaluators.{key}': value for key, value in changes.items()}
  )
  return config


def test_those_that_are_on_run():
  assert [*build.entries(config_of())] == ['test']
  on = {'fewshot.on': True, 'fewshot.data': 'digits', 'pictures.on': True}
  assert {*build.entries(config_of(**on))} == {'test', 'fewshot', 'pictures'}
  assert build.entries(config_of(**{'test.on': False})) == {}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'fewshot.on': True}, 'fewshot is on and its data is empty'),
    ({'real.on': True}, 'real is on and its labels is empty'),
    ({'test.split': ''}, 'test is on and its split is empty'),
    ({'fewshot.data': 'digits'}, "fewshot.data is 'digits' and .* is off"),
    ({'real.labels': 'x.json'}, "real.labels is 'x.json' and .* is off"),
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
  assert build.best_of(config) == 'lowest'
  assert [*build.shown(config)] == [
    'fewshot/2shot_accuracy',
    'test/accuracy',
    'test/loss',
  ]
  config.best_metric = 'fewshot/1shot_accuracy'
  with pytest.raises(ValueError, match="'fewshot/1shot_accuracy', which none"):
    build.best_of(config)


def test_what_is_needed_besides_the_data_is_looked_for_first(
  tmp_path, monkeypatch
):
  def opened(*_):
    raise AssertionError('the data, which may take long')

  monkeypatch.setattr(train.bad_images, 'open_checked', opened)
  labels = {'real.on': True, 'real.labels': str(tmp_path / 'real.json')}
  with pytest.raises(FileNotFoundError, match='no file .*real.json; get ReaL'):
    train.train(config_of(**labels), str(tmp_path / 'run'))
