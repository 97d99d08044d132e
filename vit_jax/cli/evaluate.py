"""What a classifier gets right and what it takes for what, class by class.

  python -m vit_jax.evaluate CHECKPOINT DATASET --output=runs/evaluate

runs any checkpoint on all images of a split and prints its accuracy, that of
its five likeliest classes, and the balanced one, to which every class counts
the same however many images it has. It writes classes.csv, each class with what
it is taken for most, and for up to 1,000 classes confusion.csv and
confusion.png (a row for each class of the images, a column for each that was
predicted).
"""

import argparse
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.cli import flags
from vit_jax.data import benchmarks
from vit_jax.evaluators import confusion
from vit_jax.evaluators.confusion import Measures
from vit_jax.training import metric_log, plots

OUTPUT = 'runs/evaluate'
# Of which a matrix is written, a few megabytes; with names along the picture.
MAX_CLASSES, MAX_NAMED = 1000, 40


def classes_csv(found: Measures) -> str:
  """Returns a line for each class that has images or was predicted."""
  names, confusion_CC = found.class_names, found.confusion_CC
  others_CC = confusion_CC - np.diag(np.diag(confusion_CC))
  rows = []
  for i, name in enumerate(names):
    images, predicted = confusion_CC[i].sum(), confusion_CC[:, i].sum()
    if not images and not predicted:
      continue
    right, most = confusion_CC[i, i], int(np.argmax(others_CC[i]))
    times = others_CC[i, most]
    row = [flags.cell(name), images, right / images if images else '']
    row.append(right / predicted if predicted else '')
    rows.append([*row, flags.cell(names[most]) if times else '', times])
  head = ['class', 'images', 'accuracy', 'precision', 'taken_for', 'times']
  return metric_log.csv_text([head, *rows])


def confusion_csv(found: Measures) -> str:
  """Returns a row for each class, a column for each that was predicted."""
  cells = [flags.cell(name) for name in found.class_names]
  rows = zip(cells, found.confusion_CC.tolist(), strict=True)
  return metric_log.csv_text(
    [['class', *cells], *([name, *row] for name, row in rows)]
  )


def plot(found: Measures, title: str) -> bytes:
  """Returns a PNG of the share of each class's images by prediction."""
  names, confusion_CC = found.class_names, found.confusion_CC
  C = len(names)
  images_C1 = confusion_CC.sum(axis=1, keepdims=True)
  named = C <= MAX_NAMED
  side = 3 + (0.28 * C if named else 5)
  figure = plots.figure(side + 1, side)
  axes = figure.subplots()
  shown = axes.imshow(
    confusion_CC / np.maximum(images_C1, 1), cmap='Blues', vmin=0, vmax=1
  )
  if named:
    texts = [flags.printable(name)[:24] for name in names]
    axes.set_xticks(range(C), texts, rotation=90, parse_math=False)
    axes.set_yticks(range(C), texts, parse_math=False)
  axes.set_xlabel('predicted')
  axes.set_ylabel('class of the image')
  axes.set_title(title, fontsize='medium', parse_math=False)
  figure.colorbar(
    shown, ax=axes, label="share of the class's images", shrink=0.7
  )
  return plots.png(figure)


def _run(args: argparse.Namespace) -> None:
  data = flags.data_of(args.dataset, args)
  found = confusion.evaluate(args.checkpoint, data, args.split)
  print(table(found))
  files: dict[str, str | bytes] = {'classes.csv': classes_csv(found)}
  if len(found.class_names) <= MAX_CLASSES:
    title = f'{args.checkpoint}\non {args.dataset} {args.split}'
    files['confusion.csv'] = confusion_csv(found)
    files['confusion.png'] = plot(found, title)
  flags.write_files(args.output, files)


def table(found: Measures) -> str:
  """Returns the measures, and what is confused most, for a terminal."""
  names = found.class_names
  lines: Mapping[str, str] = {
    'images': f'{found.confusion_CC.sum():,}',
    'accuracy': f'{found.accuracy:.2%}',
    **({'of five': f'{found.top5:.2%}'} if len(names) > 5 else {}),
    'balanced': f'{found.balanced:.2%}',
  }
  # Of the cells that are not 0, as there may be 21,843 times as many classes.
  pairs = [(i, j) for i, j in np.argwhere(found.confusion_CC) if i != j]
  pairs.sort(key=lambda pair: -found.confusion_CC[pair])
  return '\n'.join(
    [f'{name:<17}  {text}' for name, text in lines.items()]
    + [
      f'taken for another  {flags.printable(names[i])} for '
      f'{flags.printable(names[j])}, {found.confusion_CC[i, j]:,} times'
      for i, j in pairs[:5]
    ]
  )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status: 0, or 2 for bad input."""
  parser = flags.parser('evaluate', __doc__)
  flags.add_subject(parser)
  add = parser.add_argument
  add('--split', default='', help="default: the benchmark's, or test")
  add(
    '--output',
    default=OUTPUT,
    metavar='FOLDER',
    help='for classes.csv, confusion.csv and confusion.png, which are replaced '
    f'if they are there (default: {OUTPUT})',
  )
  args = parser.parse_args(argv)
  args.split = args.split or benchmarks.usual_splits(args.dataset)[1]
  return flags.command(_run, args)


if __name__ == '__main__':
  sys.exit(main())
