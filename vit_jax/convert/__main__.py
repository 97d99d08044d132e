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
from collections.abc import Callable, Sequence

from vit_jax import flags
from vit_jax.checkpoints import opening, transfer
from vit_jax.checkpoints.formats.recognise import WHAT_OPENS
from vit_jax.data import images, whole
from vit_jax.models import flops

# What takes a checkpoint's arrays, and what takes the model itself.
WEIGHTS = ('npz', 'bigvision', 'timm', 'hf')
PROGRAMS = ('onnx', 'stablehlo', 'orbax')

TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Request:
  """What a conversion is to do.

  Attributes:
    source: any checkpoint.
    target: new file or directory.
    to: one of `WEIGHTS` or `PROGRAMS`.
    image_size: (H, W) to resize to, None to keep the source's.
    head: one of `transfer.HEADS`.
    dtype: of the weights in the target; None for float32.
    rollout: whether an ONNX file puts out the attention rollout besides.
  """

  source: str
  target: str
  to: str
  image_size: tuple[int, int] | None = None
  head: str = 'keep'
  dtype: str | None = None
  rollout: bool = False


def convert(request: Request, say: Callable[[str], None]) -> None:
  """Converts a checkpoint.

  Args:
    request: what to do.
    say: takes a line for whoever waits.

  Raises:
    FileExistsError: if there is something at the target.
    FileNotFoundError: if the source, or the target's folder, is not there.
    ImportError: if a library is not installed, saying which.
    ValueError: if the source cannot be read, or the target cannot hold it.
  """
  module = writer(request.to)
  dtype = request.dtype or 'float32'
  if dtype not in module.DTYPES:
    raise ValueError(
      f'--dtype={dtype} is none of --to={request.to}: use '
      f'{" or ".join(module.DTYPES)}.'
    )
  if request.rollout and request.to != 'onnx':
    raise ValueError('--rollout needs --to=onnx.')
  whole.refuse_existing(request.target)
  checkpoint = opening.open_checkpoint(request.source)
  say(f'read      {checkpoint.path}: {_describe(checkpoint)}')
  checkpoint = _adapt(checkpoint, request, say)
  if request.to in WEIGHTS:
    lost = module.write(checkpoint.weights(), request.target, dtype)
  else:
    options = {'rollout': True} if request.rollout else {}
    lost = module.write(checkpoint, request.target, dtype, **options)
  size_bytes = _size_bytes(request.target)
  say(
    f'written   {request.target}: {request.to}, {dtype}, '
    f'{size_bytes / 1e6:,.1f} MB'
  )
  for sentence in lost:
    say(f'not held  {sentence}')


def writer(to: str) -> types.ModuleType:
  """Returns the module that writes one of `WEIGHTS` or `PROGRAMS`."""
  folder = 'checkpoints.formats' if to in WEIGHTS else 'convert'
  return importlib.import_module(f'vit_jax.{folder}.{to}')


def _adapt(
  checkpoint: opening.Checkpoint, request: Request, say: Callable[[str], None]
) -> opening.Checkpoint:
  """Changes size, head and positions, and says so."""
  if request.image_size and request.image_size != checkpoint.image_size:
    checkpoint = transfer.resized(checkpoint, request.image_size)
    say(
      'resized   position embeddings to images of '
      f'{"x".join(map(str, request.image_size))} pixels'
    )
  if request.head != 'keep':
    checkpoint = transfer.with_head(checkpoint, request.head)
    kept = (
      ', the representation layer is kept'
      if request.head == 'representation'
      else ''
    )
    say(f'dropped   the head, as --head={request.head} says{kept}')
  model, body = checkpoint.model, checkpoint.model.body()
  if request.to in WEIGHTS and model.kind != body.kind:
    raise ValueError(
      f'{checkpoint.path} is a {type(model).__name__}, and --to={request.to} '
      f'has no place for what it predicts: --head=drop keeps its body, a '
      f'{type(body).__name__}.'
    )
  if request.to in WEIGHTS:
    learned = transfer.with_learned_positions(checkpoint)
    if learned is not checkpoint:
      say(
        'rewritten the position embeddings as learned 1-D ones: the same '
        'numbers, which further training would change'
      )
    checkpoint = learned
  return checkpoint


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


def _size_bytes(target: str) -> int:
  path = pathlib.Path(target)
  files = path.rglob('*') if path.is_dir() else [path]
  return sum(file.stat().st_size for file in files if file.is_file())


def run_check(source: str, target: str, tolerance: float) -> bool:
  """Prints how two checkpoints differ; tells whether they agree."""
  # Here, because it imports every framework's module.
  from vit_jax.convert import check

  found = check.compare(source, target)
  height, width = found.image_size
  agree = found.difference <= tolerance
  print(
    f'source      {source}: {found.source}\n'
    f'target      {target}: {found.target}\n'
    f'images      {check.IMAGES} random ones of {height}x{width} pixels\n'
    f'difference  {found.difference:.1e} of the largest output '
    f'({found.largest:.3g}); {"within" if agree else "ABOVE"} the tolerance of '
    f'{tolerance:g}\n'
    f'top-1       the same for {found.agreement} of {check.IMAGES}'
  )
  return agree


def parse(argv: Sequence[str]) -> argparse.Namespace:
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
    help='pixels, as in 384 or 384x512: resizes the position embeddings '
    "(default: the source's)",
  )
  parser.add_argument(
    '--head',
    choices=transfer.HEADS,
    default='keep',
    help='keep all of it (default), keep the representation layer and drop the '
    'classifier, or drop both',
  )
  parser.add_argument(
    '--dtype',
    help='float32 (default), bfloat16 (bigvision, timm, hf, stablehlo), '
    'float16 (timm, hf), int8 (onnx)',
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
  """Runs the command.

  Returns:
    0; 1 if a check finds a difference; 2 for bad input.
  """
  args = parse(sys.argv[1:] if argv is None else argv)
  return flags.command(_run, args)


def _run(args: argparse.Namespace) -> int:
  if args.check:
    return int(not run_check(args.source, args.target, args.tolerance))
  convert(
    Request(
      source=args.source,
      target=args.target,
      to=args.to,
      image_size=images.size_of(args.image_size) if args.image_size else None,
      head=args.head,
      dtype=args.dtype,
      rollout=args.rollout,
    ),
    say=lambda line: print(line, flush=True),
  )
  return 0


if __name__ == '__main__':
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  sys.exit(main())
