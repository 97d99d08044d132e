"""The base config: its fields and their defaults.

A file in `configs/` starts from `base()` and sets the fields that differ.
Durations are strings such as '90 epochs', '10000 steps', '1e6 examples' or '5%'
(of the run).
"""

import ast
import functools
import itertools
import logging
import operator
import re
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

from vit_jax.models import variants
from vit_jax.models.fields import Valid, check_value
from vit_jax.objectives import OBJECTIVES
from vit_jax.register import nearest

_log = logging.getLogger(__name__)

# Fields that may change when a run resumes. They change training steps only by
# rounding, with three exceptions. `extend` and `data.on_bad_image` log a
# warning. `accum_steps` changes random draws, such as dropout, and statistics
# over a batch, such as DINO's `batch_norm`.
RESUMABLE = (
  r'log_every|eval_every|checkpoint_every|keep_last|best_metric|eval_only',
  r'mesh\..*|gather|evaluators\..*|accum_steps',
  r'model\.remat|data\.(dir|workers|class_order|on_bad_image)',
  r'wandb|sweep|sweep_skip|tune\..*|report|early_stopping|patience|extend',
)

# Valid values of fields: an interval or a tuple of choices. If a field is a
# tuple, each of its numbers must be valid. Models and objectives declare the
# valid values of their own fields.
VALID: dict[str, Valid] = {
  'seed': '[0, 4294967295]',
  'batch_size': '[1, inf)',
  'accum_steps': '[1, inf)',
  'keep_last': '[1, inf)',
  'patience': '[0, inf)',
  'data.split_seed': '[0, 4294967295]',
  'data.balance': '[0, 1]',
  'data.crop_min_area': '(0, 1]',
  'data.crop_resize': '[0, 16]',
  'data.erasing': '[0, 1]',
  'data.repeats': '[1, inf)',
  'data.resize_small': '[0, 65536]',
  'data.workers': '[0, 1024]',
  'data.wrong_labels': '[0, 1]',
  'evaluators.fewshot.shots': '[1, inf)',
  'evaluators.fewshot.seeds': '[1, inf)',
  'evaluators.knn.k': '[1, inf)',
  'evaluators.pictures.images': '[1, 1024]',
  'loss.label_smoothing': '[0, 1)',
  'loss.cutmix': '[0, inf)',
  'loss.class_weights': ('', 'balanced'),
  'loss.mixup': '[0, inf)',
  'gather': ('step', 'layer'),
  'loss.name': ('softmax', 'sigmoid'),
  'optimizer.decay': ('linear', 'cosine', 'constant', 'staircase'),
  'optimizer.momentum_dtype': ('float32', 'bfloat16'),
  'optimizer.name': ('adam', 'sgd', 'lamb', 'muon'),
  'mesh.slice': '[-1, inf)',
  'mesh.data': '[-1, inf)',
  'mesh.fsdp': '[-1, inf)',
  'mesh.tensor': '[-1, inf)',
  'optimizer.b1': '[0, 1)',
  'optimizer.b2': '[0, 1)',
  'optimizer.clip_norm': '[0, inf)',
  'optimizer.layer_decay': '(0, 1]',
  'optimizer.lora': '[0, inf)',
  'optimizer.lr': '[0, inf)',
  'optimizer.momentum': '[0, 1)',
  'optimizer.polyak': '[0, 1)',
  'optimizer.sam': '[0, inf)',
  'optimizer.weight_decay': '[0, inf)',
  'optimizer.weight_decay_end': '[0, inf)',
}


