"""Current recipes for plain ViTs on ImageNet: ViT-5 and DeiT III.

  python -m vit_jax.main --config=configs/vit5.py:vit5_s16 --workdir=...
  python -m vit_jax.main --config=configs/vit5.py:s16,imagenet2012 --workdir=...
  python -m vit_jax.main --config=configs/vit5.py:small,./cifar10 --workdir=...

The first value is the variant, the second the data. `vit5_s16`, `vit5_b16` and
`vit5_l16` are models of ViT-5 (arXiv 2602.08071). `s16`, `b16`, `l16` and `h14`
are models of DeiT III (arXiv 2204.07118), ViTs with LayerScale. `small` is a
ViT-5 that trains in minutes on a CPU, on a folder of small images.

All except `small` use DeiT III's recipe:

  length            800 epochs, batch size 2048
  loss              binary cross-entropy
  optimizer         LAMB, weight decay 0.05, learning rate 4e-3, or 3e-3 for a
                    width of 768 or more
  augmentation      3-Augment, mixup 0.8 or CutMix 1.0, repeated augmentation 3
  stochastic depth  0.05, 0.2, 0.45 and 0.6 for S, B, L and H

This config differs from the published recipe as follows:

  stochastic depth  grows from 0 over the layers; published: the same in all
                    layers
  mixed labels      are fractions; published: 1 for both classes
  cross-entropy     is summed over classes; published: averaged. Therefore
                    clip_norm clips sooner here.
  image size        is always 224 pixels; published: smaller for B and above,
                    then fine-tuning at 224 pixels
  crops             are smaller on average; see vit_jax/data/transforms.py

Published for S, B and L at 224 pixels: 82.2, 84.2 and 84.9 % (ViT-5), 81.4,
83.8 and 84.9 % (DeiT III). Not measured here.
"""

from vit_jax import config as config_lib

# Stochastic depth by width of the model.
STOCHASTIC_DEPTH = {384: 0.05, 768: 0.2, 1024: 0.45, 1280: 0.6}


def get_config(argument='vit5_s16'):
  (variant, data), pairs = config_lib.parse_argument(argument, ['vit5_s16', ''])
  config = config_lib.base()
  config.loss.update(name='sigmoid', mixup=0.8, cutmix=1.0)
  if variant == 'small':
    small(config, data or './cifar10')
  else:
    published(config, variant, data or 'imagenet2012')
  config_lib.override(config, pairs)
  return config


def published(config, variant, data):
  config.total = '800 epochs'
  config.batch_size = 2048
  config_lib.choose_model(config, variant)
  config.model.update(
    dtype='bfloat16',
    gelu='exact',
    layer_scale=1e-4,
    stochastic_depth=STOCHASTIC_DEPTH.get(config.model.width, 0.05),
  )
  config.mesh.fsdp = -1
  config.data.update(
    name=data,
    image_size='224',
    crop_min_area=0.08,
    augment='3augment(0.3)',
    repeats=3,
    resize_small=224,
    interpolation='bicubic',
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    workers=8,
  )
  config.optimizer.update(
    name='lamb',
    lr=4e-3 if config.model.width < 768 else 3e-3,
    decay='cosine',
    warmup='5 epochs',
    weight_decay=0.05,
    clip_norm=1.0,
  )
  if data == 'imagenet2012':
    config.evaluators.test.split = 'validation'


def small(config, data):
  config.total = '5 epochs'
  config.batch_size = 64
  config.data.update(name=data, image_size='32', crop_min_area=0.6)
  config_lib.choose_model(config, 'vit5_s16')
  config.model.update(
    patch_size=4, rope_side=8, width=128, depth=4, mlp_dim=256, heads=4
  )
  config.loss.update(mixup=0.2, cutmix=0.0)
  config.optimizer.update(
    lr=2e-3, decay='cosine', warmup='5%', clip_norm=1.0, weight_decay=0.05
  )
  config.eval_every = '20%'
  config.checkpoint_every = '20%'
