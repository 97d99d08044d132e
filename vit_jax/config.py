"""The base config: every field there is, with its default.

A file in `configs/` starts from `base()` and sets what differs. Fields with a
duration take '90 epochs', '10000 steps', '1e6 examples' or '5%' of the run.
"""

import ast
import functools
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

# What may change between a run and its resumption without changing what is
# learned, beyond the order of reductions (and, with another number of
# accumulation steps, beyond which units and layers are dropped).
RESUMABLE = (
  r'log_every|eval_every|checkpoint_every|keep_last|best_metric|eval_only',
  r'mesh\..*|gather|evaluators\..*|accum_steps',
  r'model\.remat|data\.(dir|workers|class_order|on_bad_image)',
  r'wandb|sweep|sweep_skip|tune\..*|report|early_stopping|patience|extend',
)

# The valid values of fields, intervals or choices; in a tuple, of each number.
# Models and objectives declare those of their fields.
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
      # One seed: every random number is folded from it and the step.
      'seed': 0,
      # Length of training.
      'total': '90 epochs',
      # Examples a step, over all devices and hosts.
      'batch_size': 4096,
      # The batch is worked off in this many parts, one after the other.
      'accum_steps': 1,
      # Checkpoint to start from, of any format that the reader opens. Its
      # position embeddings are resized and its head is replaced by a new one.
      'init': '',
      # Whether the new head starts as a linear classifier of what the body of
      # `init` makes of the training images, and not at zero.
      'head_first': False,
      # Checkpoint that is learned from, where the objective has a teacher.
      'teacher': '',
      # Only evaluate: `init`, or else the workdir's last checkpoint.
      'eval_only': False,
      # Whether a run in the workdir goes on to a longer `total` than it was
      # started with, on the schedule of the longer run.
      'extend': False,
      'log_every': '50 steps',
      'eval_every': '5%',
      'checkpoint_every': '1000 steps',
      # Checkpoints kept besides the best one by `best_metric`.
      'keep_last': 2,
      'best_metric': 'test/accuracy',
      # Project of Weights & Biases that the run is shown in; empty for none.
      'wandb': '',
      # The result of a run is its evaluated step with the best `best_metric`,
      # which should then come from a part held out of training, and not its
      # last one.
      'early_stopping': False,
      # Evaluations in a row without a better `best_metric` after which training
      # ends; 0 for never.
      'patience': 0,
      'data': {
        # 'digits', a folder with one sub-folder a class (or, for objectives
        # without labels, of images alone), a CSV file with the columns file
        # and label, a TFDS name, one of VTAB's tasks as in 'vtab/dtd', or
        # 'hf://datasets/OWNER/NAME'; for detection 'digits_canvas', or a
        # folder with COCO's annotations.
        'name': 'digits',
        # Where TFDS keeps its sets; empty for its default.
        'dir': '',
        'split': 'train',
        # Seed of what is held out where the data brings no test set.
        'split_seed': 0,
        # Order of classes that are numbers: 'text' (1, 10, 2, as torchvision
        # sorts folders) or 'number' (1, 2, 10, as timm and TFDS do). Empty
        # takes the order of text and says so where the two differ; a teacher
        # or a checkpoint without class names is then refused.
        'class_order': '',
        # Side in pixels, or height x width, as in '384x512'.
        'image_size': '224',
        # Smallest share of the image that the inception crop takes.
        'crop_min_area': 0.05,
        # 0, or BiT's crop in its place: the image is resized to this many times
        # the image size, and a random part of the image size cut out.
        'crop_resize': 0.0,
        'flip': True,
        # randaugment(2, 9), which takes the deviation of the magnitude third
        # and as=big_vision for its operations at the end, 3augment(0.3), or
        # nothing.
        'augment': '',
        # Probability that a rectangle of an image becomes noise.
        'erasing': 0.0,
        # 0 for each image once an epoch, 1 for each class equally often.
        'balance': 0.0,
        # Share of the training images that are given another class, the same
        # one every time: for experiments on what that costs.
        'wrong_labels': 0.0,
        # Each image comes so many times in a batch, each time augmented anew,
        # and an epoch has as many fewer of them (1901.09335).
        'repeats': 1,
        # 0 resizes straight to the image size when evaluating; otherwise the
        # short side is resized to this, and the centre cropped.
        'resize_small': 0,
        # bilinear or bicubic, when evaluating.
        'interpolation': 'bilinear',
        # Whether the resize to resize_small gives both sides that many pixels.
        'squash': False,
        # vit_jax is fast; torchvision (which timm uses), transformers and
        # dinov3 (transformers' processor) give the pixels of those libraries.
        'resize_like': 'vit_jax',
        # Of each channel (RGB), for values in [0, 1].
        'mean': (0.5, 0.5, 0.5),
        'std': (0.5, 0.5, 0.5),
        # Processes that read and decode, per host; 0 uses threads alone.
        'workers': 0,
        # 'error' stops before training when images cannot be read, 'skip'
        # counts them and goes on without.
        'on_bad_image': 'error',
      },
      # By the name before their metrics, as in test/accuracy; those that are
      # `on` run.
      'evaluators': {
        # Means of what the objective measures.
        'test': {'type': 'mean', 'on': True, 'split': 'test'},
        # ImageNet's validation images with ReaL's labels: path of real.json.
        'real': {
          'type': 'real',
          'on': False,
          'labels': '',
          'split': 'validation',
        },
        # Folder of ObjectNet's images, for models of ImageNet's classes.
        'objectnet': {'type': 'objectnet', 'on': False, 'data': ''},
        # Least squares on frozen representations of a few examples a class.
        'fewshot': {
          'type': 'fewshot',
          'on': False,
          # As data.name, and its splits; empty splits are the usual ones.
          'data': '',
          'train_split': '',
          'test_split': '',
          'shots': (1, 5, 10, 25),
          'seeds': 3,
          # 'choose' on held-out shots, or 'fixed' at big_vision's 2^10.
          'l2': 'choose',
          'layer': 'pre_logits',
        },
        # The k nearest training images vote, by cosine similarity; its fields
        # are those of fewshot.
        'knn': {
          'type': 'knn',
          'on': False,
          'data': '',
          'train_split': '',
          'test_split': '',
          'k': 20,
          'layer': 'pre_logits',
        },
        # COCO's average precision, of objective.name=detection: of boxes, and
        # if asked for of masks too.
        'coco': {
          'type': 'coco',
          'on': False,
          'split': 'test',
          'masks': False,
        },
        # Attention rollout on the first images of a split, and the filters of
        # the patches, to TensorBoard or wandb at every evaluation.
        'pictures': {
          'type': 'pictures',
          'on': False,
          'split': 'test',
          'images': 8,
        },
      },
      # What is learned: 'classification', or another of vit_jax/objectives,
      # which have fields of their own: `choose_objective` sets them.
      'objective': {'name': 'classification'},
      # Its fields are listed by `python -m vit_jax.models --fields`; a resnet
      # or detr has others, which `choose_model` sets.
      'model': variants.defaults('vit') | variants.fields('b16'),
      # Of classification: softmax or sigmoid, how much of the label is spread
      # over all classes, and the alphas of mixup and CutMix, of which each
      # batch has one. class_weights is '', or 'balanced' to weight each example
      # by N / (C n), with n of the N examples in its class of C.
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
        # Durations after which 'staircase' divides the rate by ten.
        'milestones': (),
        'b1': 0.9,
        'b2': 0.999,
        # Of SGD, and of Muon, which is used with 0.95.
        'momentum': 0.9,
        # Of what is kept of their first moments: float32, or bfloat16.
        'momentum_dtype': 'float32',
        # Distance at which SAM takes the gradient, 0.02 to 0.2, for two
        # gradients a step; 0 takes it where the parameters are.
        'sam': 0.0,
        # On kernels: as an L2 penalty with SGD, decoupled and times the
        # learning rate with the others.
        'weight_decay': 0.1,
        # The value that the weight decay reaches at the end of the run, on a
        # cosine; 0 keeps it.
        'weight_decay_end': 0.0,
        # Global norm; 0 does not clip.
        'clip_norm': 0.0,
        # Regular expressions of the paths of parameters, as in
        # ('^embedding/', 'encoderblock_[0-5]/'): those that match stay as they
        # are.
        'frozen': (),
        # Rank of adapters (LoRA, 2106.09685): they and the head are trained in
        # place of all parameters, and checkpoints hold them alone. They are
        # added to the kernels of the layers whose path matches `lora_on`.
        'lora': 0,
        'lora_on': '(query|value)/kernel$',
        # Pairs of such an expression and what the learning rate is multiplied
        # by where it is the first that matches, as in (('^head/', 10.0),).
        'lr_scales': (),
        # What the learning rate is multiplied by from one layer to the one
        # before it, for fine-tuning: 0.65 to 0.9.
        'layer_decay': 1.0,
        # Decay of the Polyak average of the parameters; 0 for none. Step t,
        # from 0, has min(polyak, (1 + t) / (10 + t)), so that short runs do
        # not average over the initial parameters. Where there is an average,
        # it is what evaluators measure.
        'polyak': 0.0,
      },
      # Devices along each axis of the mesh. slice=-1 takes the TPU slices that
      # there are; -1 elsewhere takes what the others leave of a slice, which
      # data and fsdp share out if both are -1.
      'mesh': {'slice': -1, 'data': -1, 'fsdp': 1, 'tensor': 1},
      # When parameters that are split over fsdp are put together: once a 'step'
      # (fastest) or in each 'layer' (least memory).
      'gather': 'step',
      # Axes of a grid of runs, all combinations of which are run. An axis is
      # (name, ((label, {field: value, ...}), ...)); --sweep adds one.
      'sweep': (),
      # Left out of the grid: runs that have all fields of one of these, as in
      # ({'model.posemb': 'none', 'model.posemb_at': 'shared'},).
      'sweep_skip': (),
      # Runs that come first, for the teachers and the initial weights that they
      # make: (name, {field: value, ...}), each this config with these fields.
      # In WORKDIR, 'stages/NAME' is the checkpoint of each; what begins with
      # 'stages/' in a field means there. See `sweeps.stages`.
      'stages': (),
      # Axes whose best combination is chosen first, by the objective's first
      # metric (accuracy, of classification) on `val` after training on `train`,
      # both parts of the training set; --tune adds one. The runs of the sweep
      # then take it.
      'tune': {'axes': (), 'train': 'train[:90%]', 'val': 'train[90%:]'},
      # What a sweep leaves behind: 'grid', a table of any two axes;
      # 'transfer', tables 2 and 9; 'scaling', figure 5.
      'report': 'grid',
    }
  )


