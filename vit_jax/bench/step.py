"""The models and batches that are measured.

The training step is that of `train`: uint8 images in, flipped and normalised on
the device, cross-entropy, Adam with decoupled weight decay, the norms that
training watches; the old state's memory is taken by the new one.
"""

from collections.abc import Mapping

import numpy as np
from ml_collections import ConfigDict

from vit_jax import aot, train
from vit_jax import config as config_lib
from vit_jax.models import variants

NUM_CLASSES = 1000


def config_of(
  variant: str,
  image_size: int,
  batch_size: int,
  dtype: str,
  overrides: Mapping[str, str],
) -> ConfigDict:
  """Returns a config that trains a model.

  Args:
    variant: of a model, as in `ti16`.
    image_size: the side in pixels.
    batch_size: images a step.
    dtype: of the computation.
    overrides: fields of the config, as in {'model.remat': 'cheap'}.

  Raises:
    ValueError: for what cannot work.
  """
  if batch_size < 1:
    raise ValueError(f'--batch_sizes has {batch_size}: at least 1 image.')
  config = config_lib.base()
  config.batch_size = batch_size
  config.data.image_size = str(image_size)
  config_lib.choose_model(config, variant)
  config.model.dtype = dtype
  config_lib.override(config, dict(overrides))
  # Refuses what does not fit together.
  train.make_objective(config, model_of(config))
  return config


def model_of(config: ConfigDict) -> variants.Model:
  """Returns the model of a config."""
  return aot.model_of(config, NUM_CLASSES)


def random_batch(config: ConfigDict) -> dict[str, np.ndarray]:
  """Returns a batch of noise."""
  rng = np.random.default_rng(0)
  shapes = aot.batch_shapes(config)
  return {
    'image': rng.integers(0, 256, shapes['image'].shape, np.uint8),
    'label': rng.integers(0, NUM_CLASSES, config.batch_size, np.int32),
  }
