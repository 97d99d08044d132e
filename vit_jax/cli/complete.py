"""Completes images with a causal iGPT and prints their bits per pixel.

  python -m vit_jax.complete CHECKPOINT photo.jpg --keep=0.5 --samples=4 \
      --out=complete.png

The command keeps the upper rows of pixels and samples the other pixels from the
model, one by one. The written picture has a row for each image: the image in
the model's palette, its kept part, and the samples.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

from etils import epath

from vit_jax.checkpoints.formats.recognise import WHAT_OPENS
from vit_jax.cli import flags
from vit_jax.projects.igpt import completion


def main(argv: Sequence[str] | None = None) -> int:
  parser = flags.parser('complete', __doc__)
  parser.add_argument('checkpoint', help=WHAT_OPENS)
  parser.add_argument('images', nargs='+', help='image files')
  add = parser.option
  keep = 'share of pixel rows to keep, from the top'
  add('--keep', 0.5, keep, type=flags.share)
  add('--samples', 4, 'samples per image', type=flags.positive)
  add('--temperature', 1.0, 'values below 1 favour likely pixels')
  add('--seed', 0, 'random seed')
  out = 'picture to write; replaces an existing file'
  add('--out', 'complete.png', out, metavar='FILE.png')
  args = parser.parse_args(argv)
  if not args.temperature > 0:
    parser.error(f'--temperature is {args.temperature}; it must be above 0.')
  if not args.out.endswith('.png'):
    parser.error(f'--out is {args.out}; the name must end in .png.')
  return flags.command(_run, args)


def _run(args: argparse.Namespace) -> None:
  folder, name = os.path.split(args.out)
  # Make the folder first, because it may fail, and sampling takes minutes.
  epath.Path(folder).mkdir(parents=True, exist_ok=True)
  names = 'keep', 'samples', 'temperature', 'seed'
  options = {name: getattr(args, name) for name in names}
  found: list[completion.Completed] = []
  for one in completion.complete(args.checkpoint, args.images, **options):
    path = args.images[len(found)]
    print(f'{flags.printable(path)}  {one.bits:.3f} bits per pixel', flush=True)
    found.append(one)
  shown = [pathlib.Path(path).name for path in args.images]
  flags.write_files(folder, {name: completion.picture(found, shown)})


if __name__ == '__main__':
  sys.exit(main())
