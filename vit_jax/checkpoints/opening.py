"""Opens checkpoints of any format."""

import collections
import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import traverse_util

from vit_jax.checkpoints import fetch, saving
from vit_jax.checkpoints.formats import table
from vit_jax.data import transforms
from vit_jax.data.images import Images
from vit_jax.data.preprocessing import Preprocessing
from vit_jax.models import flops, variants
from vit_jax.models.model import Model
from vit_jax.register import nearest

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Checkpoint:
  """A trained model with everything needed to use it; equal only to itself.

  Attributes:
    path: path of the checkpoint.
    model: the model.
    params: the model's parameters, float32 NumPy arrays. Layers are stacked if
      `model.scan` is set, else unrolled.
    image_size: (H, W) of input images in pixels.
    preprocessing: how to resize and normalise images.
    class_names: a name for each class; empty if they are unknown.
    loss: training loss of the head, 'softmax' or 'sigmoid'.
  """

  path: str
  model: Model
  params: dict[str, Any]
  image_size: tuple[int, int]
  preprocessing: Preprocessing = Preprocessing()
  class_names: tuple[str, ...] = ()
  loss: str = 'softmax'

  def __repr__(self) -> str:
    return f'Checkpoint({self.path!r}: {self.describe()})'

  def describe(self) -> str:
    """Describes the model, its size, image size and head in one line."""
    model, (H, W) = self.model, self.image_size
    head = 'no head'
    if C := model.num_classes:
      head = f'{C:,} classes {"with" if self.class_names else "without"} names'
    count = flops.count_params(model, self.image_size)
    return (
      f'{type(model).__name__}, {count:,} parameters, {H}x{W} pixels, {head}'
    )

  @property
  def images(self) -> Images:
    """Image preprocessing for the model."""
    return Images(self.image_size, self.preprocessing)

  def transform(self) -> transforms.EvalTransform:
    """Returns the transform that resizes images for the model."""
    return self.images.eval_transform()

  def normalize(self, images_BHWC: jax.Array) -> jax.Array:
    """Normalises images with values from 0 to 255; returns float32."""
    return self.images.normalize(images_BHWC)

  @functools.cached_property
  def unique_names(self) -> tuple[str, ...]:
    """The class names; the index follows a name that several classes have.

    ImageNet, for example, has two classes named crane.
    """
    counts = collections.Counter(self.class_names)
    return tuple(
      f'{name} ({i})' if counts[name] > 1 else name
      for i, name in enumerate(self.class_names)
    )

  def class_name(self, index: int) -> str:
    """Returns the unique name of a class; without class names, the index."""
    return self.unique_names[index] if self.class_names else str(index)

  def class_index(self, text: str | int) -> int:
    """Returns the index of a class, given its index or `class_name`.

    A text such as '7' is compared with the class names first. Raises ValueError
    if the class is unknown, the name is not unique, or the model has no head.
    """
    self.check_head()
    names, C = self.unique_names, self.model.num_classes
    if text in names:
      return names.index(text)
    is_index = str(text).isdecimal() and int(text) < C
    if is_index and text not in self.class_names:
      return int(text)
    hint = nearest(str(text), names) if names else 'Its classes have no names.'
    if len(hint) > 300:
      hint = f'Some of its names: {", ".join(names[:10])}.'
    raise ValueError(
      f'{self.path} has no class {text!r}. Give a class name or an index from '
      f'0 to {C - 1}. {hint}'
    )

  def check_head(self) -> None:
    """Raises ValueError if the model has no head."""
    if not self.model.num_classes:
      raise ValueError(
        f'{self.path} has no head, so it cannot predict. Give a checkpoint '
        'with classes.'
      )

  def logits(self, images_BHWC: jax.Array | np.ndarray) -> jax.Array:
    """Returns the main output of the model, such as logits [B, C].

    Without a head, a ViT or ResNet returns the representation, one vector per
    image. Images are RGB, of `image_size`, with values from 0 to 255.
    """
    return self._apply(self.on_device, images_BHWC)

  def check_finite(self, outputs: np.ndarray, image: str) -> None:
    """Raises ValueError if outputs of the model for an image are not finite."""
    if not np.all(np.isfinite(outputs)):
      raise ValueError(
        f'{self.path} gives outputs that are not finite for {image}. Its '
        'parameters are damaged, or too large for the dtype of the model.'
      )

  def probabilities(self, logits_BC: jax.typing.ArrayLike) -> jax.Array:
    """Returns class probabilities [B, C], by softmax or sigmoid; see `loss`."""
    if self.loss == 'sigmoid':
      return jax.nn.sigmoid(logits_BC)
    return jax.nn.softmax(logits_BC)

  @functools.cached_property
  def on_device(self) -> dict[str, Any]:
    """The parameters on the default device; copied on the first access."""
    return jax.device_put(self.params)

  @functools.cached_property
  def _apply(self) -> Callable[..., jax.Array]:
    return jax.jit(
      lambda params, images_BHWC: self.model.apply(
        {'params': params}, self.normalize(images_BHWC)
      )[0]
    )

  def weights(self) -> table.Weights:
    """Converts the checkpoint for the writers of foreign formats."""
    return table.Weights(
      arrays=traverse_util.flatten_dict(
        self.model.unstack_layers(self.params), sep='/'
      ),
      fields=variants.fields_of(self.model) | {'image_size': self.image_size},
      preprocessing=self.preprocessing,
      class_names=self.class_names,
      loss=self.loss,
    )


