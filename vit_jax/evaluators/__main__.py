"""Draw the few-shot accuracies of several checkpoints in one picture.

  python -m vit_jax.evaluators A/fewshot.csv B/fewshot.csv --output=AB.png

Each curve is named after its file's folder. If two folders have the same name,
the curves are named after the folders' paths. Also prints a table of each file.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from vit_jax.cli import flags
from vit_jax.evaluators import fewshot_report as report


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status, see `flags.command`."""
  parser = flags.parser('evaluators', __doc__)
  parser.add_argument(
    'files', nargs='+', help=f'the {report.CSV} of each checkpoint'
  )
  parser.add_argument(
    '--output',
    default='compare.png',
    help='PNG file to write; replaces an existing file (default: compare.png)',
  )
  return flags.command(_run, parser.parse_args(argv))


def _run(args: argparse.Namespace) -> None:
  labels = report.folder_labels(args.files)
  curves = list(map(report.read_csv, args.files, labels))
  for curve in curves:
    print(f'{curve.label}\n{report.table(curve)}')
  folder, name = os.path.split(args.output)
  flags.write_files(folder, {name: report.plot(curves)})


if __name__ == '__main__':
  sys.exit(main())
