"""DINO: learns from images without labels (2104.14294).

  python -m vit_jax.main --config=configs/dino.py:s16 --workdir=...
  python -m vit_jax.main --config=configs/dino.py:small,./cifar10 --workdir=...

The student sees small and large views of an image. The teacher, a moving
average of the student, sees only large views. The student learns to predict the
teacher's output. Evaluators measure the teacher, which is also the result of
the run.

The first value is the variant of a ViT, the second the data. `small` is a small
hybrid for a CPU and a folder of small images; it has no small views. The
default is the authors' recipe:

  length           300 epochs, batch size 1024
  optimizer        AdamW, learning rate 2e-3 (5e-4 per 256 images), weight decay
                   from 0.04 to 0.4
  teacher          temperature from 0.04 to 0.07 in the first 30 epochs
  views            two views of 224 pixels and eight views of 96 pixels

The authors clip gradients parameter by parameter; this config clips their
global norm. The authors' crops are larger (see vit_jax/data/transforms.py).

Fields of the objective:

  objective.small_views=8        number of small views; see also small_size and
                                 small_area
  objective.momentum=0.996       initial momentum of the teacher, which rises to
                                 1; the authors advise a higher one for small
                                 batches
  objective.teacher_temperature=0.07
                                 temperature of the teacher after the warm-up

The best sign of progress is k-NN accuracy. These flags measure it with labels
during training:

  --config.evaluators.knn.on --config.evaluators.knn.data=./cifar10

To learn classes afterwards, run configs/finetune.py:WORKDIR,DATA. For `small`,
run configs/own.py:DATA,WORKDIR.

Published accuracy of S/16 on ImageNet with this recipe: 73.3 % by k-NN, 76.0 %
by a linear probe. The guide is docs/guides/self_supervised.md.
"""

from vit_jax import config as config_lib


def get_config(argument='s16'):
  (variant, data), pairs = config_lib.parse_argument(argument, ['s16', ''])
  config = config_lib.base()
  config_lib.choose_objective(config, 'dino')
  config.best_metric = 'test/loss'
  if variant == 'small':
    small(config, data or './cifar10')
  else:
    paper(config, variant, data or 'imagenet2012')
  config_lib.override(config, pairs)
  return config


def paper(config, variant, data):
  config.total = '300 epochs'
  config.batch_size = 1024
  config.data.update(
    name=data,
    image_size='224',
    crop_min_area=0.4,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    workers=8,
  )
  config_lib.choose_model(config, variant)
  config.model.update(dtype='bfloat16', gelu='exact', stochastic_depth=0.1)
  # Ti and S train the scale of the last layer; other models keep it at 1.
  config.objective.last_scale = config.model.width <= 384
  config.mesh.fsdp = -1
  config.optimizer.update(
    lr=5e-4 * config.batch_size / 256,
    decay='cosine',
    warmup='10 epochs',
    weight_decay=0.04,
    weight_decay_end=0.4,
    clip_norm=3.0,
  )
  if data == 'imagenet2012':
    config.evaluators.test.split = 'validation'


def small(config, data):
  config.total = '10 epochs'
  config.batch_size = 128
  config.data.update(name=data, image_size='32', crop_min_area=0.4)
  config.model.update(
    patch_size=1,
    stem_width=32,
    stem_layers=(1, 1),
    width=128,
    depth=2,
    mlp_dim=256,
    heads=4,
    pool='gap',
  )
  config.objective.update(
    batch_norm=True,
    prototypes=1024,
    hidden=256,
    bottleneck=64,
    small_views=0,
    small_size='16',
    small_area=(0.1, 0.4),
    momentum=0.99,
    teacher_temperature=0.04,
    temperature_warmup='0 steps',
    freeze_last='5%',
  )
  config.optimizer.update(
    name='muon', lr=5e-3, decay='cosine', warmup='5%', clip_norm=1.0
  )
  config.optimizer.weight_decay = 0.05
  config.eval_every = '20%'
  config.checkpoint_every = '20%'
