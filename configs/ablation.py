"""Three grids: position embeddings, heads, and the parts of ViT-5.

  python -m vit_jax.main --config=configs/ablation.py:posemb --workdir=...
  python -m vit_jax.main --config=configs/ablation.py:head --workdir=...
  python -m vit_jax.main --config=configs/ablation.py:vit5 --workdir=...

The first value is the grid:

  posemb  table 8: every kind of position embedding. Learned embeddings are
          added at the input, or in every layer (separate or shared). The
          paper's table does not have the fixed sines and cosines.
  head    figure 9: class token (with a linear layer or an MLP), mean or
          attention pooling, each at three learning rates, because heads may
          need different rates.
  vit5    a ViT, ViT-5, and ViT-5 without one of its parts at a time.

The second value is the data: digits (the default) with three seeds, or a folder
of small images with one seed, as in posemb,./cifar10. --sweep=seed=0,1,2 runs
more seeds. The same command resumes. A grid writes results.csv and table.md.

On digits and 2 busy CPU cores, the 27 runs of posemb took 9 minutes and the 36
runs of head 18. Test accuracy is 87.7 % without position embeddings and 96.8 to
98.3 % with embeddings that are added to the tokens. Every head is best at a
learning rate of 3e-3: class token 98.0 %, mean 96.9 %, attention 96.7 %
(measured here, 2026-11-21).
"""

from vit_jax import config as config_lib
from vit_jax.data import images
from vit_jax.models import variants
from vit_jax.sweeps import axes

LEARNING_RATES = ('1e-3', '3e-3', '1e-2')


def posemb(config):
  kinds = {
    'No Pos. Emb.': 'none',
    '1-D Pos. Emb.': 'learned1d',
    '2-D Pos. Emb.': 'learned2d',
    'Rel. Pos. Emb.': 'relative',
    'Sin-Cos 2-D': 'sincos2d',
  }
  places = {
    'Default/Stem': 'input',
    'Every Layer': 'every_layer',
    'Every Layer-Shared': 'shared',
  }
  config.sweep = (
    ('Pos. Emb.', tuple((k, {'model.posemb': v}) for k, v in kinds.items())),
    ('Added', tuple((k, {'model.posemb_at': v}) for k, v in places.items())),
  )
  config.sweep_skip = tuple(
    {'model.posemb': kind, 'model.posemb_at': place}
    for kind in ('none', 'relative', 'sincos2d')
    for place in ('every_layer', 'shared')
  )


def head(config):
  def choice(pool, hidden):
    return {'model.pool': pool, 'model.representation_size': hidden}

  heads = {
    'Class token, linear': choice('cls', 0),
    'Class token, MLP': choice('cls', config.model.width),
    'Mean (GAP), linear': choice('gap', 0),
    'Attention (MAP), linear': choice('map', 0),
  }
  rates = axes.axis(config, 'optimizer.lr', LEARNING_RATES)
  config.sweep = (('Head', tuple(heads.items())), rates)


def vit5(config):
  side, _ = images.size_of(config.data.image_size)
  side //= config.model.patch_size
  parts = variants.VIT5 | {'rope_side': side}
  plain = variants.defaults('vit')

  def without(*fields):
    return {
      f'model.{field}': plain[field] if field in fields else value
      for field, value in parts.items()
    }

  models = {
    'ViT': without(*parts),
    'ViT-5': without(),
    'LayerNorm': without('norm'),
    'No LayerScale': without('layer_scale'),
    'No norm of queries and keys': without('qk_norm'),
    'Biases of q, k and v': without('qkv_bias'),
    'No rotary embeddings': without('rope', 'rope_side', 'rope_registers'),
    'No registers': without('registers', 'rope_registers'),
  }
  config.sweep = (('Model', tuple(models.items())),)


GRIDS = {'posemb': posemb, 'head': head, 'vit5': vit5}


def digits(config):
  config.total = '20 epochs'
  config.data.update(
    name='digits', image_size='16', crop_min_area=0.7, flip=False
  )
  config.model.update(width=64, depth=3, mlp_dim=128, heads=4)
  config.optimizer.update(lr=3e-3, warmup='10%')


def folder(config, name):
  config.total = '5 epochs'
  config.data.update(name=name, image_size='32', crop_min_area=0.8)
  config.model.update(width=128, depth=4, mlp_dim=256, heads=4)
  config.optimizer.update(lr=2e-3, warmup='5%', weight_decay=0.05)


def get_config(argument='posemb'):
  (grid, data), pairs = config_lib.parse_argument(
    argument, ['posemb', 'digits']
  )
  if grid not in GRIDS:
    raise ValueError(
      f'{grid!r} is not a grid. {config_lib.nearest(grid, GRIDS)}'
    )
  config = config_lib.base()
  config.batch_size = 64
  config.eval_every = '10%'
  config.checkpoint_every = '50%'
  config.model.patch_size = 4
  config.optimizer.update(decay='cosine', clip_norm=1.0)
  if data == 'digits':
    digits(config)
  else:
    folder(config, data)
  config_lib.override(config, pairs)
  GRIDS[grid](config)
  seeds = ('0', '1', '2') if data == 'digits' else ('0',)
  config.sweep += (axes.axis(config, 'seed', seeds),)
  axes.refuse_swept(config, pairs)
  return config
