"""Config fields for fine-tuning as in table 4 of the paper."""

import os
import re
from typing import Any

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.checkpoints import fetch, from_init
from vit_jax.data import benchmarks
from vit_jax.sweeps import axes

LEARNING_RATES = (0.001, 0.003, 0.01, 0.03)
# Number of steps for datasets that table 4 does not list, the same as for VTAB.
STEPS = 2_500
# BiT resizes images to 448 pixels and crops 384.
RESIZE = 448 / 384


def fine_tuning(config: ConfigDict, model: str) -> None:
  """Sets the fields of table 4 that all datasets share.

  Also sets bfloat16 and a warm-up. `model` is a variant or a checkpoint. With a
  checkpoint, also sets the preprocessing; see `from_init`.

  Raises ValueError if `model` is neither a variant nor a checkpoint.
  """
  try:
    config_lib.choose_model(config, model)
  except ValueError as e:
    if not (os.path.exists(os.path.expanduser(model)) or fetch.is_name(model)):
      raise ValueError(f'{e} No checkpoint {model!r} exists.') from None
    from_init.choose(config, model)
  config.model.dtype = 'bfloat16'
  config.batch_size = 512
  config.data.image_size = str(from_init.nearest_size(config, 384))
  config.optimizer.update(
    name='sgd',
    lr=0.01,
    decay='cosine',
    warmup='5%',
    weight_decay=0.0,
    clip_norm=1.0,
  )


def on(name: str) -> dict[str, Any]:
  """Returns the fields of table 4 for a dataset.

  `name` is the value of `data.name`. A dataset that is not in
  `benchmarks.BENCHMARKS` keeps the config's splits and transforms.
  """
  fields: dict[str, Any] = {'data.name': name}
  benchmark = benchmarks.BENCHMARKS.get(name)
  if benchmark is None:
    return fields | {'total': f'{STEPS} steps'}
  return fields | {
    'total': f'{benchmark.steps} steps',
    'data.split': benchmark.train,
    'data.flip': benchmark.flip,
    'data.crop_resize': RESIZE if benchmark.crop == 'resize' else 0.0,
    'data.crop_min_area': 1.0 if benchmark.crop == 'none' else 0.05,
    'evaluators.test.split': benchmark.test,
  }


def grid(config: ConfigDict, name: str) -> dict[str, Any]:
  """Returns the fields that tune the learning rate on one dataset."""
  benchmark = benchmarks.BENCHMARKS.get(name)
  rates = benchmark.learning_rates if benchmark else LEARNING_RATES
  convolutional = config.model.name == 'resnet' or config.model.get(
    'stem_width'
  )
  if config.model.name == from_init.NAME:  # the checkpoint is not opened yet
    name_of_init = os.path.basename(config.init.rstrip('/')).lower()
    families = r'(?<![a-z])(r\d\d|resnet|bit)'  # matches neither lr03 nor orbit
    convolutional = re.search(families, name_of_init)
  if name == 'imagenet2012' and convolutional:
    rates += benchmarks.IMAGENET_EXTRA_LEARNING_RATES
  rate_axis = axes.axis(config, 'optimizer.lr', map(str, rates))
  fields: dict[str, Any] = {'tune.axes': (rate_axis,)}
  if benchmark:
    fields['tune.train'] = benchmark.tune_train
    fields['tune.val'] = benchmark.tune_val
  return fields
