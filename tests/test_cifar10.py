"""The recipes for CIFAR-10: models, stages and how long they take."""

import pytest

from configs import cifar10
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.models import flops
from vit_jax.objectives.objective import Facts
from vit_jax.sweeps import stages


@pytest.mark.parametrize('recipe', [*cifar10.IMAGES_PER_MINUTE, 'full'])
def test_the_recipes_of_cifar10(recipe, tmp_path):
  """All stages of them, on as many images as it has."""
  config = cifar10.get_config(f'{recipe},/data/mine')
  CheckedConfig(config)
  found = stages.runs(config, str(tmp_path))
  kinds = [stage.model.name for stage, _ in found]
  assert kinds == (['resnet', 'deit'] if recipe == 'deit' else ['vit'])
  first, _ = found[0]
  assert first.data.name == '/data/mine'
  size = int(first.data.image_size)
  names = tuple('abcdefghij')
  experiment = Experiment(CheckedConfig(first), Facts(names, 50_000))
  model = experiment.objective.model
  params = flops.count_params(model, (size, size))
  # The published model of `full` has 2.8 million with a bias more or less.
  low, high = (2.6e6, 2.9e6) if recipe == 'full' else (0.4e6, 0.8e6)
  assert low < params < high
  minute = cifar10.get_config(f'{recipe},/data/mine,1')
  (short, _), *_ = stages.runs(minute, str(tmp_path))
  once = Experiment(CheckedConfig(short), Facts(names, 50_000))
  steps, in_one = experiment.durations.total, once.durations.total
  assert steps == (
    117_188 if recipe == 'full' else pytest.approx(60 * in_one, 0.02)
  )


def test_minutes_are_checked_where_they_count():
  with pytest.raises(ValueError, match="minutes are 'ten'; give"):
    cifar10.get_config('vit,/data/mine,ten')
  assert cifar10.get_config('full,/data/mine,ten').total == '300 epochs'
