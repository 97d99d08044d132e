"""Fine-tuning: table 4 of the paper.

  python -m vit_jax.main --workdir=... \
      --config=configs/finetune.py:b16,cifar10 --config.init=B_16.npz

The first value is the variant of the checkpoint, the second the data: a TFDS
name, or a folder with one sub-folder a class. SGD with momentum 0.9, batch 512,
cosine decay, no weight decay, gradients clipped at norm 1, 384 pixels, a new
zero-initialised head. Steps are those of table 4, for data it lacks those of
VTAB; of its learning rates {0.001, 0.003, 0.01, 0.03} (ImageNet up to 0.06)
0.01 is the default: try the others with --config.optimizer.lr.

Published for B/16 pre-trained on ImageNet-21k: CIFAR-10 98.95 %, ImageNet
83.97 % (table 5). Not measured here.
"""

from vit_jax import config as config_lib

STEPS = {
  'imagenet2012': 20_000,
  'cifar10': 10_000,
  'cifar100': 10_000,
  'oxford_iiit_pet': 500,
  'oxford_flowers102': 500,
}
VTAB_STEPS = 2_500


def get_config(argument='b16,cifar10'):
  (variant, dataset), pairs = config_lib.parse_argument(
    argument, ['b16', 'cifar10']
  )
  config = config_lib.base()
  config.total = f'{STEPS.get(dataset, VTAB_STEPS)} steps'
  config.batch_size = 512
  config.data.update(name=dataset, image_size='384')
  if dataset == 'imagenet2012':
    config.evaluators.test.split = 'validation'
  if dataset == 'oxford_flowers102':
    config.data.split = 'train+validation'
  config_lib.choose_model(config, variant)
  config.model.dtype = 'bfloat16'
  config.optimizer.update(
    name='sgd',
    lr=0.01,
    decay='cosine',
    warmup='5%',
    weight_decay=0.0,
    clip_norm=1.0,
  )
  config_lib.override(config, pairs)
  return config
