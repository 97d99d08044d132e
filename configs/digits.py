"""The embedded example: a small ViT on scikit-learn's handwritten digits.

python -m vit_jax.main --config=configs/digits.py --workdir=runs/digits

About a minute on 2 CPU cores; 98.9 % of a held-out fifth, the mean of five
seeds, measured here (2026-11-21).
"""

from vit_jax.config import base


def get_config():
  config = base()
  config.total = '60 epochs'
  config.batch_size = 64
  config.log_every = '20 steps'
  config.eval_every = '10%'
  config.checkpoint_every = '10%'
  config.data.update(
    # Twice the size of the scans, so that crops move by parts of a pixel.
    name='digits',
    image_size='16',
    crop_min_area=0.7,
    flip=False,
  )
  config.model.update(patch_size=4, width=96, depth=3, mlp_dim=384, heads=6)
  config.optimizer.update(lr=3e-3, decay='cosine', warmup='10%', clip_norm=1.0)
  return config
