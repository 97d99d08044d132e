"""The paper's claims at a small scale: the grids that `vit_jax.reproduce` runs.

  python -m vit_jax.reproduce --budget=2h --workdir=runs/reproduce
  python -m vit_jax.main --config=configs/reproduce.py:posemb --workdir=...
  python -m vit_jax.main --config=configs/reproduce.py:posemb,./cifar10 ...

The second line is one of the grids by itself, for whoever wants to see a number
of the report come out. The first value is its name, the second the data: digits
or a folder of small images or a TFDS name. vit_jax/paper/claims.py says what is
concluded of each.

Every grid is as small as still trains: what it cannot decide, a longer `total`
may, as in posemb,digits,total=40 epochs. The models have 32 to 128 channels and
1 to 6 layers. Most grids take more steps for other data than for digits, or no
ViT would learn what is looked for.
"""

import pathlib
import runpy
from typing import Any

from vit_jax import config as config_lib
from vit_jax.models.igpt import grey_palette
from vit_jax.sweeps import axes

SEEDS = ('0', '1', '2')
# A ResNet, and the stem of a hybrid, which leaves an eighth of the side.
RESNET: dict[str, Any] = {
  'model': 'r26x1',
  'model.layers': (1, 1),
  'model.width': 32,
}
STEM: dict[str, Any] = {
  'model.patch_size': 1,
  'model.stem_width': 32,
  'model.stem_layers': (1, 1),
}
IGPT_DEPTH = 6


def base(data):
  """Returns what most grids start from: a small ViT of 16 patches, or of 64."""
  config = config_lib.base()
  config.batch_size = 64
  config.total = '10 epochs' if data == 'digits' else '2 epochs'
  config.data.update(name=data, image_size='16', flip=False)
  config.data.crop_min_area = 0.7
  if data != 'digits':
    config.data.update(image_size='32', flip=True, crop_min_area=0.8)
  config.model.update(patch_size=4, width=64, depth=3, mlp_dim=128, heads=4)
  config.optimizer.update(lr=3e-3, decay='cosine', warmup='10%', clip_norm=1.0)
  return config


def steps(data, of_digits):
  """Returns a length that is enough for digits, and more for other data."""
  return f'{of_digits if data == "digits" else 800} steps'


def few(data):
  """Returns a split of a hundred digits, or a hundredth of other data."""
  return 'train[:100]' if data == 'digits' else 'train[:1%]'


def other(name, argument):
  """Returns a config of another file here."""
  path = pathlib.Path(__file__).with_name(f'{name}.py')
  return runpy.run_path(str(path))['get_config'](argument)


def data_size(data):
  """Section 4.3: ViT and ResNet on few and on many examples."""
  config = base(data)
  config.total = steps(data, 150)
  config.data.image_size = '32'
  models = {'ViT': {'model.patch_size': 8}, 'ResNet': RESNET}
  parts = {'few': few(data), 'all': 'train'}
  return config, {
    f'{model}, {part}': fields | {'data.split': split}
    for model, fields in models.items()
    for part, split in parts.items()
  }


def families(data):
  """Section 4.4, figure 5: three families at several sizes."""
  config = base(data)
  config.data.image_size = '32'
  config.evaluators.fewshot.update(on=True, data=data, shots=(10,), seeds=1)
  config.total = steps(data, 100)
  small = {'model.width': 32, 'model.mlp_dim': 64, 'model.depth': 2}
  large = {'model.width': 128, 'model.mlp_dim': 256, 'model.depth': 6}
  patch = {'model.patch_size': 8 if data == 'digits' else 4}
  return config, {
    'ViT-2x32': patch | small,
    'ViT-3x64': patch,
    'ViT-6x128': patch | large,
    'R2x32': RESNET,
    'R4x32': RESNET | {'model.layers': (2, 2)},
    'R2x32+ViT-2x32': small | STEM,
    'R2x32+ViT-3x64': STEM,
  }


def resolution(data):
  """Section 3.2: fine-tuning at the resolution of before, and at twice it."""
  config = base(data)
  size, long = int(config.data.image_size), config.total
  before = {'init': '', 'data.image_size': size, 'total': long}
  config.stages = (('pretrained', before | {'optimizer.lr': 3e-3}),)
  config.init = 'stages/pretrained'
  config.total = '60 steps' if data == 'digits' else '300 steps'
  config.optimizer.lr = 1e-3
  return config, {
    f'{side} pixels': {'data.image_size': side} for side in (size, 2 * size)
  }


def posemb(data):
  """Appendix D.4, table 8: kinds of position embeddings at the input."""
  kinds = ('none', 'learned1d', 'learned2d', 'relative')
  return base(data), {kind: {'model.posemb': kind} for kind in kinds}


def head(data):
  """Appendix D.3, figure 9: two heads at two learning rates each."""
  return base(data), {
    f'{pool}, {rate}': {'model.pool': pool, 'optimizer.lr': rate}
    for pool in ('cls', 'gap')
    for rate in (1e-3, 3e-3)
  }


def optimizer(data):
  """Appendix D.1: ResNets with Adam and with SGD, two rates each."""
  config = base(data)
  config.data.image_size = '32'
  config.total = steps(data, 60)
  axes.set_fields(config, RESNET)
  rates = {'adam': (1e-3, 3e-3), 'sgd': (0.03, 0.1)}
  decay = {'adam': 0.1, 'sgd': 1e-4}
  return config, {
    f'{name}, {rate}': {
      'optimizer.name': name,
      'optimizer.lr': rate,
      'optimizer.weight_decay': decay[name],
    }
    for name in rates
    for rate in rates[name]
  }


