"""Pre-training ViT: table 3 of the paper.

  python -m vit_jax.main --workdir=... --config=configs/vit.py:VARIANT
  python -m vit_jax.main --workdir=... --config=configs/vit.py:l16,imagenet2012
  python -m vit_jax.main --workdir=... \
      --config=configs/vit.py:s16,/data/my_folder,total=30epochs

VARIANT is a size (ti, s, b, l, h, g, G) and a patch size: l16 (the default),
h14. The second value is the data and picks the row of table 3:

  jft           (default) the row of JFT-300M: Adam 0.9/0.999, weight decay 0.1,
                10,000 steps of warm-up, linear decay, batch 4096, 7 or 14
                epochs. JFT is not public; the data is ImageNet-21k.
  imagenet21k   the row of ImageNet-21k: 90 epochs, weight decay 0.03, dropout.
  imagenet2012  the row of ImageNet: 300 epochs, cosine, weight decay 0.3, clip.
  other         any TFDS name or folder, by the row of ImageNet, softmax loss,
                with a warm-up of 10 % of the run in place of 10,000 steps.

ImageNet-21k is no public TFDS builder: prepare one of that name with your own
builder script, or give a folder with --config.data.name=/path. Sizes that the
table lacks take the learning rate of the nearest one it has.

Published for L/16 on JFT, 14 epochs: 87.12 % after fine-tuning on ImageNet,
0.68k TPUv3-core-days (tables 2 and 6). Not measured here.
"""

from vit_jax import config as config_lib
from vit_jax.models import variants

# Learning rate and epochs on JFT by size, and by size and patch where the
# table tells patches apart.
JFT_ROWS = {
  'ti': (8e-4, 7),
  's': (8e-4, 7),
  'b': (8e-4, 7),
  'l32': (6e-4, 7),
  'l': (4e-4, 14),
  'h': (3e-4, 14),
  'g': (3e-4, 14),
  'G': (3e-4, 14),
}


def get_config(argument='l16'):
  (variant, dataset), pairs = config_lib.parse_argument(
    argument, ['l16', 'jft']
  )
  config = config_lib.base()
  config.batch_size = 4096
  config.data.image_size = '224'
  config.data.workers = 8
  config.model.update(variants.fields(variant))
  config.model.update(
    # The head of pre-training has one hidden layer (section 3.1).
    representation_size=config.model.width,
    dtype='bfloat16',
  )
  config.optimizer.update(name='adam', warmup='10000 steps')
  if dataset == 'jft':
    jft(config, variant)
  elif dataset == 'imagenet21k':
    imagenet21k(config)
  else:
    imagenet2012(config)
  if dataset not in ('jft', 'imagenet21k', 'imagenet2012'):
    config.data.name = dataset
    config.evaluators.test.split = 'test'
    config.optimizer.warmup = '10%'
  config_lib.override(config, pairs)
  return config


def jft(config, variant):
  size = variant.rstrip('0123456789').rstrip('/')
  lr, epochs = JFT_ROWS.get(variant, JFT_ROWS[size])
  config.total = f'{epochs} epochs'
  config.optimizer.update(lr=lr, decay='linear', weight_decay=0.1)
  imagenet21k_data(config)


def imagenet21k(config):
  config.total = '90 epochs'
  config.model.dropout = 0.1
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
  config.model.dropout = 0.1
  config.optimizer.update(
    lr=3e-3, decay='cosine', weight_decay=0.3, clip_norm=1.0
  )
