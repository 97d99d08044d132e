"""Measure few-shot accuracy of a checkpoint on frozen features.

  python -m vit_jax.fewshot CHECKPOINT DATASET --shots=1,5,10,25 --seeds=5

For each seed and each number in --shots, the command draws this many training
examples (shots) per class. It fits a linear classifier to them by least squares
and measures accuracy on the whole test split. The model itself is not trained.
The command prints a table and writes fewshot.csv and fewshot.png.

--probe also fits a logistic regression to all training examples. --knn also
measures k-NN with 20 neighbours among all training examples. --probe
--layers=all measures only a logistic regression, on the features of every
layer, and writes accuracy by layer to layers.csv and layers.png.

To plot the results of several checkpoints in one picture:

  python -m vit_jax.evaluators A/fewshot.csv B/fewshot.csv
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
  checkpoint = opening.open_checkpoint(args.checkpoint)
  names = ['train_split', 'test_split', 'batch_size']
  if not args.layers:
    names += ['shots', 'seeds', 'layer', 'l2', 'probe', 'knn']
  options = {name: getattr(args, name) for name in names}
  H, W = checkpoint.image_size
  if args.image_size:
    H, W = images.size_of(args.image_size, '--image_size')
  options['image_size'] = None if (H, W) == checkpoint.image_size else (H, W)
  data = flags.data_of(args.dataset, args)
  what = 'all images' if args.layers else f'{args.layer}, {H}x{W} pixels: shots'
  title = (
    f'{args.checkpoint}\non {args.dataset}: {what} from {args.train_split}, '
    f'accuracy on {args.test_split}'
  )
  if args.layers:
    found = fewshot.probe_layers(checkpoint, data, **options)
    table, files = report.layers_table(found), report.layers_files(found, title)
  else:
    curve = fewshot.fewshot(checkpoint, data, **options)
    table, files = report.table(curve), report.files(curve, title)
  if jax.process_index() == 0:
    print(f'\n{table}')
    flags.write_files(args.output, files)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = flags.parser('fewshot', __doc__)
  add = parser.option
  flags.add_subject(parser)
  shots = 'numbers of examples per class'
  add('--shots', '1,5,10,25', shots, type=_shots, metavar='K1,K2,...')
  seeds = 'number of times the shots are drawn'
  add('--seeds', fewshot.SEEDS, seeds, type=flags.positive)
  add(
    '--layer',
    'pre_logits',
    'features to use: pre_logits (the input of the head), logits, or block_N '
    '(the output of layer N, from 0)',
  )
  add(
    '--l2',
    'choose',
    'L2 penalty of the least squares: choose takes the value with the best '
    'leave-one-out accuracy on the shots (2^10 if there is one shot per class);'
    " fixed is big_vision's protocol, with 2^10",
    choices=('choose', 'fixed'),
  )
  probe = 'also fit a logistic regression to all training examples'
  add('--probe', False, probe)
  add(
    '--knn',
    False,
    'also measure k-NN with 20 neighbours among all training examples (cosine '
    'similarity, temperature 0.07)',
  )
  add(
    '--layers',
    None,
    'with --probe: fit a logistic regression to each layer instead of measuring'
    ' few-shot accuracy',
    choices=('all',),
  )
  for kind in ('train', 'test'):
    add(
      f'--{kind}_split',
      '',
      f'{kind} split (default: {kind}, or the split that a benchmark such as '
      'vtab/dtd defines)',
    )
  add(
    '--image_size',
    None,
    'image size, such as 384 or 384x512; position embeddings are interpolated '
    "(default: the checkpoint's)",
  )
  size = f'global batch size (default: {fewshot.BATCH_PER_DEVICE} per device)'
  add('--batch_size', None, size, type=flags.positive)
  output = 'folder for the .csv and .png; existing files are replaced'
  add('--output', OUTPUT, output, metavar='FOLDER')
  add(
    '--distributed',
    False,
    'run as one of several processes, like --distributed of python -m '
    'vit_jax.main',
  )
  args = parser.parse_args(argv)
  if args.layers and not args.probe:
    parser.error('--layers=all needs --probe. Add --probe.')
  if args.layers and args.knn:
    parser.error('--layers=all does not measure k-NN. Leave out --knn.')
  usual = parser.parse_args(['', ''])
  for name in ('layer', 'l2', 'shots', 'seeds') if args.layers else ():
    if getattr(args, name) != getattr(usual, name):
      parser.error(f'--layers=all does not use --{name}. Leave out --{name}.')
  train, test = benchmarks.usual_splits(args.dataset)
  args.train_split = args.train_split or train
  args.test_split = args.test_split or test
  return args


def _shots(text: str) -> tuple[int, ...]:
  return tuple(sorted({flags.positive(part) for part in text.split(',')}))


def main(argv: Sequence[str] | None = None) -> int:
  args = parse(argv)
  return flags.command(_together if args.distributed else _run, args)


def _together(args: argparse.Namespace) -> None:
  """Runs together with other processes. If one process fails, all end."""
  processes.join()
  with processes.failing_together():
    try:
      _run(args)
    except flags.ENDINGS as e:
      sys.exit(flags.status(e))


if __name__ == '__main__':
  sys.exit(main())
