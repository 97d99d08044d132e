"""Runs small versions of the paper's claims, and writes what holds.

  python -m vit_jax.reproduce --list
  python -m vit_jax.reproduce --budget=2h --workdir=runs/reproduce
  python -m vit_jax.reproduce --budget=30m --claims=posemb,head
  python -m vit_jax.reproduce --data=./cifar10 --budget=1d
  python -m vit_jax.reproduce --scale=tpu --topology=v3:16x16

A claim is what a paper says, with a rule fixed beforehand that says of the runs
of three seeds: supported, not supported, or not decided at this budget
(vit_jax/paper/claims.py). The same command goes on where the last one stopped.
Finished runs are lines of CSV files in --results, those that come with the
package unless another folder is given, and are not run again; --budget=0s runs
nothing and only writes the report: WORKDIR/report.html, which needs no other
file, and report.md with its pictures.

Exit status: that of vit_jax.main.
"""

import argparse
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence

from etils import epath

from vit_jax import flags
from vit_jax.models.variants import nearest
from vit_jax.paper import claims, claims_page, full_size
from vit_jax.paper.reproducing import Reproduction
from vit_jax.training.run import Preempted

RESULTS = pathlib.Path(__file__).parent / 'paper' / 'results'
_UNITS_S = {'s': 1, 'm': 60, 'h': 3600, 'd': 86_400}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  args = _parser().parse_args(argv)
  return flags.command(_run, args)


def _run(args: argparse.Namespace) -> int | None:
  if args.scale == 'tpu':
    # At full size each claim has data of its own.
    for name in ('data', 'budget', 'list', 'workdir', 'results'):
      if getattr(args, name) != _parser().get_default(name):
        raise ValueError(
          f'--scale=tpu has no use for --{name}: it prints commands and runs '
          'nothing.'
        )
  for name in ('data', 'workdir', 'results'):
    if not getattr(args, name):
      raise ValueError(f'--{name} is empty: leave it out, or name one.')
  names = _claims(args.claims, args.data)
  if args.scale == 'tpu':
    for line in full_size.commands(names, args.topology, flags.config_named):
      print(line, flush=True)
    return None
  budget_s = _seconds(args.budget)
  workdir, results = map(os.path.expanduser, (args.workdir, args.results))
  reproduction = Reproduction(
    names, args.data, workdir, results, flags.config_named
  )
  if args.list:
    print(claims_page.listed(names, reproduction))
    return None
  status = None
  try:
    for line in reproduction.run(budget_s):
      print(line, flush=True)
  except Preempted as e:
    print(e, file=sys.stderr)
    status = flags.EXIT_PREEMPTED
  again = [f'--claims={args.claims}'] * bool(args.claims)
  again += [
    f'--{name}={getattr(args, name)}'
    for name in ('data', 'results')
    if getattr(args, name) != _parser().get_default(name)
  ]
  again += ['--budget=2h', f'--workdir={args.workdir}']
  command = f'python -m vit_jax.reproduce {shlex.join(again)}'
  report = claims_page.ClaimsPage(names, reproduction, command)
  for path in report.write(epath.Path(workdir)):
    print(f'written  {path}')
  print(report.counts())
  return status


def _claims(text: str, data: str) -> list[str]:
  names = text.split(',') if text else list(claims.CLAIMS)
  for name in names:
    if name not in claims.CLAIMS:
      raise ValueError(f'No claim {name!r}. {nearest(name, claims.CLAIMS)}')
  if text:
    return list(dict.fromkeys(names))
  left_out = [
    name
    for name in names
    if claims.STUDIES[claims.CLAIMS[name].study].data not in ('', data)
  ]
  if left_out:
    print(f'Left out, as {data} is not their data: {", ".join(left_out)}.')
  return [name for name in names if name not in left_out]


def _spelt(data: str) -> str:
  """Returns the name of data, a relative folder's as ./FOLDER.

  Finished runs are known by it, to the letter.
  """
  if not (data.startswith(('.', '~', '/')) or data.endswith('/')):
    return data
  path = os.path.normpath(data)
  return path if path.startswith(('.', '~', '/')) else f'./{path}'


def _seconds(text: str) -> float:
  match = re.fullmatch(r'(\d+(?:\.\d+)?)([smhd])', text)
  if not match:
    raise ValueError(
      f'--budget={text} is no time: write a number and s, m, h or d, as in 2h.'
    )
  return float(match[1]) * _UNITS_S[match[2]]


def _parser() -> argparse.ArgumentParser:
  parser = flags.parser('reproduce', __doc__)
  add = parser.add_argument
  add('--claims', default='', help='Names from --list, between commas.')
  add(
    '--data',
    default='digits',
    type=_spelt,
    help='digits, a folder of images or TFDS.',
  )
  add('--budget', default='2h', help='How long runs are started: 90s, 2h, 1d.')
  add('--workdir', default='runs/reproduce', help='Receives runs and report.')
  add('--results', default=str(RESULTS), help='Folder of the CSV files.')
  add('--list', action='store_true', help='Shows claims, runs and times.')
  add(
    '--scale',
    choices=('small', 'tpu'),
    default='small',
    help='tpu prints the commands of full size and, by the extra `plan`, what '
    'they take; runs none.',
  )
  add('--topology', default='v3:16x16', help='Of --scale=tpu, as plan has it.')
  return parser


if __name__ == '__main__':
  sys.exit(main())
