"""Compares methods with teachers and unlabelled images, in two grids.

  python -m vit_jax.main --config=configs/teachers.py --workdir=...
  python -m vit_jax.main --config=configs/teachers.py:unlabelled,./cifar10 ...
  python -m vit_jax.main --config=configs/teachers.py:wrong_labels ...

The first value is the grid.

In `unlabelled`, 40 digits have labels, or one image in 200 of a folder of small
images. Every method has a budget of 1,200 steps of 64 images, which includes
teachers, earlier students and pre-training. The methods are:

- training on labels alone;
- DeiT, hard and soft, with a ResNet teacher trained on the same labels;
- Noisy Student with four generations;
- S4L with rotations and with exemplars;
- predicting masked patches of all images, then training on labels.

In `wrong_labels`, 40 % of the labels are wrong. The methods are training
without a teacher, and DeiT, hard and soft. The teacher of DeiT is trained in
the same way as the first method, but on correct labels.

The second value is the data: digits (the default) with three seeds, or a folder
with one seed (--sweep=seed=0,1,2 runs more). The same command resumes. It
writes results.csv and table.md.
"""

from vit_jax import config as config_lib
from vit_jax.sweeps import axes

STEPS = 1200
# The soft loss with the weight of the DeiT paper.
SOFT = {'objective.kind': 'soft', 'objective.weight': 0.1}
LABELS_ALONE = {'objective': 'classification', 'teacher': ''}
DISTILLED = {
  'objective': 'distillation',
  'model.name': 'deit',
  'model.pool': 'cls',
  'teacher': 'stages/teacher',
}
NOISE = {
  'data.augment': 'randaugment(1, 4)',
  'model.dropout': 0.1,
  'model.stochastic_depth': 0.1,
}


def wrong_labels(config):
  config.total = '12 epochs'
  config.data.wrong_labels = 0.4
  config.model.pool = 'cls'  # DeiT needs it, so all methods use it
  right = LABELS_ALONE | {'model.name': 'vit', 'data.wrong_labels': 0.0}
  taught = DISTILLED | {'stages': (('teacher', right),)}
  methods = {'none': {}, 'hard': taught, 'soft': taught | SOFT}
  config.sweep = (('teacher', tuple(methods.items())),)


def unlabelled(config):
  if config.data.name == 'digits':
    few, rest = 'train[:40]', 'train[40:]'
  else:
    few, rest = 'train[:0.5%]', 'train[0.5%:]'
  # Few images are unevenly spread over classes, so draw classes equally often.
  config.data.update(split=few, balance=1.0)
  config.total = f'{STEPS} steps'
  methods = {
    'labels alone': {},
    'DeiT hard': deit(),
    'DeiT soft': deit() | SOFT,
    'Noisy Student': noisy_student(rest),
    'S4L rotation': {'objective': 'rotation', 'batch_size': 8},
    'S4L exemplar': {
      'objective': 'exemplar',
      'batch_size': 8,
      'objective.group': 8,
      'objective.copies': 4,
      'data.augment': 'randaugment(1, 4)',
    },
    'masked patches': masked(),
  }
  config.sweep = (('method', tuple(methods.items())),)


def deit():
  """Returns fields that spend half the budget on a ResNet, half on DeiT."""
  total = {'total': f'{STEPS // 2} steps'}
  resnet = {
    'model': 'r50x1',
    'model.layers': (1, 1),
    'model.width': 32,
    'data.image_size': '32',
  }
  stages = (('teacher', LABELS_ALONE | resnet),)
  return DISTILLED | total | {'stages': stages}


def noisy_student(rest):
  """Returns fields that spend a quarter of the budget on each generation."""

  def taught(name):
    path = f'stages/{name}'
    return {'teacher': path, 'objective.labels': f'{path}.npz'}

  stages = (
    ('teacher', LABELS_ALONE | {'batch_size': 64}),
    ('student_1', taught('teacher')),
    ('student_2', taught('student_1')),
  )
  return {
    'objective': 'pseudo_labels',
    'objective.unlabelled': rest,
    'objective.ratio': 3,
    'batch_size': 16,
    'total': f'{STEPS // 4} steps',
    'stages': stages,
    **taught('student_2'),
    **NOISE,
  }


def masked():
  """Returns fields that spend half the budget on masked patches."""
  first = {
    'objective': 'masked',
    'best_metric': 'test/loss',
    'init': '',
    'data.split': 'train',
    'data.balance': 0.0,
  }
  return {
    'total': f'{STEPS // 2} steps',
    'init': 'stages/masked',
    'stages': (('masked', first),),
  }


GRIDS = {'unlabelled': unlabelled, 'wrong_labels': wrong_labels}


def digits(config):
  config.data.update(
    name='digits', image_size='16', crop_min_area=0.7, flip=False
  )
  config.model.update(width=64, depth=2, mlp_dim=128, heads=4, pool='gap')
  config.optimizer.lr = 3e-3


def folder(config, name):
  config.data.update(name=name, image_size='32', crop_min_area=0.7)
  config.model.update(width=128, depth=4, mlp_dim=256, heads=4, pool='gap')
  config.optimizer.lr = 1e-3


def get_config(argument='unlabelled'):
  (grid, data), pairs = config_lib.parse_argument(
    argument, ['unlabelled', 'digits']
  )
  if grid not in GRIDS:
    raise ValueError(
      f'{grid!r} is not a grid. {config_lib.nearest(grid, GRIDS)}'
    )
  config = config_lib.base()
  config.batch_size = 64
  config.eval_every = '50%'
  config.checkpoint_every = '50%'
  config.model.patch_size = 4
  config.optimizer.update(
    decay='cosine', warmup='10%', clip_norm=1.0, weight_decay=0.05
  )
  if data == 'digits':
    digits(config)
  else:
    folder(config, data)
  GRIDS[grid](config)
  config_lib.override(config, pairs)
  seeds = ('0', '1', '2') if data == 'digits' else ('0',)
  config.sweep += (axes.axis(config, 'seed', seeds),)
  axes.refuse_swept(config, pairs)
  return config
