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
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax import flags
from vit_jax.checkpoints import opening, transfer
from vit_jax.checkpoints.formats.recognise import WHAT_OPENS
from vit_jax.data import bad_images, benchmarks, images, whole
from vit_jax.data.sources import LabelledSource, Source, labelled, subset
from vit_jax.evaluators import (
  feature_file,
  features,
  few_examples,
  layer_probe,
  probe,
)
from vit_jax.evaluators import fewshot_curves as report
from vit_jax.models import flops
from vit_jax.training import processes, sharding

SHOTS, SEEDS, OUTPUT = (1, 5, 10, 25), 5, 'runs/fewshot'

# Images at a time, which fit wherever a model was trained.
BATCH_PER_DEVICE = 64

Say = Callable[[str], None]
# By layer.
Probes = dict[str, report.ProbeResult]


def measure(args: argparse.Namespace, say: Say) -> report.Curve:
  """Measures few-shot accuracy and writes what was found.

  All processes call it together and share the work on the images; the first one
  writes. They must see the same files. `say` takes a line for whoever waits.

  Raises:
    OSError: if checkpoint, data or a folder is not there, or a file cannot be
      written.
    ValueError: for flags that cannot work, before the model is run, or for
      representations that are not finite.
  """
  mesh = sharding.make_mesh({'data': -1, 'fsdp': 1, 'tensor': 1})
  batch_size = _batch_size(args.batch_size, mesh)
  is_kept = feature_file.is_there(args.features)
  checkpoint = original = opening.open_checkpoint(args.checkpoint)
  if args.image_size:
    size = images.size_of(args.image_size)
    checkpoint = transfer.resized(original, size)
  function = features.layer(checkpoint.model, args.layer)
  say(_describe(checkpoint))
  train, test = _open(args, say)
  kept = _contents(args, original, checkpoint, train, test)
  names = kept.class_names
  plan = few_examples.plan(
    kept.train_labels_N, len(names), args.shots, args.seeds, names
  )
  if args.probe:
    probe.hold_out(kept.train_labels_N)  # refuses too few before the work
  is_first = jax.process_index() == 0
  if is_first:
    epath.Path(args.output).mkdir(parents=True, exist_ok=True)

  if args.features or args.probe:
    rows_R = np.arange(len(train))
  else:
    rows_R = few_examples.rows_needed(plan)
  if is_kept:
    train_RD, test_MD = feature_file.read(args.features, kept)
    say(f'read     {args.features}; the model is not run')
  else:
    extractor = _extractor(function, checkpoint, batch_size, mesh)
    params = jax.device_put(checkpoint.params, sharding.replicated(mesh))
    shots = subset(train, rows_R.tolist())
    train_RD = _extract(extractor, params, shots, 'training images', say)
    test_MD = _extract(extractor, params, test, 'test images', say)
    if args.features and is_first:
      feature_file.write(args.features, kept, train_RD, test_MD)
      say(f'written  {args.features}')
  results = few_examples.evaluate(
    plan,
    kept.train_labels_N,
    rows_R,
    train_RD,
    test_MD,
    kept.test_labels_M,
    num_classes=len(names),
    l2=args.l2,
  )
  probed = _probe(kept, train_RD, test_MD, mesh, say) if args.probe else None
  curve = report.Curve(args.checkpoint, results, probed)
  if is_first:
    _write(curve, args, checkpoint, say)
  return curve


