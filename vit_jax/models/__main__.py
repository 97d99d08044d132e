"""Lists the named models with what they cost.

  python -m vit_jax.models
  python -m vit_jax.models r50+b16 l16 --image_size=384 --format=csv

GFLOPs are those of one image's forward pass, a multiply-add counted as two and
multiplications by a convolution's padding not at all: 3 * forward * images is
the compute of the paper's table 6. Tokens are the encoder's, with the class
token. Any name of the grammar is understood, listed or not: s7, r101x2,
r26+l16, axial_l32.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from vit_jax import flags
from vit_jax.models import flops, variants

COLUMNS = ('model', 'parameters', 'gflops', 'tokens', 'source')


def rows(
  names: Sequence[str], image_size: tuple[int, int], num_classes: int
) -> Iterator[dict[str, Any]]:
  """Yields a row of `COLUMNS` for each named model.

  Raises:
    ValueError: for a name that is none, or an image size it cannot take.
  """
  for name in names:
    model = variants.build(
      num_classes=num_classes, image_size=image_size, **variants.fields(name)
    )
    yield {
      'model': name,
      'parameters': flops.count_params(model, image_size),
      'gflops': flops.forward_flops(model, image_size) / 1e9,
      'tokens': model.num_tokens(image_size) if model.attention else None,
      'source': variants.PUBLISHED.get(name, ''),
    }


def write(found: list[dict[str, Any]], format_name: str) -> None:
  """Prints rows as 'table' or 'csv'."""
  if format_name == 'csv':
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator='\n')
    writer.writeheader()
    writer.writerows(found)
    return
  width = max(len(row['model']) for row in found)
  print(
    f'{"model":<{width}}  {"parameters":>13}  {"GFLOPs":>8}  tokens  source'
  )
  for row in found:
    tokens = '' if row['tokens'] is None else f'{row["tokens"]:,}'
    print(
      f'{row["model"]:<{width}}  {row["parameters"]:>13,}  '
      f'{row["gflops"]:>8.2f}  {tokens:>6}  {row["source"]}'.rstrip()
    )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit status."""
  parser = flags.parser('models', __doc__)
  parser.add_argument(
    'models', nargs='*', help='Names to list; all published ones if none.'
  )
  parser.add_argument(
    '--format', choices=('table', 'csv'), default='table', help='Of the output.'
  )
  parser.add_argument(
    '--image_size', type=int, default=224, help='Side of the image in pixels.'
  )
  parser.add_argument(
    '--num_classes', type=int, default=1000, help='Of the head; 0 for none.'
  )
  return flags.command(_run, parser.parse_args(argv))


def _run(args: argparse.Namespace) -> None:
  names = args.models or list(variants.PUBLISHED)
  found = rows(names, (args.image_size, args.image_size), args.num_classes)
  shown = tqdm(found, total=len(names), unit=' models', delay=1, disable=None)
  write(list(shown), args.format)


if __name__ == '__main__':
  sys.exit(main())
