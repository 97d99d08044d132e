"""Show what a trained model attends to, and what it has learned.

  python -m vit_jax.visualize report CHECKPOINT photo.jpg a_folder/ --out=seen
  python -m vit_jax.visualize rollout CHECKPOINT pet.jpg --class=dog --class=cat
  python -m vit_jax.visualize attention CHECKPOINT photo.jpg --query=3,5
  python -m vit_jax.visualize pca CHECKPOINT a_folder/
  python -m vit_jax.visualize distance CHECKPOINT a_folder/
  python -m vit_jax.visualize filters CHECKPOINT
  python -m vit_jax.visualize posemb CHECKPOINT
  python -m vit_jax.visualize masked CHECKPOINT photo.jpg

`report` writes a single file, report.html. The other commands write pictures
(PNG) and arrays (such as rollout.npz). Files go to the folder --out and replace
existing files.
"""

import argparse
import inspect
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
from vit_jax.visualize import components, page, photos, predictions, sections
from vit_jax.visualize.rollout import FUSIONS

# The function of each command. Its docstring is the help text, and its
# parameters after the subject are flags.
_KINDS: dict[str, Callable[..., Any]] = {
  'report': page.report,
  'rollout': sections.rollout,
  'attention': sections.attention,
  'pca': components.section,
  'distance': sections.distance,
  'filters': sections.first_filters,
  'posemb': sections.posemb,
  'masked': predictions.section,
}
_COMMON = 'what', 'checkpoint', 'images', 'out', 'image_size'


def main(argv: Sequence[str] | None = None) -> int:
  return flags.command(_run, _parser().parse_args(argv))


def _run(args: argparse.Namespace) -> None:
  out = pathlib.Path(args.out)
  if out.exists() and not out.is_dir():
    raise ValueError(f'--out={args.out} is a file. Name a folder.')
  checkpoint = opening.open_checkpoint(args.checkpoint)
  if args.image_size:
    checkpoint = transfer.resized(
      checkpoint, images.size_of(args.image_size, '--image_size')
    )
  given = predict.find_files(getattr(args, 'images', []))
  subject = photos.Subject(checkpoint, photos.load(given, checkpoint))
  about = checkpoint.describe()
  options = {k: v for k, v in vars(args).items() if k not in _COMMON}
  found = _KINDS[args.what](subject, **options)
  made: dict[str, Callable[[], bytes]]
  if isinstance(found, str):
    made = {'report.html': lambda: found.encode(errors='backslashreplace')}
  else:
    print(f'{found.title}. {found.text}')
    made = {f'{figure.name}.png': figure.draw for figure in found.figures}
    arrays = io.BytesIO()
    save: Any = np.savez_compressed  # its type hints reject **arrays
    save(arrays, **found.arrays)
    made[f'{args.what}.npz'] = arrays.getvalue
  out.mkdir(parents=True, exist_ok=True)
  for name in tqdm(made, unit=' pictures', delay=2, disable=None):
    atomic_files.replace(out / name, made[name]())
  more = f' and {len(made) - 1} more' if len(made) > 1 else ''
  print(f'model    {about}\nwritten  {out / next(iter(made))}{more}')


def _parser() -> flags.Parser:
  parser = flags.parser('visualize', __doc__)
  kinds = parser.add_subparsers(dest='what', required=True, metavar='WHAT')
  for what, make in _KINDS.items():
    doc = inspect.cleandoc(make.__doc__ or '')
    text = re.split('\n\n(?:Args|Raises):', doc)[0]
    kind = kinds.add_parser(
      what, help=text.partition('\n')[0], description=text
    )
    add = kind.option
    kind.add_argument('checkpoint', help=recognise.WHAT_OPENS)
    if what not in ('filters', 'posemb'):
      given = 'image files, or folders with images'
      kind.add_argument('images', nargs='+', help=given)
    add('--out', 'visualized', 'folder for the results')
    add(
      '--image_size',
      None,
      'image size of the model, such as 512 or 384x512; position embeddings '
      "are interpolated (default: the checkpoint's size)",
    )
    if what in ('report', 'rollout'):
      fusions = tuple(FUSIONS)
      add('--fusion', 'mean', 'how heads are combined', choices=fusions)
      add(
        '--discard',
        0.0,
        "share of each layer's weights to set to 0, lowest first, such as 0.9",
        type=flags.share,
      )
    if what == 'rollout':
      kind.add_argument(
        '--class',
        dest='classes',
        action='append',
        default=[],
        metavar='NAME_OR_INDEX',
        help='class to explain; repeat the flag for several classes',
      )
    if what == 'attention':
      add(
        '--query',
        None,
        'the patch whose attention is drawn; 0,0 is top left (default: the '
        'class token, or the middle patch if there is no class token)',
        type=_patch,
        metavar='ROW,COLUMN',
      )
    if what == 'masked':
      rate = 'share of the patches that are corrupted'
      add('--rate', predictions.RATE, rate)
  return parser


def _patch(text: str) -> tuple[int, int]:
  match = re.fullmatch(r'(\d+),(\d+)', text)
  if not match:
    raise argparse.ArgumentTypeError(
      f'{text!r} is not ROW,COLUMN; write it as in 3,5'
    )
  return int(match[1]), int(match[2])


if __name__ == '__main__':
  sys.exit(main())
