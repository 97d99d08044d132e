"""Tables 2 and 9 of sweeps against sums by hand."""

import pytest

from vit_jax.data.benchmarks import BENCHMARKS, SUITES
from vit_jax.models import variants
from vit_jax.sweeps.grid import GridRun
from vit_jax.tools.paper import tables as published
from vit_jax.tools.paper.tables import TransferReport

VTAB = SUITES['vtab']
DIVERGED, PENDING = 'diverged', 'pending'


def result(value, variant='s16', **metrics):
  fields = variants.fields(variant)
  diverged = value == DIVERGED
  return {
    'status': DIVERGED if diverged else 'done',
    'metrics': {} if diverged else {'test/accuracy': value / 100} | metrics,
    'config': {'model': variants.defaults(fields['name']) | fields},
    'params': 12,
    'gflops': 0.5,
    'steps': 4,
    'elapsed_s': 1.5,
  }


def report(folder, cells, metric='test/accuracy', **more):
  """`cells`: percent of each seed by dataset, or by dataset and model.

  `more` has further metrics, by dataset.
  """
  runs, axes = [], {'Dataset': {}, 'Model': {}, 'seed': {}}
  for key, values in cells.items():
    dataset, model = key if isinstance(key, tuple) else (key, 's16')
    for seed, value in enumerate(values):
      labels = {'Dataset': dataset, 'Model': model, 'seed': f'seed={seed}'}
      for name, label in labels.items():
        axes[name][label] = None
      name = f'{dataset.replace("/", "-")}_{model}_{seed}'
      variant = model if model in variants.PUBLISHED else 's16'
      metrics = more.get(dataset, {})
      found = None if value == PENDING else result(value, variant, **metrics)
      runs.append(GridRun(labels, folder / name, found))
  return TransferReport(
    axes={name: list(labels) for name, labels in axes.items()},
    averaged=['seed'],
    metric=metric,
    runs=runs,
  )


def table(text, head=''):
  """Returns the rows of the (last) table by their first cell, as dicts."""
  lines = [line for line in text.splitlines() if line.startswith('|')]
  starts = [i for i, line in enumerate(lines) if line.startswith('|  |')]
  which = next((i for i in starts if head in lines[i]), None)
  ends = [i for i in starts if i > which] + [len(lines)]
  names, _, *rows = (
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in lines[which : ends[0]]
  )
  return {row[0]: dict(zip(names, row, strict=True)) for row in rows}


@pytest.fixture
def every(tmp_path):
  """Table 2 in full; every task of VTAB has the mean 50 + its number."""
  seeds = {
    task: [50 + i - 1, 50 + i, 50 + i + 1] for i, task in enumerate(VTAB)
  }
  others = {name: [80, 82, 87] for name in SUITES['table2'] if name not in VTAB}
  return report(
    tmp_path,
    others | seeds,
    imagenet2012={'real/accuracy': 0.9, 'real/examples': 46837.0},
  )


def test_table_2_has_ours_and_the_published_models(every):
  """The deviation of 80, 82, 87 is sqrt((9 + 1 + 16) / 2) = 3.61."""
  rows = table(every.markdown())
  assert list(rows) == [
    'ImageNet',
    'ImageNet ReaL',
    'CIFAR-10',
    'CIFAR-100',
    BENCHMARKS['oxford_iiit_pet'].title,
    BENCHMARKS['oxford_flowers102'].title,
    'VTAB (19 tasks)',
  ]
  assert list(rows['ImageNet']) == ['', 's16 (ours)', *published.TABLE_2]
  assert rows['ImageNet']['s16 (ours)'] == '83.00 ± 3.61'
  assert rows['ImageNet']['ViT-H/14 (JFT)'] == '88.55 ± 0.04'
  assert rows['ImageNet ReaL']['s16 (ours)'] == '90.00 ± 0.00'
  assert rows['ImageNet ReaL']['BiT-L (R152x4)'] == '90.54'
  assert rows['CIFAR-10']['Noisy Student (EfficientNet-L2)'] == 'n/a'
  # The seeds' means are 58, 59 and 60.
  assert rows['VTAB (19 tasks)']['s16 (ours)'] == '59.00 ± 1.00'
  assert rows['VTAB (19 tasks)']['BiT-L (R152x4)'] == '76.29 ± 1.70'
  assert every.markdown().startswith(
    'test/accuracy at the last step in percent, mean ± standard deviation of '
    'n = 3 runs (seed). Results of models not marked (ours) are from the '
    'paper.\n\n|'
  )