def choose_model(config: ConfigDict, variant: str) -> None:
  """Sets the model of a config to a named variant, as in 'l16' or 'r50x1'.

  What stays of the model before is what `variants.succeed` says.

  Raises:
    ValueError: if there is no such variant.
  """
  config.model = ConfigDict(variants.succeed(config.model, variant))


def choose_objective(config: ConfigDict, name: str) -> None:
  """Sets the objective of a config, its fields at their defaults.

  Raises:
    ValueError: if there is no such objective.
  """
  defaults = OBJECTIVES.load(name).defaults
  config.objective = ConfigDict({'name': name, **defaults})


def check_ranges(config: ConfigDict) -> None:
  """Refuses values of fields that are not valid.

  Raises:
    ValueError: naming the field, its value and its range.
  """
  known = flatten(config)
  if left_open := [field for field, value in known.items() if value is None]:
    raise ValueError(
      f'{", ".join(left_open)} are left open, for training to choose by its '
      f'data. Here they need values, as in --config.{left_open[0]}=...'
    )
  for field in known.keys() & VALID.keys():
    check_value(field, known[field], VALID[field])


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
  """Compares the `meta` of a started workdir with that of the run given now.

  Fields that the saved config lacks came later: their defaults are what was
  done before there were any.

  Args:
    saved: with `config`, its length in `steps`, the data's `examples`,
      `class_names` and identity (`data`), and the checksums of `fixed`
      parameters.
    given: the same, of now.

  With `extend` it may be longer, and what that does is said. So is another
  number of parts where units or layers are dropped; neither is refused.

  Raises:
    ValueError: naming every change that the run cannot be resumed with.
  """
  model = variants.defaults(given['config']['model']['name'])
  defaults = flatten(base()) | flatten({'model': model})
  old, new = (
    flatten(meta['config'])
    | {f'data.{key}': meta[key] for key in ('examples', 'class_names')}
    | {'objective.fixed': meta.get('fixed', [])}
    for meta in (saved, given)
  )
  # The code makes them absolute, and a workdir may have moved since.
  for fields in (old, new):
    for key in ('init', 'teacher', 'objective.labels'):
      _, stage, name = str(fields.get(key, '')).rpartition('/stages/')
      if stage:
        fields[key] = stage + name

  # A folder that was moved or renamed holds the same data.
  if saved.get('data') and saved['data'] == given.get('data'):
    old['data.name'] = new['data.name']

  def was(key: str) -> Any:
    value = old.get(key, defaults.get(key, '(absent)'))
    return list(value) if isinstance(value, tuple) else value

  skips = new['data.on_bad_image'] == 'skip'
  if skips and new['data.examples'] != old['data.examples']:
    _log.warning(
      'There were %d images and are %d. With data.on_bad_image=skip the run '
      'goes on, with those left in another order.',
      old['data.examples'],
      new['data.examples'],
    )
    old['data.examples'] = new['data.examples']
  if new['extend'] and was('total') != new['total']:
    steps, before = given['steps'], saved.get('steps', 0)
    if steps <= before:
      raise ValueError(
        f'extend is on and total is {new["total"]!r}, {steps:,} steps, where '
        f'the run in this workdir has {before:,}: give a longer one.'
      )
    _log.warning(
      'total was %s and is %s (%s steps). From here on the learning rate is '
      'that of a run of this length from its start: where it has decayed it '
      'jumps up, and the result is not that of such a run.',
      was('total'),
      new['total'],
      f'{steps:,}',
    )
    old['total'] = new['total']
  learned = str(new.get('objective.name'))
  # Unused fields may be reset to their off value when resuming.
  unused = OBJECTIVES.load(learned).unused if learned in OBJECTIVES else {}
  changes = [
    f'  {key}: {was(key)!r:.60} -> {new.get(key, "(absent)")!r:.60}'
    for key in sorted(old.keys() | new.keys())
    if was(key) != new.get(key)
    and not (key in unused and new.get(key) == unused[key])
    and not any(re.fullmatch(p, key) for p in RESUMABLE)
  ]
  if changes:
    raise ValueError(
      'This workdir holds a run with another config, which cannot be resumed '
      'with these changes:\n' + '\n'.join(changes) + '\nUndo them to resume '
      '(of images that are gone, data.on_bad_image=skip resumes without; '
      'extend=True trains on to a longer total), or give another --workdir to '
      'start a new run.'
    )
  draws = new.get('model.dropout') or new.get('model.stochastic_depth')
  if was('accum_steps') != new['accum_steps'] and draws:
    _log.warning(
      'accum_steps was %s and is %s. Each part of a batch draws what it drops '
      'of its own: the run goes on equally well, but not to the same numbers.',
      was('accum_steps'),
      new['accum_steps'],
    )


