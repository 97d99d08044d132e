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
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax import flags
from vit_jax.checkpoints import opening, transfer
from vit_jax.checkpoints.formats.recognise import WHAT_OPENS
from vit_jax.data import images, whole
from vit_jax.data.sources import LabelledSource, Source, subset
from vit_jax.evaluators import (
  feature_file,
  few_examples,
  layer_probe,
  probe,
  ridge,
)
from vit_jax.evaluators import fewshot_curves as report
from vit_jax.models import flops
from vit_jax.training import features, processes, sharding

SHOTS, SEEDS, OUTPUT = (1, 5, 10, 25), 5, 'runs/fewshot'

# Images at a time, which fit wherever a model was trained.
BATCH_PER_DEVICE = 64


def measure(args: argparse.Namespace) -> None:
  """Measures few-shot accuracy and writes what was found.

  All processes call it together and share the work on the images; the first one
  writes and prints. They must see the same files.

  Raises:
    OSError: if checkpoint, data or a folder is not there, or a file cannot be
      written.
    ValueError: for flags that cannot work, before the model is run, or for
      representations that are not finite.
  """
  mesh, batch_size = _devices(args)
  is_kept = feature_file.is_there(args.features)
  checkpoint = original = opening.open_checkpoint(args.checkpoint)
  if args.image_size:
    size = images.size_of(args.image_size, '--image_size')
    checkpoint = transfer.resized(original, size)
  function = features.layer(checkpoint.model, args.layer)
  _say(_describe(checkpoint))
  train, test = _open(args)
  kept = _contents(args, original, checkpoint, train, test)
  drawn = few_examples.Shots(
    kept.train_labels_N,
    kept.test_labels_M,
    kept.class_names,
    shots=args.shots,
    seeds=args.seeds,
    l2=args.l2,
  )
  if args.probe:
    probe.hold_out(kept.train_labels_N)  # refuses too few before the work
  _make_folder(args.output)
  is_first = jax.process_index() == 0
  only_shots = not (args.features or args.probe)
  if is_kept:
    train_XD, test_MD = feature_file.read(args.features, kept)
    _say(f'read     {args.features}; the model is not run')
  else:
    extractor = features.Extractor(
      function, checkpoint.images, batch_size=batch_size, mesh=mesh
    )
    params = sharding.place(checkpoint.params, sharding.replicated(mesh))
    some = subset(train, drawn.rows_R.tolist()) if only_shots else train
    train_XD = _extract(extractor, params, some, 'training')
    test_MD = _extract(extractor, params, test, 'test')
    if args.features and is_first:
      feature_file.write(args.features, kept, train_XD, test_MD)
      _say(f'written  {args.features}')
  shots_RD = train_XD if only_shots else train_XD[drawn.rows_R]
  results = drawn.evaluate(shots_RD, test_MD)
  probed = _probe(kept, train_XD, test_MD, mesh) if args.probe else None
  if is_first:
    curve = report.Curve(args.checkpoint, results, probed)
    _write(curve, args, checkpoint)


def measure_layers(args: argparse.Namespace) -> None:
  """Fits a linear probe to every layer and writes what was found.

  Processes and errors are as `measure` has them.
  """
  mesh, batch_size = _devices(args)
  checkpoint = opening.open_checkpoint(args.checkpoint)
  if args.image_size:
    size = images.size_of(args.image_size, '--image_size')
    checkpoint = transfer.resized(checkpoint, size)
  model = checkpoint.model
  _say(_describe(checkpoint))
  splits = _open(args)
  labels = [split.labels() for split in splits]
  probe.hold_out(labels[0])  # refuses too few before the work
  _make_folder(args.output)
  extractor = features.Extractor(
    layer_probe.every_layer(model),
    checkpoint.images,
    batch_size=batch_size,
    mesh=mesh,
  )
  params = sharding.place(checkpoint.params, sharding.replicated(mesh))
  train, test = (
    layer_probe.split(
      model,
      params,
      checkpoint.image_size,
      _extract(extractor, params, split, what),
    )
    for split, what in zip(splits, ('training', 'test'), strict=True)
  )
  found = {}
  for name in train:
    fitted = probe.fit_probe(
      train[name],
      labels[0],
      test[name],
      labels[1],
      num_classes=len(splits[0].class_names),
      mesh=mesh,
    )
    found[name] = report.ProbeResult(fitted.l2, fitted.accuracy)
    if not fitted.converged:
      _say(
        f'probed   {name}: {fitted.iterations} iterations were not enough to '
        'converge'
      )
  if jax.process_index() == 0:
    title = (
      f'{args.checkpoint}\non {args.dataset}: all of {args.train_split}, '
      f'accuracy on {args.test_split}'
    )
    files = {
      layer_probe.CSV: layer_probe.csv_text(found).encode(),
      layer_probe.PLOT: layer_probe.plot(found, title),
    }
    _put(files, args.output, layer_probe.table(found))


