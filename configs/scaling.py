"""Scaling study: accuracy against pre-training compute, as in figure 5.

  python -m vit_jax.main --config=configs/scaling.py --workdir=runs/scaling
  python -m vit_jax.main --config=configs/scaling.py:./cifar10 --workdir=...
  python -m vit_jax.main --config=configs/scaling.py:imagenet21k,imagenet2012 \
      --workdir=...

All models are pre-trained on the same number of examples. Then the run measures
the 10-shot accuracy of their frozen features. The first value is the data of
pre-training. The second value is the data of the few-shot evaluation, by
default the same (for ImageNet-21k, ImageNet). plot.png has a curve for each
family of models. table.md and results.csv have the parameters and exaFLOPs.

On digits and folders of small images, the models are small ViTs, ResNets and
hybrids, named by layers x width. Digits run with three seeds. TFDS datasets use
the models of table 6, at 224 pixels and batch size 4096, with the learning
rates of table 3 for JFT-300M. R200x3 is missing from table 3 and gets the rate
of R152x2. JFT is not public, so models train for 30 epochs on ImageNet-21k, or
for 90 epochs on other datasets. As in table 3, the decay is linear. The warm-up
is 10,000 steps on ImageNet-21k, and 10 % of the run on other datasets.

Published for ViT-L/16 with 7 epochs on JFT: 783 exaFLOPs, and 86.30 % on
ImageNet after fine-tuning (table 6). Measured here on digits with 3 seeds and
10 examples per class (2026-11-21): ViTs 66.0, 78.2 and 66.4 %, ResNets 96.5,
96.4 and 98.6 %, hybrids 88.8, 95.0 and 89.0 %. 112 steps are few for a
transformer, and the deepest model needs a lower learning rate. The 27 runs take
half an hour on 2 CPU cores.
"""

from vit_jax import config as config_lib
from vit_jax.data import folder
from vit_jax.models import variants
from vit_jax.sweeps import axes

# For each model of table 6: its variant, and its learning rate from table 3.
TABLE_6 = {
  'ViT-B/32': ('b32', 8e-4),
  'ViT-B/16': ('b16', 8e-4),
  'ViT-L/32': ('l32', 6e-4),
  'ViT-L/16': ('l16', 4e-4),
  'ViT-H/14': ('h14', 3e-4),
  'R50x1': ('r50x1', 1e-3),
  'R50x2': ('r50x2', 1e-3),
  'R101x1': ('r101x1', 8e-4),
  'R152x1': ('r152x1', 6e-4),
  'R152x2': ('r152x2', 6e-4),
  'R200x3': ('r200x3', 6e-4),
  'R50+ViT-B/32': ('r50+b32', 8e-4),
  'R50+ViT-B/16': ('r50+b16', 8e-4),
  'R50+ViT-L/32': ('r50+l32', 2e-4),
  'R50+ViT-L/16': ('r50+l16', 4e-4),
}


def small_models(patch_size):
  """Returns the fields of small models for images of 32 pixels, by name.

  The last feature map of ResNets and hybrids has 4 x 4 positions.
  """

  def vit(depth, width):
    return {
      'model': 'ti16',
      'model.patch_size': patch_size,
      'model.width': width,
      'model.mlp_dim': 2 * width,
      'model.depth': depth,
      'model.heads': 4,
    }

  def resnet(units, width):
    layers = (units // 2, units // 2)
    return {'model': 'r26x1', 'model.layers': layers, 'model.width': width}

  def hybrid(units, stem_width, depth, width):
    return vit(depth, width) | {
      'model.patch_size': 1,
      'model.stem_width': stem_width,
      'model.stem_layers': (units // 2, units // 2),
    }

  return {
    'ViT-2x32': vit(2, 32),
    'ViT-3x64': vit(3, 64),
    'ViT-6x128': vit(6, 128),
    'R2x32': resnet(2, 32),
    'R4x32': resnet(4, 32),
    'R2x64': resnet(2, 64),
    'R2x32+ViT-2x32': hybrid(2, 32, 2, 32),
    'R2x32+ViT-3x64': hybrid(2, 32, 3, 64),
    'R4x32+ViT-6x128': hybrid(4, 32, 6, 128),
  }


def large_models(loss):
  """Returns the fields of table 6's models by name."""
  models = {}
  for name, (variant, rate) in TABLE_6.items():
    fields = variants.fields(variant)
    models[name] = {
      'model': variant,
      'model.dtype': 'bfloat16',
      'model.head_bias': -10.0 if loss == 'sigmoid' else 0.0,
      'optimizer.lr': rate,
    }
    if fields['name'] == 'vit':
      # The head of pre-training has one hidden layer (section 3.1).
      models[name]['model.representation_size'] = fields['width']
  return models


def small(config, data):
  """Sets fields for runs of minutes on a CPU; returns the models."""
  config.total = '5 epochs'
  config.batch_size = 64
  config.data.update(name=data, image_size='32')
  config.optimizer.update(lr=3e-3, decay='cosine', warmup='10%', clip_norm=1.0)
  if data != 'digits':
    config.data.crop_min_area = 0.8
    return small_models(patch_size=4)
  config.data.update(crop_min_area=0.7, flip=False)
  # A patch covers 2 x 2 pixels of the original scans of 8 x 8 pixels.
  return small_models(patch_size=8)


def large(config, data):
  """Sets the fields of table 3 that all models share."""
  config.batch_size = 4096
  config.data.update(name=data, image_size='224', workers=8)
  config.optimizer.update(decay='linear', weight_decay=0.1)
  if data == 'imagenet21k':
    config.total = '30 epochs'
    config.data.split = 'train[51200:]'
    config.evaluators.test.split = 'train[:51200]'
    config.loss.name = 'sigmoid'
  else:
    config.total = '90 epochs'
    config.optimizer.warmup = '10%'
    if data == 'imagenet2012':
      config.evaluators.test.split = 'validation'


def get_config(argument='digits'):
  (data, fewshot), pairs = config_lib.parse_argument(argument, ['digits', ''])
  config = config_lib.base()
  is_small = data == 'digits' or folder.is_folder_name(data)
  models = (small if is_small else large)(config, data)
  default = 'imagenet2012' if data == 'imagenet21k' else data
  config.evaluators.fewshot.update(on=True, data=fewshot or default)
  config.best_metric = 'fewshot/10shot_accuracy'
  config.report = 'scaling'
  config.eval_every = '100%' if is_small else '10%'
  config.checkpoint_every = '50%' if is_small else '1000 steps'
  config_lib.override(config, pairs)
  # The bias of the head depends on the loss.
  models = models or large_models(config.loss.name)
  seeds = ('0', '1', '2') if data == 'digits' else ('0',)
  config.sweep = (
    ('Model', tuple(models.items())),
    axes.axis(config, 'seed', seeds),
  )
  axes.refuse_swept(config, pairs)
  return config
