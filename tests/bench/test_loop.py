"""Where the time of a run goes: by hand, and with loops that are known slow."""

import argparse
import contextlib
import csv
import re
import sys
import time
import types

import pytest

from vit_jax import flags, train
from vit_jax.bench import loop
from vit_jax.bench.loop import Gap, LoopWatch
from vit_jax.checkpoints import saving
from vit_jax.training import metric_log
from vit_jax.training import run as run_lib

pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')

CONFIG = (
  'configs/digits.py:vit,total={steps} steps,batch_size=8,eval_every={every} '
  'steps,checkpoint_every={every} steps,model.depth=1,model.width=24,'
  'model.mlp_dim=24,mesh.data=8'
)


def test_gaps_and_shares_by_hand():
  watch = LoopWatch(
    handed=[0.0, 0.5, 4.5, 7.0, 20.0],
    # The second runs until 4: half a second late for the third, which the
    # fourth follows at once. After the fourth 2 s of evaluation, which began
    # while it still ran, and 3 of saving; then 1 until the fifth.
    done=[1.0, 4.0, 7.0, 10.0, 22.0],
    evaluations=[(9.0, 12.0)],
    saves=[(12.0, 15.0), (22.5, 23.0)],
    compile_s=30.0,
    ended=23.0,
    last_write_s=4.0,
  )
  found = loop.gaps(watch)
  assert found == [
    Gap(step=2, seconds=0.5, saving=False, evaluating_s=0.0),
    Gap(step=4, seconds=8.0, saving=True, evaluating_s=2.0),
    Gap(step=5, seconds=1.0, saving=True, evaluating_s=0.0),
  ]
  assert loop.summary(watch, found, batch_size=10) == {
    'steps': 4,
    'compile_s': 30,
    'total_s': 22,
    'steps_s': 22 - 2 - 9 - 0.5,
    'evaluating_s': 2,
    'saving_s': 9,
    'idle_s': 0.5,
    'saves': 2,
    'idle_share': 0.5 / 20,
    'saving_share': 9 / 20,
    'evaluating_share': 2 / 22,
    'last_write_s': 4,
    'images_per_s': 4 * 10 / 20,
  }


def test_what_happened_when_is_noted(monkeypatch):
  """Of three steps, of which the first compiles, told by a training."""
  now, watches = [0.0], []
  clock = types.SimpleNamespace(perf_counter=lambda: now[0])

  class Metrics:
    def __init__(self, seconds):
      self.seconds = seconds

  def wait(metrics):
    if metrics.seconds is None:
      raise RuntimeError('which the loop reports')
    now[0] += metrics.seconds

  def new_watch():
    watches.append(LoopWatch())
    return watches[-1]

  def train_on(config, workdir, listener):
    def tell(event, after_s, *metrics):
      now[0] += after_s
      count = len(watches[0].done)
      listener(event, *metrics)
      while metrics and len(watches[0].done) == count:
        time.sleep(0.001)

    tell('batch', 1)
    tell('step', 20, Metrics(2))  # 23 s
    tell('batch', 1)
    tell('step', 1, Metrics(None))  # 25 s
    tell('evaluate', 1)
    tell('evaluated', 3)  # 29 s
    tell('save', 1)
    tell('saved', 2)  # 32 s
    tell('batch', 1)
    tell('step', 1, Metrics(4))  # 38 s
    tell('ended', 5)
    tell('written', 7)

  monkeypatch.setattr(loop, 'time', clock)
  monkeypatch.setattr(loop, 'LoopWatch', new_watch)
  monkeypatch.setattr(loop.jax, 'block_until_ready', wait)
  monkeypatch.setattr(train, 'train', train_on)
  assert loop.watched(None) == LoopWatch(
    handed=[21.0, 25.0, 34.0],
    done=[23.0, 25.0, 38.0],
    evaluations=[(26.0, 29.0)],
    saves=[(30.0, 32.0)],
    compile_s=20.0,
    ended=43.0,
    last_write_s=7.0,
  )


def measure(tmp_path, steps=12, every=100):
  path = tmp_path / 'loop.csv'
  args = argparse.Namespace(
    config=CONFIG.format(steps=steps, every=every), config_of=flags.config_named
  )
  loop.bench(args, loop.Output(str(path), None))
  with open(path, newline='') as f:
    (row,) = csv.DictReader(f)
  return {
    name: float(x)
    for name, x in row.items()
    if name not in ('device', 'config')
  }


def test_three_steps_are_enough_for_a_row(monkeypatch, capsys, tmp_path):
  """Handed over at 0, 2 and 5, done at 1, 3 and 6: a second of two is idle."""
  watch = LoopWatch(
    handed=[0.0, 2.0, 5.0], done=[1.0, 3.0, 6.0], compile_s=7.0, ended=6.0
  )
  monkeypatch.setattr(loop, 'watched', lambda config: watch)
  row = measure(tmp_path, steps=3)
  assert (row['batch_size'], row['steps'], row['idle_s']) == (8, 2, 3)
  assert row['images_per_s'] == pytest.approx(2 * 8 / 5)
  out = capsys.readouterr().out
  assert ': 2 steps of 8 after the first, 5.0 s, 3 images/s\n' in out
  assert re.search(r'^  idle between steps +3\.00 s, 60\.00% of', out, re.M)
  watch.done.pop()
  with pytest.raises(ValueError, match='2 steps: the loop shows itself'):
    measure(tmp_path, steps=3)


