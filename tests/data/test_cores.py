"""Work on all cores: all of it, in order, and told about."""

import io
import os

import pytest

from vit_jax.data import cores


def test_results_come_in_order_and_are_counted():
  """More than are handed to the threads at once."""
  bar = cores.progress('Trying', 4100, 'things', shown=False)
  counted, closed = [], []
  bar.update = lambda n=1: counted.append(n)
  bar.close = lambda: closed.append(len(counted))
  found = [*cores.in_threads(lambda i: i * i, range(3, 4103), bar)]
  assert found == [i * i for i in range(3, 4103)]
  assert sum(counted) == 4100 and closed == [4100]


def test_an_error_reaches_who_asked():
  bar = cores.progress('Trying', 3, 'things', shown=False)
  with pytest.raises(ZeroDivisionError):
    [*cores.in_threads(lambda i: 1 // i, range(3), bar)]


def test_cores_are_those_this_process_may_run_on(monkeypatch):
  monkeypatch.setattr(os, 'sched_getaffinity', lambda who: {2, 5, 7})
  assert cores.usable_cores() == 3
  monkeypatch.delattr(os, 'sched_getaffinity')
  monkeypatch.setattr(os, 'cpu_count', lambda: 6)
  assert cores.usable_cores() == 6
  monkeypatch.setattr(os, 'cpu_count', lambda: None)
  assert cores.usable_cores() == 1


@pytest.mark.parametrize(('on_terminal', 'seconds'), [(True, 0.5), (False, 30)])
def test_a_bar_says_what_and_how_many(monkeypatch, on_terminal, seconds):
  """Seldom where each time is a line, and never before a second has passed."""
  shown = io.StringIO()
  shown.isatty = lambda: on_terminal
  monkeypatch.setattr(cores.sys, 'stderr', shown)
  bar = cores.progress('Checking', 70, 'files')
  assert (bar.total, bar.desc, bar.unit) == (70, 'Checking', ' files')
  assert (bar.delay, bar.mininterval, bar.disable) == (1, seconds, False)
  bar.close()
  bar = cores.progress('Checking', 70, 'files', shown=False)
  assert bar.disable and not shown.getvalue()
