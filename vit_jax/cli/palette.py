"""Choose a colour palette for iGPT from the images of a dataset.

  python -m vit_jax.palette DATASET --colours=512 --out=palette.npy

The command clusters pixels by k-means in RGB. It writes the cluster centres,
from dark to bright, as a float32 array (colours, 3) in [-1, 1]. configs/igpt.py
reads the file when a run starts or resumes. Opening a checkpoint does not need
the file, because checkpoints store the colours.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from vit_jax.cli import flags
from vit_jax.data import atomic_files, images
from vit_jax.projects.igpt import palette


def main(argv: Sequence[str] | None = None) -> int:
  parser = flags.parser('palette', __doc__)
  what = "dataset of images: 'digits', a folder, a TFDS name, ..."
  parser.add_argument('dataset', help=what)
  add = parser.option
  add('--colours', 512, 'palette size')
  out = 'file to write; it must not exist'
  add('--out', None, out, required=True, metavar='FILE.npy')
  add('--split', 'train', 'split of the data')
  flags.add_data(parser)
  add('--image_size', '32', 'pixels, as 32 or 32x48 (height x width)')
  args = parser.parse_args(argv)
  if args.colours < 2:
    parser.error(f'--colours is {args.colours}; it must be 2 or more.')
  if not args.out.endswith('.npy'):
    parser.error(f'--out is {args.out}; the name must end in .npy.')
  return flags.command(_run, args)


def _run(args: argparse.Namespace) -> None:
  atomic_files.refuse_existing(args.out)
  size = images.size_of(args.image_size, '--image_size')
  data = flags.data_of(args.dataset, args)
  colours_KC = palette.palette(data, args.colours, args.split, size)
  with atomic_files.new_file(args.out) as new, new.open('wb') as file:
    np.save(file, colours_KC)
  print(f'written  {args.out}: {args.colours} colours')


if __name__ == '__main__':
  sys.exit(main())
