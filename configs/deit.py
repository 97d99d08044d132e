"""DeiT: trains a ViT on ImageNet with a teacher (arXiv 2012.12877).

  python -m vit_jax.main --config=configs/deit.py:s16 --config.teacher=... \
      --workdir=...
  python -m vit_jax.main --config=configs/deit.py:small,./cifar10 \
      --config.teacher=runs/resnet --workdir=...

The first value is the variant of a ViT, the second the data. `small` is a small
ViT that trains in minutes on a CPU, on a folder of small images. The default is
the paper's recipe on ImageNet:

  length           300 epochs, batch size 1024
  optimizer        AdamW, learning rate 1e-3, weight decay 0.05
  augmentation     RandAugment 9/0.5, random erasing 0.25, mixup 0.8 or CutMix
                   1.0, repeated augmentation 3
  regularisation   label smoothing 0.1, stochastic depth 0.1

Unlike this config, the paper's code skips each operation of RandAugment with
probability one half, and draws larger crops (see vit_jax/data/transforms.py).

The teacher is a checkpoint in any supported format: a workdir, a file, or a
published name. It must classify images into the same classes. It may have any
architecture and image size.

  objective.kind=hard              hard: the student learns the teacher's
                                   likeliest class; soft: the teacher's
                                   probabilities
  objective.temperature=3.0        temperature of the probabilities
  objective.weight=0.5             weight of the teacher's loss; the paper uses
                                   0.1 for soft
  objective.teacher_dtype=float32  or bfloat16

`deit.py:s16,model=s16` trains a plain ViT, without a distillation token.

Published accuracy of Ti, S and B at 224 pixels: 74.5, 81.2 and 83.4 % with a
teacher; without one, 72.2, 79.8 and 81.8 %. This project has not measured them.
"""

from vit_jax import config as config_lib


def get_config(argument='s16'):
  (variant, data), pairs = config_lib.parse_argument(argument, ['s16', ''])
  config = config_lib.base()
  config_lib.choose_objective(config, 'distillation')
  if variant == 'small':
    small(config, data or './cifar10')
  else:
    paper(config, variant, data or 'imagenet2012')
  config.model.name = 'deit'
  config_lib.override(config, pairs)
  return config


def paper(config, variant, data):
  config.total = '300 epochs'
  config.batch_size = 1024
  config_lib.choose_model(config, variant)
  config.model.update(dtype='bfloat16', gelu='exact', stochastic_depth=0.1)
  config.mesh.fsdp = -1
  config.data.update(
    name=data,
    image_size='224',
    crop_min_area=0.08,
    augment='randaugment(2, 9, 0.5)',
    erasing=0.25,
    repeats=3,
    resize_small=256,
    interpolation='bicubic',
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    workers=8,
  )
  config.loss.update(label_smoothing=0.1, mixup=0.8, cutmix=1.0)
  config.optimizer.update(
    lr=5e-4 * config.batch_size / 512,
    decay='cosine',
    warmup='5 epochs',
    weight_decay=0.05,
  )
  if data == 'imagenet2012':
    config.evaluators.test.split = 'validation'


def small(config, data):
  config.total = '5 epochs'
  config.batch_size = 64
  config.data.update(
    name=data, image_size='32', crop_min_area=0.8, augment='randaugment(1, 5)'
  )
  config.model.update(patch_size=4, width=128, depth=4, mlp_dim=256, heads=4)
  config.optimizer.update(
    lr=2e-3, decay='cosine', warmup='5%', clip_norm=1.0, weight_decay=0.05
  )
  config.eval_every = '20%'
  config.checkpoint_every = '20%'