def open_checkpoint(path: str | os.PathLike | Checkpoint) -> Checkpoint:
  """Opens a checkpoint and detects its format.

  In a workdir, opens the newest step, or the best step if `early_stopping` was
  set. Opens the Polyak average of the parameters or DINO's teacher, if any.

  Args:
    path: a workdir; a folder `checkpoints/STEP` in a workdir; a file or
      directory in a foreign format; or a name that `fetch.local` fetches. A
      `Checkpoint` is returned unchanged. A `TrainedModel` stands for its
      checkpoint.

  Raises:
    FileNotFoundError: if the path does not exist.
    OSError: if a folder or foreign file cannot be read.
    ValueError: if the path is not a checkpoint, is damaged, or has an
      unsupported model; if a checkpoint of a workdir cannot be read.

  Also raises the errors of `fetch.local` and `recognise.read`.
  """
  path = getattr(path, 'checkpoint', path)
  if isinstance(path, Checkpoint):
    return path
  path = os.fspath(path)
  place = saving.absolute(fetch.local(path))
  if not place.exists():
    hint = ''
    # Names like vit_base_patch16_224 and google/vit-base-patch16-224.
    if re.fullmatch(r'([\w-]+/)?[\w.-]*patch\d[\w.-]*', path):
      name = (
        f'hf://{path}'
        if '/' in path
        else f'timm://{path}' + '.TAG' * ('.' not in path)
      )
      hint = f'Did you mean {name}? '
    raise FileNotFoundError(
      f'No checkpoint at {path}. {hint}Give a path that exists, '
      'timm://NAME.TAG, hf://ORG/NAME, or a published name such as augreg/b16, '
      'from `python -m vit_jax.models --pretrained`.'
    )
  if (place / saving.META).is_dir() and saving.is_step(place):
    return _open_step(place)
  folder = place / saving.FOLDER
  if folder.is_dir() and saving.steps(folder):
    return _open_step(folder / str(_step_of(folder)))
  if '://' in os.fspath(place):
    raise ValueError(
      f'{path} is not a workdir. Directories in other formats must be on disk. '
      'Copy it to the disk first.'
    )
  return _open_foreign(os.fspath(place))


