"""Benchmarks, on whatever device is there.

  python -m vit_jax.bench train --variants=ti16,b16 --vs=flax,timm
  python -m vit_jax.bench inference --variants=b16 --vs=onnx,timm
  python -m vit_jax.bench capacity --variants=b16,r50x1 --topology=v3:2x2
  python -m vit_jax.bench loop configs/digits.py
  python -m vit_jax.bench input --vs=tf.data
  python -m vit_jax.bench fewshot

Every command takes --csv=FILE and --plot=FILE.png; COMMAND --help says more.
Several variants, sizes and batches run as a grid, one combination after the
other. Others are measured in turns with ours, so that whatever else the machine
does hits all alike; ratios are medians over the rounds, above 1 where ours is
faster.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence

from vit_jax import flags
from vit_jax.bench import capacity, inference, input, loop, solving, train_steps
from vit_jax.bench.output import Output

_COMMANDS = {
  'train': train_steps,
  'inference': inference,
  'capacity': capacity,
  'loop': loop,
  'input': input,
  'fewshot': solving,
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command; returns the exit status."""
  return flags.command(_run, _parser().parse_args(argv))


def _run(args: argparse.Namespace) -> None:
  _COMMANDS[args.command].bench(args, Output(args.csv, args.plot))


def _parser() -> argparse.ArgumentParser:
  parser = flags.parser('bench', __doc__)
  commands = parser.add_subparsers(
    required=True, metavar='COMMAND', dest='command'
  )
  added = {}
  for name, module in _COMMANDS.items():
    text = str(module.__doc__)
    added[name] = command = commands.add_parser(
      name,
      help=text.splitlines()[0],
      description=text,
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument('--csv', metavar='FILE', help='writes a row a result')
    command.add_argument('--plot', metavar='FILE.png', help='draws a picture')
  _grid_flags(added['train'], 'ti16', '16', train_steps.PEERS)
  added['train'].add_argument(
    '--devices',
    type=int,
    default=1,
    help='devices that share the batch; default: 1; on a CPU so many are made',
  )
  _grid_flags(added['inference'], 'b16', '1,8', inference.PEERS)
  added['inference'].set_defaults(devices=1)
  _grid_flags(added['capacity'], 'b16')
  added['capacity'].add_argument(
    '--modes',
    type=_names,
    default=[*capacity.MODES],
    help='what has to fit; default: inference,training',
  )
  added['capacity'].add_argument(
    '--topology',
    default='',
    help='generation and chips of a TPU, as in v3:2x2; one core counts',
  )
  added['capacity'].add_argument(
    '--memory_gib',
    type=float,
    help='memory of the device, where it does not tell or to try another',
  )
  added['loop'].add_argument(
    'config', metavar='CONFIG', help='whose training is measured'
  )
  added['loop'].set_defaults(config_of=flags.config_named)
  added['input'].add_argument(
    '--vs',
    choices=['tf.data'],
    help='also measure this, in turns with ours; needs TensorFlow',
  )
  return parser


def _grid_flags(
  command: argparse.ArgumentParser,
  variant: str,
  batch_sizes: str = '',
  peers: Iterable[str] = (),
) -> None:
  """Adds the flags that make a grid."""
  command.add_argument(
    '--variants',
    type=_names,
    default=[variant],
    help=f'models; python -m vit_jax.models lists them; default: {variant}',
  )
  command.add_argument(
    '--image_sizes',
    type=_numbers,
    default=[224],
    help='sides in pixels; default: 224',
  )
  if batch_sizes:
    command.add_argument(
      '--batch_sizes',
      type=_numbers,
      default=_numbers(batch_sizes),
      help=f'images at once; default: {batch_sizes}',
    )
  command.add_argument(
    '--dtype',
    choices=['float32', 'bfloat16'],
    default='float32',
    help='of the computation; default: float32',
  )
  if peers:
    command.add_argument(
      '--vs',
      type=_names,
      default=[],
      help='also measure these, in turns with ours: of ' + ', '.join(peers),
    )
  command.add_argument(
    '--set',
    metavar='FIELD=VALUE',
    action='append',
    default=[],
    help='a field of the config of ours, as in --set=model.remat=cheap; can be '
    'given again',
  )


def _names(text: str) -> list[str]:
  if names := [part for part in text.split(',') if part]:
    return names
  raise argparse.ArgumentTypeError('it is empty: give one or more')


def _numbers(text: str) -> list[int]:
  try:
    return [int(part) for part in _names(text)]
  except ValueError:
    raise argparse.ArgumentTypeError(
      f'{text!r} is no list of whole numbers, as in 8,16'
    ) from None


if __name__ == '__main__':
  sys.exit(main())
