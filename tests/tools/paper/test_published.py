"""The paper's tables against each other."""

import statistics

import pytest

from vit_jax.data import benchmarks
from vit_jax.tools.paper import tables as published

TASKS = benchmarks.SUITES['vtab']


def mean(text):
  """Returns a published figure without its deviation."""
  return float(text.partition(' ± ')[0])


@pytest.mark.parametrize('model', published.TABLE_9)
def test_means_of_table_9_are_those_printed_there_and_in_table_2(model):
  row = published.TABLE_9[model]
  average = statistics.mean(mean(row[task]) for task in TASKS)
  # A mean of 19 figures rounded to 0.1 is off by less than 0.05.
  assert mean(row['vtab']) == pytest.approx(average, abs=0.05)
  in_2 = mean(published.TABLE_2[model]['vtab'])
  assert in_2 == pytest.approx(average, abs=0.05)
