"""Grids of runs: their cells, resuming them, and what they refuse."""

import contextlib
import csv
import json
import os
import pathlib
import signal

import pytest

from configs import ablation, digits
from vit_jax import config as config_lib
from vit_jax import main, metric_log, run, sweep, train

# The way in which config_flags loads a config file.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')

# Digits on a model that compiles in a second or two.
SMALL = {
  'model.width': '16',
  'model.depth': '1',
  'model.mlp_dim': '16',
  'model.heads': '2',
  'data.image_size': '8',
  'batch_size': '16',
  'total': '4 steps',
  'optimizer.warmup': '1 step',
  'log_every': '1 step',
  'eval_every': '2 steps',
  'checkpoint_every': '2 steps',
}


def small(*sweeps):
  config = digits.get_config()
  config_lib.override(config, SMALL)
  config.lock()
  sweep.add_axes(config, sweeps)
  return config


@pytest.fixture
def fake(monkeypatch):
  """Replaces training; gives the list of the folders that were trained.

  The accuracy tells the learning rate and the seed; 99 diverges.
  """
  trained = []

  def fake_train(config, workdir):
    trained.append(pathlib.Path(workdir).name)
    log = metric_log.MetricLog(workdir, None)
    accuracy = config.optimizer.lr + config.seed / 100
    for step, share in ((2, 0.5), (4, 1.0)):
      if config.optimizer.lr == 99 and step == 4:
        raise run.Diverged('Step 3: the loss is nan.')
      log.write(step, {'train/loss': 1.0, 'test/accuracy': share * accuracy})
    log.close()

  monkeypatch.setattr(train, 'train', fake_train)
  return trained


def table(workdir):
  with open(workdir / 'results.csv') as f:
    return list(csv.DictReader(f))


def names(config, workdir='w'):
  return [cell.workdir.name for cell in sweep.cells(config, str(workdir))]


def test_every_combination_is_a_run_of_its_own(tmp_path):
  config = small('optimizer.lr=0.001,3e-3', 'seed=0,1', 'data.flip=true')
  cells = sweep.cells(config, str(tmp_path))
  assert [
    (c.config.optimizer.lr, c.config.seed, c.config.data.flip) for c in cells
  ] == [(0.001, 0, True), (0.001, 1, True), (0.003, 0, True), (0.003, 1, True)]
  assert [str(c.workdir) for c in cells] == [
    f'{tmp_path}/runs/lr={lr}_seed={seed}_flip=True'
    for lr in ('0.001', '0.003')
    for seed in (0, 1)
  ]
  assert all(c.config.sweep == () for c in cells)
  # All else is the config's.
  without = config.copy_and_resolve_references()
  without.update(sweep=(), seed=1)
  without.data.flip = True
  without.optimizer.lr = 0.003
  assert cells[-1].config.to_json() == without.to_json()


def test_a_tuple_is_one_value():
  config = small("optimizer.milestones=(),('30%','60%')")
  assert [c.config.optimizer.milestones for c in sweep.cells(config, 'w')] == [
    (),
    ('30%', '60%'),
  ]


def test_skipped_combinations_have_no_run():
  config = small('optimizer.lr=0.1,0.2', 'seed=0,1,2')
  config.sweep_skip = ({'optimizer.lr': 0.1, 'seed': 1}, {'seed': 2})
  assert names(config) == ['lr=0.1_seed=0', 'lr=0.2_seed=0', 'lr=0.2_seed=1']
  config.sweep_skip = ({'model.pool': 'cls'},)
  with pytest.raises(ValueError, match='sweep_skip leaves all'):
    sweep.cells(config, 'w')


