"""The command as a user types it: messages and exit statuses."""

import contextlib
import importlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tests.conftest import ROOT, WITHOUT_ROOTS_RIGHTS, run_here
from vit_jax import main
from vit_jax.checkpoints import opening
from vit_jax.cli import flags
from vit_jax.data import device_augmentation, sources, transforms

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
    (['--config.lr=1'], ["No config field 'lr'", 'Did you mean optimizer.lr?']),
    (['--config.epochs=5'], ["No config field 'epochs'", "total='50 epochs'"]),
    (['--epochs=5'], ["'epochs'", '--config.FIELD=VALUE']),
    (['--config.seed.x=1'], ["No config field 'seed.x'", 'Did you mean seed']),
    (["--config.mesh={'data': 1}"], ['config.mesh is a group']),
    (['--config.mesh=x'], ['config.mesh is a group']),
    (['--config.optimizer.lr=fast'], ['--config.optimizer.lr=fast', 'float']),
    (['--worksdir=x'], ["'worksdir'", 'Did you mean: workdir']),
    (['extra'], ["Unexpected argument 'extra'"]),
    (['--workdir='], ['--workdir is missing']),
    (['--config.data.split=trian'], ["no split 'trian'", 'train']),
    (['--config.init=nowhere.npz'], ['No checkpoint at nowhere.npz']),
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
    ('configs/digit.py', ['configs/digit.py is not a file', 'digits, ']),
    (
      'configs/vit.py:l16x',
      ["Unknown model variant 'l16x'", 'Did you mean l16'],
    ),
    # A patch of 61 pixels is possible, though not of these images.
    (
      'configs/vit.py:b16,jft,modle.depth=3',
      ["No config field 'modle.depth'", 'Did you mean model.depth'],
    ),
    ('configs/vit.py:b16,jft,12', ["'12'", 'adam or sgd']),
    ('configs/vit.py:b16,imagenet2021', ['imagenet2021', 'imagenet2012']),
  ],
)
def test_bad_configs_end_in_one_message(command, tmp_path, config, messages):
  status, _, err = command(f'--config={config}', f'--workdir={tmp_path}/run')
  assert_refused(status, err, messages)


def test_fields_of_another_architecture_are_refused(command, tmp_path):
  """The fields there are depend on the model."""
  status, _, err = command(
    *(part.format('configs/digits.py:resnet') for part in ['--config={}']),
    f'--workdir={tmp_path}/run',
    '--config.model.depth=3',
  )
  assert_refused(status, err, ["No config field 'model.depth'", 'model.width'])


def test_config_is_missing(command, tmp_path):
  status, _, err = command(f'--workdir={tmp_path}')
  assert_refused(status, err, ['--config is missing'])


def test_overrides_before_the_config_are_refused(command, tmp_path):
  status, _, err = command(
    '--config.seed=1', '--config=configs/digits.py', f'--workdir={tmp_path}'
  )
  assert_refused(status, err, ['before a value for --config'])


def test_errors_in_a_users_config_file_keep_their_traceback(command, tmp_path):
  """Which is what a person who writes one needs."""
  path = tmp_path / 'mine.py'
  path.write_text('def get_config():\n  return {}["optimizer"]\n')
  with pytest.raises(KeyError, match='optimizer'):
    command(f'--config={path}', f'--workdir={tmp_path}')


@pytest.mark.slow
def test_started_as_a_process_a_misspelt_field_is_one_line(tmp_path):
  status, out, err = started(
    '--config=configs/digits.py',
    f'--workdir={tmp_path}',
    '--config.optimzer.lr=1',
  )
  assert_refused(status, err, ['optimzer.lr', 'Did you mean optimizer.lr'])
  assert out == ''


