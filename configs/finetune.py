"""Fine-tunes a checkpoint with the recipe of the paper's table 4, in one run.

  python -m vit_jax.main --workdir=... \
      --config=configs/finetune.py:b16,cifar10 --config.init=B_16.npz

The first value is the variant of the checkpoint, or the checkpoint itself. The
second value is the data: a TFDS name, vtab/TASK, or a folder with a sub-folder
for each class. The recipe is:

  optimizer        SGD with momentum 0.9, batch size 512, no weight decay,
                   gradients clipped at norm 1
  learning rate    0.01, 5 % warm-up, cosine decay; configs/transfer.py tunes it
  length           the steps of table 4; other data use as many steps as VTAB
  model            384 pixels, a new head initialised with zeros

Published accuracy of B/16 pre-trained on ImageNet-21k: 98.95 % on CIFAR-10 and
83.97 % on ImageNet (table 5). Not measured here.
"""

from vit_jax import config as config_lib
from vit_jax.tools.paper import recipe


def get_config(argument='b16,cifar10'):
  (model, data), pairs = config_lib.parse_argument(argument, ['b16', 'cifar10'])
  config = config_lib.base()
  recipe.fine_tuning(config, model)
  config.update_from_flattened_dict(recipe.on(data))
  config_lib.override(config, pairs)
  return config
