"""Running a sweep: what it writes, resuming it, and what it refuses."""

import json
import time

import numpy as np
import pytest
from PIL import Image

from tests.sweeps.small_sweep import (
  fake_clock,
  fake_training,
  small,
  table,
)
from vit_jax import main
from vit_jax.checkpoints import saving
from vit_jax.sweeps import axes, grid, running, stages
from vit_jax.training import preemption

# The way in which config_flags loads a config file.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')


@pytest.fixture
def fake(monkeypatch):
  """The accuracy tells the learning rate and the seed."""

  def accuracy(config, step):
    return step / 4 * (config.optimizer.lr + config.seed / 100)

  return fake_training(monkeypatch, accuracy)


def results(workdir):
  return table(workdir / 'results.csv')


@pytest.mark.parametrize(
  ('sweeps', 'message'),
  [
    (['seed=0,1', 'model.pool=cls,clss'], "seed=0 / pool=clss: .*'clss'"),
    (['batch_size=16,17'], 'batch_size=17: .*multiple of 8'),
    (['data.split=train,trian'], "split=trian: .*'trian'"),
    (['best_metric=test/loss,tset/loss'], 'tset/loss: .*the evaluators do not'),
  ],
)
def test_what_cannot_work_is_found_before_anything_runs(
  fake, tmp_path, sweeps, message
):
  with pytest.raises(ValueError, match=message):
    running.run(small(*sweeps), str(tmp_path / 'w'))
  assert fake == []
  assert not (tmp_path / 'w').exists()


def test_a_missing_checkpoint_is_found_before_anything_runs(fake, tmp_path):
  with pytest.raises(ValueError, match='init=./gone: No checkpoint at '):
    running.run(small('init=,./gone'), str(tmp_path / 'w'))
  assert fake == []


def test_a_sweep_resumes_after_its_folder_moved(fake, tmp_path):
  for i, name in enumerate(('a', 'b')):
    (tmp_path / 'photos' / name).mkdir(parents=True)
    for j in range(10):
      pixels = np.full((8, 8, 3), 20 * i + j, np.uint8)
      Image.fromarray(pixels).save(tmp_path / 'photos' / name / f'{j}.png')
  config = small('seed=0,1')
  config.data.name = str(tmp_path / 'photos')
  running.run(config, str(tmp_path / 'w'))
  (tmp_path / 'photos').rename(tmp_path / 'moved')
  more = small('seed=0,1,2')
  more.data.name = str(tmp_path / 'moved')
  running.run(more, str(tmp_path / 'w'))
  assert len(fake) == 3


def test_the_data_of_the_first_run_give_the_metric(fake, tmp_path):
  config = small('data.name=digits')
  config.data.name = './no-such-folder'
  running.run(config, str(tmp_path))
  assert 'n/a' not in (tmp_path / 'table.md').read_text()


@pytest.mark.parametrize(
  ('field', 'does'), [('eval_only', 'measures'), ('extend', 'continues')]
)
def test_what_is_for_a_single_run_is_refused(command, tmp_path, field, does):
  status, out, err = command(
    '--config=configs/digits.py',
    f'--workdir={tmp_path}/w',
    '--sweep=seed=0',
    f'--config.{field}=True',
  )
  assert (status, out) == (2, '')
  assert err.startswith(f'error: {field} {does} a single run')
  assert not (tmp_path / 'w').exists()


