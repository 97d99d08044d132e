"""What the command line is refused for, before anything is measured."""

import pytest

from vit_jax.tools.bench import __main__ as command


def parsed(text):
  return vars(command._parser().parse_args(text.split()))


def test_what_is_not_given_is_what_the_help_says():
  common = {'csv': None}
  grid = {'image_sizes': [224], 'dtype': 'float32', 'set': []}
  speeds = {'vs': [], 'devices': 1}
  assert parsed('train') == common | grid | speeds | {
    'command': 'train',
    'variants': ['ti16'],
    'batch_sizes': [16],
  }
  assert parsed('inference') == common | grid | speeds | {
    'command': 'inference',
    'variants': ['b16'],
    'batch_sizes': [1, 8],
  }
  assert parsed('input') == common | {'command': 'input', 'vs': None}


def test_the_help_says_what_each_command_measures():
  text = ' '.join(command._parser().format_help().split())
  for name, module in command._COMMANDS.items():
    assert f'{name} {module.__doc__.splitlines()[0]}' in text


def test_lists_have_no_empty_names():
  given = parsed('train --variants=,b16,,s16 --image_sizes=64,32,')
  assert given['variants'] == ['b16', 's16']
  assert given['image_sizes'] == [64, 32]


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    ('train --vs=keras', '--vs=keras is none of flax, timm, timm-eager'),
    ('train --variants=q16', "No model variant 'q16'"),
    ('train --batch_sizes=4,0', '--batch_sizes has 0: at least 1 image'),
    ('train --batch_sizes=x', "'x' is no list of whole numbers, as in 8,16"),
    ('train --batch_sizes=', '--batch_sizes: it is empty: give one or more'),
    ('train --variants=', '--variants: it is empty: give one or more'),
    ('train --set=model.depht=1', 'Did you mean model.depth'),
    ('train --set=model.depth', '--set=model.depth: write FIELD=VALUE'),
    (
      'train --variants=ti16,r26+s32 --vs=flax',
      '--vs=flax has only plain ViTs',
    ),
    ('input --csv=nowhere/a.csv', 'there is no folder nowhere'),
    ('train --devices=9', '--devices=9: there are 8 x cpu'),
    ('train --devices=0', '--devices=0: there are 8 x cpu'),
    ('train --devices=3', 'use a multiple of 3'),
    # The last of a grid, before the first is measured.
    ('train --devices=2 --batch_sizes=2,3', 'use a multiple of 2'),
    ('inference --vs=keras', '--vs=keras is none of onnx, timm, timm-eager'),
    ('inference --batch_sizes=0', '--batch_sizes has 0: at least 1 image'),
    ('inference --batch_sizes=x', '--batch_sizes'),
    ('inference --variants=q16', 'q16'),
  ],
)
def test_flags_that_make_no_sense(run, args, message):
  is_small = 'r26' not in args and 'input' not in args
  status, out, err = run(*args.split(), small=is_small)
  assert status == 2
  assert message in err
  assert 'images/s' not in out and 'images,' not in out