def base() -> ConfigDict:
  """Returns the base config, unlocked so that a config file can add to it."""
  return ConfigDict(
    {
      # Seed of the run. Random keys are derived from it and the step.
      'seed': 0,
      # Length of training.
      'total': '90 epochs',
      # Examples per step, over all devices and hosts.
      'batch_size': 4096,
      # Gradient accumulation: number of microbatches per batch.
      'accum_steps': 1,
      # Checkpoint to start from, in any supported format. Its position
      # embeddings are resized and its head is replaced by a new one.
      'init': '',
      # Whether to first fit the new head as a linear classifier on frozen
      # features of `init`. Otherwise the weights of a linear head start at 0.
      'head_first': False,
      # Checkpoint of the teacher, for objectives that have one.
      'teacher': '',
      # Whether to only evaluate `init` or, if that is empty, the workdir.
      'eval_only': False,
      # Whether to continue the workdir's run to a longer `total`, with the
      # learning rates of the longer run.
      'extend': False,
      'log_every': '50 steps',
      'eval_every': '5%',
      'checkpoint_every': '1000 steps',
      # Number of newest checkpoints to keep. The checkpoint with the best
      # `best_metric` is kept as well.
      'keep_last': 2,
      'best_metric': 'test/accuracy',
      # Weights & Biases project to log to; empty to disable.
      'wandb': '',
      # Whether the result of a run is the step with the best `best_metric`
      # instead of the last step. Use a metric of a validation split.
      'early_stopping': False,
      # Training ends after this many evaluations in a row without a better
      # `best_metric`; 0 disables this.
      'patience': 0,
      'data': {
        # The dataset: 'digits', a TFDS name, a VTAB task such as 'vtab/dtd',
        # or 'hf://datasets/OWNER/NAME'. Your own images: a folder with one
        # sub-folder per class, or a CSV file with the columns file and label
        # (or labels). Objectives without labels also take a folder of images.
        # For detection: 'digits_canvas', or a folder with COCO or VOC
        # annotations. `sources.open_source` lists more, such as shards.
        'name': 'digits',
        # Folder of the TFDS datasets; empty for TFDS's default.
        'dir': '',
        'split': 'train',
        # Seed that draws a missing test split, and that shuffles examples
        # before slices such as 'train[:90%]' (except in TFDS).
        'split_seed': 0,
        # Order of classes whose names are numbers: 'text' (1, 10, 2, as in
        # torchvision) or 'number' (1, 2, 10, as in timm). Empty keeps the
        # data's order, which is the text order for folders. Training then warns
        # if each image has one class and the names are sorted as text but not
        # by value. In that case, checkpoints without these class names are
        # refused, except as `init` of training.
        'class_order': '',
        # Side in pixels, or height x width such as '384x512'.
        'image_size': '224',
        # Size of training images if it differs from image_size. Random crops
        # enlarge objects, so evaluation may be better at a somewhat larger size
        # than training (1906.06423).
        'train_size': '',
        # Minimum area of the Inception crop, as a fraction of the image.
        'crop_min_area': 0.05,
        # 0 for the Inception crop. Otherwise BiT's crop: resize the image to
        # this many times the size of training images, then crop at random.
        'crop_resize': 0.0,
        'flip': True,
        # Empty, or 3augment(JITTER) or randaugment(LAYERS, MAGNITUDE), as in
        # 3augment(0.3) or randaugment(2, 9). randaugment also takes the
        # magnitude's standard deviation, and as=big_vision for big_vision's
        # operations: randaugment(2, 9, 0.5, as=big_vision).
        'augment': '',
        # Random erasing: probability that a rectangle is replaced by noise.
        'erasing': 0.0,
        # 0 draws each image once per epoch, 1 draws all classes equally often.
        'balance': 0.0,
        # Fraction of the training images that get a fixed wrong label.
        'wrong_labels': 0.0,
        # Repeated augmentation (1901.09335): number of copies of each image in
        # a batch, augmented differently. The number of distinct images in an
        # epoch is divided by this number.
        'repeats': 1,
        # For evaluation: resize the short side to this many pixels, then crop
        # the centre. 0 resizes directly to the image size.
        'resize_small': 0,
        # Interpolation for evaluation: bilinear or bicubic.
        'interpolation': 'bilinear',
        # With resize_small: whether to squash images to the aspect ratio of
        # image_size instead of keeping their own.
        'squash': False,
        # Resizing for evaluation: 'vit_jax' (the fastest), or exactly that of
        # 'torchvision' (used by timm), 'transformers', or 'dinov3' (DINOv3's
        # processor in transformers).
        'resize_like': 'vit_jax',
        # Mean and standard deviation per channel (RGB), of values in [0, 1].
        'mean': (0.5, 0.5, 0.5),
        'std': (0.5, 0.5, 0.5),
        # Worker processes that decode images, for each training process; 0 uses
        # only threads.
        'workers': 0,
        # 'error' stops before training if images cannot be read; 'skip' logs
        # their number and trains without them.
        'on_bad_image': 'error',
      },
      # Evaluators by name. Metrics begin with the name, as in test/accuracy. An
      # evaluator runs if `on` is set.
      'evaluators': {
        # Means of the objective's metrics.
        'test': {'type': 'mean', 'on': True, 'split': 'test'},
        # ImageNet accuracy with ReaL labels; `labels` is the path of real.json.
        'real': {
          'type': 'real',
          'on': False,
          'labels': '',
          'split': 'validation',
        },
        # Accuracy of ImageNet classifiers on ObjectNet; `data` is its folder.
        'objectnet': {'type': 'objectnet', 'on': False, 'data': ''},
        # Few-shot accuracy: least squares on frozen features of a few examples
        # per class.
        'fewshot': {
          'type': 'fewshot',
          'on': False,
          # A dataset, named as in data.name, and its splits. Empty splits
          # mean train and test, or the splits that a benchmark such as
          # 'vtab/dtd' defines.
          'data': '',
          'train_split': '',
          'test_split': '',
          'shots': (1, 5, 10, 25),
          'seeds': 3,
          # L2 penalty: 'choose' selects it by leave-one-out accuracy on the
          # shots (2^10 for one shot), 'fixed' uses 2^10 as in big_vision.
          'l2': 'choose',
          'layer': 'pre_logits',
        },
        # k-nearest-neighbour accuracy, by cosine similarity; see fewshot.
        'knn': {
          'type': 'knn',
          'on': False,
          'data': '',
          'train_split': '',
          'test_split': '',
          'k': 20,
          'layer': 'pre_logits',
        },
        # COCO average precision of boxes, for objective.name=detection. `masks`
        # adds the average precision of masks, and panoptic quality.
        'coco': {
          'type': 'coco',
          'on': False,
          'split': 'test',
          'masks': False,
        },
        # Mean IoU and pixel accuracy, for objective.name=segmentation.
        'segmentation': {'type': 'segmentation', 'on': False, 'split': 'test'},
        # Logs attention rollout on a split's first images, and principal
        # components of the first convolution's filters, to TensorBoard and
        # wandb at every evaluation.
        'pictures': {
          'type': 'pictures',
          'on': False,
          'split': 'test',
          'images': 8,
        },
      },
      # One of `OBJECTIVES` in vit_jax/objectives. Each objective has its own
      # fields, which `choose_objective` sets.
      'objective': {'name': 'classification'},
      # `python -m vit_jax.models --fields` lists the fields, except name and
      # dtype ('float32' or 'bfloat16'). Other models have other fields, which
      # `choose_model` sets.
      'model': variants.defaults('vit') | variants.fields('b16'),
      # For classification: softmax or sigmoid cross-entropy, label smoothing,
      # and the alphas of mixup and CutMix (with both, each batch uses one).
      # class_weights is '' or 'balanced'. 'balanced' weights each example by
      # N / (C n), for N examples, C classes and n examples of its class.
      # `data.balance` changes N and n to the numbers that are drawn.
      'loss': {
        'name': 'softmax',
        'class_weights': '',
        'label_smoothing': 0.0,
        'mixup': 0.0,
        'cutmix': 0.0,
      },
      'optimizer': {
        # adam, sgd, lamb or muon.
        'name': 'adam',
        'lr': 1e-3,
        # linear, cosine, constant or staircase.
        'decay': 'linear',
        'warmup': '10000 steps',
        # Durations after which 'staircase' divides the learning rate by ten.
        'milestones': (),
        'b1': 0.9,
        'b2': 0.999,
        # For SGD and Muon; 0.95 is usual for Muon.
        'momentum': 0.9,
        # Dtype of the first moments: float32 or bfloat16.
        'momentum_dtype': 'float32',
        # Radius rho of SAM, usually 0.02 to 0.2; 0 disables SAM. A step of SAM
        # computes two gradients.
        'sam': 0.0,
        # Weight decay of kernels only. SGD applies it as an L2 penalty; the
        # other optimizers decouple it and multiply it by the learning rate.
        'weight_decay': 0.1,
        # Weight decay at the end of the run, reached on a cosine schedule; 0
        # keeps it constant.
        'weight_decay_end': 0.0,
        # Maximum global norm of the gradients; 0 disables clipping.
        'clip_norm': 0.0,
        # Regular expressions for the paths of parameters that are not trained,
        # such as ('^embedding/', 'encoderblock_[0-5]/').
        'frozen': (),
        # Rank of LoRA adapters (2106.09685) of the layers' kernels whose path
        # matches `lora_on`; 0 disables them. With adapters, training updates
        # only them and the head, and checkpoints store no other parameters.
        'lora': 0,
        'lora_on': '(query|value)/kernel$',
        # Pairs of a regular expression and a factor, as in
        # (('^head/', 10.0),): the first expression that matches a parameter's
        # path scales its learning rate.
        'lr_scales': (),
        # Layer-wise decay: each layer's learning rate is the next layer's
        # times this factor. For fine-tuning, 0.65 to 0.9.
        'layer_decay': 1.0,
        # Decay of the Polyak average (EMA) of the parameters; 0 disables it.
        # Evaluators measure the average. Step t, counted from 0, uses
        # min(polyak, (1 + t) / (10 + t)), so initial parameters soon fade. DINO
        # needs 0, because evaluators measure its teacher.
        'polyak': 0.0,
      },
      # Devices along each axis of the mesh. slice=-1 uses all TPU slices. -1 on
      # another axis uses the remaining devices of a slice; data and fsdp share
      # them if both are -1.
      'mesh': {'slice': -1, 'data': -1, 'fsdp': 1, 'tensor': 1},
      # When to gather parameters that are sharded over fsdp: once per 'step'
      # (fastest) or in each 'layer' (least memory).
      'gather': 'step',
      # Axes of a grid of runs; every combination is run. An axis is (name,
      # ((label, {field: value, ...}), ...)). --sweep sets an axis.
      'sweep': (),
      # Excludes runs from the grid. Each entry excludes the runs that match all
      # of its fields, as in
      # ({'model.posemb': 'none', 'model.posemb_at': 'shared'},).
      'sweep_skip': (),
      # Runs to train first, such as a teacher: (name, {field: value, ...}).
      # Each has this config with the given fields and its own seed. Its workdir
      # is WORKDIR/stages/NAME; other fields, such as `teacher`, refer to its
      # checkpoint as 'stages/NAME'. See `sweeps.stages`.
      'stages': (),
      # A sweep tunes before each group of runs; runs of a group differ only in
      # the seed. Each combination of `axes` is trained on `train` and compared
      # on `val` by the objective's first metric. `train` and `val` are parts of
      # the training set. The group uses its best combination. --tune sets an
      # axis.
      'tune': {'axes': (), 'train': 'train[:90%]', 'val': 'train[90%:]'},
      # Report of a sweep: 'grid' is a table with the second axis in its columns
      # and the others in its rows, averaged over seeds. 'transfer' gives tables
      # 2 and 9 of the paper, 'scaling' figure 5.
      'report': 'grid',
    }
  )