def split_commas(text: str) -> list[str]:
  """Splits at commas, except those of a tuple, and drops empty parts."""
  parts = re.split(r',(?![^(]*\))', text)
  return [part.strip() for part in parts if part.strip()]


def parse_argument(
  argument: str, defaults: list[str]
) -> tuple[list[str], dict]:
  """Splits what follows the colon of `--config=FILE:ARGUMENT`.

  Args:
    argument: positional values, then key=value pairs, all between commas.
    defaults: of the positional values.

  Returns:
    The positional values, and what `override` takes.

  Raises:
    ValueError: for more positional values than there are defaults, or a field
      among them.
  """
  parts = split_commas(argument)
  positional = [part for part in parts if '=' not in part]
  pairs = {
    key.strip(): value.strip()
    for key, _, value in (part.partition('=') for part in parts if '=' in part)
  }
  if len(positional) > len(defaults):
    raise ValueError(
      f'{argument!r} has {len(positional)} values where at most '
      f'{len(defaults)} are known; anything else is written key=value.'
    )
  known = flatten(base())
  for part in positional:
    if part in known:
      raise ValueError(f'{argument!r} has no value of {part}: write {part}=...')
  return positional + defaults[len(positional) :], pairs


# Names that other projects have for a field.
_OTHER_NAMES = {
  'checkpoint': 'init',
  'dataset': 'data.name',
  'epochs': "total='50 epochs'",
  'learning_rate': 'optimizer.lr',
  'num_epochs': "total='50 epochs'",
  'pretrained': 'init',
  'steps': "total='10000 steps'",
}


