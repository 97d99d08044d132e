"""Converts a checkpoint to the format of another framework, or to a program."""

import dataclasses
import importlib
import logging
import os
import pathlib
import types

import jax.numpy as jnp

from vit_jax.checkpoints import opening, transfer
from vit_jax.checkpoints.formats import table
from vit_jax.data import atomic_files

_log = logging.getLogger(__name__)

# Formats whose `write` takes a `table.Weights`, and formats whose `write` takes
# a `Checkpoint`.
WEIGHTS = ('npz', 'bigvision', 'timm', 'hf')
PROGRAMS = ('onnx', 'stablehlo', 'orbax', 'board')


def convert(
  checkpoint: opening.Checkpoint | str,
  target: str | os.PathLike,
  to: str = 'timm',
  *,
  dtype: str = 'float32',
  image_size: tuple[int, int] | None = None,
  head: str = 'keep',
  loss: str | None = None,
  rollout: bool = False,
  opset: int | None = None,
) -> list[str]:
  """Writes a checkpoint in another format.

  Args:
    checkpoint: a `Checkpoint`, or anything that `open_checkpoint` opens.
    target: a new file or directory. It is written completely or not at all.
    to: the format: one of `WEIGHTS` ('npz', 'bigvision', 'timm', 'hf') or
      `PROGRAMS` ('onnx', 'stablehlo', 'orbax', 'board').
    dtype: one of the format's `DTYPES`: the dtype of the arrays for `WEIGHTS`
      and 'orbax', and of the computation for the other formats.
    image_size: (H, W) of the images in pixels; position embeddings are resized.
      None keeps the checkpoint's size.
    head: one of `transfer.HEADS`.
    loss: 'softmax' or 'sigmoid' to replace the checkpoint's loss; None to keep
      it.
    rollout: whether an ONNX file also outputs the attention rollout.
    opset: opset of an ONNX file; None for the lowest that the model needs.

  Returns:
    Sentences about settings that the format cannot store, and about other
    differences from the checkpoint.

  Raises:
    FileExistsError: if the target exists.
    FileNotFoundError: if the target's folder is missing.
    PermissionError: if the target's folder is not writable.
    ImportError: if a library is not installed; the message names it.
    ValueError: if the format cannot store the model, or an option is invalid or
      does not fit the format.

  Also raises the errors of `open_checkpoint`.
  """
  target = os.fspath(target)
  for option, value, choices in (
    ('to', to, (*WEIGHTS, *PROGRAMS)),
    ('head', head, transfer.HEADS),
    ('loss', loss, (None, 'softmax', 'sigmoid')),
  ):
    if value not in choices:
      known = ' or '.join(map(repr, choices))
      raise ValueError(f'{option} is {value!r}; it must be {known}.')
  module = writer(to)
  if dtype not in module.DTYPES:
    raise ValueError(
      f'--to={to} does not support --dtype={dtype}. Use '
      f'{" or ".join(module.DTYPES)}.'
    )
  # The writer refuses an opset of 0.
  options = {'rollout': rollout or None, 'opset': opset}
  given = {name: x for name, x in options.items() if x is not None}
  if given and to != 'onnx':
    raise ValueError(f'--{min(given)} needs --to=onnx.')
  atomic_files.refuse_existing(target)
  checkpoint = opening.open_checkpoint(checkpoint)
  if loss:
    checkpoint = dataclasses.replace(checkpoint, loss=loss)
  _log.info('read      %s: %s', checkpoint.path, checkpoint.describe())
  if image_size and image_size != checkpoint.image_size:
    checkpoint = transfer.resized(checkpoint, image_size)
  if head != 'keep':
    checkpoint = transfer.with_head(checkpoint, head)
  written: table.Weights | opening.Checkpoint = checkpoint
  if to in WEIGHTS:
    model, body = checkpoint.model, checkpoint.model.body()
    if model.kind != body.kind:
      raise ValueError(
        f'{checkpoint.path} is a {type(model).__name__}, which --to={to} '
        'cannot store. Use --head=drop to write only its body, a '
        f'{type(body).__name__}.'
      )
    learned = transfer.with_learned_positions(checkpoint)
    if learned is not checkpoint:
      _log.info(
        'Position embeddings are written as learned 1-D embeddings with the '
        'same values. Further training would change them.'
      )
    written = learned.weights()
  lost: list[str] = module.write(written, target, dtype, **given)
  path = pathlib.Path(target)
  files = filter(pathlib.Path.is_file, (path, *path.rglob('*')))
  megabytes = sum(file.stat().st_size for file in files) / 1e6
  _log.info(
    'written   %s: %s, %s, %s MB', target, to, dtype, f'{megabytes:,.1f}'
  )
  is_sigmoid = checkpoint.loss == 'sigmoid' and checkpoint.model.num_classes
  if is_sigmoid and to in WEIGHTS and to != 'hf':
    lost.append(
      'The format does not store that the training loss was sigmoid. To get '
      'the probability of a class, apply a sigmoid to its logit.'
    )
  if to in ('onnx', 'stablehlo') and checkpoint.model.any_size:
    H, W = checkpoint.image_size
    sentence = (
      f'The program takes images of {H}x{W} pixels without padding; the '
      'checkpoint takes any size.'
    )
    if H != W:
      sentence += f' To swap height and width, use --image_size={W}x{H}.'
    lost.append(sentence)
  return lost


def writer(to: str) -> types.ModuleType:
  folder = 'checkpoints.formats' if to in WEIGHTS else 'convert'
  if to == 'board':  # a web server for a single-board computer
    folder = 'tools.serve'
  return importlib.import_module(f'vit_jax.{folder}.{to}')


def dtype_notes(checkpoint: opening.Checkpoint, dtype: str) -> list[str]:
  """Returns a note if a 16-bit model becomes a program in another dtype."""
  trained = checkpoint.model.dtype
  if trained in (jnp.float32, jnp.dtype(dtype)):
    return []
  return [f'The model computes in {trained}; the program computes in {dtype}.']
