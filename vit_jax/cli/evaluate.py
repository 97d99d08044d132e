"""Reports accuracy per class and the confusion matrix.

  python -m vit_jax.evaluate CHECKPOINT DATASET --output=runs/evaluate

The command runs a classifier on all images of a split. It prints top-1
accuracy, balanced accuracy (the mean of the class accuracies) and, for more
than five classes, top-5 accuracy. It writes classes.csv, with the most frequent
confusion of each class. For up to 1,000 classes it also writes confusion.csv
and confusion.png. Their rows are true classes, their columns predicted classes.

If images have several classes, the command prints the means of average
precision and F1, and both for the worst classes. It writes only classes.csv.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from vit_jax.cli import flags
from vit_jax.data import benchmarks
from vit_jax.evaluators import confusion, final
from vit_jax.evaluators.confusion import Measures, SeveralMeasures
from vit_jax.training import metric_log, plots

OUTPUT = 'runs/evaluate'
MAX_CLASSES = 1000  # with more, no confusion matrix is written
MAX_NAMED = 40  # with more, confusion.png has no class names


def classes_csv(found: Measures) -> str:
  """Returns a CSV with a line per class that has images or was predicted."""
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


def several_csv(found: SeveralMeasures) -> str:
  """Returns a CSV with a line per class, for images with several classes."""
  m = found.measures
  columns = m.images_C.tolist(), m.ap_C.tolist(), m.f1_C.tolist()
  cells = map(flags.cell, found.class_names)
  head = ['class', 'images', 'average_precision', 'f1']
  return metric_log.csv_text([head, *zip(cells, *columns, strict=True)])


def confusion_csv(found: Measures) -> str:
  """Returns a CSV with a row per true and a column per predicted class."""
  cells = [flags.cell(name) for name in found.class_names]
  rows = zip(cells, found.confusion_CC.tolist(), strict=True)
  return metric_log.csv_text(
    [['class', *cells], *([name, *row] for name, row in rows)]
  )


def plot(found: Measures, title: str) -> bytes:
  """Draws the confusion matrix, normalised by row, as a PNG."""
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
  if isinstance(found, SeveralMeasures):
    print('\n'.join(final.several_lines(found)))
    flags.write_files(args.output, {'classes.csv': several_csv(found)})
    return
  print(table(found))
  files: dict[str, str | bytes] = {'classes.csv': classes_csv(found)}
  if len(found.class_names) <= MAX_CLASSES:
    title = f'{args.checkpoint}\non {args.dataset} {args.split}'
    files['confusion.csv'] = confusion_csv(found)
    files['confusion.png'] = plot(found, title)
  flags.write_files(args.output, files)


def table(found: Measures) -> str:
  """Returns a table of the measures and the most confused classes."""
  lines = [('images', f'{found.confusion_CC.sum():,}')]
  lines.append(('accuracy', f'{found.accuracy:.2%}'))
  if len(found.class_names) > 5:
    lines.append(('top-5', f'{found.top5:.2%}'))
  lines.append(('balanced', f'{found.balanced:.2%}'))
  for _, text in confusion.most_confused(found):
    lines.append(('confused', flags.printable(text)))
  return '\n'.join(f'{name:<9}  {text}' for name, text in lines)


def main(argv: Sequence[str] | None = None) -> int:
  parser = flags.parser('evaluate', __doc__)
  flags.add_subject(parser)
  parser.option(
    '--split',
    '',
    'split to evaluate (default: test, or the test split that a benchmark such '
    'as imagenet2012 defines)',
  )
  parser.option(
    '--output',
    OUTPUT,
    'folder for classes.csv, confusion.csv and confusion.png; existing files '
    'are replaced',
    metavar='FOLDER',
  )
  args = parser.parse_args(argv)
  args.split = args.split or benchmarks.usual_splits(args.dataset)[1]
  return flags.command(_run, args)


if __name__ == '__main__':
  sys.exit(main())