def test_an_axis_of_the_command_replaces_that_of_the_config():
  config = ablation.get_config('head')
  before = names(config)
  sweep.add_axes(config, ['optimizer.lr=0.001,0.5'])
  assert [name for name, _ in config.sweep] == ['Head', 'optimizer.lr', 'seed']
  assert set(names(config)) & set(before) == {
    n for n in before if 'lr=0.001' in n
  }
  assert 'Class-token-MLP_lr=0.5_seed=2' in names(config)
  sweep.add_axes(config, ['optimizer.weight_decay=0.0,0.1'])
  assert [name for name, _ in config.sweep][-1] == 'optimizer.weight_decay'
  assert len(sweep.cells(config, 'w')) == 4 * 2 * 3 * 2


def test_posemb_is_table_8_and_one_row():
  config = ablation.get_config('posemb')
  cells = sweep.cells(config, 'w')
  assert [
    (c.config.model.posemb, c.config.model.posemb_at)
    for c in cells
    if c.config.seed == 0
  ] == [
    ('none', 'input'),
    ('learned1d', 'input'),
    ('learned1d', 'every_layer'),
    ('learned1d', 'shared'),
    ('learned2d', 'input'),
    ('learned2d', 'every_layer'),
    ('learned2d', 'shared'),
    ('relative', 'input'),
    ('sincos2d', 'input'),
  ]
  assert sorted({c.config.seed for c in cells}) == [0, 1, 2]
  assert cells[6].workdir.name == '1-D-Pos-Emb_Every-Layer_seed=0'


def test_head_is_figure_9():
  config = ablation.get_config('head,./cifar10,model.width=256')
  heads = {
    (c.config.model.pool, c.config.model.representation_size)
    for c in sweep.cells(config, 'w')
  }
  assert heads == {('cls', 0), ('cls', 256), ('gap', 0), ('map', 0)}
  assert config.data.name == './cifar10'


def test_an_unknown_grid_is_refused():
  with pytest.raises(ValueError, match="No grid 'haed'. Did you mean head"):
    ablation.get_config('haed')


@pytest.mark.parametrize(
  ('label', 'folder'),
  [
    ('1-D Pos. Emb.', '1-D-Pos-Emb'),
    ('lr=0.001', 'lr=0.001'),
    ('b1=-1e-05', 'b1=-1e-05'),
    ('name=../a b/c', 'name=-a-b-c'),
    ('Mean (GAP)', 'Mean-GAP'),
  ],
)
def test_labels_become_folders(label, folder):
  assert sweep.slug(label) == folder


@pytest.mark.parametrize(
  ('sweeps', 'message'),
  [
    (['optimizer.lrr=1'], "No config field 'optimizer.lrr'.*optimizer.lr"),
    (['seed=0,one'], "seed='one': expected a value of type int"),
    (['seed='], '--sweep=seed=: write a field and its values'),
    (['seed'], '--sweep=seed: write a field and its values'),
    (['seed=0', 'seed=1'], '--sweep=seed=... is given twice'),
    (['optimizer.lr=1e-3,0.001'], 'share the folder lr=0.001'),
  ],
)
def test_axes_that_do_not_work_are_refused(sweeps, message):
  with pytest.raises(ValueError, match=message):
    sweep.cells(small(*sweeps), 'w')


def test_axes_of_one_name_or_one_field_are_refused():
  config = small('seed=0')
  config.sweep += (('both', (('a', {'seed': 1, 'data.flip': True}),)),)
  with pytest.raises(ValueError, match="'seed' and 'both' .* both set seed"):
    sweep.cells(config, 'w')
  config.sweep = (('x', (('a', {'seed': 1}),)), ('x', (('b', {'total': '1'}),)))
  with pytest.raises(ValueError, match="Two axes .* named 'x'"):
    sweep.cells(config, 'w')


