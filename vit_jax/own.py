"""The config for your own photos, as in configs/own.py.

`config` leaves some fields open (None) and gives the length of training in
minutes. When training starts, `resolve` chooses these fields and the number of
steps. A run that resumes with the same minutes keeps its choices and length.
"""

import contextlib
import dataclasses
import json
import math
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax import config as config_lib
from vit_jax.checkpoints import from_init, opening, saving
from vit_jax.data import atomic_files, bad_images, decode, loader, sources
from vit_jax.evaluators import build
from vit_jax.experiment import CheckedConfig, Experiment, facts_of
from vit_jax.models import flops
from vit_jax.training import durations, sharding

FILE = 'chosen.json'
# The checkpoint that is recommended if a run starts from new parameters: the
# smallest AugReg model with a top-1 accuracy above 80 % on ImageNet.
PUBLISHED = 'augreg/s16-224'
# The model of runs without a checkpoint: two stages of a ResNet, then four
# layers of a ViT. A step on 2 CPU cores takes less than half a second.
MODEL = {
  'patch_size': 1,
  'stem_width': 32,
  'stem_layers': (1, 1),
  'width': 128,
  'depth': 4,
  'mlp_dim': 256,
  'heads': 4,
  'pool': 'gap',
}
# A checkpoint with at most this many parameters is trained like a new model,
# but at a lower learning rate and for fewer epochs. At the rate of a new model,
# a checkpoint loses accuracy.
SMALL = 5_000_000
# Optimizer, learning rate and layer-wise decay of a new model, a small
# checkpoint and a large checkpoint.
OPTIMIZERS = {
  'new': ('muon', 5e-3, 1.0),
  'small': ('muon', 1.5e-3, 1.0),
  'large': ('adam', 3e-4, 0.75),
}
# Minimum number of steps for a `total` in minutes; fewer hardly change a model.
LEAST_STEPS = 300
# Maximum number of epochs for a `total` in minutes, except that there are at
# least `LEAST_STEPS`. More epochs do not raise accuracy.
MOST_EPOCHS = {'new': 400, 'small': 150, 'large': 40}
# Evaluations per run.
_EVALUATIONS = 10
# Seconds over which the speed of training is measured; 50 steps at most.
_MEASURE_S = 6
_MINUTES = re.compile(r'\s*(\d+(?:\.\d*)?)\s*minutes?\s*')


def config(
  folder: str, init: str = '', minutes: float | str = 10
) -> ConfigDict:
  """Returns a config for photos; `from_init.resolve` and `resolve` complete it.

  `folder` may be any value of `config.data.name`. `init` is a checkpoint to
  start from, or empty for new parameters.

  Raises:
    ValueError: if `minutes` is not a positive number.
  """
  total = f'{minutes} minutes'
  if not (match := _MINUTES.fullmatch(total)) or not float(match[1]):
    raise ValueError(
      f'minutes is {minutes!r}: give a number above 0, such as 0.5.'
    )
  made = config_lib.base()
  made.total = total
  made.eval_every = made.checkpoint_every = f'{100 // _EVALUATIONS}%'
  made.data.name = folder
  made.optimizer.update(decay='cosine', warmup='5%', clip_norm=1.0)
  made.optimizer.weight_decay = 0.05
  if init:
    from_init.choose(made, init)
    made.evaluators.val = made.evaluators.test.copy_and_resolve_references()
    made.evaluators.val.split = 'train[90%:]'
    made.head_first = True
  else:
    made.model.update(MODEL)
  example = Photos(1, (1, 1), 1, 1)
  left_open = _choices(example, 1, 'new')
  if init:
    left_open |= _held_out(example)
  made.update_from_flattened_dict(
    {field: placeholder(type(value)) for field, value in left_open.items()}
  )
  return made


