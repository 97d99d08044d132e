"""Shows what a trained model looks at, and what it has learned.

  python -m vit_jax.visualize report CHECKPOINT photo.jpg a_folder/ --out=seen
  python -m vit_jax.visualize rollout CHECKPOINT pet.jpg --class=dog --class=cat
  python -m vit_jax.visualize rollout VIT a_folder/ --beside=DEIT --fusion=max
  python -m vit_jax.visualize attention CHECKPOINT photo.jpg --query=3,5
  python -m vit_jax.visualize distance CHECKPOINT a_folder/ --beside=HYBRID
  python -m vit_jax.visualize filters CHECKPOINT
  python -m vit_jax.visualize posemb CHECKPOINT
  python -m vit_jax.visualize masked CHECKPOINT photo.jpg

Each kind leaves its pictures and its arrays, WHAT.npz, in --out; the report is
a single file, report.html. Files of these names are replaced.
"""

import argparse
import io
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from vit_jax.checkpoints import opening, transfer
from vit_jax.checkpoints.formats import recognise
from vit_jax.cli import flags, predict
from vit_jax.data import atomic_files, images
from vit_jax.visualize import page, photos, predictions, sections
from vit_jax.visualize.rollout import FUSIONS
from vit_jax.visualize.sections import Section
from vit_jax.visualize.subject import Subject