@pytest.mark.parametrize(
  ('sweeps', 'message'),
  [
    (['seed=0,1', 'model.pool=cls,clss'], "seed=0 / pool=clss: .*'clss'"),
    (['model.patch_size=4,3'], 'patch_size=3: .*tile'),
    (['total=4 steps,4 weeks'], "total=4 weeks: '4 weeks' is no duration"),
    (['optimizer.decay=linear,liner'], "decay=liner: .*'liner'"),
    (['optimizer.name=adam,adm'], "name=adm: .*'adm'"),
    (['loss.name=softmax,max'], "name=max: .*'max'"),
    (['batch_size=16,17'], 'batch_size=17: .*multiple of 8'),
    (['data.name=digits,./none'], 'name=./none: .*none'),
    (['data.split=train,trian'], "split=trian: .*'trian'"),
  ],
)
def test_what_cannot_work_is_found_before_anything_runs(
  fake, tmp_path, sweeps, message
):
  with pytest.raises(ValueError, match=message):
    sweep.run(small(*sweeps), str(tmp_path / 'w'))
  assert fake == []
  assert not (tmp_path / 'w').exists()


def test_eval_only_is_refused(fake, tmp_path):
  config = small('seed=0')
  config.eval_only = True
  with pytest.raises(ValueError, match='eval_only measures a single run'):
    sweep.run(config, str(tmp_path))
  assert fake == []


def test_results_of_every_run(fake, tmp_path, capfd):
  sweep.run(small('optimizer.lr=0.1,0.2', 'seed=0,1'), str(tmp_path))
  rows = table(tmp_path)
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
  assert 'run 4 of 4: lr=0.2 / seed=1' in out and 'about 0:00:0' in out
  assert out.endswith(
    (tmp_path / 'table.md').read_text()
    + ''.join(
      f'\nwritten  {tmp_path}/{name}'
      for name in ('results.csv', 'table.md', 'plot.png')
    )
    + '\n'
  )
  assert '| lr=0.1 | 10.50 ± 0.71 |\n| lr=0.2 | 20.50 ± 0.71 |\n' in out
  assert (tmp_path / 'plot.png').read_bytes().startswith(b'\x89PNG')


def test_finished_runs_are_kept_and_more_seeds_added(fake, tmp_path):
  sweep.run(small('seed=0,1'), str(tmp_path))
  before = (tmp_path / 'runs' / 'seed=0' / 'result.json').read_bytes()
  sweep.run(small('seed=0,1'), str(tmp_path))
  assert fake == ['seed=0', 'seed=1']
  config = small('seed=2,1,0')
  # What check_resumable allows to change.
  config.log_every = '3 steps'
  sweep.run(config, str(tmp_path))
  assert fake == ['seed=0', 'seed=1', 'seed=2']
  assert (tmp_path / 'runs' / 'seed=0' / 'result.json').read_bytes() == before
  assert [row['seed'] for row in table(tmp_path)] == ['2', '1', '0']


def test_another_config_is_refused_before_anything_runs(fake, tmp_path):
  sweep.run(small('seed=1'), str(tmp_path))
  config = small('seed=0,1')
  config.optimizer.lr = 0.5
  with pytest.raises(ValueError) as e:
    sweep.run(config, str(tmp_path))
  assert str(e.value).startswith(f'{tmp_path}/runs/seed=1: ')
  assert 'optimizer.lr: 0.003 -> 0.5' in str(e.value)
  assert fake == ['seed=1']


def test_a_metric_that_finished_runs_lack_is_refused(fake, tmp_path):
  sweep.run(small('seed=0'), str(tmp_path))
  config = small('seed=0')
  config.best_metric = 'val/accuracy'
  message = "seed=0: best_metric is 'val/accuracy', .* has test/accuracy"
  with pytest.raises(ValueError, match=message):
    sweep.run(config, str(tmp_path))
  with pytest.raises(ValueError, match=message):
    sweep.run(config, str(tmp_path / 'new'))


def test_a_result_that_is_no_json_names_its_folder(fake, tmp_path):
  sweep.run(small('seed=0'), str(tmp_path))
  (tmp_path / 'runs' / 'seed=0' / 'result.json').write_text('{')
  with pytest.raises(ValueError, match=f'{tmp_path}/runs/seed=0: '):
    sweep.run(small('seed=0'), str(tmp_path))