def test_help_explains_flags_and_statuses():
  status, out, err = started('--help')
  assert status == 0
  assert err == ''
  for words in (
    'python -m vit_jax.main --config=',
    '--workdir',
    '--[no]distributed',
    '--[no]start_over',
    '--config.FIELD=VALUE',
    'vit_jax/config.py',
    'eval_only',
    'init=CHECKPOINT',
    'resumes',
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
def test_evaluates_a_workdir(command, trained):
  workdir, _ = trained
  before = sorted(workdir.rglob('*'))
  status, out, _ = command(
    *SMALL, f'--workdir={workdir}', '--config.eval_only=True'
  )
  assert status == 0
  header, *_, last = (workdir / 'metrics.csv').read_text().splitlines()
  row = dict(zip(header.split(','), last.split(','), strict=True))
  got = evaluated(out)
  # Four digits are printed.
  assert got['test/accuracy'] == pytest.approx(
    float(row['test/accuracy']), abs=1e-4
  )
  assert got['test/loss'] == pytest.approx(float(row['test/loss']), abs=1e-4)
  assert got['test/examples'] == 360
  assert sorted(workdir.rglob('*')) == before


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


def test_another_number_of_classes_cannot_be_evaluated(
  command, trained, monkeypatch
):
  monkeypatch.setattr(sources.Digits, 'class_names', ('a', 'b'), raising=False)
  init = sources.Digits.__init__

  def two_classes(self, *args):
    init(self, *args)
    self.class_names = ('even', 'odd')

  monkeypatch.setattr(sources.Digits, '__init__', two_classes)
  status, _, err = command(
    *SMALL, f'--workdir={trained[0]}', '--config.eval_only=True'
  )
  assert_refused(status, err, ['has 10 classes', 'the data have 2'])


@pytest.mark.parametrize('names', ['9876543210', 'a0cdefghij'])
def test_classes_in_another_order_cannot_be_evaluated(
  command, trained, monkeypatch, names
):
  """All of them, or one alone, whose place another has or which has its own."""
  init = sources.Digits.__init__

  def turned(self, *args):
    init(self, *args)
    self.class_names = tuple(names)

  monkeypatch.setattr(sources.Digits, '__init__', turned)
  status, _, err = command(
    *SMALL, f'--workdir={trained[0]}', '--config.eval_only=True'
  )
  assert_refused(
    status, err, [f"has '0' as class 0 and the data have '{names[0]}'"]
  )


def test_other_names_of_the_same_classes_are_evaluated(
  command, trained, monkeypatch
):
  init = sources.Digits.__init__

  def in_words(self, *args):
    init(self, *args)
    self.class_names = tuple(f'n{name}' for name in self.class_names)

  monkeypatch.setattr(sources.Digits, '__init__', in_words)
  status, out, _ = command(
    *SMALL, f'--workdir={trained[0]}', '--config.eval_only=True'
  )
  assert status == 0 and evaluated(out)['test/examples'] == 360


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
  args = (*SMALL, f'--workdir={copy}')
  before = sorted(copy.rglob('*')), (copy / 'metrics.csv').read_bytes()
  files = [f for f in copy.glob('checkpoints/*/params/**/*') if f.is_file()]
  for file in files:
    file.chmod(0)
  status, _, err = started(*args, before=WITHOUT_ROOTS_RIGHTS)
  messages = [f'{copy}/checkpoints/6 cannot be read now', 'Permission denied']
  assert_refused(status, err, messages, expected=flags.EXIT_ENVIRONMENT)
  assert before == (
    sorted(copy.rglob('*')),
    (copy / 'metrics.csv').read_bytes(),
  )
  for file in files:
    file.chmod(0o644)
  status, _, err = started(*args, before=WITHOUT_ROOTS_RIGHTS)
  assert status == 0, err


@pytest.mark.slow
def test_a_run_without_a_whole_checkpoint_starts_over_with_a_flag(
  command, copy
):
  """At the first command after the damage and at later ones."""
  args = (*SMALL, f'--workdir={copy}')
  for file in copy.glob('checkpoints/*/meta/metadata'):
    file.write_text(file.read_text()[:30])
  for _ in range(2):
    status, _, err = command(*args)
    # Damaged metrics are warned of before.
    last = err.splitlines(keepends=True)[-1]
    assert_refused(status, last, ['damaged: 6 (', '--start_over', '--workdir'])
  for folder in (copy / 'checkpoints').iterdir():
    folder.rename(folder.with_name(f'{folder.name}.damaged'))
  status, _, err = command(*args)
  assert_refused(status, err, ['6.damaged', '--start_over'])
  table = (copy / 'metrics.csv').read_bytes()
  (copy / 'metrics.csv').write_text('step,old\n1,2\n')
  status, _, err = command(*args, '--start_over')
  assert status == 0, err
  assert (copy / 'metrics.csv').read_bytes() == table
  assert command(*args)[0] == 0


@pytest.mark.slow
def test_divergence_names_the_step_and_leaves_the_last_good(command, tmp_path):
  """Step 1 is the last whose loss is finite, and the only one saved."""
  args = (
    *SMALL,
    f'--workdir={tmp_path}',
    # Parameters that are still finite, and products of them that are not.
    '--config.optimizer.lr=1e17',
    '--config.optimizer.clip_norm=0',
  )
  for _ in range(2):  # the same command again ends the same way
    status, _, err = command(*args)
    assert status == main.EXIT_DIVERGED == 65
    message = err.splitlines()[-1]
    assert message.startswith('error: Step 2: the loss is nan')
    assert f'last good checkpoint is {tmp_path}/checkpoints/1.' in message
    assert 'Traceback' not in err
    assert saved_steps(tmp_path) == [1]
  checkpoint = opening.open_checkpoint(str(tmp_path))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(checkpoint.params))


@pytest.mark.parametrize(
  'number',
  # Where a shell runs the tests in the background, SIGINT is ignored.
  [
    signal.SIGTERM,
    pytest.param(
      signal.SIGINT,
      marks=[
        pytest.mark.slow,
        pytest.mark.skipif(
          signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
          reason='Ctrl-C is ignored here',
        ),
      ],
    ),
  ],
)
def test_a_signal_saves_and_exits_with_its_own_status(tmp_path, number):
  process = start(
    *SMALL, f'--workdir={tmp_path}', '--config.total=100000 steps'
  )
  try:
    while saved_so_far(tmp_path) < 2:
      assert process.poll() is None, process.communicate()
      time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate()
  finally:
    process.kill()
  assert process.returncode == main.EXIT_PREEMPTED == 75
  assert err.splitlines()[-1] == (
    f'Preempted: saved step {saved_steps(tmp_path)[-1]}.'
  )


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


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--config.init=nowhere.npz', 'No checkpoint at nowhere.npz'),
    ('--config.optimizer.b1=2', 'optimizer.b1 is 2.0; it must be at'),
  ],
)
def test_what_is_wrong_is_said_before_data_are_read(
  command, tmp_path, monkeypatch, flag, message
):
  """And leaves no workdir behind."""
  monkeypatch.setattr(sources, 'open_source', None)
  status, out, err = command(*SMALL, f'--workdir={tmp_path}/run', flag)
  assert (status, out) == (2, '')
  assert err.startswith('error: ') and err.count('\n') == 1
  assert message in err
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ('said', 'want'), [("'no data here'", 'no data here'), ('3', 3)]
)
def test_a_config_that_exits_has_not_trained(command, tmp_path, said, want):
  path = tmp_path / 'mine.py'
  path.write_text(f'raise SystemExit({said})\n')
  status, *_ = command(f'--config={path}', f'--workdir={tmp_path}/run')
  assert status == want
