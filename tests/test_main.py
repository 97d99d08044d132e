"""The command as a user types it: messages and exit statuses."""

import contextlib
import importlib
import io
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.conftest import ROOT, WITHOUT_ROOTS_RIGHTS, run_here
from vit_jax import main
from vit_jax.checkpoints import opening
from vit_jax.cli import flags
from vit_jax.data import device_augmentation, sources, transforms
from vit_jax.training import run

train = importlib.import_module('vit_jax.train')

GOLDEN = ROOT / 'tests' / 'golden'

# The way in which config_flags loads a config file.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')

# Digits on a model that compiles in a second or two.
SMALL = (
  '--config=configs/digits.py',
  '--config.model.width=16',
  '--config.model.depth=2',
  '--config.model.mlp_dim=32',
  '--config.model.heads=2',
  '--config.data.image_size=8',
  '--config.batch_size=16',
  '--config.total=6 steps',
  '--config.optimizer.warmup=1 step',
  '--config.log_every=1 step',
  '--config.eval_every=6 steps',
  '--config.checkpoint_every=1 step',
)


def start(*args, before=(), **kwargs):
  return subprocess.Popen(
    [*before, sys.executable, '-m', 'vit_jax.main', *args],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    **kwargs,
  )


def started(*args, **kwargs):
  """Runs the command in a process of its own."""
  process = start(*args, **kwargs)
  out, err = process.communicate()
  return process.returncode, out, err


def saved_steps(workdir):
  return sorted(int(p.name) for p in (workdir / 'checkpoints').iterdir())


def saved_so_far(workdir):
  """Of a run that is saving; 0 before its first checkpoint."""
  names = [p.name for p in workdir.glob('checkpoints/*')]
  return max((int(name) for name in names if name.isdecimal()), default=0)


@pytest.mark.parametrize(
  ('args', 'messages'),
  [
    (
      ['--config.optimzer.lr=1'],
      ["No config field 'optimzer.lr'", 'Did you mean optimizer.lr'],
    ),
    (['--config.zzzzzzzzz=1'], ['zzzzzzzzz', 'optimizer.lr', 'model.depth']),
    (['--config.epochs=5'], ["No config field 'epochs'", "total='50 epochs'"]),
    (['--epochs=5'], ["'epochs'", '--config.FIELD=VALUE']),
    (['--config.seed.x=1'], ["No config field 'seed.x'", 'Did you mean seed']),
    (["--config.mesh={'data': 1}"], ['config.mesh is a group']),
    (['--config.mesh=x'], ['config.mesh is a group']),
    (['--config.optimizer.lr=fast'], ['--config.optimizer.lr=fast', 'float']),
    (['extra'], ["Unexpected argument 'extra'"]),
    (['--workdir='], ['--workdir is missing']),
    (['--config.data.split=trian'], ["no split 'trian'", 'train']),
  ],
  ids=lambda x: x[0][:24],
)
def test_bad_flags_end_in_one_message(command, tmp_path, args, messages):
  status, out, err = command(*SMALL, f'--workdir={tmp_path}/run', *args)
  assert_refused(status, err, messages)
  assert out == ''
  assert not (tmp_path / 'run' / 'metrics.csv').exists()


def assert_refused(status, err, messages, lines=1, expected=2):
  assert status == expected
  assert err.startswith('error: ')
  assert err.count('\n') == lines
  assert 'Traceback' not in err
  for message in messages:
    assert message in err


@pytest.mark.parametrize(
  ('config', 'messages'),
  [
    (
      'configs/vit.py:l16x',
      ["Unknown model variant 'l16x'", 'Did you mean l16'],
    ),
    ('configs/vit.py:b16,imagenet2021', ['imagenet2021', 'imagenet2012']),
  ],
)
def test_bad_configs_end_in_one_message(command, tmp_path, config, messages):
  status, _, err = command(f'--config={config}', f'--workdir={tmp_path}/run')
  assert_refused(status, err, messages)


def test_fields_of_another_architecture_are_refused(command, tmp_path):
  """The fields there are depend on the model."""
  status, _, err = command(
    '--config=configs/digits.py:resnet',
    f'--workdir={tmp_path}/run',
    '--config.model.depth=3',
  )
  assert_refused(status, err, ["No config field 'model.depth'", 'model.width'])


def test_errors_in_a_users_config_file_keep_their_traceback(command, tmp_path):
  """Which is what a person who writes one needs."""
  path = tmp_path / 'mine.py'
  path.write_text('def get_config():\n  return {}["optimizer"]\n')
  with pytest.raises(KeyError, match='optimizer'):
    command(f'--config={path}', f'--workdir={tmp_path}')


