"""What the command line is refused for, before anything is measured."""

import pytest

from vit_jax.tools.bench import __main__ as command


def parsed(text):
  return vars(command._parser().parse_args(text.split()))


def test_lists_have_no_empty_names():
  given = parsed('train --variants=,b16,,s16 --image_sizes=64,32,')
  assert given['variants'] == ['b16', 's16']
  assert given['image_sizes'] == [64, 32]


@pytest.mark.edge
@pytest.mark.parametrize(
  ('args', 'message'),
  [
    ('train --vs=keras', '--vs=keras is unknown. Use timm, timm-eager'),
    ('train --batch_sizes=4,0', "'0' is not a whole number above 0"),
    ('train --set=model.depht=1', 'Did you mean model.depth'),
    ('train --devices=9', '--devices is 9; it must be from 1 to 8'),
    ('train --devices=3', 'use a multiple of 3'),
  ],
)
def test_flags_that_make_no_sense(run, args, message):
  status, out, err = run(*args.split())
  assert status == 2
  assert message in err
  assert 'images/s' not in out and 'images,' not in out
