"""Converts a checkpoint from any framework to any other.

  python -m vit_jax.convert SOURCE TARGET --to=timm
  python -m vit_jax.convert --check SOURCE TARGET

The format of SOURCE is found by looking. TARGET appears whole or not at all.

  --to=npz        the official .npz of the paper's code (BiT's for a ResNet)
  --to=bigvision  big_vision's .npz
  --to=timm       a directory for timm.create_model('local-dir:TARGET')
  --to=hf         a directory for transformers' from_pretrained
  --to=onnx       one file for onnxruntime, with any batch size
  --to=stablehlo  a directory for jax.export, which runs without this package
  --to=orbax      a workdir of this package
  --to=board      a directory with a page that serves it, with onnxruntime,
                  Pillow and starlette alone; with --dtype=int8 in both, of
                  which the faster is taken where it runs

--check runs both on the same random images, each in its own framework where
that is installed, and prints the largest difference.
"""

import argparse
import dataclasses
import importlib
import os
import pathlib
import sys
import types
from collections.abc import Sequence
from typing import Any

from vit_jax import flags
from vit_jax.checkpoints import opening, transfer
from vit_jax.checkpoints.formats.recognise import WHAT_OPENS
from vit_jax.data import images, whole
from vit_jax.models import flops

# What takes a checkpoint's arrays, and what takes the model itself.
WEIGHTS = ('npz', 'bigvision', 'timm', 'hf')
PROGRAMS = ('onnx', 'stablehlo', 'orbax', 'board')

TOLERANCE = 1e-4


def convert(args: argparse.Namespace) -> None:
  """Converts a checkpoint, and prints what becomes of it.

  Raises:
    FileExistsError: if there is something at the target.
    FileNotFoundError: if the source, or the target's folder, is not there.
    ImportError: if a library is not installed, saying which.
    ValueError: if the source cannot be read, or the target cannot hold it.
  """
  to, target, dtype = args.to, args.target, args.dtype
  module = writer(to)
  if dtype not in module.DTYPES:
    raise ValueError(
      f'--dtype={dtype} is none of --to={to}: use {" or ".join(module.DTYPES)}.'
    )
  if args.rollout and to != 'onnx':
    raise ValueError('--rollout needs --to=onnx.')
  size = (
    images.size_of(args.image_size, '--image_size') if args.image_size else None
  )
  whole.refuse_existing(target)
  checkpoint = opening.open_checkpoint(args.source)
  if args.loss:
    checkpoint = dataclasses.replace(checkpoint, loss=args.loss)
  _say(f'read      {checkpoint.path}: {_describe(checkpoint)}')
  checkpoint = _adapt(checkpoint, size or checkpoint.image_size, args)
  given: Any = checkpoint.weights() if to in WEIGHTS else checkpoint
  options = {'rollout': True} if args.rollout else {}
  lost = module.write(given, target, dtype, **options)
  path = pathlib.Path(target)
  files = [file for file in (path, *path.rglob('*')) if file.is_file()]
  size_bytes = sum(file.stat().st_size for file in files)
  _say(f'written   {target}: {to}, {dtype}, {size_bytes / 1e6:,.1f} MB')
  is_sigmoid = checkpoint.loss == 'sigmoid' and checkpoint.model.num_classes
  if is_sigmoid and to in WEIGHTS and to != 'hf':
    lost.append(
      'That the loss was sigmoid: each class has a probability of its own, '
      'the sigmoid of its logit.'
    )
  if to in ('onnx', 'stablehlo') and checkpoint.model.attention == 'objects':
    H, W = checkpoint.image_size
    sentence = (
      f'Images of any size and shape: they are {H}x{W} pixels, without padding.'
    )
    if H != W:
      sentence += f' For those on their side there is --image_size={W}x{H}.'
    lost.append(sentence)
  for sentence in lost:
    _say(f'not held  {sentence}')


def _say(line: str) -> None:
  print(line, flush=True)


