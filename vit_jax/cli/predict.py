"""Labels image files with any checkpoint, or finds objects in them with DETR.

  python -m vit_jax.predict CHECKPOINT IMAGE_OR_FOLDER... --topk=5
  python -m vit_jax.predict DETR street.jpg --threshold=0.7 --out=seen

Prints one row a prediction, the likeliest first, as soon as it is known; those
of DETR have boxes (x0, y0, x1, y1) in pixels, and --out receives each image
with its boxes drawn, and masks where it has them, and COCO's results. A file
that cannot be read is reported on standard error and the others go on; the exit
status is then 1.
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
from vit_jax.data import atomic_files, decode, image_files
from vit_jax.evaluators import pretrained
from vit_jax.projects.detr import segments
from vit_jax.training import metric_log

COLUMNS = ('file', 'rank', 'class', 'probability')
BOX = ('x0', 'y0', 'x1', 'y1')
THRESHOLD, TOPK = 0.7, 5
# Of a class name in a table; ImageNet has some of 120 characters.
MAX_WIDTH = 40

Row = dict[str, Any]


def predict(
  checkpoint: opening.Checkpoint, paths: Sequence[str], topk: int
) -> Iterator[tuple[str, list[Row] | decode.UnreadableImage]]:
  """Labels files, in their order.

  Yields:
    The path, and its rows of `COLUMNS`, `topk` or as many as there are
    classes, or why it could not be read.
  """
  found = pretrained.TrainedModel(checkpoint).stream(paths, topk)
  for path, best in zip(paths, found, strict=True):
    if isinstance(best, decode.UnreadableImage):
      yield path, best
    else:
      rows = [(path, rank, *one) for rank, one in enumerate(best, 1)]
      yield path, [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def find_objects(
  checkpoint: opening.Checkpoint,
  paths: Sequence[str],
  threshold: float,
  out: str,
) -> Iterator[tuple[str, list[Row] | decode.UnreadableImage]]:
  """Finds objects in files, in their order.

  Args:
    checkpoint: of DETR.
    paths: of images.
    threshold: the least probability of the objects.
    out: a folder for pictures and `coco.json`; empty for none.

  Yields:
    The path, and its rows of `COLUMNS` and `BOX` or why it could not be read.
  """
  from vit_jax.projects.detr import detections
  from vit_jax.visualize import photos

  C = checkpoint.model.num_classes
  names = tuple(map(checkpoint.class_name, range(C)))
  detector = detections.Detector(checkpoint, threshold)
  results: list[dict[str, Any]] = []
  each = zip(
    paths,
    photos.unique_names(paths) if out else paths,
    detections.coco_ids(paths),
    strict=True,
  )
  try:
    for path, stem, image_id in each:
      try:
        shown_HWC, found = detector(path)
      except decode.UnreadableImage as e:
        yield path, e
        continue
      if out:
        results += detections.coco_results(image_id, found)
        drawn = detections.picture(shown_HWC, found, names)
        atomic_files.replace(os.path.join(out, f'objects-{stem}.png'), drawn)
      rows = [
        (path, rank, names[c], float(p), *(round(float(x), 1) for x in box_4))
        for rank, (c, p, box_4) in enumerate(zip(*found[:3], strict=True), 1)
      ]
      yield path, [dict(zip(COLUMNS + BOX, x, strict=True)) for x in rows]
  finally:
    # Also what was found before somebody ended it.
    if out:
      text = json.dumps(results, indent=1)
      atomic_files.replace(os.path.join(out, 'coco.json'), text.encode())


def find_files(paths: Sequence[str]) -> list[str]:
  """Returns the files named, and the images of folders by `list_images`."""
  found = []
  for path in paths:
    if not os.path.isdir(path):
      if not os.path.exists(path):
        raise FileNotFoundError(f'No file or folder at {path}.')
      found.append(path)
      continue
    inside, others = image_files.list_images(path)
    image_files.warn_left_out(path, others)
    if not inside:
      raise FileNotFoundError(f'The folder {path} has no image files.')
    found += inside
  return found


def main() -> int:
  """Runs the command; returns its exit status."""
  parser = flags.parser('predict', __doc__)
  parser.add_argument('checkpoint', help=recognise.WHAT_OPENS)
  parser.add_argument(
    'images', nargs='+', help='image files, and folders searched for images'
  )
  parser.add_argument(
    '--topk',
    type=flags.positive,
    help=f'of classes: predictions a file (default: {TOPK})',
  )
  parser.add_argument(
    '--format',
    choices=('table', 'csv', 'json'),
    default='table',
    help='table for people (default), csv, or json: a list of objects',
  )
  parser.add_argument(
    '--threshold',
    type=float,
    help='least probability of what DETR finds and is told of '
    f'(default: {THRESHOLD})',
  )
  parser.add_argument(
    '--out',
    help="of DETR: folder for the images with boxes and masks, and COCO's "
    'results',
  )
  args = parser.parse_args()
  if args.threshold is not None and not 0 <= args.threshold <= 1:
    parser.error(f'--threshold={args.threshold}: give a share from 0 to 1.')
  return flags.command(_run, args)


def _run(args: argparse.Namespace) -> int:
  paths = find_files(args.images)
  checkpoint = opening.open_checkpoint(args.checkpoint)
  if not checkpoint.model.num_classes:
    raise ValueError(f'{args.checkpoint} has no head: it predicts nothing.')
  finds_objects = checkpoint.model.task == 'objects'
  if not finds_objects and (args.out or args.threshold is not None):
    raise ValueError(
      f'--out and --threshold are of boxes, and {args.checkpoint} finds none, '
      'only classes: leave them out.'
    )
  if finds_objects and args.topk:
    raise ValueError(
      f'--topk is of classes, and {args.checkpoint} finds objects: say by '
      '--threshold how many.'
    )
  if args.out:
    if getattr(checkpoint.model, 'masks', False):
      segments.require_library(f'--out with the masks of {args.checkpoint}')
    os.makedirs(args.out, exist_ok=True)
  unreadable = 0

  def readable() -> Iterator[list[Row]]:
    nonlocal unreadable
    least = THRESHOLD if args.threshold is None else args.threshold
    if finds_objects:
      results = find_objects(checkpoint, paths, least, args.out)
    else:
      results = predict(checkpoint, paths, args.topk or TOPK)
    # Silent where there is no terminal, or no time for anyone to wonder.
    for path, result in tqdm(
      results, total=len(paths), unit=' files', delay=2, disable=None
    ):
      if isinstance(result, decode.UnreadableImage):
        unreadable += 1
        tqdm.write(flags.lines(f'unreadable: {result}'), file=sys.stderr)
        continue
      if not result:
        line = f'{path}: no object has a probability of {least:g} or more'
        tqdm.write(flags.lines(line), file=sys.stderr)
      yield result

  names = checkpoint.class_names or (str(checkpoint.model.num_classes - 1),)
  columns = COLUMNS + BOX if finds_objects else COLUMNS
  for text in texts(readable(), args.format, paths, names, columns):
    tqdm.write(text, file=sys.stdout, end='')
    sys.stdout.flush()  # for whoever waits at the end of a pipe
  if args.out:
    flags.say(f'written {args.out}: an image for each file read, coco.json')
  return 1 if unreadable else 0


def texts(
  found: Iterable[list[Row]],
  format_name: str,
  paths: Sequence[str],
  names: Sequence[str],
  columns: Sequence[str] = COLUMNS,
) -> Iterator[str]:
  """Yields the text of the rows of each file in a format, as they are found.

  The paths of all files and names of all classes give the width of a table.
  """
  if format_name == 'json':
    between = '[\n  '
    for row in itertools.chain.from_iterable(found):
      yield between + json.dumps(row, indent=2).replace('\n', '\n  ')
      between = ',\n  '
    yield '[]\n' if between[0] == '[' else '\n]\n'
  elif format_name == 'csv':
    yield ','.join(columns) + '\n'
    for row in itertools.chain.from_iterable(found):
      cells = (row[name] for name in columns)
      yield metric_log.csv_line(
        [flags.cell(x) if isinstance(x, str) else x for x in cells]
      )
  else:
    file_width, class_width = (
      max(len(flags.printable(text)) for text in column)
      for column in (paths, names)
    )
    for row in itertools.chain.from_iterable(found):
      file, name = (flags.printable(row[key]) for key in ('file', 'class'))
      yield (
        f'{file:<{file_width}}  {row["rank"]:>2}  '
        f'{name:<{min(class_width, MAX_WIDTH)}}  {row["probability"]:7.2%}'
        + ''.join(f'  {row[side]:7.1f}' for side in columns[len(COLUMNS) :])
        + '\n'
      )


if __name__ == '__main__':
  sys.exit(main())