def test_table_9_has_tasks_groups_and_the_mean(every):
  rows = table(every.markdown(), 'Mean')
  assert list(rows) == ['s16 (ours)', *published.TABLE_9]
  titles = list(rows['s16 (ours)'])[1:]
  marks = {'natural': '●', 'specialised': '■', 'structured': '▲'}
  assert titles == [
    *(f'{marks[BENCHMARKS[t].group]} {BENCHMARKS[t].title}' for t in VTAB),
    'Mean',
  ]
  ours = list(rows['s16 (ours)'].values())[1:]
  assert ours[:19] == [f'{50 + i}.0 ± 1.0' for i in range(19)]
  # The mean of 0..18.
  assert ours[19:] == ['59.0 ± 1.0']
  h14 = list(rows['ViT-H/14 (JFT)'].values())[1:]
  assert h14[:3] == ['95.3', '85.5', '75.2']
  assert h14[19:] == ['77.6']
  assert '● natural, ■ specialised, ▲ structured.' in every.markdown()


def test_the_deviation_of_a_mean_is_over_the_means_of_seeds(tmp_path):
  """Where tasks go up and down with the seed, their means stay."""
  cells = {
    task: [60, 70] if i % 2 else [70, 60] for i, task in enumerate(VTAB[:18])
  } | {VTAB[18]: [65, 65]}
  rows = table(report(tmp_path, cells).markdown())
  assert rows['s16 (ours)']['Mean'] == '65.0 ± 0.0'


def test_sweeps_without_datasets_have_no_such_report():
  with pytest.raises(ValueError, match="needs the axis 'Dataset'"):
    TransferReport({'seed': ['seed=0']}, ['seed'], 'test/accuracy', [])


def test_only_vtab_is_table_9_alone(tmp_path):
  text = report(tmp_path, {task: [50, 60] for task in VTAB}).markdown()
  assert text.count('|  |') == 1
  assert 'VTAB (19' not in text
  assert table(text)['s16 (ours)']['Mean'] == '55.0 ± 7.1'


def test_without_vtab_it_is_table_2_alone(tmp_path):
  text = report(tmp_path, {'cifar10': [95], './my|data': [50]}).markdown()
  assert text == (
    'test/accuracy at the last step in percent. Results of models not marked '
    '(ours) are from the paper.\n\n'
    '|  | s16 (ours) | ViT-H/14 (JFT) | ViT-L/16 (JFT) | ViT-L/16 (I21k) | '
    'BiT-L (R152x4) |\n'
    '| :-- | --: | --: | --: | --: | --: |\n'
    '| CIFAR-10 | 95.00 | 99.50 ± 0.06 | 99.42 ± 0.03 | 99.15 ± 0.03 | '
    '99.37 ± 0.06 |\n'
    '| ./my\\|data | 50.00 | n/a | n/a | n/a | n/a |\n'
  )


def test_table_5_is_there_for_models_of_its_shapes(tmp_path):
  cells = {
    ('cifar100', 'b16'): [90],
    ('cifar100', 'r50+b32'): [90],
    ('cifar100', 'axial_b32'): [90],
  }
  columns = [
    name for name in table(report(tmp_path, cells).markdown()).values()
  ]
  assert [n for n in columns[0] if 'table 5' in n] == [
    'ViT-B/16 (ImageNet, table 5)',
    'ViT-B/16 (I21k, table 5)',
    'ViT-B/16 (JFT, table 5)',
  ]
  assert columns[0]['ViT-B/16 (I21k, table 5)'] == '91.67'
  # Which H/14 has not for ImageNet.
  text = report(tmp_path, {('cifar10', 'h14'): [99]}).markdown()
  assert text.count('table 5') == 2


def test_a_hybrid_is_not_taken_for_the_vit_in_it(tmp_path):
  """R+B/32 has patches of 16 and all else of B/16."""
  text = report(tmp_path, {('cifar100', 'r+b32'): [90]}).markdown()
  assert 'table 5' not in text