def choose_model(config: ConfigDict, variant: str) -> None:
  """Sets the model to a variant such as 'l16'; see `variants.carry_over`.

  Raises:
    ValueError: if the variant is unknown.
  """
  config.model = ConfigDict(variants.carry_over(config.model, variant)).lock()


def choose_objective(config: ConfigDict, name: str) -> None:
  """Sets an objective and its fields.

  Keeps the previous fields that the new objective also has, if they differ from
  the previous objective's defaults. Raises ValueError if `name` is unknown.
  """
  new, old = (
    OBJECTIVES.load(x).defaults for x in (name, config.objective.name)
  )
  kept = {
    key: value
    for key, value in config.objective.items()
    if key in new and value != old.get(key)
  }
  config.objective = ConfigDict({'name': name, **new, **kept}).lock()


def check_fields(config: ConfigDict) -> None:
  """Checks the names and values of fields.

  Raises ValueError if a field lacks a value, has a value that `VALID` does not
  allow, or is unknown. Does not check field names in `model` and `objective`.
  """
  usual = base()
  known, allowed, valid = flatten(config), flatten(usual), dict(VALID)
  # Evaluators may have any name; the type determines the fields.
  typical = {entry.type: name for name, entry in usual.evaluators.items()}
  for name, entry in config.evaluators.items():
    other = typical.get(entry.type, name)
    allowed |= flatten(
      usual.evaluators.get(other, entry), f'evaluators.{name}.'
    )
    for field in entry:
      if (key := f'evaluators.{other}.{field}') in VALID:
        valid[f'evaluators.{name}.{field}'] = VALID[key]
  for field in known.keys() - allowed.keys():
    if not field.startswith(('model.', 'objective.')):
      raise ValueError(unknown_field(field, allowed))
  if left_open := [field for field, value in known.items() if value is None]:
    raise ValueError(
      f'Config fields without a value: {", ".join(left_open)}. Only a single '
      'training run, or its evaluation, chooses them from the data. Set them, '
      f'as in --config.{left_open[0]}=...'
    )
  for field in known.keys() & valid.keys():
    check_value(field, known[field], valid[field])


