"""Durations of short runs, which shares and rows of metrics have to fit."""

import pytest

from vit_jax import config as config_lib
from vit_jax.training.durations import durations_of, steps_of


@pytest.mark.parametrize(
  ('duration', 'steps'),
  [
    ('10000 steps', 10_000),
    ('17', 17),
    ('90 epochs', 28_151),  # 90 * 1,281,167 / 4096 = 28150.64
    ('0.5epochs', 156),
    ('1e6 examples', 244),
    ('0.25 %', 3),
  ],
)
def test_durations(duration, steps):
  got = steps_of(
    duration, batch_size=4096, examples=1_281_167, total_steps=1000
  )
  assert got == steps


def of(examples=16, **fields):
  config = config_lib.base()
  config.update(batch_size=16, total='1 epoch', eval_every='20%')
  config.update_from_flattened_dict(fields)
  return durations_of(config, examples)


def test_milestones_may_be_plain_numbers():
  assert of(1600, **{'optimizer.milestones': (10, '20')}).milestones == (10, 20)


def test_more_than_there_are_numbers_for_is_refused():
  # Ten seconds are not ten steps, and the total has no percentage.
  for total in ('1e400 steps', '10s', '90%', '1 step 2 epochs'):
    with pytest.raises(ValueError, match='total: .* is not a duration'):
      of(total=total)


def test_more_than_can_be_counted_is_refused():
  assert of(total='2147483647 steps').total == 2**31 - 1
  with pytest.raises(ValueError, match='total is .* at most 2,147,483,647'):
    of(total='2147483648 steps')


@pytest.mark.parametrize(
  ('examples', 'warmup', 'steps'),
  [
    (16, '5%', 0),
    (1600, '5%', 5),
    (16, '3 steps', 3),  # said, and refused by the schedule
  ],
)
def test_a_share_of_warm_up_fits_any_run(examples, warmup, steps):
  assert of(examples, **{'optimizer.warmup': warmup}).warmup == steps


def test_shares_are_exact():
  """1.1 * 100000 is above 110000 in floating point."""
  fields = {'total': '100000 steps', 'eval_every': '1.1%'}
  assert of(**fields).eval_every == 1100


@pytest.mark.parametrize(
  ('total', 'every', 'logged'),
  [
    ('11 steps', '50 steps', 1),
    ('100 steps', '50 steps', 10),
    ('200 steps', '50 steps', 50),
    ('9 steps', '50 steps', 1),
  ],
)
def test_short_runs_are_logged_ten_times(total, every, logged):
  fields = {'total': total, 'log_every': every, 'optimizer.warmup': '0 steps'}
  assert of(**fields).log_every == logged


def test_what_is_less_than_a_step_is_done_after_each():
  """A part of a short run, which may not be asked for as none."""
  fields = {'eval_every': '20%', 'checkpoint_every': '0.4 steps'}
  found = of(32, total='2 epochs', **fields)
  assert (found.total, found.eval_every, found.checkpoint_every) == (4, 1, 1)
  for never in ('0 steps', '.0 epochs'):
    with pytest.raises(
      ValueError, match=f"eval_every is '{never}', but 0 does n"
    ):
      of(eval_every=never)


def test_a_run_of_no_step_is_refused():
  with pytest.raises(
    ValueError, match="total is '1 epoch', 0 steps of batch_size 16 over 7 exa"
  ):
    of(7)
  assert of(9).total == 1
