"""The table and the CSV file of a sweep against sums by hand."""

import pytest

from vit_jax.sweeps.grid import GridReport, GridRun

AXES = {
  'Kind': ['none', '1-D'],
  'Added': ['input', 'every layer'],
  'seed': ['seed=0', 'seed=1', 'seed=2'],
}


def result(value, status='done', metric='test/accuracy'):
  return {
    'status': status,
    'metrics': {metric: value} if status == 'done' else {},
    'params': 12,
    'gflops': 0.5,
    'steps': 4,
    'elapsed_s': 1.5,
  }


def report(folder, cells, axes=AXES, metric='test/accuracy'):
  """`cells` has a result by the labels in a tuple."""
  return GridReport(
    axes=axes,
    averaged=['seed'],
    metric=metric,
    runs=[
      GridRun(
        dict(zip(axes, labels, strict=True)),
        folder / 'runs' / '_'.join(labels),
        value,
      )
      for labels, value in cells.items()
    ],
  )


@pytest.fixture
def mixed(tmp_path):
  """Every kind of cell: whole, absent, with gaps, and none finished."""
  none, one = (('none', 'input'), ('1-D', 'input'))
  every = ('1-D', 'every layer')
  return report(
    tmp_path,
    {
      (*none, 'seed=0'): result(0.5),
      (*none, 'seed=1'): result(0.6),
      (*none, 'seed=2'): result(0.7),
      (*one, 'seed=0'): result(0.8),
      (*one, 'seed=1'): result(0, 'diverged'),
      (*one, 'seed=2'): result(0.9),
      (*every, 'seed=0'): result(0, 'diverged'),
      (*every, 'seed=1'): result(0, 'diverged'),
      (*every, 'seed=2'): None,
    },
  )


def test_table_has_means_deviations_and_gaps(mixed):
  """The deviation is that of a sample: sqrt(2 * 10^2 / 2) = 10 per cent."""
  assert mixed.markdown() == (
    'test/accuracy at the last step in percent, mean ± standard deviation of '
    'n = 3 runs (seed); 8 of 9 runs have ended.\n'
    '\n'
    '| Kind | input | every layer |\n'
    '| :-- | --: | --: |\n'
    '| none | 60.00 ± 10.00 | n/a |\n'
    '| 1-D | 85.00 ± 7.07 (n = 2, 1 diverged) | 2 diverged, 1 pending |\n'
  )


def test_csv_has_a_line_for_each_finished_run(mixed):
  lines = mixed.csv_text().splitlines()
  assert lines[0] == (
    'Kind,Added,seed,status,test/accuracy,params,gflops,steps,elapsed_s,folder'
  )
  assert lines[1] == (
    'none,input,0,done,0.5,12,0.5,4,1.5,runs/none_input_seed=0'
  )
  assert lines[5].startswith('1-D,input,1,diverged,,12')
  assert len(lines) == 1 + 8


def test_columns_keep_the_order_of_their_axis(tmp_path):
  """Though the first row has only the third column."""
  axes = {'Kind': ['none', '1-D'], 'Added': list('zyxwv'), 'seed': ['seed=0']}
  cells = {
    ('none', 'x', 'seed=0'): result(0.5),
    **{('1-D', c, 'seed=0'): result(0.25) for c in 'zyxw'},
    ('1-D', 'v', 'seed=0'): None,
  }
  lines = report(tmp_path, cells, axes).markdown().splitlines()
  assert lines[2] == '| Kind | z | y | x | w | v |'
  assert lines[4:] == [
    '| none | n/a | n/a | 50.00 | n/a | n/a |',
    '| 1-D | 25.00 | 25.00 | 25.00 | 25.00 | pending |',
  ]


def test_a_third_axis_multiplies_the_rows(tmp_path):
  axes = {'a': ['1', '2'], 'seed': ['seed=0'], 'b': ['3', '4'], 'c': ['5', '6']}
  cells = {
    (a, 'seed=0', b, c): result(float(a + b + c) / 1000)
    for a in axes['a']
    for b in axes['b']
    for c in axes['c']
  }
  assert report(tmp_path, cells, axes).markdown().splitlines()[2:] == [
    '| a, c | 3 | 4 |',
    '| :-- | --: | --: |',
    '| 1, 5 | 13.50 | 14.50 |',
    '| 1, 6 | 13.60 | 14.60 |',
    '| 2, 5 | 23.50 | 24.50 |',
    '| 2, 6 | 23.60 | 24.60 |',
  ]


def test_seeds_alone_are_one_row(tmp_path):
  cells = {('seed=0',): result(0.25), ('seed=1',): result(0.75)}
  table = report(tmp_path, cells, {'seed': AXES['seed']}).markdown()
  assert '| all runs | 50.00 ± 35.36 |' in table


def test_other_metrics_are_no_percentages(tmp_path):
  cells = {('a|b',): result(1.23456, metric='test/loss')}
  table = report(tmp_path, cells, {'x': ['a|b']}, 'test/loss').markdown()
  assert table == (
    'test/loss at the last step.\n\n'
    '| x | test/loss |\n| :-- | --: |\n| a\\|b | 1.235 |\n'
  )


def test_tables_are_written_before_a_run_has_finished(tmp_path):
  cells = {('none', 'input', 'seed=0'): result(0, 'diverged')}
  sweep = report(tmp_path, cells)
  sweep.write(tmp_path / 'new')
  assert {p.name for p in (tmp_path / 'new').iterdir()} == {
    'results.csv',
    'table.md',
  }
  assert sweep.summary(tmp_path / 'new') == sweep.markdown() + ''.join(
    f'\nwritten  {tmp_path}/new/{name}' for name in ('results.csv', 'table.md')
  )


def test_a_metric_that_is_no_number_leaves_the_others_to_be_seen(tmp_path):
  value = float('nan')
  cells = {
    ('none', 'input', 'seed=0'): result(value),
    ('none', 'input', 'seed=1'): result(0.5),
    ('1-D', 'input', 'seed=0'): result(0.75),
  }
  sweep = report(tmp_path, cells)
  assert f'| none | {value} ± nan |' in sweep.markdown()
  assert '| 1-D | 75.00 (n = 1) |' in sweep.markdown()