def flatten(config: Any, prefix: str = '') -> dict[str, Any]:
  """Returns the leaves of a nested mapping under dotted names."""
  flat: dict[str, Any] = {}
  for key, value in config.items():
    if hasattr(value, 'items'):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[f'{prefix}{key}'] = value
  return flat


def check_resumable(saved: dict[str, Any], given: dict[str, Any]) -> None:
  """Checks that a workdir's run can be resumed with the config given now.

  If an older saved config lacks a field, the field's default counts as saved:
  new fields default to the old behaviour. A longer `total` with `extend` is
  allowed and logs a warning.

  `saved` and `given` have the keys `config`, `examples` and `class_names`, and
  may have `data`, `fixed` and `steps`, as in a checkpoint's metadata. With
  `extend`, `given` needs `steps`.

  Raises:
    ValueError: if `extend` is set and a changed `total` is not longer, or if
      changes prevent resuming. The message lists these changes.
  """
  objective = OBJECTIVES.load(given['config']['objective']['name'])
  model = variants.defaults(given['config']['model']['name'])
  defaults = flatten(base()) | flatten({'model': model})
  defaults |= flatten({'objective': objective.defaults})
  old, new = (
    flatten(meta['config'])
    | {f'data.{key}': meta[key] for key in ('examples', 'class_names')}
    | {'objective.fixed': meta.get('fixed', [])}
    for meta in (saved, given)
  )
  # Paths of stages are saved as absolute paths, and the workdir may have moved.
  for fields in (old, new):
    for key in ('init', 'teacher', 'objective.labels'):
      _, stage, name = str(fields.get(key, '')).rpartition('/stages/')
      if stage:
        fields[key] = stage + name

  # A folder that was moved or renamed holds the same data.
  if saved.get('data') and saved['data'] == given.get('data'):
    old['data.name'] = new['data.name']
  elif (
    saved.get('data')
    and given.get('data')
    # A changed name, number of images or `on_bad_image` also changes the
    # identity. The first two are reported below; `on_bad_image` may change.
    and all(
      old.get(f'data.{key}') == new[f'data.{key}']
      for key in ('name', 'examples', 'on_bad_image')
    )
  ):
    _log.warning(
      'The images or labels of %s differ from those that this run began with, '
      'or an older vit_jax began the run. If you changed images or labels, use '
      'another --workdir.',
      new['data.name'],
    )

  def was(key: str) -> Any:
    value = old.get(key, defaults.get(key, '(absent)'))
    return list(value) if isinstance(value, tuple) else value

  skips = new['data.on_bad_image'] == 'skip'
  if skips and new['data.examples'] != old['data.examples']:
    _log.warning(
      'The data had %d images and now have %d. With data.on_bad_image=skip the '
      'run continues, with its images in another order.',
      old['data.examples'],
      new['data.examples'],
    )
    old['data.examples'] = new['data.examples']
  if new['extend'] and was('total') != new['total']:
    steps, before = given['steps'], saved.get('steps', 0)
    if steps <= before:
      raise ValueError(
        f'extend is on, but total={new["total"]!r} is {steps:,} steps, and the '
        f'run in this workdir has {before:,}: set a longer total.'
      )
    _log.warning(
      'total was %s and is now %s (%s steps). From now on the learning rate '
      'follows the schedule of the longer run, so it may jump up. The result '
      'differs from a run that had the new total from the start.',
      was('total'),
      new['total'],
      f'{steps:,}',
    )
    old['total'] = new['total']
  # Unused fields may be reset to their off value when resuming.
  changes = [
    f'  {key}: {was(key)!r:.60} -> {new.get(key, "(absent)")!r:.60}'
    for key in sorted(old.keys() | new.keys())
    if was(key) != new.get(key)
    and (key not in objective.unused or new.get(key) != objective.unused[key])
    and not any(re.fullmatch(p, key) for p in RESUMABLE)
  ]
  if changes:
    raise ValueError(
      'This workdir holds a run with another config, which cannot be resumed '
      'with these changes:\n' + '\n'.join(changes) + '\nUndo them to resume, '
      'or give another --workdir to start a new run. If images were deleted, '
      'data.on_bad_image=skip resumes without them; extend=True trains to a '
      'longer total.'
    )


