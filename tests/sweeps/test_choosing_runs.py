"""Running what is tuned: choices, tables, resuming, the command."""

import json
import os
import signal

import numpy as np
import pytest
from PIL import Image

from tests.sweeps.small_sweep import (
  SMALL,
  fake_clock,
  fake_training,
  small,
  table,
)
from vit_jax import config as config_lib
from vit_jax.sweeps import axes, running, stages
from vit_jax.training import metric_log, preemption, run

# The way in which config_flags loads a config file.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')

RATES = 'optimizer.lr=0.1,0.2,0.3'


@pytest.fixture
def fake(monkeypatch):
  """0.2 is best without flips, 0.3 with them; every seed adds a hundredth."""

  def accuracy(config, step):
    best = 0.3 if config.data.flip else 0.2
    seed = config.seed / 100
    return step / 4 * (0.8 - abs(config.optimizer.lr - best) + seed)

  return fake_training(monkeypatch, accuracy)


def result(workdir, folder):
  return json.loads((workdir / folder / 'result.json').read_text())


def test_every_group_takes_its_own_best(fake, tmp_path, monkeypatch, capfd):
  fake_clock(monkeypatch)
  config = small(
    'data.flip=true,false', 'seed=3,4', tune=['optimizer.lr=0.2,0.3']
  )
  running.run(config, str(tmp_path))
  # Group after group.
  assert fake == [
    'flip=True_lr=0.2',
    'flip=True_lr=0.3',
    'flip=True_seed=3_lr=0.3',
    'flip=True_seed=4_lr=0.3',
    'flip=False_lr=0.2',
    'flip=False_lr=0.3',
    'flip=False_seed=3_lr=0.2',
    'flip=False_seed=4_lr=0.2',
  ]
  trials = table(tmp_path / 'tune.csv')
  assert list(trials[0].items()) == [
    ('data.flip', 'True'),
    ('optimizer.lr', '0.2'),
    ('status', 'done'),
    ('val/accuracy', '0.7300000000000001'),
    ('chosen', 'no'),
    ('steps', '4'),
    ('elapsed_s', '10.0'),
    ('folder', 'tune/flip=True_lr=0.2'),
  ]
  assert [r['chosen'] for r in trials] == ['no', 'yes', 'yes', 'no']
  rows = table(tmp_path / 'results.csv')
  assert list(rows[0])[:4] == ['data.flip', 'seed', 'optimizer.lr', 'status']
  assert [r['optimizer.lr'] for r in rows] == ['0.3', '0.3', '0.2', '0.2']
  for row in rows:
    saved = result(tmp_path, row['folder'])
    lr = float(row['optimizer.lr'])
    assert saved['chosen'] == {'optimizer.lr': lr}
    assert saved['config']['optimizer']['lr'] == lr
    assert saved['examples'] == 1437
  assert result(tmp_path, trials[0]['folder'])['examples'] == 1293
  out = capfd.readouterr().out
  lines = out.splitlines()
  assert lines[0] == (
    f'run 1 of 8: trial flip=True / lr=0.2 ({tmp_path}/tune/flip=True_lr=0.2)'
  )
  assert lines[2] == 'chosen for flip=True: lr=0.3, the best of 2'
  assert lines[3] == (
    'run 3 of 8: flip=True / seed=3 / lr=0.3 '
    f'({tmp_path}/runs/flip=True_seed=3_lr=0.3)'
  )
  assert lines[-1] == f'written  {tmp_path}/tune.csv'
  assert '| flip=True | 83.50 ± 0.71 |\n| flip=False | 83.50 ±' in out


def test_without_a_sweep_there_is_one_run(fake, tmp_path, capfd):
  running.run(small(tune=[RATES]), str(tmp_path))
  assert 'chosen for all runs: lr=0.2, the best of 3' in capfd.readouterr().out
  assert fake == ['lr=0.1', 'lr=0.2', 'lr=0.3', 'lr=0.2']
  (row,) = table(tmp_path / 'results.csv')
  assert (row['folder'], row['optimizer.lr']) == ('runs/lr=0.2', '0.2')
  assert '| all runs | 80.00 |' in (tmp_path / 'table.md').read_text()
  assert [row['chosen'] for row in table(tmp_path / 'tune.csv')] == [
    'no',
    'yes',
    'no',
  ]