def unknown_field(name: str, known: Iterable[str]) -> str:
  """The error message for a config field that does not exist."""
  other = _OTHER_NAMES.get(name)
  hint = f'Did you mean {other}?' if other else nearest(name, known)
  return f'No config field {name!r}. {hint}'


def override(config: ConfigDict, pairs: dict[str, str]) -> None:
  """Sets fields by dotted names, as in {'optimizer.lr': '0.01'}.

  The whole group `model` takes the name of a variant, the whole group
  `objective` that of an objective.

  Raises:
    ValueError: for a name or a value that does not fit; names the nearest.
  """
  known = flatten(config)
  for key, text in pairs.items():
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
      raise ValueError(
        f'{key}={text!r}: expected a value of type {kind.__name__}, as in '
        f'{known[key]!r}.'
      ) from None
    config.update_from_flattened_dict({key: value})


def _parse(text: str, kind: type) -> Any:
  """Returns the value that a text stands for, if it is of the kind wanted."""
  if kind is str:
    return text
  text = text.strip()
  value = ast.literal_eval({'true': 'True', 'false': 'False'}.get(text, text))
  # 1 is a float as well, and 1e3 a whole number; 1.5 and True are none.
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if is_number and kind in (int, float) and kind(value) == value:
    return kind(value)
  if type(value) is not kind:
    raise ValueError
  return value
