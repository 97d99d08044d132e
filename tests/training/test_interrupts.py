"""Ctrl-C where Python itself would print a traceback, or lose it."""

import itertools
import os
import signal
import subprocess
import sys
import threading

import jax
import pytest

from tests.conftest import ROOT
from vit_jax.training import interrupts, run

# Where a shell runs the tests in the background, SIGINT is ignored. (With
# `preexec_fn` Python forks, of which JAX warns once it has threads.)
UNIGNORED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
LOST = """
import signal, time
from vit_jax.training import interrupts
interrupts.end_at_once()
interrupts.raise_errors()
class Dies:
  def __del__(self):
    signal.raise_signal(signal.SIGINT)
try:
  Dies()
  time.sleep(100)
except KeyboardInterrupt:
  print('raised')
"""


def start(*args, **environ):
  return subprocess.Popen(
    [sys.executable, '-c', UNIGNORED, *args],
    cwd=ROOT,
    env=os.environ | environ,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def test_none_is_lost_in_a_callback():
  process = start('-c', LOST)
  assert process.communicate() == ('raised\n', '')
  assert process.returncode == 0


def test_other_programs_keep_their_handlers():
  code = (
    'import signal, sys, vit_jax.flags\n'
    'before = signal.getsignal(signal.SIGINT), sys.unraisablehook\n'
    'from vit_jax.training import interrupts\n'
    'interrupts.raise_errors()\n'
    'assert before == (signal.default_int_handler, sys.__unraisablehook__)\n'
    'assert before == (signal.getsignal(signal.SIGINT), sys.unraisablehook)'
  )
  process = start('-c', code)
  assert process.communicate() == ('', '')


def test_several_processes_are_asked_by_numbers_that_only_rise(monkeypatch):
  """By whatever steps, and none after one answer forgets it."""
  asked = []

  def reached(number):
    asked.append(number)
    return number == 4  # and at no other, as JAX has it

  monkeypatch.setattr(run, '_ASKED', itertools.count(1))
  monkeypatch.setattr(run, '_RECEIVED_BY_ALL', threading.Event())
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(
    run.multihost_utils, 'reached_preemption_sync_point', reached
  )
  with run.preemption_notice() as first:
    assert [first(step) for step in (5001, 5002)] == [False, False]
  with run.preemption_notice() as second:
    assert [second(step) for step in (1, 2, 3)] == [False, True, True]
  assert asked == [1, 2, 3, 4, 5]


def test_a_notice_knows_what_came_before_it_in_the_one_around_it():
  with run.preemption_notice() as outer:
    assert not outer(0)
    signal.raise_signal(signal.SIGTERM)
    with run.preemption_notice() as inner:
      assert inner(0)
    assert outer(0)
  with run.preemption_notice() as later:
    assert not later(0)


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
  with run.preemption_notice():
    signal.raise_signal(signal.SIGINT)
    assert handled == ['SIGTERM']
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
  with run.preemption_notice():
    signal.raise_signal(signal.SIGINT)
  assert handled == ['SIGTERM', 'SIGTERM']
  with run.preemption_notice():
    pass
  assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_an_ignored_ctrl_c_stays_ignored(handled, monkeypatch):
  """As in what a shell runs in the background."""
  monkeypatch.setattr(jax, 'process_count', lambda: 1)
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  with run.preemption_notice() as told:
    signal.raise_signal(signal.SIGINT)
    assert 1 > 1 or not told(0)
  assert not handled
  assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_one_alone_is_told_by_ctrl_c_too_and_gives_its_handlers_back(handled):
  with run.preemption_notice() as told:
    signal.raise_signal(signal.SIGINT)
    assert told(0) and not handled
  with run.preemption_notice() as told:
    # Whoever was told before is told as well.
    signal.raise_signal(signal.SIGTERM)
    assert told(0) and handled == ['SIGTERM']
  assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_sigterm_is_no_ctrl_c(handled, monkeypatch, capfd):
  """Schedulers may send it twice, and the state is saved all the same."""
  ended = []
  monkeypatch.setattr(os, '_exit', ended.append)
  with run.preemption_notice() as told:
    for _ in range(2):
      signal.raise_signal(signal.SIGTERM)
    assert told(0) and handled == ['SIGTERM', 'SIGTERM']
  assert not ended and capfd.readouterr().err == ''


def test_other_threads_have_no_handlers(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 1)
  failures = []

  def notice():
    try:
      with run.preemption_notice():
        pass
    except Exception as e:
      failures.append(e)

  thread = threading.Thread(target=notice)
  thread.start()
  thread.join()
  assert not failures


def test_what_a_shell_ignores_ends_no_import(handled):
  del handled  # gives back the handler
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  interrupts.end_at_once()
  assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
