"""Plans that are kept."""

import csv

import pytest

from tests.conftest import ROOT
from vit_jax.plan import costs, hlo, kept_plans
from vit_jax.plan.costs import GIB

STEP = costs.Step(hlo.CompiledProgram(()), GIB, GIB, 5 * GIB // 2, 61.7)
# 64 images on 8 devices of two cores, half of the peak without what is sent.
COST = costs.Cost(
  computing_s=0.1,
  least_s=0.2,
  most_s=0.25,
  sent_bytes=GIB / 8,
  images=64,
  image_flops=2.0,
  peak_flops=2560.0,
  hbm_bytes=0,
  chips=8,
  cores=16,
  devices=8,
)


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'plans.csv'


def test_a_plan_is_kept_and_found(path, monkeypatch):
  kept_plans.PlanTable(str(path)).add(
    '--config=a --topology=v3:2x2', '', STEP, COST
  )
  (row,) = csv.DictReader(path.read_text().splitlines())
  assert row.pop('date') and row.pop('versions') == kept_plans.versions()
  assert row == {
    'plan': '--config=a --topology=v3:2x2',
    'fields': '',
    'outcome': 'fits',
    'images': '64',
    'devices': '8',
    'gib': '2.50',
    'computing_ms': '100.00',
    'least_ms': '200.00',
    'most_ms': '250.00',
    'mfu': '0.5000',
    'sent_gib': '0.125',
  }
  again = kept_plans.PlanTable(str(path))
  assert again.find('--config=a --topology=v3:2x2')['images'] == '64'
  assert again.find('--config=a --topology=v3:4x4') is None
  monkeypatch.setattr(kept_plans, 'versions', lambda: 'libtpu 99')
  assert again.find('--config=a --topology=v3:2x2') is None
  # Another version's takes its place.
  again.add_too_large('--config=a --topology=v3:2x2', 'does not fit: 9 GiB')
  (row,) = csv.DictReader(path.read_text().splitlines())
  assert (row['outcome'], row['versions']) == (
    'does not fit: 9 GiB',
    'libtpu 99',
  )
  assert again.find('--config=a --topology=v3:2x2')['images'] == ''


def test_beside_it_is_markdown(path):
  plans = kept_plans.PlanTable(str(path))
  plans.add('--config=a', '--config.accum_steps=4', STEP, COST)
  plans.add_too_large('--config=b', 'does not fit: 9 GiB')
  _, _, first, second = path.with_suffix('.md').read_text().splitlines()
  assert first == (
    '| `--config=a --config.accum_steps=4` | 8 | 2.50 | 100.0 | 80.0 (50.0%) '
    '| 200.0 to 250.0 | 0.125 |'
  )
  # A table keeps four digits.
  tiny = [row | {'mfu': '0.0000'} for row in plans.rows()]
  assert ' 80.0 (<0.1%) |' in kept_plans.markdown(tiny)
  assert second == '| `--config=b` | does not fit: 9 GiB |  |  |  |  |  |'


@pytest.mark.parametrize(
  'text',
  [
    *('a,b\n1,2\n', '', 'plan\nx,y\n', 'HEAD\nx,,fits,a,b\n', '\0', 'ÿ'),
    *('HEAD\nx\n', 'HEAD\nx,,fits\n'),
  ],
)
def test_another_table_is_left_as_it_is(path, text):
  text = text.replace('HEAD', ','.join(kept_plans._COLUMNS))
  path.write_bytes(text.encode('latin-1'))
  with pytest.raises(ValueError, match='plans.csv has no plans with the col'):
    kept_plans.PlanTable(str(path))
  assert path.read_bytes() == text.encode('latin-1')


def test_those_kept_here_are_shown_as_they_are():
  kept = ROOT / 'vit_jax/plan/plans.csv'
  rows = kept_plans.PlanTable(str(kept)).rows()
  assert kept.with_suffix('.md').read_text() == kept_plans.markdown(rows)


def test_it_is_a_csv_file():
  with pytest.raises(ValueError, match='--table=plans: its name should end in'):
    kept_plans.PlanTable('plans')


def test_a_folder_that_is_not_there_is_said_before_compiling(tmp_path):
  with pytest.raises(FileNotFoundError, match='no such folder'):
    kept_plans.PlanTable(f'{tmp_path}/none/plans.csv')


def test_what_another_process_adds_is_kept(path):
  one, other = (kept_plans.PlanTable(str(path)) for _ in range(2))
  one.add_too_large('--config=a', 'no')
  other.add_too_large('--config=b', 'no')
  assert [row['plan'] for row in one.rows()] == ['--config=a', '--config=b']


def test_versions_are_of_what_is_installed(monkeypatch):
  missing = set()

  def version(package):
    if package in missing:
      raise kept_plans.PackageNotFoundError(package)
    return f'1.{len(package)}'

  monkeypatch.setattr(kept_plans, 'version', version)
  assert kept_plans.versions() == 'libtpu 1.6, jax 1.3'
  missing.add('libtpu')  # as where $TPU_LIBRARY_PATH has the compiler
  assert kept_plans.versions() == 'jax 1.3'
