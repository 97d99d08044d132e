"""Figure 5 of sweeps: what a model has computed, and where it is drawn."""

import csv
import io

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from tests.tools.paper import table_6
from vit_jax.models import variants
from vit_jax.sweeps.grid import GridRun
from vit_jax.tools.paper import scaling
from vit_jax.tools.paper.scaling import Point, ScalingReport

METRIC = 'fewshot/10shot_accuracy'


def result(variant, value, gflops, metric=METRIC):
  fields = variants.fields(variant)
  model = variants.defaults(fields['name']) | fields
  return {
    'status': 'diverged' if value is None else 'done',
    'metrics': {} if value is None else {metric: value},
    'config': {'model': model, 'batch_size': 4096},
    'params': 86_567_656,
    'gflops': gflops,
    'steps': 1000,
    'elapsed_s': 1.5,
  }


def report(folder, cells, metric=METRIC):
  """`cells`: results of the seeds by model."""
  runs = [
    GridRun(
      {'Model': model, 'seed': f'seed={i}'}, folder / f'{model}_{i}', found
    )
    for model, results in cells.items()
    for i, found in enumerate(results)
  ]
  n = max(map(len, cells.values()))
  axes = {'Model': list(cells), 'seed': [f'seed={i}' for i in range(n)]}
  return ScalingReport(axes=axes, averaged=['seed'], metric=metric, runs=runs)


@pytest.fixture
def mixed(tmp_path):
  return report(
    tmp_path,
    {
      'ViT-B/16': [result('b16', v, 35.0) for v in (0.6, 0.7, 0.8)],
      'ViT-B/32': [result('b32', v, 8.75) for v in (0.5, None)],
      'R50x1': [result('r50x1', v, 8.0) for v in (None, None)],
      'R50x2': [None, None],
      'R50+ViT-B/16': [None, result('r50+b16', 0.9, 40.0)],
    },
  )


def test_compute_is_counted_as_in_table_6():
  """L/16 takes the printed 783 exaFLOPs for 7 epochs of 303M images."""
  found = result('l16', 0.5, 123.15)
  found['steps'] = round(7 * table_6.JFT_IMAGES / 4096)
  assert scaling.exaflops(found) == pytest.approx(783, rel=0.003)


@pytest.mark.parametrize(
  ('variant', 'family'),
  [
    ('b16', 'ViT'),
    ('r50x1', 'ResNet (BiT)'),
    ('r50+b16', 'Hybrid'),
    ('axial_b16', 'Axial'),
    ('igpt_s', 'Other'),
  ],
)
def test_the_family_of_a_model(variant, family):
  assert scaling.family(result(variant, 0.5, 1.0)['config']['model']) == family


def test_table_has_what_each_model_is_and_takes(mixed):
  assert mixed.markdown() == (
    f'{METRIC} at the last step in percent, mean ± standard deviation of n = 3 '
    'runs (seed); 8 of 11 runs have ended.\n'
    '\n'
    f'| Model | Family | Parameters | exaFLOPs | {METRIC} |\n'
    '| :-- | :-- | --: | --: | --: |\n'
    '| ViT-B/16 | ViT | 86,567,656 | 0.4301 | 70.00 ± 10.00 |\n'
    '| ViT-B/32 | ViT | 86,567,656 | 0.1075 | 50.00 (n = 1, 1 diverged) |\n'
    '| R50x1 | ResNet (BiT) | 86,567,656 |  | diverged |\n'
    '| R50x2 |  |  |  | pending |\n'
    '| R50+ViT-B/16 | Hybrid | 86,567,656 | 0.4915 | 90.00 (n = 1) |\n'
  )


def test_a_further_axis_makes_further_models(tmp_path):
  runs = [
    GridRun(
      {'Model': 'a', 'lr': f'lr={i}'}, tmp_path / f'{i}', result('b16', i, 1)
    )
    for i in (0, 1)
  ]
  axes = {'Model': ['a'], 'lr': ['lr=0', 'lr=1']}
  made = ScalingReport(axes=axes, averaged=[], metric=METRIC, runs=runs)
  assert [point.name for point in made.points()] == ['a, lr=0', 'a, lr=1']