def test_results_of_every_run(fake, tmp_path, monkeypatch, capfd):
  fake_clock(monkeypatch)
  running.run(small('optimizer.lr=0.1,0.2', 'seed=0,1'), str(tmp_path))
  rows = results(tmp_path)
  assert [(r['optimizer.lr'], r['seed']) for r in rows] == [
    ('0.1', '0'),
    ('0.1', '1'),
    ('0.2', '0'),
    ('0.2', '1'),
  ]
  # Of the last step.
  assert [float(r['test/accuracy']) for r in rows] == pytest.approx(
    [0.1, 0.11, 0.2, 0.21]
  )
  for row, name in zip(rows, fake, strict=True):
    assert row['status'] == 'done'
    assert row['steps'] == '4'
    # Patches; 5 positions and a class token; norms; attention; MLP; head.
    assert int(row['params']) == (
      49 * 16 + 6 * 16 + 3 * 32 + 4 * 17 * 16 + 2 * 17 * 16 + 17 * 10
    )
    assert 0 < float(row['gflops']) < 0.001
    assert float(row['elapsed_s']) > 0
    assert row['folder'] == f'runs/{name}'
    assert (tmp_path / row['folder'] / 'result.json').exists()
  out = capfd.readouterr().out
  assert f'run 1 of 4: lr=0.1 / seed=0 ({tmp_path}/runs/lr=0.1_seed=0)\n' in out
  assert 'run 4 of 4: lr=0.2 / seed=1' in out
  assert out.endswith(
    (tmp_path / 'table.md').read_text()
    + ''.join(
      f'\nwritten  {tmp_path}/{name}' for name in ('results.csv', 'table.md')
    )
    + '\n'
  )
  assert '| lr=0.1 | 10.50 ± 0.71 |\n| lr=0.2 | 20.50 ± 0.71 |\n' in out


def test_finished_runs_are_kept_and_more_seeds_added(fake, tmp_path):
  running.run(small('seed=0,1'), str(tmp_path))
  path = tmp_path / 'runs' / 'seed=0' / 'result.json'
  # As of a version that stopped no run early.
  result = json.loads(path.read_text())
  del result['config']['early_stopping']
  path.write_text(json.dumps(result))
  before = path.read_bytes()
  running.run(small('seed=0,1'), str(tmp_path))
  assert fake == ['seed=0', 'seed=1']
  config = small('seed=2,1,0')
  # What check_resumable allows to change.
  config.log_every = '3 steps'
  running.run(config, str(tmp_path))
  assert fake == ['seed=0', 'seed=1', 'seed=2']
  assert path.read_bytes() == before
  assert [row['seed'] for row in results(tmp_path)] == ['2', '1', '0']


def test_another_config_is_refused_before_anything_runs(fake, tmp_path):
  running.run(small('seed=1'), str(tmp_path))
  config = small('seed=0,1')
  config.optimizer.lr = 0.5
  with pytest.raises(ValueError) as e:
    running.run(config, str(tmp_path))
  assert str(e.value).startswith(f'{tmp_path}/runs/seed=1: ')
  assert 'optimizer.lr: 0.003 -> 0.5' in str(e.value)
  assert fake == ['seed=1']


def test_a_result_that_is_no_json_names_its_folder(fake, tmp_path):
  running.run(small('seed=0'), str(tmp_path))
  (tmp_path / 'runs' / 'seed=0' / 'result.json').write_text('{')
  with pytest.raises(ValueError, match=f'{tmp_path}/runs/seed=0: '):
    running.run(small('seed=0'), str(tmp_path))


def test_a_run_that_diverges_is_noted_and_the_others_go_on(
  fake, tmp_path, capfd, caplog
):
  config = small('optimizer.lr=0.1,99,0.2', 'seed=0,1')
  for _ in range(2):  # it would diverge again: it is not run again
    running.run(config, str(tmp_path))
  assert len(fake) == 6
  assert [row['status'] for row in results(tmp_path)] == (
    2 * ['done'] + 2 * ['diverged'] + 2 * ['done']
  )
  row = results(tmp_path)[2]
  assert (row['test/accuracy'], row['steps']) == ('', '2')
  assert '| lr=99.0 | diverged |' in (tmp_path / 'table.md').read_text()
  assert 'diverged: Step 3: the loss is nan.' in capfd.readouterr().out
  # It was measured by nothing, of which nothing has to be said.
  assert not caplog.records


