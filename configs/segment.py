"""Segmentation: predicts a class for each pixel, by a linear head on a ViT.

  python -m vit_jax.main --config=configs/segment.py:./photos,CHECKPOINT \
      --workdir=...
  python -m vit_jax.main --config=configs/segment.py:./photos,CHECKPOINT,whole \
      --workdir=...
  python -m vit_jax.main --config=configs/segment.py --workdir=...

The first value is a folder with masks, the second a checkpoint of a ViT. The
first command is a linear probe: it trains only the head, on frozen features.
The second command fine-tunes the whole model. Without a checkpoint, a small
model is trained from scratch. The third command does this on canvases with
digits, which need no download.

`./photos` has images/, masks/ with a PNG for each image, and classes.txt; or
COCO annotations with masks. Images are resized to data.image_size, ignoring
their aspect ratio. In training, they are first cropped and flipped at random.

The guide is docs/guides/segmentation.md.
"""

from vit_jax import config as config_lib
from vit_jax.checkpoints import from_init


def get_config(argument='digits_canvas'):
  (data, init, trained), pairs = config_lib.parse_argument(
    argument, ['digits_canvas', '', 'head']
  )
  if trained not in ('head', 'whole'):
    raise ValueError(f'The third value is {trained!r}; write head or whole.')
  config = config_lib.base()
  config_lib.choose_objective(config, 'segmentation')
  config.data.update(name=data, crop_min_area=0.25)
  config.evaluators.segmentation.on = True
  config.best_metric = 'segmentation/mean_iou'
  config.total = '50 epochs'
  config.batch_size = 16
  config.eval_every = config.checkpoint_every = '10%'
  config.optimizer.update(
    decay='cosine', warmup='5%', clip_norm=1.0, weight_decay=0.05
  )
  if not init:
    small(config)
  else:
    from_init.choose(config, init)
    if trained == 'head':
      config.optimizer.frozen = ('^(?!head/)',)
    else:
      config.optimizer.update(lr=1e-4, layer_decay=0.75)
  config_lib.override(config, pairs)
  return config


def small(config):
  config.data.image_size = '96'
  config.model.update(
    patch_size=8, width=128, depth=4, mlp_dim=256, heads=4, pool='gap'
  )
  config.optimizer.update(name='muon', lr=5e-3)
  if config.data.name == 'digits_canvas':
    config.data.flip = False
    config.total = '2 epochs'