def shape(data):
  """Appendix D.2, figure 8: one dimension of a small ViT doubled."""
  config = base(data)
  config.model.update(width=32, depth=2, mlp_dim=64)
  if data == 'digits':
    config.total = '120 steps'
  return config, {
    'small': {},
    'depth': {'model.depth': 4},
    'width': {'model.width': 64},
    'MLP': {'model.mlp_dim': 128},
    'patch': {'model.patch_size': 2},
  }


def inside(data):
  """Section 4.5, figure 7: a ViT and a hybrid of 64 patches to look into."""
  config = base(data)
  config.model.depth = 4
  if data == 'digits':
    config.total = '150 steps'
  patch = {'model.patch_size': int(config.data.image_size) // 8}
  return config, {
    'ViT': patch,
    'hybrid': STEM | {'data.image_size': 64},
  }


def axial(data):
  """Appendix D.6: a ViT and the axial variant, without a class token both."""
  config = base(data)
  config.model.update(depth=2, pool='gap')
  return config, {'ViT': {}, 'Axial-ViT': {'model.axial': True}}


def masked(data):
  """Section 4.6, B.1.2: few labels after masked patches, or from scratch."""
  config = base(data)
  config.model.pool = 'gap'
  config.total = '100 steps'
  config.data.split = few(data)

  def after(target, rate):
    fields = {
      'objective': 'masked',
      'objective.target': target,
      'objective.rate': rate,
      'best_metric': 'test/loss',
      'data.split': 'train',
      'total': steps(data, 200),
      'init': '',
    }
    return {'stages': (('pretrained', fields),), 'init': 'stages/pretrained'}

  return config, {
    'from scratch': {},
    'mean colour': after('mean_colour', 0.5),
    'downsized': after('downsized', 0.5),
    'pixels': after('pixels', 0.5),
    'mean colour, 15 %': after('mean_colour', 0.15),
  }


def igpt(data):
  """iGPT, figures 2 and 3: probes of every layer, at three lengths."""
  config = other('digits', 'igpt')
  if data != 'digits':
    config = other('igpt', f'tiny,{data}')
    config.data.image_size = '16'
    config.model.palette = grey_palette(16)
  config.model.update(width=32, depth=IGPT_DEPTH, mlp_dim=128, heads=4)
  config.evaluators.fewshot.update(on=True, data=data, shots=(10,), seeds=1)
  probe = config.evaluators.fewshot.copy_and_resolve_references()
  for i in range(IGPT_DEPTH):
    config.evaluators[f'layer{i}'] = probe.copy_and_resolve_references()
    config.evaluators[f'layer{i}'].layer = f'block_{i}'
  config.evaluators.fewshot.layer = 'pre_logits'
  return config, {
    f'{steps} steps': {'total': f'{steps} steps'} for steps in (30, 60, 120)
  }


def deit(data):
  """DeiT: the same student with and without a ResNet to learn from."""
  config = base(data)
  config.total = steps(data, 200)
  config.data.split = few(data)
  config_lib.choose_objective(config, 'distillation')
  config.model.name = 'deit'
  config.teacher = 'stages/teacher'
  alone = {'objective': 'classification', 'teacher': ''}
  length = {'data.image_size': 32, 'total': steps(data, 60)}
  teacher = RESNET | alone | length
  config.stages = (('teacher', teacher),)
  return config, {
    'without a teacher': alone | {'model.name': 'vit', 'stages': ()},
    'distillation token': {},
  }


def noisy_student(data):
  """Noisy Student: three generations, or as many images of few labels."""
  config = other('noisy_student', f'{data},compare,total=150 steps')
  methods = dict(config.sweep[0][1])
  del methods['without noise']
  return config, methods


def detr(data):
  """DETR: decoder layers, and the weight of no object; digits on a canvas."""
  if data != 'digits':
    raise ValueError(
      f'data is {data!r}: the claims of DETR are measured on digits on a '
      'canvas alone; leave them out of --claims.'
    )
  config = other('detr', 'digits,total=2000 steps')
  return config, {
    '3 layers': {},
    '1 layer': {'model.decoder_layers': 1},
    'no object 1': {'objective.no_object': 1.0},
  }


GRIDS = {
  'data': data_size,
  'families': families,
  'resolution': resolution,
  'posemb': posemb,
  'head': head,
  'optimizer': optimizer,
  'shape': shape,
  'inside': inside,
  'axial': axial,
  'masked': masked,
  'igpt': igpt,
  'deit': deit,
  'noisy_student': noisy_student,
  'detr': detr,
}


def get_config(argument='posemb'):
  (name, data), pairs = config_lib.parse_argument(
    argument, ['posemb', 'digits']
  )
  if name not in GRIDS:
    raise ValueError(f'No grid {name!r}. {config_lib.nearest(name, GRIDS)}')
  config, values = GRIDS[name](data)
  config.log_every = '20 steps'
  config.eval_every = config.checkpoint_every = '100%'
  config_lib.override(config, pairs)
  config.sweep = (
    (name, tuple(values.items())),
    axes.axis(config, 'seed', SEEDS),
  )
  axes.refuse_swept(config, pairs)
  return config