def test_columns_are_our_models_and_every_further_axis(tmp_path):
  runs = [
    GridRun(
      {'Dataset': 'cifar10', 'Model': m, 'seed': 'seed=0', 'lr': f'lr={lr}'},
      tmp_path / f'{m}{lr}',
      result(90 + lr),
    )
    for m in ('x', 'y')
    for lr in (1, 2)
  ]
  axes = {n: sorted({r.labels[n] for r in runs}) for n in runs[0].labels}
  made = TransferReport(
    axes=axes, averaged=['seed'], metric='test/accuracy', runs=runs
  )
  row = table(made.markdown())['CIFAR-10']
  assert list(row.items())[1:5] == [
    ('x, lr=1 (ours)', '91.00'),
    ('x, lr=2 (ours)', '92.00'),
    ('y, lr=1 (ours)', '91.00'),
    ('y, lr=2 (ours)', '92.00'),
  ]


def test_objectnet_has_rows_beside_the_published(tmp_path):
  made = report(
    tmp_path,
    {('imagenet2012', 'a'): [80], ('imagenet2012', 'b'): [PENDING]},
    imagenet2012={'objectnet/accuracy': 0.5, 'objectnet/top5_accuracy': 0.7},
  )
  rows = table(made.markdown())
  assert list(rows) == ['ImageNet', 'ObjectNet', 'ObjectNet, top-5']
  row = rows['ObjectNet, top-5']
  assert row['a (ours)'] == '70.00' and row['b (ours)'] == 'pending'
  assert row['ViT-H/14 (JFT)'] == '82.1' and row['ViT-L/16 (JFT)'] == 'n/a'
  assert rows['ObjectNet']['ViT-H/14 (JFT)'] == '61.7'


def test_a_finished_run_without_a_metric_is_none_of_the_pending(tmp_path):
  made = report(tmp_path, {('imagenet2012', 'a'): [80]})
  other = report(
    tmp_path,
    {('imagenet2012', 'b'): [80]},
    imagenet2012={'real/accuracy': 0.9},
  )
  both = TransferReport(
    axes=made.axes | {'Model': ['a', 'b']},
    averaged=['seed'],
    metric='test/accuracy',
    runs=[*made.runs, *other.runs],
  )
  row = table(both.markdown())['ImageNet ReaL']
  assert (row['a (ours)'], row['b (ours)']) == ('n/a', '90.00')


def test_pending_and_diverged_runs_are_named(tmp_path):
  cells = {
    'cifar10': [90, DIVERGED, 94],
    'oxford_iiit_pet': [DIVERGED, PENDING, PENDING],
    './data': [1, 2, 3],
  }
  text = report(tmp_path, cells).markdown()
  assert '; 7 of 9 runs have ended. Results of' in text
  assert [row['s16 (ours)'] for row in table(text).values()] == [
    '92.00 ± 2.83 (n = 2, 1 diverged)',
    '1 diverged, 2 pending',
    '2.00 ± 1.00',
  ]


@pytest.mark.parametrize(
  ('last', 'want'),
  [
    ([50, 50, 50], '50.00 ± 0.00'),
    ([PENDING, DIVERGED, PENDING], '18 of 19 tasks (1 diverged)'),
    # Seeds that have every task are compared with one another.
    ([50, DIVERGED, 50], '50.00 ± 0.00 (n = 2, 1 diverged)'),
  ],
)
def test_the_mean_of_vtab_waits_for_all_tasks(tmp_path, last, want):
  cells = {'./data': [1, 2, 3]} | {task: [50, 50, 50] for task in VTAB}
  cells[VTAB[9]] = last
  text = report(tmp_path, cells).markdown()
  row = table(text)['VTAB (19 tasks)']
  assert row['s16 (ours)'] == want


def test_a_model_without_runs_of_vtab_has_none_of_its_tasks(tmp_path):
  cells = {('./data', 'a'): [90], ('vtab/dtd', 'b'): [70]}
  text = report(tmp_path, cells).markdown()
  assert table(text)['VTAB (19 tasks)'] == {
    '': 'VTAB (19 tasks)',
    'a (ours)': '0 of 19 tasks',
    'b (ours)': '1 of 19 tasks',
  } | {
    model: row['vtab']
    for model, row in published.TABLE_2.items()
    if 'vtab' in row
  }
  assert table(text)['./data']['b (ours)'] == 'n/a'
  assert table(text, 'Mean')['a (ours)']['● DTD'] == 'n/a'


def test_the_test_set_is_shown_whatever_chooses_the_step(tmp_path):
  made = report(
    tmp_path, {'cifar10': [90]}, 'val/accuracy', cifar10={'val/accuracy': 0.5}
  )
  made.runs[0].result['best_step'] = 2
  text = made.markdown()
  assert text.startswith('test/accuracy at the best step in percent.')
  assert table(text)['CIFAR-10']['s16 (ours)'] == '90.00'