def _devices(args: argparse.Namespace) -> tuple[jax.sharding.Mesh, int]:
  """Returns the mesh of all devices, and the images at a time."""
  mesh = sharding.make_mesh({'data': -1, 'fsdp': 1, 'tensor': 1})
  batch_size = args.batch_size or BATCH_PER_DEVICE * mesh.size
  if batch_size % mesh.size:
    raise ValueError(
      f'--batch_size={batch_size} cannot be shared evenly by {mesh.size} '
      f'devices: use a multiple of {mesh.size}, such as '
      f'{-(-batch_size // mesh.size) * mesh.size}.'
    )
  return mesh, batch_size


def _say(text: str) -> None:
  if jax.process_index() == 0:
    print(text, flush=True)


def _describe(checkpoint: opening.Checkpoint) -> str:
  """Returns the model, and what is done to its images."""
  height, width = checkpoint.image_size
  given = checkpoint.preprocessing
  way = f'resized to {height}x{width} pixels'
  if given.resize_small:
    way = (
      f'the short side to {given.resize_small} pixels, the centre of '
      f'{height}x{width} cut out'
    )
  mean, std = (' '.join(f'{x:.4g}' for x in v) for v in (given.mean, given.std))
  return (
    f'model    {type(checkpoint.model).__name__}, '
    f'{flops.count_params(checkpoint.model, checkpoint.image_size):,} '
    f'parameters, {checkpoint.path}\n'
    f'images   {way} ({given.interpolation}), mean {mean}, deviation {std}'
  )


def _open(args: argparse.Namespace) -> tuple[LabelledSource, LabelledSource]:
  """Opens both splits, their images checked.

  Raises:
    ValueError: if their classes differ, and as `sources.open_source`.
  """
  train, test = few_examples.open_splits(
    flags.data_of(args.dataset, args), args.train_split, args.test_split
  )
  _say(
    f'data     {args.dataset}, {len(train.class_names):,} classes: '
    f'{len(train):,} images of {args.train_split}, '
    f'{len(test):,} of {args.test_split}'
  )
  return train, test


def _make_folder(output: str) -> None:
  """Makes the folder of the results, before the work."""
  if jax.process_index() == 0:
    epath.Path(output).mkdir(parents=True, exist_ok=True)


def _contents(
  args: argparse.Namespace,
  original: opening.Checkpoint,
  checkpoint: opening.Checkpoint,
  train: LabelledSource,
  test: LabelledSource,
) -> feature_file.Contents:
  """Returns what representations depend on, and their labels."""
  return feature_file.Contents(
    facts={
      # Of no use, and long in the making for billions, where no file is kept.
      'parameters': args.features and feature_file.identity(original),
      'layer': args.layer,
      'image_size': list(checkpoint.image_size),
      'preprocessing': dataclasses.asdict(checkpoint.preprocessing),
      'dataset': args.dataset,
      'train_split': args.train_split,
      'test_split': args.test_split,
      'split_seed': args.split_seed,
      'train_files': train.fingerprint(),
      'test_files': test.fingerprint(),
    },
    train_labels_N=train.labels(),
    test_labels_M=test.labels(),
    class_names=train.class_names,
  )