@dataclasses.dataclass(frozen=True)
class Photos:
  """Facts about the training photos."""

  count: int
  size: tuple[int, int]  # median height and width in pixels
  fewest: int  # photos of the rarest class
  most: int  # photos of the commonest class


def photos_of(source: sources.Source) -> Photos:
  """Counts the photos of each class, and opens up to 100 to get their size."""
  sizes = []
  for i in np.linspace(0, len(source) - 1, min(len(source), 100)).astype(int):
    record = source[int(i)]
    picture = decode.open_image(record['image'], record['name'])
    sizes.append((picture.height, picture.width))
  counts = [len(source)]
  if isinstance(source, sources.LabelledSource):
    counts = [int(n) for n in np.bincount(source.labels()) if n]
  height, width = (int(side) for side in np.median(sizes, axis=0))
  return Photos(len(source), (height, width), min(counts), max(counts))


def _choices(photos: Photos, epochs: float, kind: str) -> dict[str, Any]:
  """Chooses fields from the photos and the length of training.

  Augmentation is stronger if there are more epochs. `kind` is a key of
  `OPTIMIZERS`.
  """
  strength = 0 if epochs < 30 else 1 if epochs < 150 else 2
  name, rate, layer_decay = OPTIMIZERS[kind]
  # A token of `MODEL` covers 8 x 8 pixels, so tiny images are enlarged to get
  # enough tokens. Sides above 48 pixels would leave time for fewer epochs.
  side = 32 if min(photos.size) < 24 else 48
  return {
    'batch_size': 64,
    # Random crops enlarge objects by 23 to 43 % on average. Evaluation does not
    # crop; its images are larger by 17 or 25 % instead.
    'data.image_size': f'{side + 8}',
    'data.train_size': f'{side}',
    'data.crop_min_area': (0.5, 0.4, 0.3)[strength],
    'data.augment': '',
    'data.balance': 0.5 if photos.most > 5 * photos.fewest else 0.0,
    'loss.label_smoothing': (0.0, 0.1, 0.1)[strength],
    'loss.mixup': (0.0, 0.2, 0.2)[strength],
    'optimizer.name': name,
    'optimizer.lr': rate,
    'optimizer.layer_decay': layer_decay,
  }


def _held_out(photos: Photos, split: str = '') -> dict[str, Any]:
  """Chooses the validation split of a run that starts from a checkpoint.

  If there are 1,000 photos or more and no `split` is given, holds out a tenth.
  The best step then has the lowest validation loss, because accuracy is often
  equal at many steps. For fewer photos this loss is too noisy, so the result is
  the last step.
  """
  enough = photos.count >= 1000 and not split
  return {
    'data.split': 'train[:90%]' if enough else 'train',
    'evaluators.val.on': enough,
    'best_metric': 'val/loss' if enough else 'test/accuracy',
    'early_stopping': enough,
  }


def resolve(
  config: ConfigDict, workdir: str, measure: bool = True
) -> Callable[[], None]:
  """Fills in the open fields of a config from WORKDIR/chosen.json.

  Chooses fields that the file lacks, the length if `total` changed, and all
  fields if `init` changed. Returns a function that writes the file. Call that
  function after the run has locked the workdir.

  Args:
    config: a config after `from_init.resolve`.
    workdir: folder of the run.
    measure: whether to time training steps if `total` is in minutes. If false
      (for evaluation), such a `total` becomes one step, unless chosen.json has
      the number of steps.

  Raises:
    ValueError: if the data or `total` are invalid.
    OSError: if the data or the checkpoint `config.init` are missing.
    ImportError: if the data need a package that is not installed.
  """
  asked = {
    field: value
    for field, value in config_lib.flatten(config).items()
    if value is None or (field == 'total' and _MINUTES.fullmatch(value))
  }
  if not asked:
    return lambda: None
  path = saving.absolute(workdir) / FILE
  kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
  if kept.get('init', config.init) != config.init:
    kept = {}
  chosen = {
    field: kept[field]['chosen']
    for field, value in asked.items()
    if field in kept and kept[field]['asked'] == value
  }
  # Choose train_size again if image_size was chosen before and is now set to
  # another value, or was set before and is now to be chosen.
  size = kept.get('data.image_size', {}).get('chosen')
  was_open, is_open = size is not None, 'data.image_size' in asked
  if was_open != is_open and (is_open or size != config.data.image_size):
    chosen.pop('data.train_size', None)
  is_new = chosen.keys() != asked.keys()
  if is_new:
    found = _choose(config, chosen, measure)
    chosen = {field: found[field] for field in asked}
  _fill(config, chosen)

  def keep() -> None:
    if is_new and jax.process_index() == 0:
      new = {k: {'asked': v, 'chosen': chosen[k]} for k, v in asked.items()}
      new['init'] = config.init
      path.parent.mkdir(parents=True, exist_ok=True)
      atomic_files.replace(path, json.dumps(new, indent=1).encode())

  return keep