def _step_of(folder: epath.Path) -> int:
  """Returns the step whose checkpoint is the result of a run.

  Avoids `Checkpoints`, which deletes checkpoints that a run is still writing.
  """
  kept = saving.steps(folder)
  newest = kept[-1]
  with _reading(folder / str(newest)):
    meta = saving.read_meta(folder / str(newest))
    config = meta['config']
    # Older runs lack this field.
    if not config.get('early_stopping'):
      return newest
    metric = str(config['best_metric'])
  metrics = {}
  for step in kept:
    with _reading(folder / str(step)):
      metrics[step] = saving.read_metrics(folder / str(step))
  # Older runs always chose the highest value.
  best = saving.best_step(metrics, metric, meta.get('best', 'highest'))
  return newest if best is None else best


@contextlib.contextmanager
def _reading(step_dir: epath.Path) -> Iterator[None]:
  """Turns any error into a ValueError that names the checkpoint."""
  try:
    yield
  except Exception as e:
    # Orbax raises FileNotFoundError also for a folder that cannot be read.
    is_missing = isinstance(e, FileNotFoundError)
    read_failure = saving.judge(step_dir, e)[1] if is_missing else ''
    raise ValueError(
      f'The checkpoint {step_dir} cannot be read: '
      f'{read_failure or saving.first_line(e)}'
    ) from e


def _open_step(step_dir: epath.Path) -> Checkpoint:
  with _reading(step_dir):
    meta = saving.read_meta(step_dir)
    config, size = meta['config'], tuple(meta['image_size'])
    names = meta['class_names']
    # Older checkpoints lack `model`; the config and the classes determine it.
    classes = meta.get('num_classes', len(names))
    fields = meta.get('model', config['model'] | {'num_classes': classes})
    model = variants.build(image_size=size, **fields)
    preprocessing = Preprocessing.of(config['data'])
    if config['optimizer'].get('lora'):
      # Imported by name, because `adapters` imports this module.
      adapters = importlib.import_module('vit_jax.checkpoints.adapters')
      params: dict[str, Any] = adapters.read(step_dir, meta, model)
    else:
      item = 'average' if config['optimizer']['polyak'] else 'params'
      like = flops.param_shapes(model, size)
      if result := meta.get('result'):
        item = 'objective_state'
        params = saving.read_arrays(step_dir / item, {result: like})[result]
      else:
        params = saving.read_arrays(step_dir / item, like)
      if jax.tree.map(np.shape, params) != jax.tree.map(np.shape, like):
        raise ValueError(f'the arrays of {item} do not fit the config')
      kept = saving.read_checksums(step_dir, item)
      saving.check_sums(params, kept, item, is_part=bool(result))
  if short_sides := config.get('objective', {}).get('short_sides'):
    # DETR opens at the size of its evaluation: the short side is the last of
    # `short_sides`.
    size = min(short_sides[-1], *size), max(size)
  return Checkpoint(
    path=os.fspath(step_dir),
    model=model,
    params=params,
    image_size=size,
    preprocessing=preprocessing,
    class_names=tuple(names),
    # Early configs lack this field.
    loss=config.get('loss', {}).get('name', 'softmax'),
  )


def _open_foreign(path: str) -> Checkpoint:
  # Imported here, so that training loads no foreign formats.
  from vit_jax.checkpoints.formats import recognise

  file = recognise.read(path)
  size = file.fields['image_size']
  try:
    model = variants.build(**file.fields)
  except (TypeError, ValueError) as e:
    raise ValueError(f'The model of {path} is not supported: {e}') from e
  shapes = traverse_util.flatten_dict(flops.param_shapes(model, size), sep='/')
  arrays = table.file_to_ours(file, {k: x.shape for k, x in shapes.items()})
  for warning in file.warnings:
    _log.warning(warning)
  return Checkpoint(
    path=path,
    model=model,
    params=traverse_util.unflatten_dict(arrays, sep='/'),
    image_size=size,
    preprocessing=file.preprocessing,
    class_names=file.class_names,
    loss=file.loss,
  )
