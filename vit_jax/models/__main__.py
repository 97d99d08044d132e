"""Lists the named models with their parameters, GFLOPs and tokens.

  python -m vit_jax.models
  python -m vit_jax.models r50+b16 l16 --image_size=384 --format=csv
  python -m vit_jax.models l16 --params
  python -m vit_jax.models --fields
  python -m vit_jax.models --pretrained

`--params` prints a table of the given models' parameters, with shapes, dtypes
and totals. `--fields` lists the config fields of ViT, or of the given models,
except name and dtype, with their default, valid values and meaning.
`--pretrained` lists the published checkpoints: the name to pass as a
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

from clu import parameter_overview
from tqdm import tqdm

from vit_jax.checkpoints import catalogue
from vit_jax.cli import flags
from vit_jax.data import images
from vit_jax.models import flops, variants
from vit_jax.models.fields import REQUIRED
from vit_jax.models.model import Model

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
  models: Mapping[str, Model], image_size: tuple[int, int]
) -> Iterator[dict[str, Any]]:
  """Yields a row for each model; the keys are names."""
  for name, model in models.items():
    yield {
      'model': name,
      'parameters': flops.count_params(model, image_size),
      'gflops': flops.forward_flops(model, image_size) / 1e9,
      'tokens': model.num_tokens(image_size) if model.attention else None,
      'source': variants.PUBLISHED.get(name, ''),
    }


def published(models: Sequence[str]) -> list[dict[str, Any]]:
  """Returns a row for each published checkpoint of the models, or of all.

  Raises ValueError for an unknown model.
  """
  for model in models:
    variants.fields(model)
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
  models = 'models to list (default: all published models)'
  parser.add_argument('models', nargs='*', help=models)
  lists = parser.add_mutually_exclusive_group()
  for flag, text in (
    ('--pretrained', 'list the published checkpoints of the models'),
    ('--fields', 'list the config fields of the models, or of ViT'),
    ('--params', 'list the parameters of the models'),
  ):
    lists.add_argument(flag, action='store_true', help=text)
  add = parser.option
  add('--format', 'table', 'output format', choices=('table', 'csv'))
  add('--image_size', '224', 'side in pixels, or height x width, as in 384x512')
  add('--num_classes', 1000, 'classes of the head; 0 for none')
  args = parser.parse_args(argv)
  for given, unused in (
    ('pretrained', ('image_size', 'num_classes')),
    ('fields', ('image_size', 'num_classes')),
    ('params', ('format',)),
  ):
    for name in unused if getattr(args, given) else ():
      if getattr(args, name) != parser.get_default(name):
        parser.error(f'--{given} takes no --{name}. Leave one of them out.')
  return flags.command(_run, args)


def _run(args: argparse.Namespace) -> None:
  if args.pretrained:
    found, shape = published(args.models), _CHECKPOINTS
  elif args.fields:
    found, shape = fields(args.models), _FIELDS
  else:
    size = images.size_of(args.image_size, '--image_size')
    models = {}
    for name in args.models or variants.PUBLISHED:
      try:
        models[name] = variants.build_model(
          name, num_classes=args.num_classes, image_size=size
        )
      except ValueError as e:
        if args.models:
          raise
        print(f'{name} is left out: {e}', file=sys.stderr)
    if args.params:
      for model in models.values():
        shapes = flops.param_shapes(model, size)
        table = parameter_overview.get_parameter_overview(
          shapes, include_stats=False
        )
        print(table)
      return
    shown = tqdm(rows(models, size), total=len(models), delay=1, disable=None)
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
