"""Trains a small ViT from scratch on a folder of small images.

  python -m vit_jax.main --config=configs/small.py:/data/cifar10 --workdir=...

For a folder of photos, use configs/own.py: it trains better models in the same
time. This config is the baseline of some results in docs/results.

The folder has a sub-folder for each class, or train/CLASS/ and test/CLASS/. On
CIFAR-10 as JPEG files, the test accuracy was 56.6 % after 10.6 minutes on 2 CPU
cores (docs/results/training.md).
"""

from vit_jax import config as config_lib


def get_config(argument='./cifar10'):
  (folder,), pairs = config_lib.parse_argument(argument, ['./cifar10'])
  config = config_lib.base()
  config.total = '5 epochs'
  config.batch_size = 64
  config.data.update(name=folder, image_size='32', crop_min_area=0.8)
  config.model.update(
    patch_size=4, width=128, depth=4, mlp_dim=256, heads=4, pool='gap'
  )
  config.optimizer.update(
    lr=2e-3, decay='cosine', warmup='5%', clip_norm=1.0, weight_decay=0.05
  )
  config.eval_every = '20%'
  config.checkpoint_every = '20%'
  config_lib.override(config, pairs)
  return config