class Clock:
  """Runs as the real one, and jumps once no step is under way."""

  JUMP_S = 1000.0

  def __init__(self, monkeypatch):
    self._jumped_s = 0.0
    self._watches = []
    monkeypatch.setattr(loop, 'time', self)
    monkeypatch.setattr(loop, 'LoopWatch', self._new_watch)

  def _new_watch(self):
    self._watches.append(LoopWatch())
    return self._watches[-1]

  def perf_counter(self):
    return time.perf_counter() + self._jumped_s

  def jump(self):
    watch = self._watches[-1]
    while len(watch.done) < len(watch.handed):
      time.sleep(0.001)
    self._jumped_s += self.JUMP_S

  def slowed(self, function):
    def slow(*args, **kwargs):
      self.jump()
      return function(*args, **kwargs)

    return slow


def check_jumps(row, jumped, jumps):
  """All jumps of the clock are in one column, so many at least."""
  parts = {
    name: row[f'{name}_s'] for name in ('steps', 'evaluating', 'saving', 'idle')
  }
  assert sum(parts.values()) == pytest.approx(row['total_s'])
  assert parts.pop(jumped) > jumps * Clock.JUMP_S
  assert sum(parts.values()) < Clock.JUMP_S


@pytest.mark.slow
def test_a_slow_input_leaves_the_device_idle(tmp_path, monkeypatch):
  clock = Clock(monkeypatch)
  train_batches = train.loader.train_batches

  def slow_batches(*args, **kwargs):
    with contextlib.closing(train_batches(*args, **kwargs)) as batches:
      for batch in batches:
        clock.jump()
        yield batch

  monkeypatch.setattr(train.loader, 'train_batches', slow_batches)
  row = measure(tmp_path)
  # The first batch comes before all this.
  check_jumps(row, 'idle', jumps=11)
  assert row['idle_share'] > 0.9


@pytest.mark.slow
def test_slow_saving_is_a_stall_and_not_idle(tmp_path, monkeypatch):
  clock = Clock(monkeypatch)
  monkeypatch.setattr(
    saving.Checkpoints, 'save', clock.slowed(saving.Checkpoints.save)
  )
  row = measure(tmp_path, steps=12, every=4)
  assert row['saves'] == 3
  check_jumps(row, 'saving', jumps=3)
  assert row['saving_share'] > 0.7


@pytest.mark.slow
def test_evaluation_is_apart(tmp_path, monkeypatch):
  clock = Clock(monkeypatch)
  split = metric_log.metrics_and_pictures
  monkeypatch.setattr(metric_log, 'metrics_and_pictures', clock.slowed(split))
  row = measure(tmp_path, steps=12, every=6)
  check_jumps(row, 'evaluating', jumps=2)
  assert row['evaluating_share'] > 0.6


@pytest.fixture
def interval_s():
  """After how long Python hands its lock on, whatever earlier tests left."""
  before = sys.getswitchinterval()
  sys.setswitchinterval(0.02)
  yield sys.getswitchinterval()
  sys.setswitchinterval(before)


def test_a_training_that_fails_is_no_secret(monkeypatch, interval_s):
  seen = []

  def save(*_):
    seen.append(sys.getswitchinterval())
    raise ZeroDivisionError

  monkeypatch.setattr(run_lib.Run, 'save', save)
  with pytest.raises(ZeroDivisionError):
    loop.watched(flags.config_named(CONFIG.format(steps=2, every=2)))
  assert seen and max(seen) < interval_s == sys.getswitchinterval()


@pytest.mark.parametrize(
  ('ending', 'status', 'message'),
  [
    (
      run_lib.Diverged('Step 3: the loss is nan.'),
      2,
      'Step 3: the loss is nan. Th',
    ),
    (run_lib.Preempted('saved'), 130, 'interrupted'),
  ],
)
def test_a_training_that_ends_early_is_one_message(
  run, monkeypatch, ending, status, message
):
  def train_on(*_, **__):
    raise ending

  monkeypatch.setattr(train, 'train', train_on)
  found, _, err = run('loop', 'digits', small=False)
  assert (found, err.count('\n')) == (status, 1)
  assert message in err


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    ('configs/nothing.py', 'error: configs/nothing.py is no file: give'),
    ('nothing', 'nothing is no file: give the path of one, or a name: abla'),
    ('configs/digits.py:vlt', "No family 'vlt'"),
    (CONFIG.format(steps=2, every=2), '2 steps: the loop shows itself'),
  ],
)
def test_configs_that_make_no_sense(run, monkeypatch, config, message):
  status, _, err = run('loop', config, small=False)
  assert status == 2
  assert message in err


@pytest.mark.slow
def test_the_command_draws(run, tmp_path):
  path = tmp_path / 'loop.png'
  config = CONFIG.format(steps=6, every=3)
  status, out, _ = run('loop', config, f'--plot={path}', small=False)
  assert status == 0
  assert 'idle between steps' in out
  assert path.read_bytes().startswith(b'\x89PNG')