def test_seeds_alone_are_one_model(tmp_path):
  runs = [
    GridRun({'seed': f'seed={i}'}, tmp_path / f'{i}', result('b16', i, 1))
    for i in (0, 1)
  ]
  axes = {'seed': ['seed=0', 'seed=1']}
  made = ScalingReport(axes=axes, averaged=['seed'], metric=METRIC, runs=runs)
  assert [(p.name, p.mean) for p in made.points()] == [('all runs', 0.5)]


def test_csv_has_the_compute_of_every_run(mixed):
  """For B/16 three times forward: 3 x 35e9 x 1000 x 4096 = 0.43008e18."""
  rows = list(csv.DictReader(io.StringIO(mixed.csv_text())))
  assert list(rows[0]) == [
    *('Model', 'seed', 'status', METRIC, 'params', 'gflops', 'steps'),
    *('elapsed_s', 'exaflops', 'folder'),
  ]
  assert len(rows) == 8
  assert [float(row['exaflops']) for row in rows] == pytest.approx(
    [0.43008] * 3 + [0.10752] * 2 + [0.098304] * 2 + [0.49152]
  )


def test_points_are_means_of_what_has_finished(mixed):
  first, second, third = mixed.points()
  assert first == Point(
    'ViT-B/16',
    'ViT',
    pytest.approx(0.43008),
    pytest.approx(0.7),
    pytest.approx(0.1),
  )
  assert (second.name, second.mean, second.deviation) == ('ViT-B/32', 0.5, None)
  assert (third.name, third.family) == ('R50+ViT-B/16', 'Hybrid')


def draw(points):
  axes = Figure().subplots()
  scaling.draw_points(axes, points)
  return axes


def test_a_line_goes_through_a_family_in_order_of_compute():
  axes = draw(
    [
      Point('b', 'ViT', 20.0, 0.6, 0.1),
      Point('c', 'ResNet (BiT)', 5.0, 0.4),
      Point('a', 'ViT', 10.0, 0.5, 0.2),
    ]
  )
  vit, resnet = (container.lines[0] for container in axes.containers)
  assert vit.get_xdata().tolist() == [10, 20]
  assert vit.get_ydata().tolist() == [0.5, 0.6]
  assert resnet.get_xydata().tolist() == [[5, 0.4]]
  assert vit.get_color() != resnet.get_color()
  assert vit.get_marker() != resnet.get_marker()
  (bars,) = axes.containers[0].lines[2]
  assert [list(s[:, 1]) for s in bars.get_segments()] == [
    pytest.approx([0.3, 0.7]),
    pytest.approx([0.5, 0.7]),
  ]
  assert axes.get_xscale() == 'log'
  assert 'exaFLOPs' in axes.get_xlabel()


def test_plot_has_the_models_and_the_families_shown(mixed, figures):
  picture = matplotlib.image.imread(io.BytesIO(mixed.plot()))
  assert picture.std() > 0
  (figure,) = figures
  (axes,) = figure.axes
  assert axes.get_ylabel() == f'{METRIC} at the last step'
  assert {t.get_text() for t in axes.texts} == {
    'ViT-B/16',
    'ViT-B/32',
    'R50+ViT-B/16',
  }
  (legend,) = figure.legends
  assert [t.get_text() for t in legend.get_texts()] == ['ViT', 'Hybrid']
  # 1 is 100 %.
  text = axes.yaxis.get_major_formatter()(0.5, 0)
  assert text.endswith('%') and float(text[:-1]) == 50


def test_no_plot_before_a_run_has_finished(tmp_path):
  made = report(tmp_path, {'a': [result('b16', None, 1.0)], 'b': [None]})
  assert made.plot() is None
  made.write(tmp_path / 'new')
  assert {p.name for p in (tmp_path / 'new').iterdir()} == {
    'results.csv',
    'table.md',
  }
