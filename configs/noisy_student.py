"""Noisy Student: self-training with unlabelled images (arXiv 1911.04252).

  python -m vit_jax.main --config=configs/noisy_student.py --workdir=...
  python -m vit_jax.main --config=configs/noisy_student.py:./cifar10 ...
  python -m vit_jax.main --config=configs/noisy_student.py:digits,compare ...

The first value is the data. For digits, 40 images count as labelled and the
others as unlabelled. For a folder of small images or another dataset, one image
in 200 counts as labelled and all count as unlabelled.

A teacher learns from the labelled images and predicts labels for the unlabelled
images. A student learns from both, with noise: RandAugment, crops, dropout and
stochastic depth. Then this student is the teacher of the next student. There
are three students. The same command resumes. It writes:

  WORKDIR/stages/teacher/          the first teacher
  WORKDIR/stages/teacher.npz       its labels for the unlabelled images
  WORKDIR/stages/student_1/ ...    the first student, and so on
  WORKDIR                          the last student

The second value `compare` runs three methods with three seeds each: Noisy
Student, Noisy Student without noise for the students, and training on the
labelled images alone. All generations see the same number of images.

Fields that you can set, here with their values for digits (except PATH):

  data.split=train[:40]            the labelled images
  objective.unlabelled=train[40:]  the unlabelled images: a split of the same
                                   data
  objective.unlabelled_data=PATH   the unlabelled images: another dataset, with
                                   or without classes
  objective.threshold=0.3          minimum probability of the likeliest class
  objective.images_a_class=0       unlabelled images per class; 0 means the
                                   number in the largest class
  objective.ratio=3                pseudo-labelled images per labelled image
"""

from vit_jax import config as config_lib
from vit_jax.sweeps import axes

GENERATIONS = 3
NOISE = {
  'data.augment': 'randaugment(1, 4)',
  'data.crop_min_area': 0.7,
  'model.dropout': 0.1,
  'model.stochastic_depth': 0.1,
}
WITHOUT_NOISE = {
  'data.augment': '',
  'data.crop_min_area': 1.0,
  'model.dropout': 0.0,
  'model.stochastic_depth': 0.0,
}


def get_config(argument='digits'):
  (data, what), pairs = config_lib.parse_argument(argument, ['digits', ''])
  config = config_lib.base()
  config_lib.choose_objective(config, 'pseudo_labels')
  config.batch_size = 16
  config.objective.ratio = 3
  if data == 'digits':
    digits(config)
  else:
    small(config, data)
  config.update_from_flattened_dict(NOISE)
  # Few images are unevenly spread over classes, so draw classes equally often.
  config.data.balance = 1.0
  config.optimizer.update(
    lr=3e-3, decay='cosine', warmup='10%', clip_norm=1.0, weight_decay=0.05
  )
  config.eval_every = '25%'
  config.checkpoint_every = '25%'
  # Override twice, because `generations` both copies and sets fields.
  config_lib.override(config, pairs)
  generations(config)
  if what == 'compare':
    compare(config)
    axes.refuse_swept(config, pairs)
  elif what:
    raise ValueError(f'The second value is {what!r}: use compare or omit it.')
  config_lib.override(config, pairs)
  return config


def digits(config):
  config.total = '600 steps'
  config.data.update(
    name='digits', split='train[:40]', image_size='16', flip=False
  )
  config.objective.unlabelled = 'train[40:]'
  config.model.update(
    patch_size=4, width=64, depth=2, mlp_dim=128, heads=4, pool='gap'
  )


def small(config, data):
  config.total = '3000 steps'
  if data == 'imagenet2012':
    config.evaluators.test.split = 'validation'  # the test split has no labels
  config.data.update(name=data, split='train[:0.5%]', image_size='32')
  config.model.update(
    patch_size=4, width=128, depth=4, mlp_dim=256, heads=4, pool='gap'
  )


def generations(config):
  """Sets the stages: each generation learns from the previous generation."""
  names = ['teacher', *(f'student_{n}' for n in range(1, GENERATIONS))]
  taught = [
    {'teacher': f'stages/{name}', 'objective.labels': f'stages/{name}.npz'}
    for name in names
  ]
  first = supervised(config)
  config.stages = tuple(zip(names, [first, *taught[:-1]], strict=True))
  config.teacher = taught[-1]['teacher']
  config.objective.labels = taught[-1]['objective.labels']


def supervised(config):
  """Returns the fields of a run on the labelled images alone."""
  return {
    'objective': 'classification',
    'teacher': '',
    'batch_size': config.batch_size * (1 + config.objective.ratio),
  }


def compare(config):
  (name, first), *others = config.stages
  # The first teacher always has noise.
  config.stages = ((name, NOISE | first), *others)
  methods = (
    ('noisy student', NOISE),
    ('without noise', WITHOUT_NOISE),
    ('supervised', {'stages': (), **supervised(config)}),
  )
  seeds = tuple((f'seed={seed}', {'seed': seed}) for seed in range(3))
  config.sweep = (('method', methods), ('seed', seeds))