def test_a_single_candidate_is_not_tried(fake, tmp_path):
  running.run(small('seed=0,1', tune=['optimizer.lr=0.1']), str(tmp_path))
  assert fake == ['seed=0_lr=0.1', 'seed=1_lr=0.1']
  assert [r['optimizer.lr'] for r in table(tmp_path / 'results.csv')] == (
    2 * ['0.1']
  )
  assert not (tmp_path / 'tune').exists()
  assert not (tmp_path / 'tune.csv').exists()


def test_several_labels_are_compared_by_average_precision(
  tmp_path, monkeypatch, capfd
):
  """By a command that trains, and by the next one, which only reads results."""
  rows = ['file,labels']
  for i in range(20):
    image = np.full((8, 8, 3), 12 * i, np.uint8)
    Image.fromarray(image).save(tmp_path / f'{i}.png')
    rows.append(f'{i}.png,{("cat", "dog", "cat;dog")[i % 3]}')
  (tmp_path / 'photos.csv').write_text('\n'.join(rows) + '\n')

  def train(config, workdir, start_over=False):
    log = metric_log.MetricLog(workdir, None)
    value = 1 - config.optimizer.lr
    log.write(4, {f'{name}/map': value for name in config.evaluators})
    log.close()
    config.best_metric = 'changed by training'

  monkeypatch.setattr(stages, 'train_one', train)
  for _ in range(2):
    config = small('seed=0,1', tune=['optimizer.lr=0.3,0.1'])
    config.data.name = str(tmp_path / 'photos.csv')
    config.loss.name = 'sigmoid'
    config.tune.update(train='train[:50%]', val='train[50%:]')
    running.run(config, str(tmp_path / 'sweep'))
    out = capfd.readouterr().out
    assert 'test/map at the last step, mean' in out and 'diverged' not in out
  for row in table(tmp_path / 'sweep' / 'results.csv'):
    assert (row['optimizer.lr'], row['test/map']) == ('0.1', '0.9')


def test_a_candidate_that_diverges_loses(fake, tmp_path):
  running.run(small(tune=['optimizer.lr=99,0.1']), str(tmp_path))
  rows = table(tmp_path / 'tune.csv')
  assert [(r['status'], r['val/accuracy'][:4], r['chosen']) for r in rows] == [
    ('diverged', '', 'no'),
    ('done', '0.70', 'yes'),
  ]
  assert table(tmp_path / 'results.csv')[0]['optimizer.lr'] == '0.1'


def test_groups_that_diverge_altogether_end_in_an_error(fake, tmp_path):
  """The other groups still run, and another candidate helps."""
  config = small(
    'data.flip=true,false',
    'seed=0,1',
    tune=['optimizer.lr=99', 'optimizer.weight_decay=0,1'],
  )
  (name, (with_flips, (label, fields))), seeds = config.sweep
  rates = (axes.axis(config, 'optimizer.lr', ('0.1', '0.2')),)
  without = label, fields | {'tune.axes': rates}
  config.sweep = ((name, (with_flips, without)), seeds)
  for _ in range(2):
    with pytest.raises(run.Diverged) as e:
      running.run(config, str(tmp_path))
    assert 'chosen for flip=True: 2 of 2 trials diverged. Run' in str(e.value)
  assert len(fake) == 2 + 2 + 2
  assert [r['chosen'] for r in table(tmp_path / 'tune.csv')] == [
    'no',
    'no',
    'no',
    'yes',
  ]
  assert len(table(tmp_path / 'results.csv')) == 2
  text = (tmp_path / 'table.md').read_text()
  assert '2 of 4 runs have ended' in text
  assert '| flip=True | pending |' in text


def test_a_missing_metric_is_not_called_divergence(tmp_path, monkeypatch):
  fake_training(monkeypatch, lambda config, step: float('nan'))
  lost = r'1 of 2 trials diverged, and val/accuracy .* is missing or NaN\. '
  with pytest.raises(run.Diverged, match=lost):
    running.run(small(tune=['optimizer.lr=99,0.1']), str(tmp_path))


