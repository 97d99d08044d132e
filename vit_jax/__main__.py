"""All commands, as `python -m vit_jax COMMAND` or `vit-jax COMMAND`.

A config can be named alone, from any folder: --config=digits, --config=vit:l16.
"""

import runpy
import sys

# By name: the module, and what it is for.
COMMANDS = {
  'train': ('vit_jax.main', 'trains, resumes, fine-tunes, evaluates a config'),
  'predict': ('vit_jax.predict', 'labels images'),
  'evaluate': ('vit_jax.evaluate', 'accuracy by class, what is confused'),
  'runs': ('vit_jax.runs', 'a table of runs, the best first, and their curves'),
  'fewshot': ('vit_jax.fewshot', 'few-shot accuracy and linear probes'),
  'convert': ('vit_jax.convert', 'checkpoints for other frameworks'),
  'serve': ('vit_jax.serve', 'a page and an API that label images'),
  'visualize': ('vit_jax.visualize', 'attention, filters, positions'),
  'palette': ('vit_jax.palette', 'colours for iGPT, of a data set'),
  'complete': ('vit_jax.complete', 'draws the rest of images, with iGPT'),
  'data': ('vit_jax.data', 'COCO annotations of images with masks'),
  'models': ('vit_jax.models', 'lists models: parameters, GFLOPs, tokens'),
  'plan': ('vit_jax.plan', 'what training takes on a TPU that is not there'),
  'bench': ('vit_jax.bench', 'measures speed'),
  'curves': ('vit_jax.evaluators', 'several few-shot results in one picture'),
}


def main() -> int | None:
  """Runs a command as its module runs; returns 2 for one that is none."""
  name = sys.argv[1] if len(sys.argv) > 1 else ''
  if name in COMMANDS:
    del sys.argv[1]
    runpy.run_module(COMMANDS[name][0], run_name='__main__', alter_sys=True)
    return None
  is_help = name in ('', '-h', '--help', 'help')
  lines = [
    'usage: vit-jax COMMAND ..., and vit-jax COMMAND --help',
    '',
    *(f'  {command:<10} {what}' for command, (_, what) in COMMANDS.items()),
  ]
  if not is_help:
    lines.insert(0, f'error: No command {name!r}.')
  print('\n'.join(lines), file=sys.stdout if is_help else sys.stderr)
  return 0 if is_help else 2


if __name__ == '__main__':
  sys.exit(main())