def test_help_explains_flags_and_statuses():
  status, out, err = started('--help')
  assert status == 0
  assert err == ''
  for words in (
    'python -m vit_jax.main --config=',
    '--[no]start_over',
    '--config.FIELD=VALUE',
    '1    an error in the program',
    f'{main.EXIT_DIVERGED}   training diverged',
    '2    bad input',
    f'{flags.EXIT_ENVIRONMENT}   the machine',
    f'{main.EXIT_PREEMPTED}   preempted',
    f'{flags.EXIT_INTERRUPTED}  Ctrl-C',
  ):
    assert words in out


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A workdir that the command filled, and the text it printed."""
  workdir = tmp_path_factory.mktemp('trained') / 'run'
  with contextlib.redirect_stdout(io.StringIO()) as out:
    assert run_here(*SMALL, f'--workdir={workdir}') == 0
  return workdir, out.getvalue()


@pytest.mark.slow
def test_training_prints_progress_and_a_summary(trained):
  workdir, out = trained
  sizes = jax.tree.map(np.size, opening.open_checkpoint(str(workdir)).params)
  parameters = sum(jax.tree.leaves(sizes))
  assert f'model  ViT, {parameters:,} parameters, ' in out
  assert ' GFLOPs an image of 8x8 pixels\n' in out
  assert 'data   digits train: 1,437 images, 10 classes\n' in out
  assert 'run    6 steps of 16 on 8 x cpu, mesh ' in out
  assert 'step 6/6' in out
  assert 'final test/accuracy' in out
  assert str(workdir / 'checkpoints' / '6') in out
  assert (workdir / 'curves.png').stat().st_size > 1000
  assert (workdir / 'metrics.csv').exists()
  table = (workdir / 'parameters.txt').read_text()
  assert f'Total: {parameters:,} -- {4 * parameters:,} bytes' in table
  assert table.count('| float32 ') == len(jax.tree.leaves(sizes))


def evaluated(out):
  return {
    name: float(value)
    for name, value in (line.split() for line in out.splitlines())
  }


@pytest.mark.slow
def test_evaluates_a_published_checkpoint_at_its_own_size(command, tmp_path):
  """Against a plain loop over the test split; the config says 8 pixels."""
  path = GOLDEN / 'tiny_s7.npz'
  status, out, err = command(
    *SMALL,
    f'--workdir={tmp_path}/run',
    '--config.eval_only=True',
    f'--config.init={path}',
  )
  assert status == 0
  assert not (tmp_path / 'run').exists()
  assert 'Images have 32x32 pixels, the size' in err and 'instead of 8.' in err
  checkpoint = opening.open_checkpoint(str(path))
  source = sources.open_source('digits', 'test')
  transform = transforms.EvalTransform(checkpoint.image_size)
  examples = [transform(source[i]) for i in range(len(source))]
  images = np.stack([e['image'] for e in examples])
  labels = np.array([e['label'] for e in examples])
  logits, _ = checkpoint.model.apply(
    {'params': checkpoint.params}, device_augmentation.normalize(images)
  )
  log_probabilities = np.asarray(jax.nn.log_softmax(logits))
  losses = -log_probabilities[range(360), labels]
  got = evaluated(out)
  assert got['test/examples'] == 360
  # Four digits are printed; one example is 28 times that.
  assert got['test/accuracy'] == pytest.approx(
    np.mean(np.argmax(log_probabilities, -1) == labels), abs=1e-4
  )
  assert got['test/loss'] == pytest.approx(losses.mean(), abs=1e-4)


def test_classes_in_another_order_cannot_be_evaluated(
  command, trained, monkeypatch
):
  """The name '0' belongs to class 0 of the model and to class 1 of the data."""
  init = sources.Digits.__init__

  def turned(self, *args):
    init(self, *args)
    self.class_names = tuple('a0cdefghij')

  monkeypatch.setattr(sources.Digits, '__init__', turned)
  status, _, err = command(
    *SMALL, f'--workdir={trained[0]}', '--config.eval_only=True'
  )
  assert_refused(status, err, ["has '0' as class 0 and the data have 'a'"])


def test_other_names_of_the_same_classes_are_evaluated(
  command, trained, monkeypatch
):
  init = sources.Digits.__init__

  def in_words(self, *args):
    init(self, *args)
    self.class_names = tuple(f'n{name}' for name in self.class_names)

  monkeypatch.setattr(sources.Digits, '__init__', in_words)
  before = sorted(trained[0].rglob('*'))
  status, out, _ = command(
    *SMALL, f'--workdir={trained[0]}', '--config.eval_only=True'
  )
  assert status == 0 and evaluated(out)['test/examples'] == 360
  assert sorted(trained[0].rglob('*')) == before


def test_evaluating_the_last_of_several_stages(command, tmp_path, monkeypatch):
  """In a workdir below the home folder."""
  found = []

  def evaluate_only(config, workdir):
    found.append((config.teacher, workdir))
    return {}

  monkeypatch.setattr(train, 'evaluate_only', evaluate_only)
  monkeypatch.setenv('HOME', str(tmp_path))
  status, *_ = command(
    '--config=configs/noisy_student.py:digits',
    '--workdir=~/run',
    '--config.eval_only=True',
  )
  run = f'{tmp_path}/run'
  assert (status, found) == (0, [(f'{run}/stages/student_2', run)])


def test_another_config_in_the_same_workdir_is_refused(command, trained):
  workdir, _ = trained
  status, _, err = command(
    *SMALL, f'--workdir={workdir}', '--config.optimizer.lr=0.5'
  )
  messages = ['optimizer.lr: 0.003 -> 0.5', 'another --workdir']
  assert_refused(status, err, messages, lines=3)


@pytest.fixture
def copy(trained, tmp_path):
  """A workdir that another command may spoil."""
  shutil.copytree(trained[0], tmp_path / 'run')
  return tmp_path / 'run'


@pytest.mark.slow
def test_checkpoints_of_somebody_else_are_left_as_they_are(copy):
  if WITHOUT_ROOTS_RIGHTS is None:
    pytest.skip('root may read everything, and there is no setpriv')
  before = sorted(copy.rglob('*')), (copy / 'metrics.csv').read_bytes()
  for file in copy.glob('checkpoints/*/params/**/*'):
    if file.is_file():
      file.chmod(0)
  status, _, err = started(
    *SMALL, f'--workdir={copy}', before=WITHOUT_ROOTS_RIGHTS
  )
  messages = [f'{copy}/checkpoints/6 cannot be read now', 'Permission denied']
  assert_refused(status, err, messages, expected=flags.EXIT_ENVIRONMENT)
  assert before == (
    sorted(copy.rglob('*')),
    (copy / 'metrics.csv').read_bytes(),
  )


@pytest.mark.slow
def test_a_run_without_a_whole_checkpoint_starts_over_with_a_flag(
  command, copy
):
  args = (*SMALL, f'--workdir={copy}')
  for file in copy.glob('checkpoints/*/meta/metadata'):
    file.write_text(file.read_text()[:30])
  status, _, err = command(*args)
  # Damaged metrics are warned of before.
  last = err.splitlines(keepends=True)[-1]
  assert_refused(status, last, ['damaged: 6 (', '--start_over', '--workdir'])
  table = (copy / 'metrics.csv').read_bytes()
  (copy / 'metrics.csv').write_text('step,old\n1,2\n')
  status, _, err = command(*args, '--start_over')
  assert status == 0, err
  assert (copy / 'metrics.csv').read_bytes() == table


@pytest.mark.slow
def test_divergence_has_its_own_status_and_leaves_the_last_good(
  command, tmp_path
):
  """Step 1 is the last whose loss is finite, and the only one saved."""
  status, _, err = command(
    *SMALL,
    f'--workdir={tmp_path}',
    # Parameters that are still finite, and products of them that are not.
    '--config.optimizer.lr=1e17',
    '--config.optimizer.clip_norm=0',
  )
  assert status == main.EXIT_DIVERGED == 65
  message = err.splitlines()[-1]
  assert message.startswith('error: Step 2: the loss is nan')
  assert f'last good checkpoint is {tmp_path}/checkpoints/1.' in message
  assert 'Traceback' not in err
  assert saved_steps(tmp_path) == [1]


def test_a_preempted_run_saves_and_has_its_own_status(
  command, preempt_at, tmp_path
):
  preempt_at(2)
  status, _, err = command(*SMALL, f'--workdir={tmp_path}')
  assert status == main.EXIT_PREEMPTED == 75
  assert err.splitlines()[-1] == 'Preempted: saved step 2.'
  assert saved_steps(tmp_path) == [1, 2]


def test_a_profile_has_the_steps_that_were_asked_for(
  command, tmp_path, monkeypatch
):
  """Steps 3 and 4."""
  done, add_metrics = [], run.Run.add_metrics

  def take(self, step, metrics):
    done.append(step)
    add_metrics(self, step, metrics)

  # The command sets it for the whole process; this restores it at the end.
  monkeypatch.setattr(run.Run, 'profiled', range(0))
  monkeypatch.setattr(run.Run, 'add_metrics', take)
  monkeypatch.setattr(run.profiler, 'start', done.append)
  monkeypatch.setattr(run.profiler, 'stop', lambda: done.append('end'))
  status, *_ = command(*SMALL, f'--workdir={tmp_path}', '--profile=3:2')
  assert status == 0
  assert done == [1, 2, f'{tmp_path}/profile', 3, 4, 'end', 5, 6]


@pytest.mark.slow
def test_distributed_without_a_coordinator_is_refused(tmp_path):
  environment = {
    k: v for k, v in os.environ.items() if not k.startswith('JAX_')
  }
  status, _, err = started(
    *SMALL,
    f'--workdir={tmp_path}',
    '--distributed',
    env=environment | {'JAX_PLATFORMS': 'cpu'},
  )
  assert_refused(status, err, ['coordinator_address'])


def test_a_missing_checkpoint_is_refused_before_data_are_read(
  command, tmp_path, monkeypatch
):
  """And leaves no workdir behind."""
  monkeypatch.setattr(sources, 'open_source', None)
  status, out, err = command(
    *SMALL, f'--workdir={tmp_path}/run', '--config.init=nowhere.npz'
  )
  assert_refused(status, err, ['No checkpoint at nowhere.npz'])
  assert out == ''
  assert not list(tmp_path.iterdir())


def test_a_config_that_exits_has_not_trained(command, tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text('raise SystemExit(3)\n')
  status, *_ = command(f'--config={path}', f'--workdir={tmp_path}/run')
  assert status == 3
