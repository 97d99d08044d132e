"""Labels image files with any checkpoint.

  python -m vit_jax.predict CHECKPOINT IMAGE_OR_FOLDER... --topk=5

Prints one row a prediction, the likeliest first, as soon as it is known. A file
that cannot be read is reported on standard error and the others go on; the exit
status is then 1.
"""

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from vit_jax import flags
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import recognise
from vit_jax.data import decode, folder

BATCH_SIZE = 32
COLUMNS = ('file', 'rank', 'class', 'probability')
# Of a class name in a table; ImageNet has some of 120 characters.
MAX_WIDTH = 40

Row = dict[str, Any]


def predict(
  checkpoint: opening.Checkpoint, paths: Sequence[str], topk: int
) -> Iterator[tuple[str, list[Row] | decode.UnreadableImage]]:
  """Labels files, in their order.

  Yields:
    The path, and its rows of `COLUMNS` (probability: the softmax over the
    classes) or why it could not be read. There are `topk` rows a file, or as
    many as there are classes.
  """
  names = checkpoint.class_names or tuple(
    map(str, range(checkpoint.model.num_classes))
  )
  topk = min(topk, len(names))
  transform = checkpoint.transform()

  @jax.jit
  def top(logits_BC: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.lax.top_k(jax.nn.softmax(logits_BC), topk)

  def load(path: str) -> np.ndarray | decode.UnreadableImage:
    try:
      return transform.image(decode.read_file(path), path)
    except decode.UnreadableImage as e:
      return e

  with futures.ThreadPoolExecutor() as pool:
    for start in range(0, len(paths), BATCH_SIZE):
      batch = paths[start : start + BATCH_SIZE]
      loaded = list(pool.map(load, batch))
      images_BHWC = np.zeros((BATCH_SIZE, *checkpoint.image_size, 3), np.uint8)
      for i, image in enumerate(loaded):
        if isinstance(image, np.ndarray):
          images_BHWC[i] = image
      values, indices = jax.device_get(top(checkpoint.logits(images_BHWC)))
      for i, (path, image) in enumerate(zip(batch, loaded, strict=True)):
        if isinstance(image, decode.UnreadableImage):
          yield path, image
          continue
        ranked = enumerate(zip(indices[i], values[i], strict=True), 1)
        rows = [(path, rank, names[c], float(p)) for rank, (c, p) in ranked]
        yield path, [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def find_files(paths: Sequence[str]) -> list[str]:
  """Returns the files named, and the images in the folders named, sorted.

  Raises:
    FileNotFoundError: for a path that does not exist or a folder that has no
      image.
  """
  found = []
  for path in paths:
    if not os.path.isdir(path):
      if not os.path.exists(path):
        raise FileNotFoundError(f'No file or folder at {path}.')
      found.append(path)
      continue
    inside = sorted(
      os.path.join(parent, name)
      for parent, _, names in os.walk(path)
      for name in names
      if folder.is_image_name(name)
    )
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
    '--topk', type=int, default=5, help='predictions a file (default: 5)'
  )
  parser.add_argument(
    '--format',
    choices=('table', 'csv', 'json'),
    default='table',
    help='table for people (default), csv, or json: a list of objects',
  )
  args = parser.parse_args()
  if args.topk < 1:
    parser.error(f'--topk={args.topk}: at least 1 prediction is needed.')
  return flags.command(_run, args)


def _run(args: argparse.Namespace) -> int:
  paths = find_files(args.images)
  checkpoint = opening.open_checkpoint(args.checkpoint)
  if not checkpoint.model.num_classes:
    raise ValueError(f'{args.checkpoint} has no head: it predicts nothing.')
  unreadable = 0

  def readable() -> Iterator[list[Row]]:
    nonlocal unreadable
    results = predict(checkpoint, paths, args.topk)
    # Silent where there is no terminal, or no time for anyone to wonder.
    for _, result in tqdm(
      results, total=len(paths), unit=' files', delay=2, disable=None
    ):
      if isinstance(result, decode.UnreadableImage):
        unreadable += 1
        tqdm.write(f'unreadable: {result}', file=sys.stderr)
      else:
        yield result

  names = checkpoint.class_names or (str(checkpoint.model.num_classes - 1),)
  for text in texts(readable(), args.format, paths, names):
    tqdm.write(text, file=sys.stdout, end='')
    sys.stdout.flush()  # for whoever waits at the end of a pipe
  return 1 if unreadable else 0


def texts(
  found: Iterable[list[Row]],
  format_name: str,
  paths: Sequence[str],
  names: Sequence[str],
) -> Iterator[str]:
  """Yields what is printed of the rows of each file, as they are found.

  Args:
    found: rows of `COLUMNS`, by file.
    format_name: 'table', 'csv' or 'json'.
    paths: of all files, and
    names: of all classes, which say how wide a table is.
  """
  if format_name == 'json':
    between = '[\n  '
    for rows in found:
      for row in rows:
        yield between + json.dumps(row, indent=2).replace('\n', '\n  ')
        between = ',\n  '
    yield '[]\n' if between[0] == '[' else '\n]\n'
  elif format_name == 'csv':
    yield ','.join(COLUMNS) + '\n'
    for rows in found:
      lines = io.StringIO()
      writer = csv.DictWriter(lines, COLUMNS, lineterminator='\n')
      for row in rows:
        cells = {name: flags.cell(row[name]) for name in ('file', 'class')}
        writer.writerow(row | cells)
      yield lines.getvalue()
  else:
    file_width, class_width = (
      max(len(flags.printable(text)) for text in column)
      for column in (paths, names)
    )
    for rows in found:
      for row in rows:
        file, name = (flags.printable(row[key]) for key in ('file', 'class'))
        yield (
          f'{file:<{file_width}}  {row["rank"]:>2}  '
          f'{name:<{min(class_width, MAX_WIDTH)}}  {row["probability"]:7.2%}\n'
        )


if __name__ == '__main__':
  sys.exit(main())
