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
import collections
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from vit_jax import flags
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats.recognise import WHAT_OPENS
from vit_jax.data import bad_images, sources, whole
from vit_jax.evaluators import few_examples
from vit_jax.training import features, metric_log, plots, sharding

OUTPUT = 'runs/evaluate'
BATCH_PER_DEVICE = 64
# Of which a matrix is written, a few megabytes; with names along the picture.
MAX_CLASSES, MAX_NAMED = 1000, 40


class Measures(NamedTuple):
  """What is measured of predictions.

  Attributes:
    accuracy: share of the images whose likeliest class is the right one.
    top5: share of those with the right class among the five likeliest.
    balanced: mean over the classes that have images of the share of theirs.
    confusion_CC: images by class and by predicted class, integers.
  """

  accuracy: float
  top5: float
  balanced: float
  confusion_CC: np.ndarray


def measures(
  labels_N: np.ndarray, likeliest_Nk: np.ndarray, C: int
) -> Measures:
  """Returns what is measured of the k <= 5 likeliest of C classes.

  Args:
    labels_N: the right classes.
    likeliest_Nk: predicted ones, the likeliest first.
    C: number of classes.
  """
  confusion_CC = np.zeros((C, C), np.int64)
  np.add.at(confusion_CC, (labels_N, likeliest_Nk[:, 0]), 1)
  images_C = confusion_CC.sum(axis=1)
  there = images_C > 0
  right_C = np.diag(confusion_CC)
  return Measures(
    accuracy=float(right_C.sum() / len(labels_N)),
    top5=float(np.mean(np.any(likeliest_Nk == labels_N[:, None], axis=1))),
    balanced=float(np.mean(right_C[there] / images_C[there])),
    confusion_CC=confusion_CC,
  )


def same_classes(
  checkpoint: opening.Checkpoint, names: tuple[str, ...]
) -> np.ndarray:
  """Returns the checkpoint's class for each class of a data set.

  By name; by number where the checkpoint has no names.

  Raises:
    ValueError: if it has no head, or lacks a class.
  """
  C = checkpoint.model.num_classes
  if not C:
    raise ValueError(f'{checkpoint.path} has no head: it predicts nothing.')
  if not checkpoint.class_names:
    if len(names) != C:
      raise ValueError(
        f'{checkpoint.path} has {C:,} classes without names, and the data '
        f'{len(names):,}: they cannot be told apart.'
      )
    return np.arange(C)
  if tuple(names) == tuple(checkpoint.class_names):
    return np.arange(C)
  times = collections.Counter(checkpoint.class_names)
  if twice := [name for name in names if times[name] > 1]:
    raise ValueError(
      f'{checkpoint.path} has several classes named {twice[0]!r}, which cannot '
      'be told apart by their names: give images of all its classes, in its '
      'order.'
    )
  known = {name: i for i, name in enumerate(checkpoint.class_names)}
  if missing := [name for name in names if name not in known]:
    raise ValueError(
      f'{checkpoint.path} does not know {len(missing):,} of the {len(names):,} '
      f'classes, such as {missing[0]!r}; it knows '
      f'{checkpoint.class_names[0]!r} and others. Fine-tune it on these, or '
      'give images of what it knows.'
    )
  return np.array([known[name] for name in names])


def classes_csv(found: Measures, names: Sequence[str]) -> str:
  """Returns a line for each class that has images or was predicted."""
  confusion_CC = found.confusion_CC
  rows = []
  for i, name in enumerate(names):
    images, predicted = confusion_CC[i].sum(), confusion_CC[:, i].sum()
    if not images and not predicted:
      continue
    right = confusion_CC[i, i]
    others = np.where(np.arange(len(names)) == i, 0, confusion_CC[i])
    most = int(np.argmax(others))
    rows.append(
      [
        flags.cell(name),
        images,
        right / images if images else '',
        right / predicted if predicted else '',
        flags.cell(names[most]) if others[most] else '',
        others[most],
      ]
    )
  head = ['class', 'images', 'accuracy', 'precision', 'taken_for', 'times']
  return ''.join(map(metric_log.csv_line, [head, *rows]))


def confusion_csv(found: Measures, names: Sequence[str]) -> str:
  """Returns a row for each class, a column for each that was predicted."""
  cells = [flags.cell(name) for name in names]
  rows = zip(cells, found.confusion_CC.tolist(), strict=True)
  lines = [['class', *cells], *([name, *row] for name, row in rows)]
  return ''.join(map(metric_log.csv_line, lines))


def plot(found: Measures, names: Sequence[str], title: str) -> bytes:
  """Returns a PNG of the share of each class's images by prediction."""
  C = len(names)
  confusion_CC = found.confusion_CC
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


def evaluate(args: argparse.Namespace) -> None:
  """Measures, prints and writes.

  Raises:
    OSError: if checkpoint, data or the folder is not there.
    ValueError: if they do not fit together.
  """
  checkpoint = opening.open_checkpoint(args.checkpoint)
  source = sources.labelled(
    bad_images.open_checked(flags.data_of(args.dataset, args), args.split),
    f'{args.dataset} {args.split}',
  )
  class_C = same_classes(checkpoint, source.class_names)
  folder = epath.Path(args.output)
  folder.mkdir(parents=True, exist_ok=True)
  mesh = sharding.make_mesh({'data': -1, 'fsdp': 1, 'tensor': 1})
  C = checkpoint.model.num_classes
  extractor = features.Extractor(
    features.top_k(checkpoint.model, min(5, C)),
    checkpoint.images,
    batch_size=BATCH_PER_DEVICE * mesh.size,
    mesh=mesh,
  )
  params = jax.device_put(checkpoint.params, sharding.replicated(mesh))
  likeliest_Nk = extractor(params, source, f'{args.split} images')
  is_read_N = features.is_read(likeliest_Nk)
  labels_N = class_C[source.labels()[is_read_N]]
  found = measures(labels_N, likeliest_Nk[is_read_N], C)
  names = checkpoint.class_names or source.class_names
  print(_table(found, names, len(labels_N)))
  files = {'classes.csv': classes_csv(found, names).encode()}
  if C <= MAX_CLASSES:
    title = f'{args.checkpoint}\non {args.dataset} {args.split}'
    files['confusion.csv'] = confusion_csv(found, names).encode()
    files['confusion.png'] = plot(found, names, title)
  for name, content in files.items():
    whole.replace(folder / name, content)
    print(f'written            {folder / name}')


def _table(found: Measures, names: Sequence[str], count: int) -> str:
  """Returns the measures, and what is confused most, for a terminal."""
  lines: Mapping[str, str] = {
    'images': f'{count:,}',
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
  add = parser.add_argument
  add('checkpoint', help=WHAT_OPENS)
  add('dataset', help=flags.WHAT_IS_LABELLED)
  add('--split', default='', help="default: the benchmark's, or test")
  flags.add_data(parser)
  add(
    '--output',
    default=OUTPUT,
    metavar='FOLDER',
    help='for classes.csv, confusion.csv and confusion.png, which are replaced '
    f'if they are there (default: {OUTPUT})',
  )
  args = parser.parse_args(argv)
  args.split = args.split or few_examples.usual_splits(args.dataset)[1]
  return flags.command(evaluate, args)


if __name__ == '__main__':
  sys.exit(main())
