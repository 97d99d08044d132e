"""S4L: few labels, and a self-supervised loss on all images (arXiv 1905.03670).

  python -m vit_jax.main --config=configs/s4l.py:./cifar10 --workdir=...
  python -m vit_jax.main --config=configs/s4l.py:./cifar10,exemplar ...

The first value is a folder of images or another dataset. The second value is
the self-supervised task. With rotation (the default), the model predicts the
rotation of an image. With exemplar, it recognises augmented copies of the same
image. One image in 200 counts as labelled (250 of CIFAR-10), and all count as
unlabelled. A batch has equally many labelled and unlabelled images. Each image
occurs in four rotations or eight copies, so a step processes 8 or 16 times
`batch_size` images.

  data.split=train[:0.5%]          the labelled images
  objective.unlabelled=train       the unlabelled images: a split of the same
                                   data
  objective.unlabelled_data=PATH   the unlabelled images: another dataset, with
                                   or without classes
  objective.weight=1.0             weight of the self-supervised loss
  model=b16                        another ViT; the paper uses a ResNet-50 v2
"""

from vit_jax import config as config_lib
from vit_jax.data import benchmarks


def get_config(argument='./cifar10'):
  defaults = ['./cifar10', 'rotation']
  (data, objective), pairs = config_lib.parse_argument(argument, defaults)
  if objective not in ('rotation', 'exemplar'):
    raise ValueError(
      f'{objective!r} is not a task of S4L; use rotation or exemplar.'
    )
  config = config_lib.base()
  config_lib.choose_objective(config, objective)
  config.total = '3000 steps'
  config.batch_size = 16
  config.data.update(
    name=data, split='train[:0.5%]', image_size='32', crop_min_area=0.8
  )
  config.evaluators.test.split = benchmarks.usual_splits(data)[1]
  config.model.update(
    patch_size=4, width=128, depth=4, mlp_dim=256, heads=4, pool='gap'
  )
  if objective == 'exemplar':
    config.data.augment = 'randaugment(2, 5)'
  config.optimizer.update(
    lr=1e-3, decay='cosine', warmup='5%', clip_norm=1.0, weight_decay=0.05
  )
  config.eval_every = '20%'
  config.checkpoint_every = '20%'
  config_lib.override(config, pairs)
  return config
