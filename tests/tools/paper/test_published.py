"""The paper's tables against each other and against what is built here."""

import statistics

import pytest

from tests.tools.paper import table_6
from vit_jax.data import benchmarks
from vit_jax.models import variants
from vit_jax.tools.paper import published

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


@pytest.mark.parametrize(
  ('group', 'total', 'n'),
  [('natural', 606.8, 7), ('specialised', 348.0, 4), ('structured', 520.2, 8)],
)
def test_groups_of_table_9_have_their_columns(group, total, n):
  """By sums of H/14's row, made by hand."""
  row = published.TABLE_9['ViT-H/14 (JFT)']
  figures = [mean(row[task]) for task in benchmarks.SUITES[group]]
  assert len(figures) == n
  assert sum(figures) == pytest.approx(total)


def test_models_of_tables_5_and_6_can_be_built():
  named = {variant for variant, _ in published.TABLE_5}
  named |= {row.variant for row in table_6.TABLE_6}
  assert named <= variants.PUBLISHED.keys()
  for row in table_6.TABLE_6:
    assert row.model.lower().replace('vit-', '').replace('/', '') == row.variant
