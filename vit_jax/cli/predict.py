"""Classify image files, detect their objects or segment them.

  python -m vit_jax.predict CHECKPOINT IMAGE_OR_FOLDER... --topk=5
  python -m vit_jax.predict DETR street.jpg --threshold=0.7 --out=seen
  python -m vit_jax.predict SEGMENTATION street.jpg --out=seen

The command prints one row per prediction, file by file. The rows of a file are
sorted, the highest probability first.

DETR: rows also have boxes (x0, y0, x1, y1) in pixels. --out is a folder for
pictures with boxes and masks.

Segmentation: rows have a class's share of the pixels instead of a probability.
--out is a folder for pictures with painted classes, and for PNG files of class
indices.

The command reports unreadable files on standard error and processes the other
files. If a file is unreadable, the exit status is 1.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import recognise
from vit_jax.cli import flags
from vit_jax.data import decode, image_files
from vit_jax.evaluators import pretrained
from vit_jax.training import metric_log

COLUMNS = ('file', 'rank', 'class', 'probability')
BOX = ('x0', 'y0', 'x1', 'y1')
# Output columns and valid flags of each model task.
TASKS = {
  'classes': (COLUMNS, ('topk',)),
  'objects': (COLUMNS + BOX, ('threshold', 'out')),
  'masks': ((*COLUMNS[:3], 'share'), ('out',)),
}
THRESHOLD, TOPK = 0.7, 5

Row = dict[str, Any]


def find_files(paths: Sequence[str]) -> list[str]:
  """Returns the given files, and all images at any depth of given folders.

  Raises FileNotFoundError if a path is missing, or a folder has no images.
  """
  found = []
  for path in paths:
    if not os.path.isdir(path):
      if not os.path.exists(path):
        raise FileNotFoundError(
          f'No file or folder at {path}. Give an existing path.'
        )
      found.append(path)
      continue
    inside, others = image_files.list_images(path)
    image_files.warn_left_out(path, others)
    if not inside:
      raise FileNotFoundError(
        f'The folder {path} has no image files. Give a folder with images.'
      )
    found += inside
  return found


def main() -> int:
  parser = flags.parser('predict', __doc__)
  parser.add_argument('checkpoint', help=recognise.WHAT_OPENS)
  images = 'image files, or folders with images'
  parser.add_argument('images', nargs='+', help=images)
  add = parser.option
  topk = f'for classifiers: predictions per file (default: {TOPK})'
  add('--topk', None, topk, type=flags.positive)
  formats = 'output format; json is a list of objects'
  add('--format', 'table', formats, choices=('table', 'csv', 'json'))
  threshold = 'for DETR: minimum probability of the listed objects'
  threshold += f' (default: {THRESHOLD})'
  add('--threshold', None, threshold, type=float)
  add('--out', None, 'for DETR and segmentation: folder for painted images')
  args = parser.parse_args()
  if args.threshold is not None and not 0 <= args.threshold <= 1:
    parser.error(f'--threshold is {args.threshold}; it must be from 0 to 1.')
  return flags.command(_run, args)


def _run(args: argparse.Namespace) -> int:
  paths = find_files(args.images)
  checkpoint = opening.open_checkpoint(args.checkpoint)
  checkpoint.check_head()
  task = checkpoint.model.task
  columns, apply = TASKS.get(task, TASKS['classes'])
  for name in ('topk', 'threshold', 'out'):
    if getattr(args, name) is not None and name not in apply:
      raise ValueError(
        f'{args.checkpoint} predicts {task}, but --{name} does not apply to '
        f'{task}. Leave out --{name}.'
      )
  least = THRESHOLD if args.threshold is None else args.threshold
  results: Iterator[Any]
  if task == 'objects':
    from vit_jax.projects.detr import detections

    results = detections.find(checkpoint, paths, least, args.out)
  elif task == 'masks':
    from vit_jax.projects.segmentation import painting

    results = painting.find(checkpoint, paths, args.out)
  else:
    model = pretrained.TrainedModel(checkpoint)
    results = model.stream(paths, args.topk or TOPK)
  unreadable = 0

  def readable() -> Iterator[list[Row]]:
    nonlocal unreadable
    # The bar appears after two seconds, and only in a terminal.
    bar = tqdm(results, total=len(paths), unit=' files', delay=2, disable=None)
    for path, result in zip(paths, bar, strict=True):
      if isinstance(result, decode.UnreadableImage):
        unreadable += 1
        tqdm.write(flags.lines(f'unreadable: {result}'), file=sys.stderr)
        continue
      if not result:
        line = f'{path}: no object has a probability of {least:g} or more'
        tqdm.write(flags.lines(line), file=sys.stderr)
      rows = [(path, rank, *one) for rank, one in enumerate(result, 1)]
      yield [dict(zip(columns, row, strict=True)) for row in rows]

  names = checkpoint.class_names or (str(checkpoint.model.num_classes - 1),)
  for text in texts(readable(), args.format, paths, names, columns):
    tqdm.write(text, file=sys.stdout, end='')
    sys.stdout.flush()  # a reader of the pipe sees each row at once
  if args.out:
    flags.say(f'written {args.out}: pictures of all readable files')
  return 1 if unreadable else 0


def texts(
  found: Iterable[list[Row]],
  format_name: str,
  paths: Sequence[str],
  names: Sequence[str],
  columns: Sequence[str] = COLUMNS,
) -> Iterator[str]:
  """Yields text for each row as soon as it is found; JSON only at the end.

  All `paths` and class `names` set the widths of a table's columns.
  """
  rows = itertools.chain.from_iterable(found)
  if format_name == 'json':
    yield json.dumps(list(rows), indent=2) + '\n'
    return
  if format_name == 'csv':
    yield metric_log.csv_text([columns])
    for row in rows:
      cells = (row[name] for name in columns)
      yield metric_log.csv_text(
        [[flags.cell(x) if isinstance(x, str) else x for x in cells]]
      )
    return
  file_width = max(len(flags.printable(path)) for path in paths)
  class_width = max(len(flags.short(name)) for name in names)
  for row in rows:
    file, name = flags.printable(row['file']), flags.short(row['class'])
    yield (
      f'{file:<{file_width}}  {row["rank"]:>2}  {name:<{class_width}}  '
      f'{row[columns[3]]:7.2%}'
      + ''.join(f'  {row[side]:7.1f}' for side in columns[len(COLUMNS) :])
      + '\n'
    )


if __name__ == '__main__':
  sys.exit(main())
