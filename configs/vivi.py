"""VIVI: few labels, and a self-supervised loss on videos (arXiv 1912.02783).

  python -m vit_jax.main --config=configs/vivi.py:./cifar10,./clips ...

The first value is the data whose classes the model learns. For digits, 40
images count as labelled; for a folder of small images or another dataset, one
image in 200. The second value is a folder of videos. Each video is a folder of
frames: ./clips/NAME/000001.jpg and so on. A batch has as many videos as
labelled images. Each video gives `shots` x `frames` x `copies` images, by
default 8. So a step processes nine times `batch_size` images.

Fields that you can set, here with their values for digits:

  data.split=train[:40]            the labelled images
  objective.shots=2                shots per video, each from another part of
                                   the video, in order
  objective.frames=2               frames per shot
  objective.length=16              maximum number of frames that a shot spans
  objective.copies=2               augmented copies of each frame
  objective.weight=1.0             weight of the loss on videos

model=VARIANT selects another ViT. The paper uses a ResNet-50 v2.
"""

from vit_jax import config as config_lib
from vit_jax.data import benchmarks


def get_config(argument='digits'):
  (data, videos), pairs = config_lib.parse_argument(
    argument, ['digits', './clips']
  )
  config = config_lib.base()
  config_lib.choose_objective(config, 'video')
  config.objective.videos = videos
  config.batch_size = 16
  if data == 'digits':
    digits(config)
  else:
    small(config, data)
  config.model.update(patch_size=4, heads=4, pool='gap')
  config.optimizer.update(
    decay='cosine', warmup='10%', clip_norm=1.0, weight_decay=0.05
  )
  config.eval_every = '20%'
  config.checkpoint_every = '20%'
  config_lib.override(config, pairs)
  return config


def digits(config):
  config.total = '1000 steps'
  config.data.update(
    name='digits', split='train[:40]', image_size='16', crop_min_area=0.7
  )
  config.data.flip = False
  config.model.update(width=64, depth=2, mlp_dim=128)
  config.optimizer.lr = 3e-3


def small(config, data):
  config.total = '3000 steps'
  config.data.update(
    name=data, split='train[:0.5%]', image_size='32', crop_min_area=0.8
  )
  config.evaluators.test.split = benchmarks.usual_splits(data)[1]
  config.data.augment = 'randaugment(2, 5)'
  config.model.update(width=128, depth=4, mlp_dim=256)
  config.optimizer.lr = 1e-3
