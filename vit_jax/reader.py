"""The one checkpoint reader, and carrying weights over to a new task."""

import dataclasses
import logging
import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util

from vit_jax.checkpoint import (
  CHECKSUMS,
  FOLDER,
  META,
  absolute,
  checksums,
  verified,
)
from vit_jax.convert import formats, table
from vit_jax.models import posemb, variants
from vit_jax.models.variants import Model
from vit_jax.models.vit import ViT

_log = logging.getLogger(__name__)

_HEAD = ('pre_logits', 'head')
# Fields of a model that its body does not depend on.
_NOT_BODY = (
  'num_classes',
  'representation_size',
  'head_bias',
  'dropout',
  'dtype',
  'scan',
  'remat',
  'parent',
  'name',
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A trained model with all it takes to use it.

  Attributes:
    path: where it was read from.
    model: gives logits.
    params: NumPy arrays, float32, layers unrolled or stacked as `model` has it.
    image_size: (H, W) in pixels that the position embeddings are for.
    preprocessing: how images are brought there.
    class_names: C names; empty where the file has none.
  """

  path: str
  model: Model
  params: dict[str, Any]
  image_size: tuple[int, int]
  preprocessing: table.Preprocessing = table.Preprocessing()
  class_names: tuple[str, ...] = ()

  def weights(self) -> table.Weights:
    """Returns the same for the writers of foreign formats."""
    fields = {
      field.name: getattr(self.model, field.name)
      for field in dataclasses.fields(self.model)
      if field.name not in ('parent', 'name')
    }
    fields |= {
      'name': 'vit' if isinstance(self.model, ViT) else 'resnet',
      'image_size': self.image_size,
    }
    return table.Weights(
      arrays=traverse_util.flatten_dict(
        variants.unstack_layers(self.params), sep='/'
      ),
      fields=fields,
      preprocessing=self.preprocessing,
      class_names=self.class_names,
    )


def open_checkpoint(path: str) -> Checkpoint:
  """Opens any checkpoint; the format is found by looking.

  Args:
    path: a workdir or one of its `checkpoints/STEP` folders (its Polyak average
      where it has one), or an official .npz file.

  Raises:
    FileNotFoundError: if nothing is there.
    ValueError: if it is no checkpoint, or a damaged one.
  """
  place = absolute(path)
  if not place.exists():
    raise FileNotFoundError(f'No checkpoint at {path}.')
  if not place.is_dir():
    return _open_foreign(path)
  if (place / META).is_dir() and place.name.isdigit():
    return _open_step(place)
  steps = (
    [
      int(child.name)
      for child in (place / FOLDER).iterdir()
      if child.name.isdigit()
    ]
    if (place / FOLDER).is_dir()
    else []
  )
  if not steps:
    raise ValueError(
      f'{path} holds no checkpoint: give a workdir with finished checkpoints, '
      'one of its checkpoints/STEP folders, or an .npz file.'
    )
  return _open_step(place / FOLDER / str(max(steps)))


def _open_step(step_dir: epath.Path) -> Checkpoint:
  try:
    saved = ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(
      step_dir / META
    )
    meta = verified(saved)
    config, size = meta['config'], tuple(meta['image_size'])
    model = variants.build(
      num_classes=len(meta['class_names']), image_size=size, **config['model']
    )
    item = 'average' if config['optimizer']['polyak'] else 'params'
    like = _param_shapes(model, size)
    params = _restore(step_dir / item, like)
    sums_like = jax.eval_shape(checksums, like)
    sums = _restore(step_dir / CHECKSUMS, {item: sums_like})
    if not np.array_equal(checksums(params), sums[item]):
      raise ValueError(f'the arrays of {item} are not those saved')
  except Exception as e:
    raise ValueError(
      f'The checkpoint {step_dir} cannot be read: {type(e).__name__}: {e}'
    ) from e
  return Checkpoint(
    path=os.fspath(step_dir),
    model=model,
    params=params,
    image_size=size,
    preprocessing=table.Preprocessing(
      resize_small=config['data']['resize_small']
    ),
    class_names=tuple(meta['class_names']),
  )


def _restore(folder: epath.Path, like: Any) -> Any:
  """Returns those of a folder's arrays that `like` has, for NumPy."""
  return ocp.PyTreeCheckpointer().restore(
    folder,
    args=ocp.args.PyTreeRestore(
      item=like,
      restore_args=jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like
      ),
      partial_restore=True,
    ),
  )


def _open_foreign(path: str) -> Checkpoint:
  file = formats.read(path)
  size = file.fields['image_size']
  try:
    model = variants.build(**file.fields)
  except (TypeError, ValueError) as e:
    raise ValueError(f'{path} is no checkpoint of a model here: {e}') from e
  shapes = traverse_util.flatten_dict(_param_shapes(model, size), sep='/')
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
  )


def _param_shapes(model: Model, image_size: tuple[int, int]) -> Any:
  return jax.eval_shape(
    lambda key: variants.init(model, key, image_size), jax.random.key(0)
  )


def transfer(
  checkpoint: Checkpoint,
  model: Model,
  image_size: tuple[int, int],
  fresh: Any,
) -> Any:
  """Carries a checkpoint's parameters over to a model about to be trained.

  The whole old head, `pre_logits` included, is left behind (section 3.2), and
  position embeddings are interpolated to the new grid.

  Args:
    checkpoint: to start from.
    model: to be trained; must have the same body.
    image_size: (H, W) the model is built for.
    fresh: the model's own initial parameters, which supply the head.

  Returns:
    NumPy parameters for `model`.

  Raises:
    ValueError: naming the field in which the bodies differ.
  """
  _check_same_body(checkpoint, model)
  params = dict(checkpoint.params)
  if checkpoint.model.scan and not model.scan:
    params = variants.unstack_layers(params)
  if model.scan and not checkpoint.model.scan:
    params = jax.device_get(variants.stack_layers(params))
  for name in _HEAD:
    params.pop(name, None)
  head = {name: fresh[name] for name in _HEAD if name in fresh}
  body = {name: x for name, x in fresh.items() if name not in _HEAD}
  grids = (
    (checkpoint.model.grid(checkpoint.image_size), model.grid(image_size))
    if isinstance(checkpoint.model, ViT) and isinstance(model, ViT)
    else (checkpoint.image_size, image_size)
  )
  return posemb.resize_all(params, body, *grids) | jax.device_get(head)


def _check_same_body(checkpoint: Checkpoint, model: Model) -> None:
  old = checkpoint.model
  if type(old) is not type(model):
    raise ValueError(
      f'{checkpoint.path} is a {type(old).__name__} and config.model a '
      f'{type(model).__name__}: choose the config variant of the checkpoint.'
    )
  for field in dataclasses.fields(old):
    was, wanted = getattr(old, field.name), getattr(model, field.name)
    if field.name not in _NOT_BODY and was != wanted:
      raise ValueError(
        f'{checkpoint.path} has {field.name} {was} and '
        f'config.model.{field.name} is {wanted}: choose the config variant of '
        'the checkpoint.'
      )
