"""Masked patch prediction: section 4.6 and appendix B.1.2 of the paper.

  python -m vit_jax.main --config=configs/masked.py:b16 --workdir=...
  python -m vit_jax.main --config=configs/masked.py:small,./cifar10 \
      --workdir=...

Half of the patches are corrupted, and the model predicts the mean colour of
each corrupted patch. Training does not read labels. The evaluators fewshot and
knn read them if they are on. The first value is the variant of a ViT, the
second the data. `small` is a small ViT that trains in minutes on a CPU, on a
folder of small images. The default is the paper's recipe:

  length           a million steps (14 epochs of JFT-300M), batch size 4096
  optimizer        Adam at 2e-4, 10,000 steps of warm-up, cosine decay

JFT is not public, so the default data are ImageNet-21k. The paper does not
mention weight decay, so this config sets it to 0. Fields of the objective:

  objective.target=mean_colour     or downsized (4 x 4 colours), or pixels
  objective.rate=0.5               fraction of patches that are corrupted
  objective.mask=0.8               fraction of the corrupted patches that become
                                   the mask token
  objective.other=0.1              fraction of the corrupted patches that become
                                   another patch of the image; the remaining
                                   corrupted patches are unchanged

To learn classes afterwards, run configs/finetune.py:WORKDIR,DATA. For `small`,
run configs/small.py:DATA with --config.init=WORKDIR.

Published accuracy of B/16 on ImageNet after fine-tuning: 79.9 %, 2 points above
training from scratch and 4 below supervised pre-training.
docs/results/objectives.md has the results measured here.
"""

from vit_jax import config as config_lib


def get_config(argument='b16'):
  (variant, data), pairs = config_lib.parse_argument(argument, ['b16', ''])
  config = config_lib.base()
  config_lib.choose_objective(config, 'masked')
  config.best_metric = 'test/loss'
  if variant == 'small':
    small(config, data or './cifar10')
  else:
    paper(config, variant, data or 'imagenet21k')
  config_lib.override(config, pairs)
  return config


def paper(config, variant, data):
  config.total = '1e6 steps'
  config.batch_size = 4096
  config.data.update(name=data, image_size='224', workers=8)
  config_lib.choose_model(config, variant)
  config.model.dtype = 'bfloat16'
  config.mesh.fsdp = -1
  config.optimizer.update(
    lr=2e-4, decay='cosine', warmup='10000 steps', weight_decay=0.0
  )
  if data == 'imagenet21k':
    config.data.split = 'train[51200:]'
    config.evaluators.test.split = 'train[:51200]'
  elif data == 'imagenet2012':
    config.evaluators.test.split = 'validation'


def small(config, data):
  config.total = '10 epochs'
  config.batch_size = 64
  config.data.update(name=data, image_size='32', crop_min_area=0.8)
  config.model.update(
    patch_size=4, width=128, depth=4, mlp_dim=256, heads=4, pool='gap'
  )
  config.optimizer.update(
    lr=2e-3, decay='cosine', warmup='5%', clip_norm=1.0, weight_decay=0.05
  )
  config.eval_every = '20%'
  config.checkpoint_every = '20%'