def test_a_run_that_diverges_is_noted_and_the_others_go_on(
  fake, tmp_path, capfd
):
  config = small('optimizer.lr=0.1,99,0.2', 'seed=0,1')
  for _ in range(2):  # it would diverge again: it is not run again
    sweep.run(config, str(tmp_path))
  assert len(fake) == 6
  assert [row['status'] for row in table(tmp_path)] == (
    2 * ['done'] + 2 * ['diverged'] + 2 * ['done']
  )
  row = table(tmp_path)[2]
  assert (row['test/accuracy'], row['steps']) == ('', '2')
  assert '| lr=99.0 | diverged |' in (tmp_path / 'table.md').read_text()
  assert 'diverged: Step 3: the loss is nan.' in capfd.readouterr().out


@contextlib.contextmanager
def preempted_at_3():
  yield lambda step: step == 3


def test_a_sweep_stopped_in_its_second_run_ends_as_if_it_was_not(
  tmp_path, monkeypatch
):
  config = small('seed=0,1')
  started = []

  def counting(config, workdir, train=train.train):
    started.append(config.seed)
    if started == [0, 1]:
      monkeypatch.setattr(train_module, 'preemption_notice', preempted_at_3)
    try:
      train(config, workdir)
    finally:
      monkeypatch.setattr(train_module, 'preemption_notice', notice)

  train_module, notice = train, train.preemption_notice
  monkeypatch.setattr(train, 'train', counting)
  stopped = tmp_path / 'stopped'
  with pytest.raises(run.Preempted, match='saved step 3'):
    sweep.run(config, str(stopped))
  assert [row['seed'] for row in table(stopped)] == ['0']
  assert '1 of 2 runs have finished' in (stopped / 'table.md').read_text()
  # A run left unfinished cannot go on as another one either.
  other = small('seed=0,1')
  other.optimizer.lr = 0.5
  (stopped / 'runs' / 'seed=0').rename(tmp_path / 'aside')
  with pytest.raises(ValueError, match='seed=1: .*another config'):
    sweep.run(other, str(stopped))
  (tmp_path / 'aside').rename(stopped / 'runs' / 'seed=0')

  sweep.run(config, str(stopped))
  assert started == [0, 1, 1]
  whole = tmp_path / 'whole'
  sweep.run(small('seed=1'), str(whole))
  resumed, uninterrupted = table(stopped)[1], table(whole)[0]
  assert resumed.pop('elapsed_s') != uninterrupted.pop('elapsed_s')
  assert resumed == uninterrupted
  curves = (workdir / 'runs/seed=1/metrics.csv' for workdir in (stopped, whole))
  assert len({path.read_text() for path in curves}) == 1


def test_elapsed_time_counts_both_parts(fake, tmp_path, monkeypatch):
  class Started:
    def __init__(self, *args):
      pass

    def latest_meta(self):
      config = sweep.cells(small('seed=0'), str(tmp_path))[0].config
      return {
        'config': json.loads(config.to_json()),
        'class_names': ['a'],
        'examples': 1,
        'elapsed_s': 1000.0,
      }

    def close(self):
      pass

  monkeypatch.setattr(sweep, 'Checkpoints', Started)
  (tmp_path / 'runs' / 'seed=0' / 'checkpoints').mkdir(parents=True)
  sweep.run(small('seed=0'), str(tmp_path))
  assert 1000 < float(table(tmp_path)[0]['elapsed_s']) < 1100


def test_only_the_main_process_writes_and_prints(
  fake, tmp_path, monkeypatch, capfd
):
  config = small('seed=0')
  monkeypatch.setattr(sweep.jax, 'process_index', lambda: 1)
  sweep.run(config, str(tmp_path))
  assert fake == ['seed=0']
  assert capfd.readouterr().out == ''
  assert not (tmp_path / 'results.csv').exists()
  assert not (tmp_path / 'runs' / 'seed=0' / 'result.json').exists()


