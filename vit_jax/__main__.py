"""Runs a command: `python -m vit_jax COMMAND` or `vit-jax COMMAND`.

Configs of this project can be given by name: --config=digits, --config=vit:l16.
"""

import runpy
import sys

# Module and description by command.
COMMANDS = {
  'train': ('vit_jax.main', 'trains, resumes, fine-tunes or evaluates'),
  'predict': ('vit_jax.predict', 'labels images'),
  'evaluate': ('vit_jax.evaluate', 'measures accuracy per class'),
  'runs': ('vit_jax.runs', 'lists runs, best first, and draws their curves'),
  'fewshot': ('vit_jax.fewshot', 'measures few-shot, linear and k-NN accuracy'),
  'convert': ('vit_jax.convert', 'converts checkpoints to other frameworks'),
  'serve': ('vit_jax.serve', 'serves a web page and an API that label images'),
  'visualize': ('vit_jax.visualize', 'plots attention, filters, positions'),
  'palette': (
    'vit_jax.palette',
    "computes iGPT's colour palette of a dataset",
  ),
  'complete': ('vit_jax.complete', 'completes images with iGPT'),
  'data': (
    'vit_jax.data',
    'writes ArrayRecord files, or COCO annotations from masks',
  ),
  'models': ('vit_jax.models', 'lists models: parameters, GFLOPs, tokens'),
  'plan': ('vit_jax.plan', 'estimates memory and time on TPUs, without a TPU'),
  'bench': ('vit_jax.bench', 'measures speed'),
  'curves': ('vit_jax.evaluators', 'plots several few-shot results'),
}


def main() -> int | None:
  """Runs the module of a command; without a command, lists all commands.

  Returns 2 if the command is unknown. Each command sets its own exit status.
  """
  name = sys.argv[1] if len(sys.argv) > 1 else ''
  if name in COMMANDS:
    del sys.argv[1]
    runpy.run_module(COMMANDS[name][0], run_name='__main__', alter_sys=True)
    return None
  is_help = name in ('', '-h', '--help', 'help')
  lines = [
    'usage: vit-jax COMMAND ... (for help: vit-jax COMMAND --help)',
    '',
    *(f'  {command:<10} {what}' for command, (_, what) in COMMANDS.items()),
  ]
  if not is_help:
    lines.insert(0, f'error: Unknown command {name!r}.')
  print('\n'.join(lines), file=sys.stdout if is_help else sys.stderr)
  return 0 if is_help else 2


if __name__ == '__main__':
  sys.exit(main())
