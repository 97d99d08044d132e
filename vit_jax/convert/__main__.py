"""Converts a checkpoint to the format of another framework.

  python -m vit_jax.convert SOURCE TARGET --to=timm
  python -m vit_jax.convert --check SOURCE TARGET

The format of SOURCE is detected. TARGET is written completely or not at all.

  --to=npz        the .npz of the ViT paper's code (for a ResNet, BiT's .npz)
  --to=bigvision  big_vision's .npz
  --to=timm       a directory for timm.create_model('local-dir:TARGET')
  --to=hf         a directory for transformers' from_pretrained
  --to=onnx       one file for onnxruntime, with any batch size
  --to=stablehlo  a directory with a program, which jax.export runs without
                  this package
  --to=orbax      a workdir of this package
  --to=board      a directory with a web server for the model, which runs
                  without JAX; --dtype=int8 writes both float32 and int8, and
                  the server uses the faster one

--check runs SOURCE and TARGET on the same random images and prints the largest
difference of their outputs. ONNX and StableHLO programs run in their own
runtimes.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from vit_jax.checkpoints import transfer
from vit_jax.checkpoints.formats.recognise import WHAT_OPENS
from vit_jax.cli import flags
from vit_jax.convert.convert import PROGRAMS, WEIGHTS, convert
from vit_jax.data import images

TOLERANCE = 1e-4


def _run(args: argparse.Namespace) -> int | None:
  if args.check:
    # Imported here, so that conversion loads no other exporter.
    from vit_jax.convert import check

    return int(not check.agree(args.source, args.target, args.tolerance))
  size = args.image_size and images.size_of(args.image_size, '--image_size')
  names = 'to', 'dtype', 'head', 'loss', 'rollout', 'opset'
  options = {name: getattr(args, name) for name in names}
  for sentence in convert(
    args.source, args.target, image_size=size or None, **options
  ):
    print(f'note      {sentence}')
  return None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = flags.parser('convert', __doc__)
  parser.add_argument('source', help=WHAT_OPENS)
  target = 'new file or directory; with --check, the existing one to compare'
  parser.add_argument('target', help=target)
  add = parser.option
  add('--to', None, 'target format', choices=WEIGHTS + PROGRAMS)
  check = 'only compare SOURCE and TARGET; both may be exported programs'
  add('--check', False, check)
  add(
    '--image_size',
    None,
    'image size in pixels, as in 384 or 384x512; learned position embeddings '
    "are resized to it (default: the source's image size)",
  )
  add(
    '--head',
    'keep',
    'keep the whole head, drop the classifier but keep the representation '
    'layer, or drop both',
    choices=transfer.HEADS,
  )
  add(
    '--loss',
    None,
    'training loss of the head, which most source formats do not store '
    "(default: the source's loss, or softmax)",
    choices=('softmax', 'sigmoid'),
  )
  add(
    '--dtype',
    'float32',
    'float32, bfloat16 (bigvision, timm, hf, stablehlo), float16 (timm, hf, '
    'onnx), int8 (onnx, board)',
  )
  rollout = 'with --to=onnx, also output the attention rollout'
  add('--rollout', False, rollout)
  add(
    '--opset',
    None,
    'with --to=onnx, the opset version (default: the lowest that the model '
    'needs)',
    type=flags.positive,
  )
  add(
    '--tolerance',
    TOLERANCE,
    'with --check, the largest accepted difference, relative to the largest '
    'output; use 0.02 for bfloat16, 0.005 for float16, 0.1 for int8',
  )
  args = parser.parse_args(argv)
  if not args.check and args.to is None:
    parser.error(f'--to is needed: one of {", ".join(WEIGHTS + PROGRAMS)}.')
  return args


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command and returns its exit status.

  The status is 1 if a check fails; see `flags.command` for other statuses.
  """
  args = parse(argv)
  return flags.command(_run, args)


if __name__ == '__main__':
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  sys.exit(main())
