"""Few-shot accuracy of any checkpoint, on its frozen representations.

  python -m vit_jax.fewshot CHECKPOINT DATASET --shots=1,5,10,25 --seeds=5

draws the shots of every class for each seed, fits them by least squares and
measures accuracy on the whole test split, with no step of training. It prints a
table and writes fewshot.csv and fewshot.png. With --probe it fits a logistic
regression to all training examples besides.

--layers=all fits one to every layer and draws accuracy over depth, layers.csv
and layers.png, in place of the shots.

--features=FILE.npz keeps the representations of both splits, for other tools
and for the next time: where the file is there already and holds what is asked
for, the model is not run again.

  python -m vit_jax.evaluators A/fewshot.csv B/fewshot.csv

draws several checkpoints into one picture.
"""

import argparse
import sys
from collections.abc import Sequence

import jax

from vit_jax.checkpoints import opening
from vit_jax.cli import flags
from vit_jax.data import benchmarks, images
from vit_jax.evaluators import fewshot
from vit_jax.evaluators import fewshot_report as report
from vit_jax.training import processes

OUTPUT = 'runs/fewshot'


def _run(args: argparse.Namespace) -> None:
  """Measures, prints a table and writes it with its picture."""
  checkpoint = opening.open_checkpoint(args.checkpoint)
  size = checkpoint.image_size
  if args.image_size:
    size = images.size_of(args.image_size, '--image_size')
  names = ['train_split', 'test_split', 'batch_size']
  if not args.layers:
    names += ['shots', 'seeds', 'layer', 'l2', 'probe', 'features']
  options = {name: getattr(args, name) for name in names}
  options['image_size'] = None if size == checkpoint.image_size else size
  data = flags.data_of(args.dataset, args)
  H, W = size
  what = 'all' if args.layers else f'{args.layer}, {H}x{W} pixels: shots'
  title = (
    f'{args.checkpoint}\non {args.dataset}: {what} of {args.train_split}, '
    f'accuracy on {args.test_split}'
  )
  files: dict[str, str | bytes]
  if args.layers:
    found = fewshot.probe_layers(checkpoint, data, **options)
    table = report.layers_table(found)
    files = {
      report.LAYERS_CSV: report.layers_csv(found),
      report.LAYERS_PLOT: report.layers_plot(found, title),
    }
  else:
    curve = fewshot.fewshot(checkpoint, data, **options)
    table = report.table(curve)
    files = {
      report.CSV: report.csv_text(curve),
      report.PLOT: report.plot([curve], title),
    }
  if jax.process_index() == 0:
    print(f'\n{table}')
    flags.write_files(args.output, files)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
  """Returns the flags; exits with status 2 for those that make no sense."""
  parser = flags.parser('fewshot', __doc__)
  add = parser.add_argument
  flags.add_subject(parser)
  add(
    '--shots',
    type=_shots,
    default=fewshot.SHOTS,
    metavar='K1,K2,...',
    help='examples of each class (default: 1,5,10,25)',
  )
  add(
    '--seeds',
    type=flags.positive,
    default=fewshot.SEEDS,
    help=f'how many times the shots are drawn (default: {fewshot.SEEDS})',
  )
  add(
    '--layer',
    default='pre_logits',
    help='pre_logits (default, what the head sees), logits, or block_N: after '
    'layer N, from 0',
  )
  add(
    '--l2',
    choices=('choose', 'fixed'),
    default='choose',
    help="the penalty: chosen on shots held out (default) or big_vision's 2^10",
  )
  add(
    '--probe',
    action='store_true',
    help='fit a logistic regression to all training examples besides',
  )
  add(
    '--layers',
    choices=('all',),
    help='with --probe: fit it to each layer, and nothing to the shots',
  )
  add(
    '--features',
    default='',
    metavar='FILE.npz',
    help='keep the representations of both splits, or use those kept there',
  )
  add('--train_split', default='', help="default: the benchmark's, or train")
  add('--test_split', default='', help="default: the benchmark's, or test")
  add(
    '--image_size',
    help='pixels, as in 384 or 384x512: resizes the position embeddings '
    "(default: the checkpoint's own)",
  )
  add(
    '--batch_size',
    type=flags.positive,
    help='images at a time over all devices (default: '
    f'{fewshot.BATCH_PER_DEVICE} on each)',
  )
  add(
    '--output',
    default=OUTPUT,
    metavar='FOLDER',
    help=f'for {report.CSV} and {report.PLOT}, or {report.LAYERS_CSV} and '
    f'{report.LAYERS_PLOT}, which are replaced if they are there (default: '
    f'{OUTPUT})',
  )
  add(
    '--distributed',
    action='store_true',
    help='this is one of several processes, as of python -m vit_jax.main',
  )
  args = parser.parse_args(argv)
  if args.layers and not args.probe:
    parser.error('--layers=all takes --probe.')
  if args.layers and args.features:
    parser.error('--layers=all keeps no --features.')
  for name in ('layer', 'l2', 'shots', 'seeds') if args.layers else ():
    if getattr(args, name) != parser.get_default(name):
      parser.error(f'--layers=all has no use for --{name}.')
  train, test = benchmarks.usual_splits(args.dataset)
  args.train_split = args.train_split or train
  args.test_split = args.test_split or test
  return args


def _shots(text: str) -> tuple[int, ...]:
  return tuple(sorted({flags.positive(part) for part in text.split(',')}))


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status: 0, or 2 for bad input."""
  args = parse(argv)
  return flags.command(_together if args.distributed else _run, args)


def _together(args: argparse.Namespace) -> None:
  """Runs with other processes, which end if one of them fails."""
  processes.join()
  with processes.failing_together():
    try:
      _run(args)
    except flags.ENDINGS as e:
      sys.exit(flags.status(e))


if __name__ == '__main__':
  sys.exit(main())
