"""The table, the CSV file and the plot of a sweep against sums by hand."""

import dataclasses

import pytest
from matplotlib.figure import Figure

from vit_jax.sweeps.grid import GridReport, GridRun
from vit_jax.training import metric_log

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
    'n = 3 runs (seed); 8 of 9 runs have finished.\n'
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


def write_curve(run, points):
  log = metric_log.MetricLog(str(run.workdir), None)
  for step, accuracy in points.items():
    log.write(step, {'train/loss': 1.0})
    if accuracy is not None:
      log.write(step, {'test/accuracy': accuracy})
  log.close()


def test_curves_are_means_over_steps_that_all_runs_have(tmp_path):
  cells = {
    ('none', 'input', f'seed={i}'): r
    for i, r in enumerate([result(0.5), result(0.7), result(0, 'diverged')])
  }
  sweep = report(tmp_path, cells)
  write_curve(sweep.runs[0], {1: None, 2: 0.1, 4: 0.5})
  write_curve(sweep.runs[1], {2: 0.3, 3: 0.4, 4: 0.7})
  write_curve(sweep.runs[2], {2: 0.9})  # and diverged
  steps, values = sweep.curve(sweep.runs)
  assert steps == [2, 4]
  assert values == pytest.approx([0.2, 0.6])


def plotted(mixed):
  for run in mixed.runs:
    if run.status == 'done':
      write_curve(run, {2: 0.4, 4: run.result['metrics']['test/accuracy']})
  return mixed


def test_plot_shows_every_run(mixed):
  axes = Figure().subplots()
  plotted(mixed).draw_last(axes)
  dots = [
    list(line.get_xdata())
    for line in axes.lines
    if line.get_linestyle() == 'None' and line.get_marker() == '.'
  ]
  assert dots == [[0.5, 0.6, 0.7], [0.8, 0.9], []]
  assert [t.get_text() for t in axes.get_yticklabels()] == ['none', '1-D']


def test_no_plot_before_a_run_has_finished(tmp_path, mixed):
  cells = {('none', 'input', 'seed=0'): result(0, 'diverged')}
  sweep = report(tmp_path, cells)
  assert sweep.plot() is None
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
  for run in sweep.runs:
    last = run.result['metrics']['test/accuracy']
    write_curve(run, {2: 0.25, 4: last})
  assert f'| none | {value} ± nan |' in sweep.markdown()
  assert '| 1-D | 75.00 (n = 1) |' in sweep.markdown()
  assert sweep.plot()
  axes = Figure().subplots()
  sweep.draw_curves(axes)
  assert axes.get_ylim() == pytest.approx((0.74, 0.76))
  alone = dataclasses.replace(sweep, runs=sweep.runs[:1])
  assert alone.plot()


def test_plot_explains_rows_and_columns(mixed, figures):
  assert plotted(mixed).plot()
  (figure,) = figures
  texts = [text.get_text() for text in figure.legends[0].get_texts()]
  left, right = figure.axes
  # A line for each value of the metric, in either.
  for axes, both in ((left, [True, False]), (right, [True, True])):
    lines = axes.get_xgridlines()[0], axes.get_ygridlines()[0]
    assert [line.get_visible() for line in lines] == both
  percent = [
    any('%' in label.get_text() for label in labels)
    for labels in (left.get_xticklabels(), right.get_yticklabels())
  ]
  legend = figure.legends[0].get_lines()
  columns = ['', 'Added', 'input', 'every layer']
  assert texts == ['Kind', 'none', '1-D', *columns]
  assert percent == [True, True]
  # What a line is named after has none itself.
  assert [x.get_linestyle() != 'None' for x in legend] == [
    *(False, True, True, False, False, True, True)
  ]
  assert [x.get_linewidth() for x in legend[1:3]] == [4, 4]
  assert len(left.xaxis.get_major_locator().tick_values(0, 1)) == 6
  # Of one, and in as many inches as are needed at least.
  for axis in (left.xaxis, right.yaxis):
    assert axis.get_major_formatter().xmax == 1
  assert figure.get_size_inches() == pytest.approx((12, 3.6))
  # As the curves are drawn.
  _, *rows, _, _, input_, every = legend
  first, below, beside = right.lines
  assert [x.get_color() for x in rows] == [
    x.get_color() for x in (first, below)
  ]
  assert [x.get_marker() for x in (input_, every)] == [
    x.get_marker() for x in (below, beside)
  ]
