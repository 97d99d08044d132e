"""Lists the named models with their parameters, GFLOPs and tokens.

  python -m vit_jax.models
  python -m vit_jax.models r50+b16 l16 --image_size=384 --format=csv
  python -m vit_jax.models l16 --params
  python -m vit_jax.models --fields
  python -m vit_jax.models --pretrained

`--params` prints a table (never CSV) of the given models' parameters, with
shapes, dtypes and totals. `--fields` lists the config fields of ViT, or of the
given models, except name and dtype, with their default, valid values and
meaning. `--pretrained` lists the published checkpoints: the name to pass as a
checkpoint, the model, the image size, the training data, the top-1 accuracy and
its source, and the size and address of the file.

GFLOPs count matrix products and convolutions of one image's forward pass. A
multiply-add counts as two operations; products with padding do not count. The
paper's table 6 counts three times as much for each training image. Tokens count
the encoder's input, including class and register tokens. Names that are not
listed work too, such as s7, r101x2, r26+l16 and axial_l32.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from vit_jax.checkpoints import catalogue
from vit_jax.cli import flags
from vit_jax.data import images
from vit_jax.models import flops, variants
from vit_jax.models.fields import REQUIRED
from vit_jax.register import nearest

# Columns of the tables: name:format, where the format is optional.
_MODELS = 'model parameters:, gflops:.2f tokens:, source'
_CHECKPOINTS = (
  'name model image_size:d data accuracy:g accuracy_from size_mib:, address'
)
_FIELDS = 'field default values meaning'
_TITLES = {
  'gflops': 'GFLOPs',
  'image_size': 'pixels',
  'accuracy': 'top-1',
  'accuracy_from': 'top-1 source',
  'size_mib': 'MiB',
}


def rows(
  names: Sequence[str], image_size: tuple[int, int], num_classes: int
) -> Iterator[dict[str, Any]]:
  """Yields a row for each named model.

  Raises:
    ValueError: for an unknown name, or an image size the model cannot take.
  """
  for name in names:
    model = variants.build_model(
      name, num_classes=num_classes, image_size=image_size
    )
    yield {
      'model': name,
      'parameters': flops.count_params(model, image_size),
      'gflops': flops.forward_flops(model, image_size) / 1e9,
      'tokens': model.num_tokens(image_size) if model.attention else None,
      'source': variants.PUBLISHED.get(name, ''),
    }


def write_parameters(
  names: Sequence[str], image_size: tuple[int, int], num_classes: int
) -> None:
  """Prints a table of parameters for each model; raises what `rows` raises."""
  from clu import parameter_overview

  for name in names:
    model = variants.build_model(
      name, num_classes=num_classes, image_size=image_size
    )
    shapes = flops.param_shapes(model, image_size)
    print(
      parameter_overview.get_parameter_overview(shapes, include_stats=False)
    )


def published(models: Sequence[str]) -> list[dict[str, Any]]:
  """Returns a row for each published checkpoint of the models, or of all.

  Raises:
    ValueError: for an unknown model, or one without published checkpoints.
  """
  have = {entry.model for entry in catalogue.PUBLISHED.values()}
  for model in models:
    variants.fields(model)
    if model not in have:
      raise ValueError(
        f'{model} has no published checkpoint. {nearest(model, have)}'
      )
  return [
    {'name': name} | entry._asdict()
    for name, entry in catalogue.PUBLISHED.items()
    if not models or entry.model in models
  ]


def fields(models: Sequence[str]) -> list[dict[str, Any]]:
  """Returns a row for each config field of the models, or of ViT.

  Leaves out name and dtype. Raises ValueError for an unknown model.
  """
  kinds = dict.fromkeys(variants.fields(m)['name'] for m in models or ['b16'])
  return [
    {
      'field': f'model.{f.name}',
      'default': '' if f.default is REQUIRED else f'{f.default!r:.12}',
      'values': valid
      if isinstance(valid := f.metadata['valid'], str)
      else ', '.join(map(str, valid)),
      'meaning': f.metadata['doc'],
    }
    for kind in kinds
    for f in variants.ARCHITECTURES.load(kind).own_fields()
    if f.name not in ('num_classes', 'dtype')
  ]


def write(found: list[dict[str, Any]], columns: Mapping[str, str]) -> None:
  """Prints rows as a table; `columns` maps column names to cell formats."""
  lines = [[_TITLES.get(name, name) for name in columns]]
  for row in found:
    cells = ((row[name], form) for name, form in columns.items())
    lines.append(['' if x is None else f'{x:{form}}' for x, form in cells])
  widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
  sides = ['>' if form else '<' for form in columns.values()]
  for line in lines:
    aligned = map('{:{}{}}'.format, line, sides, widths)
    print('  '.join(aligned).rstrip())


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status, see `flags.command`."""
  parser = flags.parser('models', __doc__)
  add = parser.add_argument
  add(
    'models', nargs='*', help='Models to list (default: all published models).'
  )
  lists = parser.add_mutually_exclusive_group()
  lists.add_argument(
    '--pretrained',
    action='store_true',
    help='List the published checkpoints of these models, or of all models.',
  )
  lists.add_argument(
    '--fields',
    action='store_true',
    help='List the config fields of these models, or of ViT.',
  )
  lists.add_argument(
    '--params',
    action='store_true',
    help='List the parameters of these models.',
  )
  add(
    '--format', choices=('table', 'csv'), default='table', help='Output format.'
  )
  add(
    '--image_size',
    help='Side of the image in pixels, or height x width (default: 224).',
  )
  add(
    '--num_classes',
    type=int,
    help='Classes of the head; 0 for a model without a head (default: 1000).',
  )
  args = parser.parse_args(argv)
  if args.params and (args.format != 'table' or not args.models):
    parser.error(
      '--params needs model names, as in l16 --params, and prints no CSV.'
    )
  given = args.image_size, args.num_classes
  if (args.pretrained or args.fields) and given != (None, None):
    parser.error(
      '--image_size and --num_classes do not apply to --pretrained and '
      '--fields. Leave them out.'
    )
  if (args.num_classes or 0) < 0:
    parser.error(f'--num_classes is {args.num_classes}; it must be 0 or more.')
  return flags.command(_run, args)


def _run(args: argparse.Namespace) -> None:
  if args.pretrained:
    found, shape = published(args.models), _CHECKPOINTS
  elif args.fields:
    found, shape = fields(args.models), _FIELDS
  else:
    names = args.models or list(variants.PUBLISHED)
    classes = 1000 if args.num_classes is None else args.num_classes
    size = images.size_of(args.image_size or '224', '--image_size')
    if args.params:
      write_parameters(names, size, classes)
      return
    listed = rows(names, size, classes)
    shown = tqdm(
      listed, total=len(names), unit=' models', delay=1, disable=None
    )
    found, shape = list(shown), _MODELS
  columns = dict(name.partition(':')[::2] for name in shape.split())
  if args.format == 'table':
    write(found, columns)
    return
  writer = csv.DictWriter(sys.stdout, list(columns), lineterminator='\n')
  writer.writeheader()
  writer.writerows(found)


if __name__ == '__main__':
  sys.exit(main())
