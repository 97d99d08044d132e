"""Makes the configs, experiments and batches of benchmarks."""

from collections.abc import Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.objectives.objective import Facts

NUM_CLASSES = 1000
# Class names and number of examples. The number is large enough for the warm-up
# at batch sizes below 90,000, and small enough for 32-bit steps.
_FACTS = Facts(tuple(map(str, range(NUM_CLASSES))), 10**7)
# Fields that have their own flags, because they appear in the tables' titles.
_NAMED = 'batch_size', 'data.image_size', 'model', 'model.dtype', 'model.name'


def config_of(
  variant: str,
  image_size: int,
  batch_size: int,
  dtype: str,
  overrides: Sequence[str],
) -> ConfigDict:
  """Returns the config of one combination of the grid.

  `image_size` is in pixels. `overrides` are texts like `model.remat=cheap`.
  Raises ValueError if a value is invalid.
  """
  config = config_lib.base()
  config.batch_size = batch_size
  config.data.image_size = str(image_size)
  config_lib.choose_model(config, variant)
  config.model.dtype = dtype
  for text in overrides:
    name, equals, value = text.partition('=')
    if not equals:
      raise ValueError(f'--set={text} lacks "=". Write FIELD=VALUE.')
    if name in _NAMED:
      raise ValueError(f'--set={text}: {name} has its own flag. See --help.')
    config_lib.override(config, {name: value})
  return config


def experiment_of(
  config: ConfigDict, devices: Sequence[jax.Device]
) -> Experiment:
  return Experiment(CheckedConfig(config, devices), _FACTS)


def random_batch(experiment: Experiment) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  shapes = experiment.objective.batch_shapes(experiment.config.batch_size)
  return {
    name: rng.integers(
      0, 256 if x.dtype == np.uint8 else NUM_CLASSES, x.shape, x.dtype
    )
    for name, x in shapes.items()
  }
