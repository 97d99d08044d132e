"""Pre-trains ViTs, ResNets and hybrids, as in table 3 of the paper.

  python -m vit_jax.main --workdir=... --config=configs/vit.py:VARIANT
  python -m vit_jax.main --workdir=... --config=configs/vit.py:l16,imagenet2012
  python -m vit_jax.main --workdir=... --config=configs/vit.py:r50x1,jft,sgd
  python -m vit_jax.main --workdir=... \
      --config=configs/vit.py:s16,/data/my_folder,total=30epochs

VARIANT is a ViT, named by size and patch size, such as l16 (the default) or
h14; a ViT-5 such as vit5_b16; a ResNet such as r50x1; a hybrid such as r50+b16;
or an axial model such as axial_b16. `python -m vit_jax.models` lists the
published variants. The second value is the data, which selects the row of table
3. All rows have Adam 0.9/0.999, 10,000 steps of warm-up and batch size 4096.

  jft           (default) the row of JFT-300M: 7 or 14 epochs, linear decay,
                weight decay 0.1. The data are ImageNet-21k: JFT is not public.
  imagenet21k   90 epochs, linear decay, weight decay 0.03, dropout.
  imagenet2012  the row of ImageNet: 300 epochs, cosine decay, weight decay 0.3,
                dropout, gradient clipping.
  NAME          any TFDS name or folder: the row of ImageNet, with a warm-up of
                10 % of the run instead of 10,000 steps.

The third value is adam (default) or sgd. sgd is the setting of appendix D.1,
which is from BiT: momentum 0.9, learning rate 0.48 (for another batch size, set
0.03 per 256 images), L2 penalty 1e-4, 5,000 steps of warm-up (10 % for NAME).
The rate is divided by ten after 10/40, 23/40, 30/40 and 37/40 of the run.

TFDS cannot prepare ImageNet-21k. Registered users can download its images from
https://image-net.org. Give a folder with train/CLASS/ sub-folders as
--config.data.name=/path (without train/, a fifth of the images is not used); or
build your own TFDS dataset imagenet21k. A model that is missing from table 3
uses the row of the nearest model.

Published accuracy on ImageNet after fine-tuning: L/16 with 14 epochs on JFT
reaches 87.12 % in 0.68k TPUv3-core-days (tables 2 and 6). R50x1 and R152x2 with
7 epochs reach 77.54 % and 84.97 % with Adam, 78.24 % and 84.37 % with SGD
(table 7). This project has not measured these accuracies.
"""

import re

from vit_jax import config as config_lib

# Rows of table 3 for JFT: pattern of variants, learning rate, epochs. The first
# match counts.
JFT_ROWS = (
  (r'r(26|50)x\d+', 1e-3, 7),
  (r'r101x\d+', 8e-4, 7),
  (r'r152x\d+', 6e-4, 7),
  (r'r200x\d+', 6e-4, 14),
  (r'r\d*\+(ti|s|b|halfb)/?\d+', 8e-4, 7),
  (r'r\d*\+l/?32', 2e-4, 7),
  (r'r\d*\+.*', 4e-4, 14),
  (r'axial_r.*', 1e-3, 7),
  (r'(axial_|vit5_)?(ti|s|b|halfb)/?\d+', 8e-4, 7),
  (r'(axial_|vit5_)?l/?32', 6e-4, 7),
  (r'(axial_|vit5_)?l/?\d+', 4e-4, 14),
  (r'.*', 3e-4, 14),
)


def get_config(argument='l16'):
  (variant, dataset, optimizer), pairs = config_lib.parse_argument(
    argument, ['l16', 'jft', 'adam']
  )
  if optimizer not in ('adam', 'sgd'):
    raise ValueError(f'The optimizer is {optimizer!r}: use adam or sgd.')
  config = config_lib.base()
  config.batch_size = 4096
  config.data.image_size = '224'
  config.data.workers = 8
  config_lib.choose_model(config, variant)
  config.model.dtype = 'bfloat16'
  # Each device updates only a part of the parameters (ZeRO-1).
  config.mesh.fsdp = -1
  if 'representation_size' in config.model:
    # The head of pre-training has one hidden layer (section 3.1).
    config.model.representation_size = config.model.width
  config.optimizer.update(name='adam', warmup='10000 steps')
  if dataset == 'jft':
    jft(config, variant)
  elif dataset == 'imagenet21k':
    imagenet21k(config)
  else:
    imagenet2012(config)
  if optimizer == 'sgd':
    sgd(config)
  if dataset not in ('jft', 'imagenet21k', 'imagenet2012'):
    config.data.name = dataset
    config.evaluators.test.split = 'test'
    config.optimizer.warmup = '10%'
  config_lib.override(config, pairs)
  return config


def jft(config, variant):
  lr, epochs = next(
    row for pattern, *row in JFT_ROWS if re.fullmatch(pattern, variant)
  )
  config.total = f'{epochs} epochs'
  config.optimizer.update(lr=lr, decay='linear', weight_decay=0.1)
  imagenet21k_data(config)


def imagenet21k(config):
  config.total = '90 epochs'
  drop_out(config)
  config.optimizer.update(lr=1e-3, decay='linear', weight_decay=0.03)
  imagenet21k_data(config)


def imagenet21k_data(config):
  config.data.update(name='imagenet21k', split='train[51200:]')
  config.evaluators.test.split = 'train[:51200]'
  config.loss.name = 'sigmoid'
  config.model.head_bias = -10.0


def imagenet2012(config):
  config.total = '300 epochs'
  config.data.name = 'imagenet2012'
  config.evaluators.test.split = 'validation'
  drop_out(config)
  config.optimizer.update(
    lr=3e-3, decay='cosine', weight_decay=0.3, clip_norm=1.0
  )


def drop_out(config):
  # Some models, such as ResNets, have no dropout.
  if 'dropout' in config.model:
    config.model.dropout = 0.1


def sgd(config):
  config.optimizer.update(
    name='sgd',
    momentum=0.9,
    lr=0.03 * config.batch_size / 256,
    warmup='5000 steps',
    decay='staircase',
    milestones=('25%', '57.5%', '75%', '92.5%'),
    weight_decay=1e-4,
    clip_norm=0.0,
  )
