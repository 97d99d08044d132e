"""Benchmark training, inference and input on this machine.

  python -m vit_jax.bench train --variants=ti16,b16 --vs=timm
  python -m vit_jax.bench inference --variants=b16 --vs=onnx,timm
  python -m vit_jax.bench input --vs=tf.data
  python -m vit_jax.bench input --data ./photos arrayrecord:./photos-shards

See COMMAND --help. With several variants, image sizes and batch sizes, the
command measures all combinations, one after the other. Our code and the
libraries of --vs run in turns, so that other load on the machine affects all of
them. Each round gives the ratio of the first row's images/s to each other
row's; the command prints the median ratios.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence

from vit_jax.cli import flags
from vit_jax.tools.bench import input, speed


def main(argv: Sequence[str] | None = None) -> int:
  args = _parser().parse_args(argv)
  return flags.command(args.bench, args)


def _parser() -> flags.Parser:
  parser = flags.parser('bench', __doc__)
  commands = parser.add_subparsers(required=True, metavar='COMMAND')

  def add(
    name: str, bench: Callable[[argparse.Namespace], None]
  ) -> flags.Parser:
    text = str(inspect.getdoc(bench))
    command = commands.add_parser(
      name, help=text.splitlines()[0], description=text
    )
    command.set_defaults(bench=bench, devices=1)
    return command

  train = add('train', speed.train)
  _grid_flags(train, 'ti16', '16', speed.peers_of(training=True))
  devices = 'number of devices that share the batch; a CPU simulates them'
  train.option('--devices', 1, devices)
  peers = speed.peers_of(training=False)
  _grid_flags(add('inference', speed.inference), 'b16', '1,8', peers)
  compared = add('input', input.bench).add_mutually_exclusive_group()
  compared.add_argument(
    '--data',
    nargs='+',
    metavar='NAME',
    help='datasets to measure in turns, named as in --config.data.name',
  )
  compared.add_argument(
    '--vs',
    choices=['tf.data'],
    help='also measure this library; needs TensorFlow',
  )
  return parser


def _grid_flags(
  command: flags.Parser, variant: str, batch_sizes: str, peers: Iterable[str]
) -> None:
  """Adds the flags that train and inference share."""
  add = command.option
  variants = 'models; python -m vit_jax.models lists them'
  add('--variants', variant, variants, type=_names)
  add('--image_sizes', '224', 'image sides in pixels', type=_numbers)
  add('--batch_sizes', batch_sizes, 'images per batch', type=_numbers)
  dtypes = ('float32', 'bfloat16')
  add('--dtype', 'float32', 'compute dtype', choices=dtypes)
  command.add_argument(
    '--vs',
    type=_names,
    default=[],
    help='also measure some of these implementations, separated by commas: '
    + ', '.join(peers),
  )
  command.add_argument(
    '--set',
    metavar='FIELD=VALUE',
    action='append',
    default=[],
    help='set a config field, as in --set=model.remat=cheap; repeatable',
  )


def _names(text: str) -> list[str]:
  if names := [part for part in text.split(',') if part]:
    return names
  raise argparse.ArgumentTypeError('the list is empty; give one or more values')


def _numbers(text: str) -> list[int]:
  return [flags.positive(part) for part in _names(text)]


if __name__ == '__main__':
  sys.exit(main())
