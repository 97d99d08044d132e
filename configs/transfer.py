"""Transfer evaluation of a model, as in tables 2 and 9 of the paper.

  python -m vit_jax.main --config=configs/transfer.py:MODEL,SUITE --workdir=...

MODEL is a variant together with --config.init=CHECKPOINT, or the checkpoint
itself. SUITE is one of:

  table2      ImageNet, CIFAR-10, CIFAR-100, Pets, Flowers and VTAB
  vtab        the 19 tasks of VTAB
  natural, specialised, structured
              a group of VTAB's tasks
  NAME+...    one or more datasets: TFDS names, vtab/TASK or folders

For each dataset, the command first tries the learning rates of table 4, if
there are several: it trains on a part of the training set and measures accuracy
on the rest. Then it trains on the whole training set with the best rate and
three seeds. The same command resumes. Every run updates table.md, results.csv
and, if rates are tried, tune.csv. table.md has the mean and the standard
deviation over seeds, beside the published numbers. Examples with more fields:

    l16,table2,evaluators.real.on=True,evaluators.real.labels=real.json
    l16,imagenet2012,evaluators.objectnet.on=True,evaluators.objectnet.data=DIR
    runs/mine,./data,data.image_size=64,total=200 steps,batch_size=64

table2 fine-tunes on ImageNet at 512 pixels (518 for patches of 14) with Polyak
averaging of 0.9999, as the paper did for its table 2. Other datasets, and
ImageNet in other suites, have 384 pixels (378 for patches of 14).

Published accuracy of L/16 pre-trained on ImageNet-21k, which this project has
not measured: ImageNet 85.30 %, VTAB 72.72 %. docs/guides/fine_tune.md has a
small example on CIFAR-10.
"""

from vit_jax import config as config_lib
from vit_jax.checkpoints import from_init
from vit_jax.data import benchmarks
from vit_jax.sweeps import axes
from vit_jax.tools.paper import recipe

SEEDS = ('0', '1', '2')
# Switches off evaluators that measure only models fine-tuned on ImageNet.
IMAGENET_ONLY = {
  'evaluators.real.on': False,
  'evaluators.real.labels': '',
  'evaluators.objectnet.on': False,
  'evaluators.objectnet.data': '',
}


def fields_on(config, name, suite):
  """Returns the fields of one dataset, with its grid of learning rates."""
  fields = recipe.on(name) | recipe.grid(config, name)
  if name == 'imagenet2012':
    if suite == 'table2':
      fields |= {
        'data.image_size': str(from_init.nearest_size(config, 512)),
        'optimizer.polyak': 0.9999,
      }
  elif name in benchmarks.BENCHMARKS:
    fields |= IMAGENET_ONLY
  return fields


def get_config(argument='b16,table2'):
  (model, suite), pairs = config_lib.parse_argument(argument, ['b16', 'table2'])
  config = config_lib.base()
  recipe.fine_tuning(config, model)
  config.eval_every = '100%'  # uses the test set only once, at the end
  config_lib.override(config, pairs)
  names = benchmarks.SUITES.get(suite) or tuple(suite.split('+'))
  tasks = {}
  for name in names:
    # Fields that the user sets override the recipe, except that evaluators that
    # cannot work on this dataset stay off.
    tasks[name] = {
      field: value
      for field, value in fields_on(config, name, suite).items()
      if field not in pairs or (field in IMAGENET_ONLY and not value)
    }
  if len(tasks) == 1:
    # Sets fields outside the axis, so that --config.FIELD can change them.
    config.update_from_flattened_dict(*tasks.values())
    tasks = {names[0]: {}}
  config.report = 'transfer'
  config.sweep = (
    ('Dataset', tuple(tasks.items())),
    ('Model', ((model, {}),)),
    axes.axis(config, 'seed', SEEDS),
  )
  axes.refuse_swept(config, pairs.keys() - set(IMAGENET_ONLY))
  return config
