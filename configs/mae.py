"""Masked autoencoders (MAE): learn from images without labels (2111.06377).

  python -m vit_jax.main --config=configs/mae.py:b16 --workdir=...
  python -m vit_jax.main --config=configs/mae.py:small,./cifar10 --workdir=...

Three quarters of the patches are hidden. The encoder sees only the other
patches, and a small decoder predicts the pixels of the hidden patches. The
first value is the variant of a ViT, the second the data. `small` is a small ViT
that trains in minutes on a CPU, on a folder of small images. The default is the
published recipe:

  length           800 epochs, batch size 4096; for the paper's longer schedule,
                   set total='1600 epochs'
  optimizer        AdamW with betas 0.9 and 0.95, weight decay 0.05
  learning rate    2.4e-3 (1.5e-4 per 256 images), warm-up of 40 epochs, cosine
                   decay
  augmentation     crops of at least a fifth of the image, flips

Fields of the objective:

  objective.rate=0.75            fraction of hidden patches
  objective.normalized=True      normalises the target pixels of each patch to
                                 mean 0 and standard deviation 1
  objective.decoder_depth=8      layers of the decoder; see also decoder_width
                                 and decoder_heads

To learn classes afterwards, run configs/finetune.py:WORKDIR,DATA. For `small`,
run configs/small.py:DATA with --config.init=WORKDIR. Both drop the decoder.

Published accuracy on ImageNet after 1600 epochs and fine-tuning: B/16 83.6 %,
L/16 85.9 %. The guide is docs/guides/self_supervised.md.
"""

from vit_jax import config as config_lib


def get_config(argument='b16'):
  (variant, data), pairs = config_lib.parse_argument(argument, ['b16', ''])
  config = config_lib.base()
  config_lib.choose_objective(config, 'mae')
  config.best_metric = 'test/loss'
  if variant == 'small':
    small(config, data or './cifar10')
  else:
    paper(config, variant, data or 'imagenet2012')
  config_lib.override(config, pairs)
  return config


def paper(config, variant, data):
  config.total = '800 epochs'
  config.batch_size = 4096
  config.data.update(
    name=data,
    image_size='224',
    crop_min_area=0.2,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    workers=8,
  )
  config_lib.choose_model(config, variant)
  config.model.update(posemb='sincos2d', dtype='bfloat16', gelu='exact')
  config.mesh.fsdp = -1
  config.optimizer.update(
    lr=1.5e-4 * config.batch_size / 256,
    decay='cosine',
    warmup='40 epochs',
    b2=0.95,
    weight_decay=0.05,
  )
  if data == 'imagenet2012':
    config.evaluators.test.split = 'validation'


def small(config, data):
  config.total = '10 epochs'
  config.batch_size = 128
  config.data.update(name=data, image_size='32', crop_min_area=0.5)
  config.model.update(
    patch_size=4, width=128, depth=4, mlp_dim=256, heads=4, pool='gap'
  )
  config.objective.update(decoder_width=64, decoder_depth=1, decoder_heads=4)
  config.optimizer.update(
    name='muon', lr=5e-3, decay='cosine', warmup='5%', weight_decay=0.05
  )
  config.eval_every = '20%'
  config.checkpoint_every = '20%'
