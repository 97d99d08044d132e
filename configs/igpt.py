"""iGPT: "Generative Pretraining from Pixels" (ICML 2020).

  python -m vit_jax.palette imagenet2012 --out=palette.npy
  python -m vit_jax.main --config=configs/igpt.py:s,imagenet2012,palette.npy \
      --workdir=...
  python -m vit_jax.main --config=configs/igpt.py:tiny,./cifar10 --workdir=...

A transformer predicts the colour of every pixel of the pixels before it. The
first value is a size (s, m, l, or tiny for minutes on a CPU), the second the
data, and the third a palette of `vit_jax.palette`; without one it is 8 values
each of red, green and blue.

  model.causal=False               BERT: objective.rate (.15) of the pixels are
                                   hidden, and predicted of the others
  objective.name=classification --config.init=WORKDIR
                                   fine-tuning on classes

The default is the paper's: batch 128, a million steps, Adam with beta .9 and
.95, a warm-up of one epoch, cosine decay to 0, neither dropout nor weight
decay; rates .003 (S, M) and .001 (L). Its crops (the short side at random from
256 to 384 pixels, 224 of them, down to 32) are inception crops of at least a
third of the area here.

Published: test NLL on 32 x 32 ImageNet 2.0895 nats a pixel (S), 2.0614 (M),
2.0466 (L). Measured here: see docs/results/objectives.md.
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
      f'No size {size!r}. {config_lib.nearest(size, [*RATES, "tiny"])}'
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
