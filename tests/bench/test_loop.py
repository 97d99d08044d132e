"""Where the time of a run goes: by hand, and with loops that are known slow."""

import argparse
import contextlib
import csv
import sys
import time

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
    handed=[0.0, 0.5, 4.5, 6.5, 20.0],
    # The second runs until 4: half a second late for the third, which the
    # fourth follows at once. After the fourth 2 s of evaluation, which began
    # while it still ran, and 3 of saving; then 1 until the fifth.
    done=[1.0, 4.0, 7.0, 10.0, 22.0],
    evaluations=[(9.0, 12.0)],
    saves=[(12.0, 15.0), (22.5, 23.0)],
    compile_s=30.0,
    ended=23.0,
  )
  found = loop.gaps(watch)
  assert found == [
    Gap(step=2, seconds=0.5, saving=False, evaluating_s=0.0),
    Gap(step=4, seconds=8.0, saving=True, evaluating_s=2.0),
    Gap(step=5, seconds=1.0, saving=True, evaluating_s=0.0),
  ]
  row = loop.summary(watch, found, batch_size=10)
  assert row['total_s'] == 22
  assert row['evaluating_s'] == 2
  assert row['saving_s'] == 9
  assert row['idle_s'] == 0.5
  assert row['steps_s'] == 22 - 2 - 9 - 0.5
  assert row['idle_share'] == 0.5 / 20
  assert row['saving_share'] == 9 / 20
  assert row['evaluating_share'] == 2 / 22
  assert row['images_per_s'] == 4 * 10 / 20


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


def slowed(function, seconds):
  def slow(*args, **kwargs):
    time.sleep(seconds)
    return function(*args, **kwargs)

  return slow


@pytest.mark.slow
def test_a_slow_input_leaves_the_device_idle(tmp_path, monkeypatch):
  train_batches = train.loader.train_batches

  def slow_batches(*args, **kwargs):
    with contextlib.closing(train_batches(*args, **kwargs)) as batches:
      for batch in batches:
        time.sleep(0.3)
        yield batch

  quick = measure(tmp_path)
  monkeypatch.setattr(train.loader, 'train_batches', slow_batches)
  # Enough steps that the one checkpoint, seconds on a busy machine, does not
  # take the better part of the run from the waiting.
  slow = measure(tmp_path, steps=40)
  assert slow['idle_share'] > 0.6
  assert slow['idle_s'] > 39 * 0.3 - slow['steps_s'] - 0.1
  assert quick['idle_share'] < 0.5 * slow['idle_share']


@pytest.mark.slow
def test_slow_saving_is_a_stall_and_not_idle(tmp_path, monkeypatch):
  monkeypatch.setattr(
    saving.Checkpoints, 'save', slowed(saving.Checkpoints.save, 0.5)
  )
  row = measure(tmp_path, steps=12, every=4)
  assert row['saves'] == 3
  assert row['saving_s'] > 1.5
  assert row['saving_share'] > 2 * row['idle_share']


@pytest.mark.slow
def test_evaluation_is_apart(tmp_path, monkeypatch):
  split = metric_log.metrics_and_pictures
  monkeypatch.setattr(metric_log, 'metrics_and_pictures', slowed(split, 1.0))
  row = measure(tmp_path, steps=12, every=6)
  # What runs while the steps do is no gap: a few of them are under way.
  assert row['evaluating_s'] > 1.5
  assert row['saving_s'] < 1.5
  parts = sum(row[f'{x}_s'] for x in ('steps', 'evaluating', 'saving', 'idle'))
  assert parts == pytest.approx(row['total_s'])


def test_a_training_that_fails_is_no_secret(monkeypatch):
  interval_s = sys.getswitchinterval()
  monkeypatch.setattr(run_lib.Run, 'save', lambda *_: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    loop.watched(flags.config_named(CONFIG.format(steps=2, every=2)))
  assert sys.getswitchinterval() == interval_s


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