# Of each kind, what it shows and what it leaves to those who plot themselves.
_KINDS = {
  'report': (
    'all of the next five as one page',
    'The page holds its pictures itself; the others leave arrays.',
  ),
  'rollout': (
    'how much of each patch reaches the output: over the photograph, alone, '
    'and the photograph without the half of low values; with --class, what '
    'speaks for that class',
    'Arrays: maps (map, image, h, w), from 0 to 1; fusions and classes of each '
    'map, an empty name for the image as a whole; files; beside_1_maps and so '
    'on for further models.',
  ),
  'attention': (
    'what one token attends to, in every layer and head',
    'Arrays: maps (image, layer, head, h, w), softmax weights; files.',
  ),
  'distance': (
    'how far heads look, in pixels (figures 7 and 11 of the paper)',
    'Arrays: all (layer, head), in pixels; beside_1_all and so on for further '
    'models.',
  ),
  'filters': (
    'principal components of the patch embedding (figure 7)',
    'Arrays: components (count, P, P, RGB), each of length 1.',
  ),
  'posemb': (
    'similarity of position embeddings (figures 7 and 10)',
    'Arrays: cosines (table, h, w, h, w), of relative embeddings (table, '
    'offset, offset), or by their names where they differ in size; names of '
    'the tables.',
  ),
  'masked': (
    'of a model that configs/masked.py trained: an image, what is hidden of '
    'it, and what the model predicts there',
    'Arrays: kind (image, h, w): 0 seen, 1 masked, 2 another patch in its '
    'place, 3 seen and predicted; images, hidden, predicted (pixels); files.',
  ),
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status: 0, or 2 for bad input."""
  return flags.command(_run, _parser().parse_args(argv))


def _run(args: argparse.Namespace) -> None:
  out = pathlib.Path(args.out)
  if out.exists() and not out.is_dir():
    raise ValueError(f'--out={args.out} is a file: name a folder.')
  said = ''
  made: dict[str, Callable[[], bytes]] = {}
  subject = _subject(args, args.checkpoint)
  checkpoint = subject.checkpoint
  about = checkpoint.model.describe(checkpoint.image_size)
  if args.what == 'report':
    html = page.report(subject, args.fusion or 'mean', args.discard)
    made['report.html'] = lambda: html.encode(errors='backslashreplace')
  else:
    section = _section(args, subject)
    said = f'{section.title}. {section.text}\n'
    for figure in [section.sheet, *section.figures]:
      if figure:
        made[f'{figure.name}.png'] = figure.draw
    arrays = io.BytesIO()
    save: Any = np.savez_compressed  # whose types take no names of arrays
    save(arrays, **section.arrays)
    made[f'{args.what}.npz'] = arrays.getvalue
  out.mkdir(parents=True, exist_ok=True)
  for name in tqdm(made, unit=' pictures', delay=2, disable=None):
    atomic_files.replace(out / name, made[name]())
  more = f' and {len(made) - 1} more' if len(made) > 1 else ''
  print(f'{said}model    {about}\nwritten  {out / next(iter(made))}{more}')


def _subject(args: argparse.Namespace, path: str) -> Subject:
  """Returns a checkpoint, and what images there are."""
  checkpoint = opening.open_checkpoint(path)
  if args.image_size:
    checkpoint = transfer.resized(
      checkpoint, images.size_of(args.image_size, '--image_size')
    )
  given = predict.find_files(getattr(args, 'images', []))
  loaded = photos.load(given, checkpoint)
  return Subject(checkpoint, loaded, path)


def _section(args: argparse.Namespace, subject: Subject) -> Section:
  """Returns what one kind makes."""
  beside = [_subject(args, path) for path in getattr(args, 'beside', [])]
  match args.what:
    case 'rollout':
      fusions = args.fusion or ['mean']
      return sections.rollout(
        [subject, *beside], fusions, args.discard, args.classes
      )
    case 'attention':
      return sections.attention(subject, args.query)
    case 'distance':
      return sections.distance([subject, *beside])
    case 'filters':
      return sections.first_filters(subject)
    case 'posemb':
      return sections.posemb(subject)
  return predictions.section(subject, args.rate, args.seed)


def _parser() -> argparse.ArgumentParser:
  parser = flags.parser('visualize', __doc__)
  kinds = parser.add_subparsers(dest='what', required=True, metavar='WHAT')
  for what, (text, arrays) in _KINDS.items():
    kind = kinds.add_parser(
      what, help=text, description=f'{what}: {text}.', epilog=arrays
    )
    add = kind.add_argument
    add('checkpoint', help=recognise.WHAT_OPENS)
    if what not in ('filters', 'posemb'):
      add('images', nargs='+', help='image files, and folders that hold some')
    add(
      '--out',
      default='visualized',
      help='folder to write to, made if missing (default: visualized)',
    )
    add(
      '--image_size',
      help='pixels that the model is to see, as in 512 or 384x512; position '
      'embeddings are interpolated (default: those of the checkpoint, or 224)',
    )
    if what in ('report', 'rollout'):
      add(
        '--fusion',
        choices=tuple(FUSIONS),
        action='append' if what == 'rollout' else 'store',
        help='of the heads (default: mean)'
        + '; may be given several times' * (what == 'rollout'),
      )
      add(
        '--discard',
        type=_share,
        default=0.0,
        help="share of each layer's lowest weights that are left out, as in "
        '0.9 (default: 0)',
      )
    if what == 'rollout':
      add(
        '--class',
        dest='classes',
        action='append',
        default=[],
        metavar='NAME_OR_INDEX',
        help='what speaks for this class; may be given several times',
      )
    if what == 'attention':
      add(
        '--query',
        type=_patch,
        metavar='ROW,COLUMN',
        help='a patch, from 0,0 at the top left (default: the class token, or '
        'the patch in the middle where there is none)',
      )
    if what == 'masked':
      add(
        '--rate',
        type=_share,
        default=predictions.RATE,
        help='share of the patches that are hidden '
        f'(default: {predictions.RATE})',
      )
      add('--seed', type=int, default=0, help='which ones (default: 0)')
    if what in ('rollout', 'distance'):
      add(
        '--beside',
        action='append',
        default=[],
        metavar='CHECKPOINT',
        help='another one, on the same images; may be given several times',
      )
  return parser


def _share(text: str) -> float:
  share = float(text)
  if not 0 <= share < 1:
    raise argparse.ArgumentTypeError(f'{text} is not from 0 to below 1')
  return share


def _patch(text: str) -> tuple[int, int]:
  match = re.fullmatch(r'(\d+),(\d+)', text)
  if not match:
    raise argparse.ArgumentTypeError(f'{text!r} is no ROW,COLUMN, as in 3,5')
  return int(match[1]), int(match[2])


if __name__ == '__main__':
  sys.exit(main())
