"""Transfers weights to a new task, image size or head."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.models import flops, posemb
from vit_jax.models.model import Model

HEADS = ('keep', 'representation', 'drop')


def to_new_task(
  checkpoint: Checkpoint,
  model: Model,
  image_size: tuple[int, int],
  fresh: Any,
) -> Any:
  """Transfers a checkpoint's parameters to a model for fine-tuning.

  Drops the old head and interpolates position embeddings to the new grid
  (section 3.2 of the ViT paper). If the checkpoint's model is a part of the new
  model, such as a backbone, only this part is replaced.

  Args:
    checkpoint: the checkpoint.
    model: the model to train. Its body, or the body of one of its parts, must
      equal the checkpoint's, except in `compute_fields` and `optional_params`.
    image_size: (H, W) that the model is built for.
    fresh: initial parameters, kept for the new head and other missing parts.

  Returns NumPy arrays. Raises ValueError if the bodies differ, and the
  ValueError of `posemb.resize_all`.
  """
  for name, part in model.parts().items():
    if type(part) is type(checkpoint.model):
      _check_same_body(checkpoint, part, f'{name}_')
      body = to_new_task(checkpoint, part, image_size, fresh[name])
      return _on_host(fresh) | {name: body}
  _check_same_body(checkpoint, model)
  old, params = checkpoint.model, dict(checkpoint.params)
  if old.scan and not model.scan:
    params = model.unstack_layers(params)
  if model.scan and not old.scan:
    params = jax.device_get(model.stack_layers(params))
  other = [
    name
    for field, names in model.optional_params.items()
    for name in names
    if getattr(old, field) != getattr(model, field)
  ]
  for name in (*old.task_params, *other):
    params.pop(name, None)
  named = (*model.task_params, *other)
  task = {name: fresh[name] for name in named if name in fresh}
  body = {name: x for name, x in fresh.items() if name not in task}
  grids = (old.grid(checkpoint.image_size), model.grid(image_size))
  return posemb.resize_all(params, body, *grids) | _on_host(task)


def _on_host(params: Any) -> Any:
  """Gathers arrays from all processes as NumPy arrays."""
  return multihost_utils.process_allgather(params, tiled=True)


def _check_same_body(
  checkpoint: Checkpoint, model: Model, prefix: str = ''
) -> None:
  old, new = checkpoint.model.body(), model.body()
  if type(old) is not type(new):
    wrong = [f'a {type(old).__name__}; config.model is a {type(new).__name__}']
  else:
    may_differ = (*old.compute_fields, *old.optional_params)
    names = [field.name for field in old.own_fields()]
    wrong = [
      f'{name} {str(getattr(old, name)):.60}; config.model.{prefix}{name} is '
      f'{str(getattr(new, name)):.60}'
      for name in names
      if name not in may_differ and getattr(old, name) != getattr(new, name)
    ]
  if wrong:
    way_out = "Set these fields to the checkpoint's values."
    if not prefix:
      way_out = (
        f'--config=configs/finetune.py:{checkpoint.path},DATA takes the '
        "checkpoint's model."
      )
    raise ValueError(
      f'{checkpoint.path} has a different body than config.model. It has '
      f'{". It has ".join(wrong)}. {way_out}'
    )


def at_size(
  model: Model, params: Any, old: tuple[int, int], new: tuple[int, int]
) -> Any:
  """Converts parameters from one image size (H, W) to another.

  Interpolates position embeddings (section 3.2 of the ViT paper). With JAX
  arrays, works under `jax.jit` and `jax.grad`. Raises ValueError if other
  parameters depend on the image size, and the errors of `posemb.resize_all`.
  """
  like = flops.param_shapes(model, new)
  # By default, TPUs multiply matrices in bfloat16.
  with jax.default_matmul_precision('float32'):
    found = posemb.resize_all(params, like, model.grid(old), model.grid(new))
  if jax.tree.map(jnp.shape, found) != jax.tree.map(jnp.shape, like):
    raise ValueError(
      f'The parameters of {type(model).__name__} depend on the image size, so '
      f'the size cannot change from {old[0]}x{old[1]} to {new[0]}x{new[1]} '
      'pixels.'
    )
  return found


def resized(
  checkpoint: Checkpoint, image_size: int | tuple[int, int]
) -> Checkpoint:
  """Converts a checkpoint to another image size, as `at_size` does.

  `image_size` is (H, W) in pixels, or one number for both. Also scales
  `preprocessing.resize_small`, the shorter side before the crop. Raises
  ValueError if the model does not support this image size.
  """
  model, old = checkpoint.model, checkpoint.image_size
  if isinstance(image_size, int):
    image_size = image_size, image_size
  model.check(image_size)
  return dataclasses.replace(
    checkpoint,
    params=at_size(model, checkpoint.params, old, image_size),
    image_size=image_size,
    preprocessing=checkpoint.preprocessing.scaled(old, image_size),
  )


def with_head(checkpoint: Checkpoint, head: str) -> Checkpoint:
  """Returns a checkpoint with its head kept or dropped.

  `head` is one of `HEADS`. 'representation' drops the classifier and keeps the
  representation layer. Raises ValueError if the model lacks this layer.
  """
  if head == 'keep':
    return checkpoint
  if head == 'drop':
    model = checkpoint.model.body()
  elif 'pre_logits' in checkpoint.params:
    model = checkpoint.model.clone(num_classes=0)
  else:
    raise ValueError(
      f'{checkpoint.path} has no representation layer to keep. Use --head=keep '
      'or --head=drop.'
    )
  kept = flops.param_shapes(model, checkpoint.image_size)
  params = {k: x for k, x in checkpoint.params.items() if k in kept}
  return dataclasses.replace(
    checkpoint, model=model, params=params, class_names=()
  )


def with_learned_positions(checkpoint: Checkpoint) -> Checkpoint:
  """Converts position embeddings to learned 1-D embeddings.

  Most foreign formats store only this kind. Converts learned 2-D, fixed and
  missing embeddings if `posemb_at` is 'input'; the outputs stay the same.
  Returns other checkpoints unchanged.
  """
  model = checkpoint.model
  if (
    getattr(model, 'posemb', '') not in ('none', 'learned2d', 'sincos2d')
    or model.posemb_at != 'input'
  ):
    return checkpoint
  grid, extra = model.grid(checkpoint.image_size), model.class_tokens
  encoder = dict(checkpoint.params['Transformer'])
  learned = encoder.pop('posembed_input', {})
  if model.posemb == 'none':
    shape = (1, extra + grid[0] * grid[1], model.width)
    table_1LD = np.zeros(shape, np.float32)
  else:
    table_1LD = np.asarray(
      posemb.PositionEmbedding(model.posemb).apply(
        {'params': learned}, grid, extra, model.width
      )
    )
  encoder['posembed_input'] = {'pos_embedding': table_1LD}
  return dataclasses.replace(
    checkpoint,
    model=model.clone(posemb='learned1d'),
    params=checkpoint.params | {'Transformer': encoder},
  )