def _fill(config: ConfigDict, fields: dict[str, Any]) -> None:
  """Sets `total` and the fields whose value is None; ignores other fields."""
  known = config_lib.flatten(config)
  is_open = {k for k, v in known.items() if v is None} | {'total'}
  config.update_from_flattened_dict(
    {k: v for k, v in fields.items() if k in is_open}
  )


def _choose(
  config: ConfigDict, kept: dict[str, Any], measure: bool
) -> dict[str, Any]:
  """Returns a value for each open field; `kept` has choices of an earlier run.

  With `measure`, prints the choices and times steps for a new total in minutes.
  """
  source = bad_images.open_checked(config.data, config.data.split or 'train')
  photos = photos_of(source)
  kind = 'new'
  fixed: dict[str, Any] = {}
  if config.data.image_size is not None or 'data.image_size' in kept:
    fixed = {'data.train_size': ''}
  if config.init:
    kept = _held_out(photos, config.data.split) | kept
    if not config.data.split and (split := kept['data.split']):
      photos = photos_of(bad_images.open_checked(config.data, split))
    checkpoint = opening.open_checkpoint(config.init)
    H, W = checkpoint.image_size
    kind = 'small'
    if flops.count_params(checkpoint.model, (H, W)) > SMALL:
      kind = 'large'
      fixed = {'data.image_size': f'{H}x{W}', 'data.train_size': ''}
    elif not fixed:
      usual = _choices(photos, 1, kind)
      fixed = {
        field: str(from_init.nearest_size(config, int(usual[field])))
        for field in ('data.image_size', 'data.train_size')
      }
    if checkpoint.model.depth_loop is None:
      fixed['optimizer.layer_decay'] = 1.0
  trial = config.copy_and_resolve_references()
  # Measures speed with the strongest augmentation.
  _fill(trial, {'total': f'{LEAST_STEPS} steps'} | kept | fixed)
  _fill(trial, _choices(photos, MOST_EPOCHS[kind], kind))
  batch, minutes = trial.batch_size, _MINUTES.fullmatch(config.total)
  if not minutes or 'total' in kept:
    given = kept.get('total', config.total)
    total = durations.steps_of(given, batch_size=batch, examples=photos.count)
  elif measure:
    most = math.ceil(MOST_EPOCHS[kind] * photos.count / batch)
    total = _steps_in(float(minutes[1]), trial, source, most)
  else:
    total = 1
  epochs = total * batch / photos.count
  chosen = _choices(photos, epochs, kind) | fixed | kept
  chosen = {'total': f'{total} steps'} | chosen
  if measure and jax.process_index() == 0:
    filled = config.copy_and_resolve_references()
    _fill(filled, chosen)
    print(_summary(photos, filled, total, epochs))
  return chosen


