"""Teachers and unlabelled images: two tables, each by one command.

  python -m vit_jax.main --config=configs/teachers.py --workdir=...
  python -m vit_jax.main --config=configs/teachers.py:unlabelled,./cifar10 ...
  python -m vit_jax.main --config=configs/teachers.py:wrong_labels ...

unlabelled: 40 digits have labels and the others none, or one image in 200 of a
folder of small images. Every method has one budget of 2,400 steps of 64 images
(VIVI 72), of which teachers, students before the last and pre-training take
their part: labels alone; DeiT, hard and soft, from a ResNet of the same labels;
Noisy Student, four generations; S4L's rotations and exemplars; VIVI, on made
videos of the unlabelled; and masked patches of all, then labels.

wrong_labels: 40 % of the labels are wrong, and a teacher of the same recipe has
right ones: no teacher, DeiT hard and soft.

Digits have three seeds, a folder one (--sweep=seed=0,1,2 runs more). The same
command resumes, and leaves results.csv, table.md and plot.png.
"""

from vit_jax import config as config_lib
from vit_jax.sweeps import axes

# The paper's soft losses have the weight 0.1.
SOFT = {'objective.kind': 'soft', 'objective.weight': 0.1}
SUPERVISED = {'objective': 'classification', 'stages': ()}
STEPS = 2400


def wrong_labels(config):
  config.total = '20 epochs'
  config.data.wrong_labels = 0.4
  distil(config)
  config.stages = (
    (
      'teacher',
      {
        'objective': 'classification',
        'model.name': 'vit',
        'teacher': '',
        'data.wrong_labels': 0.0,
      },
    ),
  )
  config.sweep = (
    (
      'teacher',
      (
        ('none', SUPERVISED | {'model.name': 'vit', 'teacher': ''}),
        ('hard', {}),
        ('soft', SOFT),
      ),
    ),
  )


def distil(config):
  """Has a DeiT learn from the stage 'teacher'."""
  config_lib.choose_objective(config, 'distillation')
  config.model.update(name='deit', pool='cls')
  config.teacher = 'stages/teacher'


GRIDS = {'wrong_labels': wrong_labels}


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
    raise ValueError(f'No grid {grid!r}. {config_lib.nearest(grid, GRIDS)}')
  config = config_lib.base()
  config.batch_size = 64
  config.eval_every = '25%'
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
