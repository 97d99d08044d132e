"""SIGTERM and Ctrl-C: told after a step, and by whom."""

import signal
import threading

import jax
import pytest

from vit_jax.training import preemption
from vit_jax.training.preemption import preemption_notice


def test_several_processes_are_asked_by_numbers_that_only_rise(monkeypatch):
  """Over all runs of a sweep, and none after one answer forgets it."""
  asked = []

  def reached(number):
    asked.append(number)
    return number == asked[0] + 3  # and at no other, as JAX has it

  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(
    preemption.multihost_utils, 'reached_preemption_sync_point', reached
  )
  with preemption_notice():
    with preemption_notice() as first:
      assert [first() for _ in range(2)] == [False, False]
    with preemption_notice() as second:
      assert [second() for _ in range(3)] == [False, True, True]
  assert asked == [asked[0] + i for i in range(5)]


def test_a_notice_knows_what_came_before_it_in_the_one_around_it():
  with preemption_notice() as outer:
    assert not outer()
    signal.raise_signal(signal.SIGTERM)
    with preemption_notice() as inner:
      assert inner()
    assert outer()
  with preemption_notice() as later:
    assert not later()


@pytest.mark.parametrize(
  ('number', 'error'),
  [
    (signal.SIGTERM, preemption.Preempted),
    (signal.SIGINT, KeyboardInterrupt),
  ],
)
def test_a_signal_outside_of_a_run_ends_at_once(handled, number, error):
  with preemption_notice(between_runs=True) as between:
    with preemption_notice(between_runs=True), preemption_notice() as told:
      signal.raise_signal(number)
      assert told()
    assert between()
  with preemption_notice(between_runs=True):
    with preemption_notice():
      pass
    with pytest.raises(error):
      signal.raise_signal(number)
  assert not handled


@pytest.fixture
def handled():
  """Gives the SIGTERMs received, with Ctrl-C as it is in a terminal."""
  received = []
  handlers = {
    signal.SIGTERM: lambda *_: received.append('SIGTERM'),
    signal.SIGINT: signal.default_int_handler,
  }
  before = {n: signal.signal(n, h) for n, h in handlers.items()}
  yield received
  for number, handler in before.items():
    signal.signal(number, handler)


def test_ctrl_c_to_one_of_several_is_sigterm_once(handled, monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  with preemption_notice():
    signal.raise_signal(signal.SIGINT)
    assert handled == ['SIGTERM']
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
  with preemption_notice():
    signal.raise_signal(signal.SIGINT)
  assert handled == ['SIGTERM', 'SIGTERM']
  with preemption_notice():
    pass
  assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_an_ignored_ctrl_c_stays_ignored(handled):
  """As in what a shell runs in the background."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  with preemption_notice() as told:
    signal.raise_signal(signal.SIGINT)
    assert not told()
  assert not handled
  assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_other_threads_have_no_handlers():
  failures = []

  def notice():
    try:
      with preemption_notice():
        pass
    except Exception as e:
      failures.append(e)

  thread = threading.Thread(target=notice)
  thread.start()
  thread.join()
  assert not failures


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_one_alone_is_told_and_gives_its_handlers_back(handled, number):
  numbers = signal.SIGINT, signal.SIGTERM
  before = [*map(signal.getsignal, numbers)]
  with preemption_notice() as told:
    signal.raise_signal(number)
    assert told() and not handled
    if number == signal.SIGTERM:  # as schedulers may send it twice
      signal.raise_signal(number)
    else:
      with preemption_notice(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
  assert [*map(signal.getsignal, numbers)] == before