def split_commas(text: str) -> list[str]:
  """Splits at commas outside of parentheses."""
  parts, depth = [''], 0
  for character in text:
    depth += (character == '(') - (character == ')')
    if character == ',' and not depth:
      parts.append('')
    else:
      parts[-1] += character
  return [part.strip() for part in parts]


def parse_argument(
  argument: str, defaults: list[str]
) -> tuple[list[str], dict]:
  """Splits the argument of `--config=FILE:ARGUMENT`.

  Returns the positional values, with `defaults` for missing ones, and the
  key=value pairs for `override`. An empty value is a missing one.

  Raises:
    ValueError: if there are more positional values than defaults.
  """
  positional, pairs = [], {}
  for part in split_commas(argument):
    key, equals, value = part.partition('=')
    if equals and '/' not in key:  # a path may have =, as in runs/lr=0.1
      pairs[key.strip()] = value.strip()
    else:
      positional.append(part)
  while positional and not positional[-1]:
    positional.pop()
  if len(positional) > len(defaults):
    raise ValueError(
      f'{argument!r} has {len(positional)} values without a key; at most '
      f'{len(defaults)} are expected. Write further values as key=value.'
    )
  values = itertools.zip_longest(positional, defaults, fillvalue='')
  return [value or default for value, default in values], pairs