def test_more_candidates_run_what_is_new_and_mix_nothing(fake, tmp_path):
  workdir = str(tmp_path)

  def go(rates):
    del fake[:]
    running.run(small('seed=0,1', tune=[f'optimizer.lr={rates}']), workdir)
    return [r['folder'] for r in table(tmp_path / 'results.csv')]

  assert go('0.1,0.4') == ['runs/seed=0_lr=0.1', 'runs/seed=1_lr=0.1']
  assert fake == ['lr=0.1', 'lr=0.4', 'seed=0_lr=0.1', 'seed=1_lr=0.1']
  before = (tmp_path / 'tune.csv').read_bytes()
  assert go('0.1,0.4') == ['runs/seed=0_lr=0.1', 'runs/seed=1_lr=0.1']
  assert fake == []
  assert (tmp_path / 'tune.csv').read_bytes() == before
  # Not better, then better.
  assert go('0.5,0.1,0.4') == ['runs/seed=0_lr=0.1', 'runs/seed=1_lr=0.1']
  assert fake == ['lr=0.5']
  assert go('0.1,0.2') == ['runs/seed=0_lr=0.2', 'runs/seed=1_lr=0.2']
  assert fake == ['lr=0.2', 'seed=0_lr=0.2', 'seed=1_lr=0.2']
  # What was chosen before is still there.
  assert go('0.4,0.1') == ['runs/seed=0_lr=0.1', 'runs/seed=1_lr=0.1']
  assert fake == []


def test_another_config_is_refused_before_anything_runs(fake, tmp_path):
  running.run(small(tune=['optimizer.lr=0.1,0.4']), str(tmp_path))
  config = small(tune=[RATES])
  config.tune.train = 'train[:70%]'
  with pytest.raises(ValueError) as e:
    running.run(config, str(tmp_path))
  assert str(e.value).startswith(f'{tmp_path}/tune/lr=0.1: ')
  assert "data.split: 'train[:90%]' -> 'train[:70%]'" in str(e.value)
  # Of a run whose turn may never come, too.
  config = small(tune=[RATES])
  config.optimizer.b1 = 0.5
  (tmp_path / 'tune').rename(tmp_path / 'aside')
  with pytest.raises(ValueError, match='runs/lr=0.1: .*another config'):
    running.run(config, str(tmp_path))
  assert len(fake) == 3


@pytest.mark.slow
@pytest.mark.parametrize('stop_at', [2, 3])
def test_a_stopped_tuning_ends_as_if_it_was_not(
  fake, tmp_path, monkeypatch, stop_at
):
  config = small('seed=0,1', tune=[RATES])
  train_whole = stages.train_one

  def stopped(config, workdir, start_over):
    with preemption.preemption_notice():
      if len(fake) + 1 == stop_at:
        os.kill(os.getpid(), signal.SIGTERM)
      train_whole(config, workdir)

  monkeypatch.setattr(stages, 'train_one', stopped)
  with pytest.raises(preemption.Preempted, match='every run so far is saved'):
    running.run(config, str(tmp_path / 'stopped'))
  assert len(fake) == stop_at
  rows = table(tmp_path / 'stopped' / 'tune.csv')
  # Nothing is chosen before everything was tried.
  assert [r['chosen'] for r in rows] == (
    ['no', 'yes', 'no'] if stop_at == 3 else 2 * ['']
  )
  running.run(config, str(tmp_path / 'stopped'))
  assert len(fake) == 5
  running.run(config, str(tmp_path / 'whole'))
  for name in ('tune.csv', 'results.csv'):
    both = [table(tmp_path / w / name) for w in ('stopped', 'whole')]
    for row in (*both[0], *both[1]):
      del row['elapsed_s']
    assert both[0] == both[1]
  texts = [(tmp_path / w / 'table.md') for w in ('stopped', 'whole')]
  assert texts[0].read_text() == texts[1].read_text()


def test_early_stopping_takes_the_best_step(monkeypatch, tmp_path):
  """Both rates reach their best at step 2, and 0.1 is the better at step 4."""

  def accuracy(config, step):
    return 0.5 if step == 2 else 0.3 + config.optimizer.lr

  fake_training(monkeypatch, accuracy)
  config = small(tune=['optimizer.lr=0.05,0.1'])
  for early in (False, True):
    workdir = tmp_path / f'{early}'
    config.early_stopping = early
    running.run(config, str(workdir))
    name = 'lr=0.05' if early else 'lr=0.1'
    for folder in ('tune/lr=0.05', 'tune/lr=0.1', f'runs/{name}'):
      saved = result(workdir, folder)
      assert saved.get('best_step') == (2 if early else None)
      lr = saved['config']['optimizer']['lr']
      prefix = 'test' if folder.startswith('runs') else 'val'
      want = 0.5 if early else 0.3 + lr
      assert saved['metrics'] == {f'{prefix}/accuracy': want}
      assert saved['steps'] == 4
    when = 'best' if early else 'last'
    text = (workdir / 'table.md').read_text()
    assert f'test/accuracy at the {when} step' in text
    # The step that counts is part of what a result is.
    config.early_stopping = not early
    with pytest.raises(ValueError, match=f'early_stopping: {early} -> '):
      running.run(config, str(workdir))
    config.update(early_stopping=early, patience=2)
    with pytest.raises(ValueError, match='patience: 0 -> 2'):
      running.run(config, str(workdir))
    config.patience = 0


