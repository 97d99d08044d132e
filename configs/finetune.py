"""Fine-tuning: table 4 of the paper, one run.

  python -m vit_jax.main --workdir=... \
      --config=configs/finetune.py:b16,cifar10 --config.init=B_16.npz

The first value is the variant of the checkpoint, or the checkpoint itself. The
second value is the data: a TFDS name, vtab/TASK, or a folder with a sub-folder
for each class. The recipe is SGD with momentum 0.9, batch 512, cosine decay, no
weight decay, gradients clipped at norm 1, 384 pixels and a new zero-initialised
head. The number of steps is that of table 4, or that of VTAB for other data.
The learning rate is 0.01; configs/transfer.py tunes it.

Published for B/16 pre-trained on ImageNet-21k: CIFAR-10 98.95 %, ImageNet
83.97 % (table 5). Not measured here.
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