def measure_layers(args: argparse.Namespace, say: Say) -> Probes:
  """Fits a linear probe to every layer and writes what was found.

  Processes, `say` and errors are as `measure` has them.
  """
  mesh = sharding.make_mesh({'data': -1, 'fsdp': 1, 'tensor': 1})
  batch_size = _batch_size(args.batch_size, mesh)
  checkpoint = opening.open_checkpoint(args.checkpoint)
  if args.image_size:
    size = images.size_of(args.image_size)
    checkpoint = transfer.resized(checkpoint, size)
  model = checkpoint.model
  say(_describe(checkpoint))
  splits = _open(args, say)
  labels = [split.labels() for split in splits]
  probe.hold_out(labels[0])  # refuses too few before the work
  is_first = jax.process_index() == 0
  if is_first:
    epath.Path(args.output).mkdir(parents=True, exist_ok=True)
  extractor = _extractor(
    layer_probe.every_layer(model), checkpoint, batch_size, mesh
  )
  params = jax.device_put(checkpoint.params, sharding.replicated(mesh))
  train, test = (
    layer_probe.split(
      model,
      params,
      checkpoint.image_size,
      _extract(extractor, params, split, f'{what} images', say),
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
  if is_first:
    title = (
      f'{args.checkpoint}\non {args.dataset}: all of {args.train_split}, '
      f'accuracy on {args.test_split}'
    )
    files = {
      layer_probe.CSV: layer_probe.csv_text(found).encode(),
      layer_probe.PLOT: layer_probe.plot(found, title),
    }
    _put(files, args.output, layer_probe.table(found), say)
  return found


def _extractor(
  function: features.Function,
  checkpoint: opening.Checkpoint,
  batch_size: int,
  mesh: jax.sharding.Mesh,
) -> features.Extractor:
  """Returns what applies a function to images as the checkpoint has them."""
  return features.Extractor(
    function,
    images.Images(
      checkpoint.image_size, **dataclasses.asdict(checkpoint.preprocessing)
    ),
    batch_size=batch_size,
    mesh=mesh,
  )


def _batch_size(given: int | None, mesh: jax.sharding.Mesh) -> int:
  if given is None:
    return BATCH_PER_DEVICE * mesh.size
  if given % mesh.size:
    raise ValueError(
      f'--batch_size={given} cannot be shared evenly by {mesh.size} devices: '
      f'use a multiple of {mesh.size}, such as '
      f'{-(-given // mesh.size) * mesh.size}.'
    )
  return given


def _describe(checkpoint: opening.Checkpoint) -> str:
  """Returns the model, and what is done to its images."""
  height, width = checkpoint.image_size
  given = checkpoint.preprocessing
  way = (
    f'the short side to {given.resize_small} pixels, the centre of '
    f'{height}x{width} cut out'
    if given.resize_small
    else f'resized to {height}x{width} pixels'
  )
  mean, std = (' '.join(f'{x:.4g}' for x in v) for v in (given.mean, given.std))
  return (
    f'model    {type(checkpoint.model).__name__}, '
    f'{flops.count_params(checkpoint.model, checkpoint.image_size):,} '
    f'parameters, {checkpoint.path}\n'
    f'images   {way} ({given.interpolation}), mean {mean}, deviation {std}'
  )


def _open(
  args: argparse.Namespace, say: Say
) -> tuple[LabelledSource, LabelledSource]:
  """Opens both splits, their images checked.

  Raises:
    ValueError: if their classes differ, and as `sources.open_source`.
  """
  config = ConfigDict(
    {
      'name': args.dataset,
      'dir': args.data_dir,
      'split_seed': args.split_seed,
      'on_bad_image': args.on_bad_image,
    }
  )
  train, test = (
    labelled(bad_images.open_checked(config, split), f'{args.dataset} {split}')
    for split in (args.train_split, args.test_split)
  )
  if train.class_names != test.class_names:
    raise ValueError(
      f'The classes of {args.dataset} {args.test_split} are not those of '
      f'{args.train_split}.'
    )
  say(
    f'data     {args.dataset}, {len(train.class_names):,} classes: '
    f'{len(train):,} images of {args.train_split}, '
    f'{len(test):,} of {args.test_split}'
  )
  return train, test


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
      'parameters': feature_file.identity(original),
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
  extractor: features.Extractor,
  params: Any,
  source: Source,
  what: str,
  say: Say,
) -> np.ndarray:
  """Returns the representations ND of all images, and says how long it took.

  Raises:
    ValueError: if they are not finite.
  """
  started_s = time.monotonic()
  x_ND = extractor(params, source, what)
  elapsed_s = time.monotonic() - started_s
  if not np.isfinite(x_ND).all():
    raise ValueError(
      f'The representations of the {what} are not finite. Has the model '
      'diverged?'
    )
  say(
    f'run on   {len(source):,} {what} in {elapsed_s:,.1f} s, '
    f'{len(source) / elapsed_s:,.0f} images/s: {x_ND.shape[1]:,} numbers each'
  )
  return x_ND


def _probe(
  kept: feature_file.Contents,
  train_ND: np.ndarray,
  test_MD: np.ndarray,
  mesh: jax.sharding.Mesh,
  say: Say,
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
  say(
    f'probed   all training images in {time.monotonic() - started_s:,.1f} s: '
    f'{found.heldout_accuracy:.2%} on the tenth held out, then '
    f'{found.iterations} iterations on all{end}'
  )
  return report.ProbeResult(found.l2, found.accuracy)


def _write(
  curve: report.Curve,
  args: argparse.Namespace,
  checkpoint: opening.Checkpoint,
  say: Say,
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
  _put(files, args.output, report.table(curve), say)


def _put(files: Mapping[str, bytes], output: str, table: str, say: Say) -> None:
  """Says what was found, and writes files into a folder."""
  say(f'\n{table}')
  for name, content in files.items():
    whole.replace(epath.Path(output) / name, content)
    say(f'written  {epath.Path(output) / name}')


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Returns the flags; exits with status 2 for those that make no sense."""
  parser = flags.parser('fewshot', __doc__)
  add = parser.add_argument
  add('checkpoint', help=WHAT_OPENS)
  add(
    'dataset',
    help="'digits', a folder with one sub-folder a class, written with a "
    "slash, a TFDS name, or 'vtab/TASK'",
  )
  add(
    '--shots',
    type=_shots,
    default=SHOTS,
    metavar='K1,K2,...',
    help='examples of each class (default: 1,5,10,25)',
  )
  add(
    '--seeds',
    type=_positive,
    default=SEEDS,
    help=f'how many times the shots are drawn (default: {SEEDS})',
  )
  add(
    '--layer',
    default='pre_logits',
    help='pre_logits (default: what the head sees), logits, or block_N: after '
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
  add('--data_dir', default='', help='where TFDS has its data sets')
  add(
    '--split_seed',
    type=int,
    default=0,
    help='of what is held out where the data bring no test split (default: 0)',
  )
  add(
    '--on_bad_image',
    choices=('error', 'skip'),
    default='error',
    help='what to do about unreadable images (default: error)',
  )
  add(
    '--image_size',
    help='pixels, as in 384 or 384x512: resizes the position embeddings '
    "(default: the checkpoint's own)",
  )
  add(
    '--batch_size',
    type=_positive,
    help='images at a time over all devices (default: '
    f'{BATCH_PER_DEVICE} on each)',
  )
  add(
    '--output',
    default=OUTPUT,
    metavar='FOLDER',
    help=f'for {report.CSV} and {report.PLOT}, which are replaced if they are '
    f'there (default: {OUTPUT})',
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
  usual = benchmarks.benchmark(args.dataset)
  args.train_split = args.train_split or (usual.train if usual else 'train')
  args.test_split = args.test_split or (usual.test if usual else 'test')
  return args


def _shots(text: str) -> tuple[int, ...]:
  return tuple(sorted({_positive(part) for part in text.split(',')}))


def _positive(text: str) -> int:
  if not text.strip().isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text!r} is no whole number above 0')
  return int(text)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status: 0, or 2 for bad input."""
  return flags.command(_run, parse(sys.argv[1:] if argv is None else argv))


def _run(args: argparse.Namespace) -> None:
  if args.distributed:
    processes.join()
  is_first = jax.process_index() == 0
  measured = measure_layers if args.layers else measure
  measured(args, say=lambda line: print(line, flush=True) if is_first else None)


if __name__ == '__main__':
  sys.exit(main())
