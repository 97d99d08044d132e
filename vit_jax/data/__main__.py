"""Write images as ArrayRecord files, or masks as COCO annotations.

  python -m vit_jax.data ./photos --shards=./photos-shards
  python -m vit_jax.data ./pennfudan --class=person

With --shards, the command writes a dataset as ArrayRecord files to a new
folder. The images must have at most one class each. Train on it with
`--config.data.name=arrayrecord:./photos-shards`.

Without --shards, the command writes COCO annotations to train DETR. The folder
must have images/ and masks/. The mask of images/a.jpg is masks/a.png or
masks/a_mask.png. A mask pixel is the number of its object, 0 for background, or
255 for a border. 255 is an object if a mask has the object 254, or if the masks
have only 0 and 255. The result is instances.json in the folder. Train on it
with `--config=configs/detr.py:r50,./pennfudan`.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from vit_jax.cli import flags
from vit_jax.data import atomic_files, write_shards
from vit_jax.projects.detr import mask_files


def main(argv: Sequence[str] | None = None) -> int:
  parser = flags.parser('data', __doc__)
  folder = 'folder with images/ and masks/; with --shards, a dataset name'
  parser.add_argument('folder', help=folder)
  add = parser.option
  add('--class', 'object', 'class of all objects', dest='class_name')
  add('--shards', None, 'the new folder of ArrayRecord files')
  add(
    '--splits',
    None,
    'splits that --shards writes (default: train, val and test, if they exist)',
  )
  args = parser.parse_args(argv)
  return flags.command(_write_shards if args.shards else _annotate, args)


def _write_shards(args: argparse.Namespace) -> None:
  target = args.shards.rstrip('/')
  names = args.splits.split(',') if args.splits else ()
  sizes = write_shards.write(args.folder, target, names)
  files = sorted(pathlib.Path(target).glob('*.array_record'))
  counts = ', '.join(f'{count:,} in {key}' for key, count in sizes.items())
  size_mb = sum(path.stat().st_size for path in files) / 1e6
  print(f'written  {target}: {len(files)} files, {size_mb:,.0f} MB')
  print(f'images   {counts}')
  print(f'use      --config.data.name=arrayrecord:{target}')


def _annotate(args: argparse.Namespace) -> None:
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
