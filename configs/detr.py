"""DETR: object detection as set prediction (2005.12872).

  python -m vit_jax.main --config=configs/detr.py:digits --workdir=runs/found
  python -m vit_jax.main --config=configs/detr.py:r50,./coco --workdir=... \
    --config.init=resnet50.pth
  python -m vit_jax.main --config=configs/detr.py:small,./mine --workdir=...

The first value is a variant of DETR (r50, r101, r50_dc5, r101_dc5), or `small`
for few images and random initial parameters. The second value is a folder with
annotations in the format of COCO or VOC. `digits` needs no download: its images
are canvases of 48x48 pixels with one to three of scikit-learn's digits.

The variants use the original recipe: AdamW at 1e-4 (1e-5 for the backbone), a
frozen root and first stage, batch size 64, and gradients clipped at 0.1. It
takes 300 epochs, the last 100 at a tenth of the learning rates. Images, whole
or cropped, have short sides of 480 to 800 pixels. For 500 epochs:

  "...:r50,./coco,total=500 epochs,optimizer.milestones=('400 epochs',)"

These things differ from the original:

- Weight decay applies only to kernels.
- Initial query, key and value kernels are larger by a factor of sqrt(2). The
  biases of MLPs and of the input projection start at 0.
- A batch has one of three shapes: squares of 960, 1184 or 1333 pixels. Its
  images get similar short sides. This needs more padding than the original. In
  the first two shapes, images with an aspect ratio above 5/3 may be shrunk.
- The backbone has random initial parameters unless --config.init is a
  checkpoint of a DETR, or of a ResNet with the same layers, width and version.
  A frozen BatchNorm needs the statistics of a checkpoint. To start without a
  checkpoint, set model.backbone_version=1 and optimizer.frozen=().

With model.masks=True the model learns masks. Each object, except crowds, must
have a mask. evaluators.coco.masks=True measures masks. The original trains
boxes first, then only the mask head. Here --config.init always replaces the
class layer by a new one, so this command trains the class layer too:

  "...:r50,./coco,model.masks=True,init=runs/boxes,optimizer.lr_scales=()" \
    --config.objective.mask_stride=4 \
    --config.optimizer.frozen="('^(?!class_embed|bbox_attention|mask_head)',)"

`digits` reaches an AP of 0.730 and an AP50 of 0.953 on 500 test canvases, in
about half an hour on 2 busy cores (one seed, 2026-11-24).

With COCO annotations, the index of a class is its category id. evaluators.coco
measures AP and COCO's other metrics. It needs pip install -e '.[detection]'.
"""

from vit_jax import config as config_lib

ROOT = r'^backbone/(conv_root|bn_root|block1)(/|$)'


def get_config(argument='digits'):
  (variant, data), pairs = config_lib.parse_argument(argument, ['digits', ''])
  config = config_lib.base()
  config_lib.choose_objective(config, 'detection')
  config.evaluators.coco.on = True
  config.best_metric = 'coco/AP'
  if variant == 'digits':
    digits(config)
  elif variant == 'small':
    small(config, data or './coco')
  else:
    original(config, variant, data or './coco')
  config_lib.override(config, pairs)
  return config


def original(config, variant, data):
  config_lib.choose_model(config, f'detr_{variant}')
  config.total = '300 epochs'
  config.batch_size = 64
  config.data.update(
    name=data,
    image_size='1333',
    workers=8,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
  )
  config.evaluators.test.split = config.evaluators.coco.split = 'validation'
  config.objective.update(
    short_sides=tuple(range(480, 801, 32)),
    crop_sides=(400, 500, 600),
    buckets=3,
  )
  config.optimizer.update(
    lr=1e-4,
    decay='staircase',
    milestones=('200 epochs',),
    warmup='0 steps',
    weight_decay=1e-4,
    clip_norm=0.1,
    frozen=(ROOT,),
    lr_scales=(('^backbone/', 0.1),),
  )


def small(config, data):
  from_scratch(
    config, (1, 1, 2, 2), num_queries=50, width=128, heads=8, mlp_dim=256
  )
  config.objective.max_objects = 42
  config.total = '3000 steps'
  config.data.update(name=data, image_size='128')
  config.optimizer.lr = 5e-4


def digits(config):
  from_scratch(
    config, (1, 2, 2), num_queries=10, width=64, heads=4, mlp_dim=128
  )
  config.objective.max_objects = 3
  config.total = '4500 steps'
  config.data.update(name='digits_canvas', image_size='48', flip=False)
  config.optimizer.lr = 1e-3


def from_scratch(config, backbone_layers, **fields):
  """Sets fields that train a small model from scratch on few images."""
  config_lib.choose_model(config, 'detr_r50')
  config.model.update(
    encoder_layers=2,
    decoder_layers=3,
    dropout=0.0,
    backbone='plain',
    backbone_layers=backbone_layers,
    backbone_width=32,
    **fields,
  )
  # Without the dense loss, few images and steps teach the model almost nothing.
  config.objective.dense = 2.0
  config.batch_size = 16
  config.log_every = '20 steps'
  config.eval_every = '10%'
  config.checkpoint_every = '10%'
  config.optimizer.update(
    decay='cosine', warmup='5%', clip_norm=1.0, weight_decay=1e-4
  )
