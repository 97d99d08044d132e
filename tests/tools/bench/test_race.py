"""Turns, medians and ratios, of contenders whose speed is known."""

import itertools
import types

import pytest

from vit_jax.tools.bench import race
from vit_jax.tools.bench.race import Contender


def scripted(name, *rates, **facts):
  turns = iter(rates)
  return lambda: Contender(name, lambda: next(turns), **facts)


def test_medians_and_ratios_are_over_the_rounds(monkeypatch):
  monkeypatch.setattr(race, 'ROUNDS', 3)
  # The first turn warms up. The machine is slow in the second round.
  lines = race.race(
    [
      scripted('ours', 999, 12, 1, 8, compile_s=2.5, memory_gib=None),
      scripted('theirs', 0.001, 6, 0.25, 5),
    ]
  )
  # The median of the ratios 2, 4 and 1.6. The ratio of the medians is 1.6.
  assert lines == [
    'images/s, median of 3 rounds (minimum to maximum):',
    '  ours                            8.0  (1.0 to 12.0), compiled in 2.5 s',
    '  theirs                          5.0  (0.2 to 6.0)',
    'ours / theirs: 2.00',
  ]


@pytest.mark.parametrize(
  ('share', 'text'), [(0.5 / 400, '50.0%'), (1e-8, '<0.1%')]
)
def test_mfu_follows_from_the_speed(share, text):
  made = Contender('a', lambda: 400.0, memory_gib=1.25, mfu_per_image_s=share)
  assert race.race([lambda: made])[1].endswith(f', 1.25 GiB, MFU {text}')


@pytest.mark.parametrize(
  'message',
  ['RESOURCE_EXHAUSTED: 3 GiB\nmore', 'CUDA out of memory. Tried 3 GiB\nmore'],
)
def test_what_does_not_fit_is_left_out(monkeypatch, message, capsys):
  monkeypatch.setattr(race, 'ROUNDS', 1)

  def too_large():
    raise RuntimeError(message)

  lines = race.race([too_large, scripted('b', 1, 2), scripted('c', 1, 1)])
  said = f'does not fit into memory: {message.splitlines()[0][:200]}\n'
  assert capsys.readouterr().out == f'Implementation 1 {said}'
  # Others are compared with the first that fits, which is named.
  assert len(lines) == 4 and lines[-1] == 'b / c: 2.00'
  lines = race.race([scripted('a', 4, 4), too_large, scripted('c', 1, 1)])
  assert lines[-1] == 'a / c: 4.00'
  assert capsys.readouterr().out == f'Implementation 2 {said}'


def test_other_errors_are_not_hidden():
  def broken():
    raise RuntimeError('the device is on fire')

  with pytest.raises(RuntimeError, match='on fire'):
    race.race([broken])


class Device:
  """Takes steps at once and needs 0.125 s for each, on a clock of its own."""

  def __init__(self, first_s=0.125):
    self.now = 0.0
    self.queued = 0.0
    self.steps = self.waits = 0
    self.first_s = first_s

  def start(self):
    self.queued += 0.125 if self.steps else self.first_s
    self.steps += 1

  def wait(self):
    self.now += self.queued
    self.queued = 0.0
    self.waits += 1


def test_a_turn_has_as_many_steps_as_there_is_time_for(monkeypatch):
  device = Device(first_s=30)  # compiles
  clock = types.SimpleNamespace(perf_counter=lambda: device.now)
  monkeypatch.setattr(race, 'time', clock)
  turn = race.paced(device.start, device.wait, images=4)
  assert turn() == 32
  # One that compiles, one for the pace, 0.5 / 0.125 that count: these are
  # queued, and waited for once.
  assert (device.steps, device.waits) == (6, 3)
  assert turn() == 32
  assert (device.steps, device.waits) == (10, 4)


@pytest.mark.parametrize(('step_s', 'rate'), [(2.0, 1.5), (2**-10, 307_200)])
def test_a_turn_has_one_step_at_least_and_a_hundred_at_most(
  monkeypatch, step_s, rate
):
  """All steps take one tick of the clock, of three images each."""
  seconds = itertools.count(step=step_s)
  clock = types.SimpleNamespace(perf_counter=lambda: next(seconds))
  monkeypatch.setattr(race, 'time', clock)
  turn = race.paced(lambda: None, lambda: None, images=3)
  assert turn() == rate


def test_contenders_take_turns_in_every_round(monkeypatch):
  """So that all see the same machine."""
  monkeypatch.setattr(race, 'ROUNDS', 3)
  taken = []

  def contender(name):
    return Contender(name, lambda: taken.append(name) or 1.0)

  race.race([lambda: contender('a'), lambda: contender('b')])
  assert taken == 4 * ['a', 'b']