def test_the_command_runs_a_grid_of_a_config_file(command, tmp_path):
  pairs = ','.join(f'{key}={value}' for key, value in SMALL.items())
  pairs += ',total=2 steps'
  status, out, err = command(
    f'--config=configs/ablation.py:head,{pairs}',
    f'--workdir={tmp_path}',
    '--sweep=optimizer.lr=0.01',
    '--sweep=seed=0',
  )
  assert status == 0, err
  rows = table(tmp_path)
  heads = ['Class token, linear', 'Class token, MLP']
  heads += ['Mean (GAP), linear', 'Attention (MAP), linear']
  assert [row['Head'] for row in rows] == heads
  # The hidden layer of 16, as wide as the model, and a head of its own.
  params = [int(row['params']) for row in rows]
  assert params[1] - params[0] == 17 * 16
  lines = (tmp_path / 'table.md').read_text().splitlines()
  assert lines[2] == '| Head | lr=0.01 |'
  for line, row in zip(lines[4:], rows, strict=True):
    accuracy = 100 * float(row['test/accuracy'])
    assert line == f'| {row["Head"]} | {accuracy:.2f} |'
    # Each is a run like any other.
    folder = tmp_path / row['folder']
    assert (folder / 'curves.png').exists()
    columns, steps = metric_log.read_table(folder / 'metrics.csv')
    assert steps[2]['test/accuracy'] == row['test/accuracy']
  assert out.endswith(f'written  {tmp_path}/plot.png\n')


@pytest.mark.parametrize(
  ('args', 'messages'),
  [
    (['--sweep=optimizer.lrr=1'], ["'optimizer.lrr'", 'optimizer.lr']),
    (['--sweep=seed=0,x'], ["seed='x'", 'int']),
    (['--sweep=seed'], ['write a field and its values']),
    (
      ['--sweep=seed=0,1', '--config.seed=3'],
      ["seed is set by the axis 'seed'", '--sweep=seed=...'],
    ),
    (['--sweep=seed=0', '--config.eval_only=True'], ['a single run']),
    (
      ['--config=configs/ablation.py:head,optimizer.lr=1'],
      ["optimizer.lr is set by the axis 'optimizer.lr'", '--sweep=optimi'],
    ),
  ],
)
def test_the_command_refuses_in_one_line(command, tmp_path, args, messages):
  status, out, err = command(
    '--config=configs/digits.py', f'--workdir={tmp_path}/w', *args
  )
  assert status == main.EXIT_BAD_INPUT
  assert err.startswith('error: ') and err.count('\n') == 1
  for message in messages:
    assert message in err
  assert out == ''
  assert not (tmp_path / 'w').exists()


def test_a_preempted_sweep_has_the_status_of_a_preempted_run(
  command, tmp_path, monkeypatch
):
  def preempted(config, workdir):
    raise run.Preempted('Preempted: saved step 3.')

  monkeypatch.setattr(train, 'train', preempted)
  status, _, err = command(
    '--config=configs/digits.py', f'--workdir={tmp_path}', '--sweep=seed=0,1'
  )
  assert status == main.EXIT_PREEMPTED
  assert err == 'Preempted: saved step 3.\n'


def test_sigterm_in_the_last_step_of_a_run_stops_the_sweep(
  fake, tmp_path, monkeypatch
):
  """The run itself has nothing left to save, and ends as if nothing were."""
  finish = train.train

  def last_step(config, workdir):
    with run.preemption_notice():
      os.kill(os.getpid(), signal.SIGTERM)
      finish(config, workdir)

  monkeypatch.setattr(train, 'train', last_step)
  config = small('seed=0,1,2')
  with pytest.raises(run.Preempted):
    sweep.run(config, str(tmp_path))
  assert fake == ['seed=0']
  assert [row['status'] for row in table(tmp_path)] == ['done']
  monkeypatch.setattr(train, 'train', finish)
  sweep.run(config, str(tmp_path))
  assert fake == ['seed=0', 'seed=1', 'seed=2']
