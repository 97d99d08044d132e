"""The paper's tables against each other and against what is built here."""

import statistics

import pytest

from vit_jax.data import benchmarks
from vit_jax.models import variants
from vit_jax.tools.paper import published

OTHER_NAMES = {'real', 'objectnet', 'objectnet/top5', 'vtab'}
TABLES = {
  'table 2': published.TABLE_2,
  'objectnet': published.OBJECTNET,
  'table 5': published.TABLE_5,
  'table 6': {i: row.results for i, row in enumerate(published.TABLE_6)},
  'table 9': published.TABLE_9,
}
TASKS = benchmarks.SUITES['vtab']


@pytest.mark.parametrize(
  ('text', 'mean', 'deviation'),
  [('88.55 ± 0.04', 88.55, 0.04), ('88.4', 88.4, None), ('5 ± 0', 5, 0)],
)
def test_a_printed_figure_is_a_number(text, mean, deviation):
  figure = published.Printed(text)
  assert (figure.mean, figure.deviation) == (mean, deviation)


@pytest.mark.parametrize('table', TABLES)
def test_every_figure_is_a_percentage_of_a_known_data_set(table):
  for results in TABLES[table].values():
    assert results.keys() <= benchmarks.BENCHMARKS.keys() | OTHER_NAMES
    for figure in results.values():
      assert 25 < figure.mean < 100
      assert 0 <= (figure.deviation or 0) < 2


def test_table_2_in_full():
  whole = {*benchmarks.SUITES['table2'], 'real', 'vtab'} - set(TASKS)
  names = {model: set(row) for model, row in published.TABLE_2.items()}
  assert names.pop(published.NOISY_STUDENT) == {'imagenet2012', 'real'}
  assert len(names) == 4
  assert all(row == whole for row in names.values())
  # One of each row and column.
  h14, l16, i21k, bit, noisy = published.TABLE_2.values()
  assert h14['imagenet2012'].text == '88.55 ± 0.04'
  assert l16['real'].text == '90.54 ± 0.03'
  assert i21k['cifar10'].text == '99.15 ± 0.03'
  assert bit['cifar100'].text == '93.51 ± 0.08'
  assert h14['oxford_iiit_pet'].text == '97.56 ± 0.03'
  assert l16['oxford_flowers102'].text == '99.74 ± 0.00'
  assert bit['vtab'].text == '76.29 ± 1.70'
  assert bit['real'].text == '90.54'
  assert noisy['imagenet2012'].text == '88.4'


@pytest.mark.parametrize(
  ('column', 'figures'),
  [
    ('caltech101', ['95.3', '95.4', '90.8']),
    ('sun397', ['65.0', '63.5', '61.0']),
    ('eurosat', ['96.7', '96.5', '95.6']),
    ('dmlab', ['53.1', '49.7', '41.9']),
    ('kitti', ['84.5', '82.2', '79.9']),
    ('smallnorb_elevation', ['51.2', '51.1', '41.7']),
  ],
)
def test_columns_of_table_9_are_under_their_names(column, figures):
  rows = published.TABLE_9.values()
  assert [row[f'vtab/{column}'].text for row in rows] == figures
  assert all(tuple(row) == (*TASKS, 'vtab') for row in rows)


@pytest.mark.parametrize('model', published.TABLE_9)
def test_means_of_table_9_are_those_printed_there_and_in_table_2(model):
  row = published.TABLE_9[model]
  mean = statistics.mean(row[task].mean for task in TASKS)
  # A mean of 19 figures rounded to 0.1 is off by less than 0.05.
  assert row['vtab'].mean == pytest.approx(mean, abs=0.05)
  assert published.TABLE_2[model]['vtab'].mean == pytest.approx(mean, abs=0.05)


@pytest.mark.parametrize(
  ('group', 'total', 'n'),
  [('natural', 606.8, 7), ('specialised', 348.0, 4), ('structured', 520.2, 8)],
)
def test_groups_of_table_9_have_their_columns(group, total, n):
  """By sums of H/14's row, made by hand."""
  row = published.TABLE_9[published.H14_JFT]
  figures = [row[task].mean for task in benchmarks.SUITES[group]]
  assert len(figures) == n
  assert sum(figures) == pytest.approx(total)


def test_tables_5_and_6_agree_on_jft():
  """H/14 apart, of which both print other numbers."""
  longest = {row.variant: row for row in published.TABLE_6}
  for variant in ('b16', 'b32', 'l16', 'l32'):
    assert published.TABLE_5[variant, 'JFT'] == longest[variant].results


def test_table_5_grows_with_the_data():
  """On ImageNet, for every model."""
  for variant in ('b16', 'l16', 'l32', 'h14'):
    found = [
      published.TABLE_5[variant, data]['imagenet2012'].mean
      for data in ('ImageNet', 'I21k', 'JFT')
      if (variant, data) in published.TABLE_5
    ]
    assert found == sorted(found) and len(found) == 3 - (variant == 'h14')


def test_models_of_tables_5_and_6_can_be_built():
  named = {variant for variant, _ in published.TABLE_5}
  named |= {row.variant for row in published.TABLE_6}
  assert named <= variants.PUBLISHED.keys()
  for row in published.TABLE_6:
    assert row.model.lower().replace('vit-', '').replace('/', '') == row.variant


def test_twice_the_epochs_are_twice_the_compute():
  for short in published.TABLE_6:
    for long in published.TABLE_6:
      if (short.variant, short.epochs, long.epochs) == (long.variant, 7, 14):
        ratio = long.exaflops / short.exaflops
        # R50+L/16 is the exception that tests of the counts know about.
        assert ratio == pytest.approx(
          2, rel=0.003 if short.exaflops != 859 else 0.03
        )