def _steps_in(
  minutes: float, trial: ConfigDict, source: sources.Source, most: int
) -> int:
  """Returns how many steps fit: at most `most`, but at least `LEAST_STEPS`."""
  if jax.process_index() == 0:
    print('measuring the speed of training ...', flush=True)
  compile_s, step_s = _speed(trial, source)
  batch = trial.batch_size
  tested = sum(
    len(sources.open_config(trial.data, split)) for split in build.splits(trial)
  )
  # Evaluating an image takes a third of the time of training on it.
  evaluations_s = _EVALUATIONS * tested / batch / 3 * step_s
  left_s = 60 * minutes - 2 * compile_s - evaluations_s
  steps = max(LEAST_STEPS, min(most, int(left_s / step_s)))
  took = (steps * step_s + 2 * compile_s + evaluations_s) / 60
  if jax.process_index() == 0:
    print(
      f'time    {step_s:.2g} s a step: {steps:,} steps in about {took:.3g} '
      'minutes'
    )
    if took > 1.2 * minutes:
      print(
        f'        {minutes:g} minutes are too few for this machine: a model '
        f'learns next to nothing in fewer than {LEAST_STEPS} steps.'
      )
  return int(multihost_utils.broadcast_one_to_all(np.int32(steps)))


def _speed(config: ConfigDict, source: sources.Source) -> tuple[float, float]:
  """Returns the seconds of the compiling step, and the mean of later steps."""
  experiment = Experiment(CheckedConfig(config), facts_of(config, source))
  params = experiment.new_params()
  fixed = experiment.place(experiment.objective.fixed())
  fixed = experiment.all_fixed(fixed, params)
  state = experiment.start(params)
  part, parts = sharding.batch_share(experiment.mesh)
  batches = loader.train_batches(
    source,
    experiment.objective.train_transform(),
    batch_size=config.batch_size,
    seed=config.seed,
    process_index=part,
    process_count=parts,
    workers=config.data.workers,
  )
  step = experiment.train_step()
  times: list[float] = []
  with contextlib.closing(batches):
    more = True
    while more:
      began_s = time.monotonic()
      batch = sharding.global_batch(next(batches), experiment.mesh)
      taken = sharding.replicate(np.int32(len(times)), experiment.mesh)
      state, metrics = step(state, fixed, batch, taken)
      jax.block_until_ready(metrics)
      times.append(time.monotonic() - began_s)
      more = len(times) < 4 or (sum(times[1:]) < _MEASURE_S and len(times) < 50)
      # Process 0 decides, because all must take the same number of steps.
      more = bool(multihost_utils.broadcast_one_to_all(np.int32(more)))
  return times[0], statistics.mean(times[1:])


def _summary(
  photos: Photos, config: ConfigDict, total: int, epochs: float
) -> str:
  """Describes the photos and the config that was chosen for them."""
  height, width = photos.size
  augmentation = [
    'crops',
    *['flips'] * config.data.flip,
    *['mixup'] * bool(config.loss.mixup),
    *[config.data.augment] * bool(config.data.augment),
  ]
  pixels = config.data.image_size
  if config.data.train_size:
    pixels = f'{config.data.train_size} pixels, tested at {pixels}'
  per_class = ''
  # Without single classes, `photos_of` sets `fewest` to `count`.
  if photos.fewest < photos.count:
    per_class = f'{photos.fewest:,} to {photos.most:,} a class, '
  lines = [
    f'photos  {photos.count:,} to learn from, {per_class}usually '
    f'{width}x{height} pixels',
    f'chosen  images of {pixels} pixels, {total:,} steps of '
    f'{config.batch_size} ({epochs:.3g} epochs), {", ".join(augmentation)}, '
    f'{config.optimizer.name} at {config.optimizer.lr:g}',
  ]
  if not config.init:
    flag = f'--config=configs/own.py:{config.data.name},{PUBLISHED}'
    lines.append(
      'start   new parameters. A published checkpoint (a download of 88 MB) '
      f'does better: {flag}'
    )
  return '\n'.join(lines)