def test_where_the_lowest_is_best_it_is_chosen(monkeypatch, tmp_path):
  """Of the rates the one with the lower loss, of its steps the first."""

  def fake_train(config, workdir, start_over=False):
    log = metric_log.MetricLog(workdir, None)
    for step, loss in ((2, 1.0), (4, 2.0)):
      (name,) = (n for n, entry in config.evaluators.items() if entry.on)
      log.write(step, {f'{name}/loss': loss + config.optimizer.lr})
    log.close()

  monkeypatch.setattr(stages, 'train_one', fake_train)
  config = small(tune=['optimizer.lr=0.3,0.1,0.2'])
  config_lib.choose_objective(config, 'masked')
  config.update(best_metric='test/loss', early_stopping=True)
  config.model.pool = 'gap'
  running.run(config, str(tmp_path))
  rows = table(tmp_path / 'tune.csv')
  assert [(r['val/loss'], r['chosen']) for r in rows] == [
    ('1.3', 'no'),
    ('1.1', 'yes'),
    ('1.2', 'no'),
  ]
  saved = result(tmp_path, 'runs/lr=0.1')
  assert saved['best_step'] == 2
  assert saved['metrics'] == {'test/loss': 1.1}


NAN = float('nan')


@pytest.mark.parametrize(
  ('first', 'last', 'best'), [(0.5, 0.5, 2), (NAN, NAN, 4)]
)
def test_early_stopping_takes_the_first_of_equal_steps(
  monkeypatch, tmp_path, first, last, best
):
  """A NaN is the best of nothing, and where there is no other the last is."""
  fake_training(monkeypatch, lambda config, step: first if step == 2 else last)
  config = small('seed=0')
  config.early_stopping = True
  running.run(config, str(tmp_path))
  assert result(tmp_path, 'runs/seed=0')['best_step'] == best
  patient = small('seed=0')
  patient.patience = 2
  running.run(patient, str(tmp_path / 'patient'))
  message = "best_metric: 'test/accuracy' -> 'fewshot/10shot_accuracy'"
  for made, folder in ((config, tmp_path), (patient, tmp_path / 'patient')):
    made.best_metric = 'fewshot/10shot_accuracy'
    made.evaluators.fewshot.update(on=True, data='digits')
    with pytest.raises(ValueError, match=message):
      running.run(made, str(folder))


@pytest.mark.slow
def test_the_command_tunes(command, tmp_path):
  args = [
    '--config=configs/digits.py:'
    + ','.join(f'{key}={value}' for key, value in SMALL.items()),
    '--tune=optimizer.lr=1e-9,0.02',
  ]
  status, out, err = command(*args, f'--workdir={tmp_path}', '--sweep=seed=1')
  assert status == 0, err
  assert 'chosen for all runs: lr=' in out
  rows = table(tmp_path / 'tune.csv')
  best = max(rows, key=lambda row: float(row['val/accuracy']))
  assert [row['chosen'] == 'yes' for row in rows] == [
    row is best for row in rows
  ]
  lr = best['optimizer.lr']

  def last(folder):
    _, steps = metric_log.read_table(tmp_path / folder / 'metrics.csv')
    return steps[4]

  assert last(best['folder'])['val/examples'] == '144.0'
  assert 'test/examples' not in last(best['folder'])
  (row,) = table(tmp_path / 'results.csv')
  assert row['folder'] == f'runs/seed=1_lr={lr}'
  assert last(row['folder'])['test/examples'] == '360.0'
  assert last(row['folder'])['test/accuracy'] == row['test/accuracy']
  # A run is what the same values give without choosing.
  alone = tmp_path / 'alone'
  status, _, err = command(
    args[0],
    f'--workdir={alone}',
    '--config.seed=1',
    f'--config.optimizer.lr={lr}',
  )
  assert status == 0, err
  chosen = tmp_path / row['folder'] / 'metrics.csv'
  assert chosen.read_text() == (alone / 'metrics.csv').read_text()
  # Measuring chooses nothing.
  status, out, err = command(
    *args, f'--workdir={alone}', '--config.eval_only=True'
  )
  assert status == 0, err
  assert f'test/accuracy {float(row["test/accuracy"]):.4f}' in out
