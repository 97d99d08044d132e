"""Work on all cores: all of it, in order, and told about."""

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
