"""iGPT: "Generative Pretraining from Pixels" (ICML 2020).

  python -m vit_jax.palette imagenet2012 --out=palette.npy
  python -m vit_jax.main --config=configs/igpt.py:s,imagenet2012,palette.npy \
      --workdir=...
  python -m vit_jax.main --config=configs/igpt.py:tiny,./cifar10 --workdir=...

A transformer predicts the colour of each pixel from the previous pixels. The
first value is a size: s, m, l, or tiny for a CPU (hours on CIFAR-10). The
second value is the data. The third value is a palette from `vit_jax.palette`;
the default palette has 8 values each of red, green and blue.

  model.causal=False               BERT: hides a fraction of the pixels,
                                   objective.rate (0.15), and predicts them from
                                   the visible pixels

To learn classes afterwards, add objective.name=classification,init=WORKDIR to
the values.

The default is the paper's recipe:

  length           a million steps, batch size 128
  optimizer        Adam with betas 0.9 and 0.95, no weight decay, no dropout
  learning rate    0.003 (S, M) or 0.001 (L), warm-up of one epoch, cosine decay

Images and the default palette differ from the paper. The paper resizes the
short side to a random size from 256 to 384 pixels, crops 224 pixels and resizes
the crop to 32. This config takes Inception crops of at least a third of the
area and flips them at random.

Published test NLL on 32 x 32 ImageNet: 2.0895 nats per pixel (S), 2.0614 (M),
2.0466 (L). docs/results/objectives.md has the results measured here.
"""

from vit_jax import config as config_lib
from vit_jax.projects.igpt import palette as palette_lib

RATES = {'s': 3e-3, 'm': 3e-3, 'l': 1e-3}


def get_config(argument='s'):
  (size, data, palette), pairs = config_lib.parse_argument(
    argument, ['s', '', '']
  )
  config = config_lib.base()
  config_lib.choose_objective(config, 'pixels')
  config.best_metric = 'test/loss'
  config.data.image_size = '32'
  config.optimizer.update(decay='cosine', b2=0.95, weight_decay=0.0)
  if size == 'tiny':
    tiny(config, data or './cifar10')
  elif size in RATES:
    paper(config, size, data or 'imagenet2012')
  else:
    raise ValueError(
      f'{size!r} is not a size. {config_lib.nearest(size, [*RATES, "tiny"])}'
    )
  if palette:
    config.model.palette = palette_lib.read(palette)
  config_lib.override(config, pairs)
  return config


def paper(config, size, data):
  config_lib.choose_model(config, f'igpt_{size}')
  config.model.update(dtype='bfloat16', scan=True)
  config.total = '1e6 steps'
  config.batch_size = 128
  config.data.update(name=data, crop_min_area=0.34, workers=8)
  config.optimizer.update(lr=RATES[size], warmup='1 epoch')
  if data == 'imagenet2012':
    config.evaluators.test.split = 'validation'


def tiny(config, data):
  config_lib.choose_model(config, 'igpt_s')
  config.model.update(width=64, depth=4, mlp_dim=256, heads=4)
  config.total = '5 epochs'
  config.batch_size = 32
  config.data.update(name=data, crop_min_area=1.0)
  config.optimizer.update(lr=3e-3, warmup='5%', clip_norm=1.0)
  config.eval_every = '20%'
  config.checkpoint_every = '20%'
