"""Write COCO annotations for images with masks, to train DETR.

  python -m vit_jax.data ./pennfudan --class=person

The folder has images/ and masks/ with files of the same names. A pixel of a
mask is 0, or the number of its object. The command writes instances.json, which
`--config=configs/detr.py:r50,./pennfudan` reads.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from vit_jax.cli import flags
from vit_jax.data import atomic_files
from vit_jax.projects.detr import mask_files


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status: 0, or 2 for bad input."""
  parser = flags.parser('data', __doc__)
  parser.add_argument('folder', help='with images/ and masks/')
  parser.add_argument(
    '--class',
    dest='class_name',
    default='object',
    help='class of all objects (default: object)',
  )
  return flags.command(_run, parser.parse_args(argv))


def _run(args: argparse.Namespace) -> None:
  target = pathlib.Path(args.folder) / 'instances.json'
  atomic_files.refuse_existing(str(target))
  found = mask_files.instances(target.parent, args.class_name)
  with atomic_files.new_file(str(target)) as partial:
    partial.write_text(json.dumps(found), encoding='utf-8')
  print(
    f'written  {target}: {len(found["images"])} images, '
    f'{len(found["annotations"])} objects'
  )


if __name__ == '__main__':
  sys.exit(main())
