"""What the command line is refused for, before anything is measured."""

import pytest


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    ('train --vs=keras', '--vs=keras is none of flax, timm, timm-eager'),
    ('train --variants=q16', "No model variant 'q16'"),
    ('train --batch_sizes=4,0', '--batch_sizes has 0: at least 1 image'),
    ('train --batch_sizes=x', "'x' is no list of whole numbers, as in 8,16"),
    ('train --batch_sizes=', '--batch_sizes: it is empty: give one or more'),
    ('train --variants=', '--variants: it is empty: give one or more'),
    ('capacity --memory_gib=1 --modes=,', '--modes: it is empty'),
    ('train --set=model.depht=1', 'Did you mean model.depth'),
    ('train --set=model.depth', '--set=model.depth: write FIELD=VALUE'),
    (
      'train --variants=ti16,r26+s32 --vs=flax',
      '--vs=flax has only plain ViTs',
    ),
    ('train --plot=a.pdf', '--plot=a.pdf'),
    ('train --devices=9', '--devices=9: there are 8 x cpu'),
    ('train --devices=0', '--devices=0: there are 8 x cpu'),
    ('train --devices=3', 'use a multiple of 3'),
    # The last of a grid, before the first is measured.
    ('train --devices=2 --batch_sizes=2,3', 'use a multiple of 2'),
    ('inference --vs=keras', '--vs=keras is none of onnx, timm, timm-eager'),
    ('inference --batch_sizes=0', '--batch_sizes has 0: at least 1 image'),
    ('inference --batch_sizes=x', '--batch_sizes'),
    ('inference --variants=q16', 'q16'),
    ('capacity', 'cpu does not tell how much memory it has: give --memory_gib'),
    ('capacity --memory_gib=1 --modes=training,x', '--modes=x is none of'),
    ('capacity --memory_gib=1 --variants=ti16,ti15', '15'),
  ],
)
def test_flags_that_make_no_sense(run, args, message):
  status, out, err = run(*args.split(), small='r26' not in args)
  assert status == 2
  assert message in err
  assert 'images/s' not in out and 'images,' not in out