def writer(to: str) -> types.ModuleType:
  """Returns the module that writes one of `WEIGHTS` or `PROGRAMS`.

  It is as `table.Format` says; those of programs take a `Checkpoint`.
  """
  folder = 'checkpoints.formats' if to in WEIGHTS else 'convert'
  return importlib.import_module(f'vit_jax.{folder}.{to}')


def _adapt(
  checkpoint: opening.Checkpoint,
  size: tuple[int, int],
  args: argparse.Namespace,
) -> opening.Checkpoint:
  """Changes size, head and positions, and says so."""
  if size != checkpoint.image_size:
    checkpoint = transfer.resized(checkpoint, size)
    H, W = size
    _say(f'resized   for images of {H}x{W} pixels')
  if args.head != 'keep':
    checkpoint = transfer.with_head(checkpoint, args.head)
    kept = (
      ', the representation layer is kept'
      if args.head == 'representation'
      else ''
    )
    _say(f'dropped   the head, as --head={args.head} says{kept}')
  if args.to not in WEIGHTS:
    return checkpoint
  model, body = checkpoint.model, checkpoint.model.body()
  if model.kind != body.kind:
    raise ValueError(
      f'{checkpoint.path} is a {type(model).__name__}, and --to={args.to} '
      f'has no place for what it predicts: --head=drop keeps its body, a '
      f'{type(body).__name__}.'
    )
  learned = transfer.with_learned_positions(checkpoint)
  if learned is not checkpoint:
    _say(
      'rewritten the position embeddings as learned 1-D ones: the same '
      'numbers, which further training would change'
    )
  return learned


def _describe(checkpoint: opening.Checkpoint) -> str:
  model, (height, width) = checkpoint.model, checkpoint.image_size
  names = 'with' if checkpoint.class_names else 'without'
  head = (
    f'{model.num_classes:,} classes {names} names'
    if model.num_classes
    else 'no head'
  )
  return (
    f'{type(model).__name__}, '
    f'{flops.count_params(model, checkpoint.image_size):,} parameters, '
    f'{height}x{width} pixels, {head}'
  )


def _check(args: argparse.Namespace) -> int:
  # Here, because it imports every framework's module.
  from vit_jax.convert import check

  return int(not check.agree(args.source, args.target, args.tolerance))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
  """Returns the flags; exits with status 2 for those that make no sense."""
  parser = flags.parser('convert', __doc__)
  parser.add_argument('source', help=WHAT_OPENS)
  parser.add_argument('target', help='new file or directory')
  parser.add_argument('--to', choices=WEIGHTS + PROGRAMS, help='format')
  parser.add_argument(
    '--check', action='store_true', help='compare the two instead'
  )
  parser.add_argument(
    '--image_size',
    help='of the images in pixels, as in 384 or 384x512, for which learned '
    "position embeddings are resized (default: the source's)",
  )
  parser.add_argument(
    '--head',
    choices=transfer.HEADS,
    default='keep',
    help='keep all of it (default), keep the representation layer and drop the '
    'classifier, or drop both',
  )
  parser.add_argument(
    '--loss',
    choices=('softmax', 'sigmoid'),
    help='that the head was trained with, which most formats do not say '
    "(default: the source's, or softmax)",
  )
  parser.add_argument(
    '--dtype',
    default='float32',
    help='float32 (default), bfloat16 (bigvision, timm, hf, stablehlo), '
    'float16 (timm, hf), int8 (onnx, board)',
  )
  parser.add_argument(
    '--rollout',
    action='store_true',
    help='with --to=onnx, put out the attention rollout too',
  )
  parser.add_argument(
    '--tolerance',
    type=float,
    default=TOLERANCE,
    help='with --check, the largest difference, as a share of the largest '
    f'output, that is no failure (default: {TOLERANCE:g}; bfloat16 takes 0.02, '
    'int8 0.1)',
  )
  args = parser.parse_args(argv)
  if not args.check and args.to is None:
    parser.error(f'--to is needed: one of {", ".join(WEIGHTS + PROGRAMS)}.')
  return args


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns 0, 1 if a check finds a difference, or 2."""
  args = parse(argv)
  return flags.command(_check if args.check else convert, args)


if __name__ == '__main__':
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  sys.exit(main())