# Names that other projects have for a field.
_OTHER_NAMES = {
  'aa': 'data.augment',
  'checkpoint': 'init',
  'dataset': 'data.name',
  'drop_path': 'model.stochastic_depth',
  'epochs': "total='50 epochs'",
  'img_size': 'data.image_size',
  'learning_rate': 'optimizer.lr',
  'num_epochs': "total='50 epochs'",
  'opt': 'optimizer.name',
  'pretrained': 'init',
  'reprob': 'data.erasing',
  'sched': 'optimizer.decay',
  'smoothing': 'loss.label_smoothing',
  'steps': "total='10000 steps'",
}


def unknown_field(name: str, known: Iterable[str]) -> str:
  """Returns the error message for a config field that does not exist."""
  other = _OTHER_NAMES.get(name)
  hint = f'Did you mean {other}?' if other else nearest(name, known)
  return f'No config field {name!r}. {hint}'


def override(config: ConfigDict, pairs: dict[str, str]) -> None:
  """Sets fields by dotted names, such as {'optimizer.lr': '0.01'}.

  `model` takes the name of a variant, `objective` the name of an objective.
  Both are set first, because they change other fields of their groups.

  Raises:
    ValueError: if a name is unknown, or a value has the wrong type.
  """
  known = flatten(config)
  for key in sorted(pairs, key=lambda key: key not in ('model', 'objective')):
    text = pairs[key]
    if key in ('model', 'objective'):
      choose = choose_model if key == 'model' else choose_objective
      choose(config, text)
      known = flatten(config)
      continue
    if key not in known:
      raise ValueError(unknown_field(key, known))
    *groups, field = key.split('.')
    kind = functools.reduce(operator.getitem, groups, config).get_type(field)
    try:
      value = _parse(text, kind)
    except (ValueError, SyntaxError, TypeError, OverflowError):
      example = '' if known[key] is None else f', as in {known[key]!r}'
      raise ValueError(
        f'{key}={text!r}: expected a value of type {kind.__name__}{example}.'
      ) from None
    config.update_from_flattened_dict({key: value})


def _parse(text: str, kind: type) -> Any:
  """Parses a value of the given type."""
  if kind is str:
    return text
  text = text.strip()
  value = ast.literal_eval({'true': 'True', 'false': 'False'}.get(text, text))
  # Accepts 1 as a float and 1e3 as an int, but neither 1.5 nor True as an int.
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if is_number and kind in (int, float) and kind(value) == value:
    return kind(value)
  if type(value) is not kind:
    raise ValueError
  return value