def _extract(
  extractor: features.Extractor, params: Any, source: Source, split: str
) -> np.ndarray:
  """Returns the representations ND of all images, and says how long it took.

  Raises:
    ValueError: if they are not finite, or an image cannot be read any more.
  """
  started_s = time.monotonic()
  x_ND = extractor(params, source, f'{split} images')
  elapsed_s = time.monotonic() - started_s
  if gone := np.sum(~features.is_read(x_ND)):
    raise ValueError(
      f'{gone} of {len(x_ND)} {split} images cannot be read any more: run it '
      'again, without them.'
    )
  ridge.check_finite(split, x_ND)
  _say(
    f'run on   {len(source):,} {split} images in {elapsed_s:,.1f} s, '
    f'{len(source) / elapsed_s:,.0f} images/s: {x_ND.shape[1]:,} numbers each'
  )
  return x_ND


def _probe(
  kept: feature_file.Contents,
  train_ND: np.ndarray,
  test_MD: np.ndarray,
  mesh: jax.sharding.Mesh,
) -> report.ProbeResult:
  """Fits a linear probe to all training images, and says how that went."""
  started_s = time.monotonic()
  found = probe.fit_probe(
    train_ND,
    kept.train_labels_N,
    test_MD,
    kept.test_labels_M,
    num_classes=len(kept.class_names),
    mesh=mesh,
  )
  end = '' if found.converged else ', which were not enough to converge'
  _say(
    f'probed   all training images in {time.monotonic() - started_s:,.1f} s: '
    f'{found.heldout_accuracy:.2%} on the tenth held out, then '
    f'{found.iterations} iterations on all{end}'
  )
  return report.ProbeResult(found.l2, found.accuracy)


def _write(
  curve: report.Curve, args: argparse.Namespace, checkpoint: opening.Checkpoint
) -> None:
  """Writes the CSV file and the picture, and says what is in them."""
  height, width = checkpoint.image_size
  title = (
    f'{args.checkpoint}, {args.layer}, {height}x{width} pixels\n'
    f'on {args.dataset}: shots of {args.train_split}, '
    f'accuracy on {args.test_split}'
  )
  files = {
    report.CSV: report.csv_text(curve).encode(),
    report.PLOT: report.plot([curve], title),
  }
  _put(files, args.output, report.table(curve))


def _put(files: Mapping[str, bytes], output: str, table: str) -> None:
  """Says what was found, and writes files into a folder."""
  _say(f'\n{table}')
  for name, content in files.items():
    path = epath.Path(output) / name
    whole.replace(path, content)
    _say(f'written  {path}')


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
  """Returns the flags; exits with status 2 for those that make no sense."""
  parser = flags.parser('fewshot', __doc__)
  add = parser.add_argument
  add('checkpoint', help=WHAT_OPENS)
  add('dataset', help=flags.WHAT_IS_LABELLED)
  add(
    '--shots',
    type=_shots,
    default=SHOTS,
    metavar='K1,K2,...',
    help='examples of each class (default: 1,5,10,25)',
  )
  add(
    '--seeds',
    type=flags.positive,
    default=SEEDS,
    help=f'how many times the shots are drawn (default: {SEEDS})',
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
  flags.add_data(parser)
  add(
    '--image_size',
    help='pixels, as in 384 or 384x512: resizes the position embeddings '
    "(default: the checkpoint's own)",
  )
  add(
    '--batch_size',
    type=flags.positive,
    help='images at a time over all devices (default: '
    f'{BATCH_PER_DEVICE} on each)',
  )
  add(
    '--output',
    default=OUTPUT,
    metavar='FOLDER',
    help=f'for {report.CSV} and {report.PLOT}, or {layer_probe.CSV} and '
    f'{layer_probe.PLOT}, which are replaced if they are there (default: '
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
  train, test = few_examples.usual_splits(args.dataset)
  args.train_split = args.train_split or train
  args.test_split = args.test_split or test
  return args


def _shots(text: str) -> tuple[int, ...]:
  return tuple(sorted({flags.positive(part) for part in text.split(',')}))


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status: 0, or 2 for bad input."""
  args = parse(argv)
  run = measure_layers if args.layers else measure
  if args.distributed:
    run = functools.partial(_together, run)
  return flags.command(run, args)


def _together(
  run: Callable[[argparse.Namespace], None], args: argparse.Namespace
) -> None:
  """Runs with other processes, which end if one of them fails."""
  processes.join()
  with processes.failing_together():
    try:
      run(args)
    except flags.ENDINGS as e:
      sys.exit(flags.status(e))


if __name__ == '__main__':
  sys.exit(main())
