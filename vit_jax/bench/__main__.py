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
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax import flags

_TRAIN = """Training steps.

Ours is the step of the training loop: uint8 images in, flipped and normalised
on the device, cross-entropy, Adam with decoupled weight decay, the norms that
training watches. The batch is on the device already. Printed are images/s, the
seconds that compiling took, memory as the compiler has planned it (for torch:
as it was, on GPUs) and, where the device's peak is known, MFU: 3 x forward
FLOPs x images/s of the peak in bfloat16.

Steps run on the first device, or on as many as --devices says, which share the
batch; images/s are of all together, memory is of each. XLA uses the cores of a
CPU best with a device on each, unless steps take but a few milliseconds.

--vs names what runs in turns with it, on the same images:

  flax        the same ViT written plainly with Flax's own layers, and AdamW
  timm        timm's model of the same architecture with torch.compile (eager
              where that fails, and it says so), fused AdamW, autocast if
              --dtype=bfloat16
  timm-eager  the same without torch.compile

A device that cannot hold a batch says so, and the grid goes on."""

_INFERENCE = """From uint8 images in host memory to logits, on the first device.

--vs names what runs in turns with ours:

  onnx        our ONNX file in onnxruntime, on the CPU
  timm        timm's model of the same architecture with torch.compile (eager
              where that fails, and it says so)
  timm-eager  the same without torch.compile

The picture shows images/s over the image size where there are several, of the
best batch size: the left panel of figure 12."""

_CAPACITY = """The largest batch that fits: figure 12, right.

Nothing runs: batches are compiled until the largest that fits is known to 1/32.
The memory is that of the first device; --topology takes a core of a TPU that is
not there, by its own compiler (pip install -e '.[plan]'), which also estimates
images/s, the left panel: the best of the batches that were tried.
A loop over layers compiles faster, but keeps more when it trains: less so with
--set=model.scan=True --set=model.remat=cheap."""

_LOOP = """What the training loop itself costs, by a real training.

CONFIG is a file in configs/, with its arguments after a colon:

  python -m vit_jax.bench loop configs/digits.py
  python -m vit_jax.bench loop 'configs/small.py:./cifar10,total=500 steps'

The run, after its first step is done, falls into steps (some step is under
way on the device), evaluating, saving (none is, because of a checkpoint) and
idle (none is, because the loop was late). It trains in a temporary folder."""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command; returns the exit status."""
  args = _parser().parse_args(argv)
  return flags.command(args.run, args)


def _parser() -> argparse.ArgumentParser:
  parser = flags.parser('bench', __doc__)
  commands = parser.add_subparsers(required=True, metavar='COMMAND')

  def add(
    name: str, text: str, run: Callable[[argparse.Namespace], None]
  ) -> argparse.ArgumentParser:
    command = commands.add_parser(
      name,
      help=text.splitlines()[0],
      description=text,
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument('--csv', metavar='FILE', help='writes a row a result')
    command.add_argument('--plot', metavar='FILE.png', help='draws a picture')
    command.set_defaults(run=run)
    return command

  train_steps = add('train', _TRAIN, _train)
  _grid_flags(train_steps, 'ti16', '16', vs='flax, timm, timm-eager')
  train_steps.add_argument(
    '--devices',
    type=int,
    default=1,
    help='devices that share the batch; default: 1; on a CPU so many are made',
  )
  inference = add('inference', _INFERENCE, _inference)
  _grid_flags(inference, 'b16', '1,8', vs='onnx, timm, timm-eager')
  capacity = add('capacity', _CAPACITY, _capacity)
  _grid_flags(capacity, 'b16', None, vs=None)
  capacity.add_argument(
    '--modes',
    type=_names,
    default=['inference', 'training'],
    help='what has to fit; default: inference,training',
  )
  capacity.add_argument(
    '--topology',
    default='',
    help='generation and chips of a TPU, as in v3:2x2; one core counts',
  )
  capacity.add_argument(
    '--memory_gib',
    type=float,
    help='memory of the device, where it does not tell or to try another',
  )
  add('loop', _LOOP, _loop).add_argument('config', metavar='CONFIG')
  add(
    'input',
    'The input pipeline on one core.\n\nDecoding photographs of 640x427 '
    'pixels, cutting a\nrandom part of each and resizing it to 224x224.',
    _input,
  ).add_argument(
    '--vs',
    choices=['tf.data'],
    help='also measure this, in turns with ours; needs TensorFlow',
  )
  add(
    'fewshot',
    'Few-shot classifiers.\n\nChoosing and fitting them beside solving the '
    'normal\nequations anew for every penalty.',
    _fewshot,
  )
  return parser


def _grid_flags(
  command: argparse.ArgumentParser,
  variant: str,
  batch_sizes: str | None,
  vs: str | None,
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
  if vs:
    command.add_argument(
      '--vs',
      type=_names,
      default=[],
      help=f'also measure these, in turns with ours: of {vs}',
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
  return [part for part in text.split(',') if part]


def _numbers(text: str) -> list[int]:
  return [int(part) for part in _names(text)]


def _overrides(args: argparse.Namespace) -> dict[str, str]:
  found = {}
  for text in args.set:
    name, equals, value = text.partition('=')
    if not equals:
      raise ValueError(f'--set={text}: write FIELD=VALUE.')
    found[name] = value
  return found


# Each imports what it needs: JAX, TensorFlow and matplotlib take their time.
def _train(args: argparse.Namespace) -> None:
  _share_memory(args.vs)
  if args.devices > 1:
    os.environ.setdefault('JAX_NUM_CPU_DEVICES', str(args.devices))
  from vit_jax.bench import train_steps

  _speed(train_steps.TASK, args, args.devices)


def _inference(args: argparse.Namespace) -> None:
  _share_memory(args.vs)
  from vit_jax.bench import inference

  _speed(inference.TASK, args)


def _speed(task: Any, args: argparse.Namespace, devices: int = 1) -> None:
  from vit_jax.bench import output, speed

  speed.bench(
    task,
    args.variants,
    args.image_sizes,
    args.batch_sizes,
    args.dtype,
    args.vs,
    _overrides(args),
    output.Output(args.csv, args.plot),
    devices,
  )


def _share_memory(versus: Sequence[str]) -> None:
  """Leaves half of a GPU to PyTorch, of which JAX takes 3/4 unless told."""
  if {'timm', 'timm-eager'} & {*versus}:
    os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '.47')


def _capacity(args: argparse.Namespace) -> None:
  from vit_jax.bench import capacity, output

  capacity.bench_capacity(
    args.variants,
    args.image_sizes,
    args.modes,
    args.dtype,
    capacity.machine_of(args.topology, args.memory_gib),
    _overrides(args),
    output.Output(args.csv, args.plot),
  )


def _loop(args: argparse.Namespace) -> None:
  from vit_jax.bench import loop, output

  files = output.Output(args.csv, args.plot)
  loop.bench_loop(loop.load_config(args.config), args.config, files)


def _input(args: argparse.Namespace) -> None:
  from vit_jax.bench import input, output

  input.bench_input(args.vs, output.Output(args.csv, args.plot))


def _fewshot(args: argparse.Namespace) -> None:
  from vit_jax.bench import output, solving

  solving.bench_fewshot(output.Output(args.csv, args.plot))


if __name__ == '__main__':
  sys.exit(main())