@pytest.mark.slow
def test_a_sweep_stopped_in_its_second_run_ends_as_if_it_was_not(
  tmp_path, monkeypatch, preempt_at
):
  config = small('seed=0,1')
  started = []

  def counting(config, workdir, start_over, train=stages.train_one):
    started.append(config.seed)
    if started == [0, 1]:
      preempt_at(3)
    try:
      train(config, workdir)
    finally:
      preempt_at(None)

  monkeypatch.setattr(stages, 'train_one', counting)
  stopped = tmp_path / 'stopped'
  with pytest.raises(preemption.Preempted, match='saved step 3'):
    running.run(config, str(stopped))
  assert [row['seed'] for row in results(stopped)] == ['0']
  assert '1 of 2 runs have ended' in (stopped / 'table.md').read_text()

  running.run(config, str(stopped))
  assert started == [0, 1, 1]
  whole = tmp_path / 'whole'
  running.run(small('seed=1'), str(whole))
  resumed, uninterrupted = results(stopped)[1], results(whole)[0]
  assert resumed.pop('elapsed_s') != uninterrupted.pop('elapsed_s')
  assert resumed == uninterrupted
  curves = (workdir / 'runs/seed=1/metrics.csv' for workdir in (stopped, whole))
  assert len({path.read_text() for path in curves}) == 1


def test_elapsed_time_counts_both_parts(fake, tmp_path, monkeypatch):
  fake_clock(monkeypatch)
  (cell,) = axes.cells(small('seed=0'), str(tmp_path))
  meta = {
    'config': json.loads(cell.config.to_json()),
    'class_names': ['a'],
    'examples': 1,
    'elapsed_s': 1000.0,
  }
  saving.save_parameters(
    str(cell.workdir), {'w': np.zeros(1, np.float32)}, meta
  )
  # A damaged one is not looked at, and left to the run itself.
  damaged = cell.workdir / 'checkpoints' / '7'
  damaged.mkdir()
  running.run(small('seed=0'), str(tmp_path))
  assert float(results(tmp_path)[0]['elapsed_s']) == 1010
  assert damaged.exists()


def test_half_saved_checkpoints_are_left_to_the_run(fake, tmp_path):
  """Two that clean up at once stumble over each other."""
  (cell,) = axes.cells(small('seed=0'), str(tmp_path))
  half = cell.workdir / 'checkpoints' / '4.orbax-checkpoint-tmp'
  half.mkdir(parents=True)
  running.run(small('seed=0'), str(tmp_path))
  time.sleep(0.2)
  assert half.exists()


def test_a_report_of_another_kind(fake, tmp_path, capfd, monkeypatch):
  class Report(grid.GridReport):
    def markdown(self):
      return f'{self.metric} of {len(self.runs)}, {list(self.axes)}\n'

  monkeypatch.setattr(running.REPORTS, 'load', {'scaling': Report}.get)
  config = small('data.flip=true', 'seed=0,1')
  config.report = 'scaling'
  running.run(config, str(tmp_path))
  text = "test/accuracy of 2, ['data.flip', 'seed']\n"
  assert (tmp_path / 'table.md').read_text() == text
  assert text in capfd.readouterr().out


@pytest.mark.parametrize(
  ('flag', 'field'), [('sweep', 'seed'), ('tune', 'optimizer.lr')]
)
def test_the_command_refuses_a_field_of_an_axis(command, tmp_path, flag, field):
  status, out, err = command(
    '--config=configs/digits.py',
    f'--workdir={tmp_path}/w',
    f'--{flag}={field}=1,2',
    f'--config.{field}=3',
  )
  assert (status, out) == (2, '')
  assert err.startswith(f'error: {field} is set by the axis {field!r}')
  assert f'--{flag}={field}=...' in err and err.count('\n') == 1
  assert not (tmp_path / 'w').exists()


def test_a_preempted_sweep_has_the_status_of_a_preempted_run(
  command, tmp_path, monkeypatch
):
  def preempted(config, workdir, start_over):
    raise preemption.Preempted('Preempted: saved step 3.')

  monkeypatch.setattr(stages, 'train_one', preempted)
  status, _, err = command(
    '--config=configs/digits.py', f'--workdir={tmp_path}', '--sweep=seed=0,1'
  )
  assert status == main.EXIT_PREEMPTED
  assert err == 'Preempted: saved step 3.\n'
