"""The status lines with a clock by hand, the curves and the summary."""

import io
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from vit_jax.training import metric_log, progress


class Clock:
  """Seconds that pass only when a test says so."""

  def __init__(self):
    self.now_s = 1000.0

  def __call__(self):
    return self.now_s


@pytest.fixture
def clock():
  return Clock()


def _progress(clock, stream, **kwargs):
  defaults = {
    'total_steps': 10_000,
    'start_step': 0,
    'batch_size': 512,
    'cores': 2,
    'train_flops_per_image': 1e9,
    'peak_flops': 4e12,
  }
  kwargs = defaults | {'stream': stream, 'clock': clock} | kwargs
  return progress.Progress(**kwargs)


def test_the_whole_line(clock):
  out = io.StringIO()
  shown = _progress(clock, out)
  clock.now_s += 60  # Compiling.
  shown.first_step_done(1)
  shown.update(1, {'train/loss': 6.9}, 55.0)
  clock.now_s += 200
  scalars = {'train/loss': np.float32(0.8123), 'train/accuracy': 0.7131}
  shown.update(1201, scalars | {'train/lr': 0.1, 'other/loss': 3.0}, 4.0)
  # 1200 steps of 512 images in 200 s: 3072 images/s, 77 % of 4e12 FLOP/s, and
  # 8799 steps more at 6 steps/s.
  assert out.getvalue().splitlines() == [
    'step 1/10,000 0% | loss 6.90',
    'step 1,201/10,000 12% | loss 0.812 | acc 71.3% | 3,072 img/s | '
    '1,536 img/s/core | MFU 76.8% | data wait 2% | 0:24:26 left',
  ]
  assert shown.images_per_s_per_core == 1536


def test_rates_are_of_the_last_interval_and_totals_of_all(clock):
  out = io.StringIO()
  shown = _progress(clock, out, total_steps=300)
  shown.first_step_done(100)
  clock.now_s += 100
  shown.update(200, {}, 0.0)
  clock.now_s += 300
  shown.update(300, {}, 30.0)
  last = out.getvalue().splitlines()[-1]
  assert '| 171 img/s | 85.3 img/s/core |' in last
  assert 'data wait 10% | 0:00:00 left' in last
  assert last.startswith('step 300/300 100%')
  assert shown.images_per_s_per_core == 200 * 256 / 400


def test_pauses_count_for_no_rate_but_for_time_left_and_cost(clock):
  out = io.StringIO()
  shown = _progress(clock, out, total_steps=400)
  with shown.pause():
    clock.now_s += 1000  # Before the first step: no rate knows of it.
  shown.first_step_done(1)
  clock.now_s += 10
  with shown.pause():
    clock.now_s += 100
  with pytest.raises(KeyError), shown.pause():
    clock.now_s += 50
    raise KeyError
  clock.now_s += 40
  shown.update(101, {}, 25.0)
  line = out.getvalue()
  assert shown.images_per_s_per_core == 100 * 256 / 50
  assert '1,024 img/s' in line
  assert 'data wait 50%' in line
  assert '0:09:58 left' in line  # 299 steps of 2 s, the pauses included.
  clock.now_s += 50
  shown.update(201, {}, 0.0)  # The pauses are not taken off twice.
  assert shown.images_per_s_per_core == 512
  assert shown.elapsed_s == 1250


def test_messages_are_lines_too(clock):
  out = io.StringIO()
  shown = _progress(clock, out)
  shown.first_step_done(1)
  shown.update(1, {'train/loss': 6.9}, 0.0)
  with shown.pause():
    pass
  shown.message('test accuracy 71.2%')
  assert out.getvalue() == 'step 1/10,000 0% | loss 6.90\ntest accuracy 71.2%\n'


def test_disabled_prints_nothing_but_counts(clock):
  out = io.StringIO()
  shown = _progress(clock, out, enabled=False)
  shown.first_step_done(1)
  clock.now_s += 1
  shown.update(3, {'train/loss': 1.0}, 0.0)
  with shown.pause():
    pass
  shown.message('hello')
  assert out.getvalue() == ''
  assert shown.images_per_s_per_core == 512


def _log(tmp_path, rows):
  log = metric_log.MetricLog(str(tmp_path / 'run'), None)
  for step, scalars in rows.items():
    log.write(step, scalars)
  log.close()
  return log


_ROWS = {
  100: {'train/loss': 2.0, 'train/accuracy': 0.2, 'train/lr': 0.1},
  200: {'train/loss': 1.5, 'real/accuracy': 0.25},
  300: {'train/loss': 1.0, 'train/accuracy': 0.6, 'train/lr': 0.0},
  400: {'test/accuracy': 0.9125, 'test/loss': 1.9, 'real/accuracy': 0.5},
  500: {'test/accuracy': 0.9125},
  1200: {'test/accuracy': 0.875},
}


def test_the_curves_are_the_columns(tmp_path, figures):
  log = _log(tmp_path, _ROWS)
  png_path = tmp_path / 'curves.png'
  modules = set(sys.modules)
  best = ['test/accuracy', 'real/accuracy']
  assert progress.plot_curves(log, str(png_path), best)
  with Image.open(png_path) as image:
    assert image.format == 'PNG'
    # In inches: 2.5 for each of three panels, and 0.6 for the steps below.
    assert image.size == (800, 810)
    assert len(image.convert('RGB').getcolors(1 << 24)) > 3  # Not blank.
  (figure,) = figures
  lines = {
    axes.get_ylabel(): {
      line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
      for line in axes.get_lines()
    }
    for axes in figure.axes
  }
  assert lines == {
    'loss': {
      'train': ([100, 200, 300], [2.0, 1.5, 1.0]),
      'test': ([400], [1.9]),
    },
    'accuracy': {
      'train': ([100, 300], [0.2, 0.6]),
      'real': ([200, 400], [0.25, 0.5]),
      'test': ([400, 500, 1200], [0.9125, 0.9125, 0.875]),
    },
    'learning rate': {'train': ([100, 300], [0.1, 0.0])},
  }
  loss, accuracy, _ = figure.axes
  # Shares are read as percent, a loss is not.
  assert [label.get_text() for label in accuracy.get_yticklabels()] == [
    f'{share:.0%}' for share in accuracy.get_yticks()
  ]
  assert not any('%' in label.get_text() for label in loss.get_yticklabels())
  assert sorted(os.listdir(tmp_path)) == ['curves.png', 'run']
  assert 'matplotlib.pyplot' not in set(sys.modules) - modules


def test_nothing_to_draw(tmp_path):
  log = _log(tmp_path, {1: {'train/grad_norm': 3.0}})
  assert (
    progress.plot_curves(log, str(tmp_path / 'curves.png'), ['test/accuracy'])
    is False
  )
  assert os.listdir(tmp_path) == ['run']


def test_the_summary(tmp_path, clock):
  shown = _progress(clock, io.StringIO(), cores=2, prior_s=533.088)
  shown.first_step_done(1)
  clock.now_s += 0.0005
  text = shown.summary(
    _log(tmp_path, _ROWS),
    {'test/accuracy': 'highest', 'real/accuracy': 'highest'},
    '/runs/a/checkpoints/1200',
    ['/runs/a/metrics.csv', '/runs/a/curves.png'],
  )
  assert text.splitlines() == [
    'best real/accuracy   50.00% at step 400',
    'final real/accuracy  50.00% at step 400',
    'best test/accuracy   91.25% at step 400',
    'final test/accuracy  87.50% at step 1,200',
    'checkpoint           /runs/a/checkpoints/1200',
    'cost                 0.0123 core-days',
    'written              /runs/a/metrics.csv',
    'written              /runs/a/curves.png',
  ]
  clock.now_s += 10
  shown.update(101, {}, 0.0)
  text = shown.summary(_log(tmp_path, {}), {}, 'a', [])
  assert text.startswith('checkpoint  a\nspeed       2,560 images/s per core\n')


def test_a_status_survives_a_pipe_that_nobody_reads():
  """Where Python would flush once more, and end by that."""
  code = """
import sys
from vit_jax.training import progress
shown = progress.Progress(
  total_steps=9, start_step=0, batch_size=1, cores=1,
  train_flops_per_image=None, peak_flops=None)
sys.stdin.readline()
shown.message('evaluated')
print('and more', flush=True)
sys.exit(75)
"""
  process = subprocess.Popen(
    [sys.executable, '-c', code],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  process.stdout.close()
  process.stdin.write(b'\n')
  process.stdin.close()
  assert process.wait() == 75


@pytest.mark.parametrize(
  ('share', 'text'), [(0.001, '0.1%'), (0.00099, '<0.1%')]
)
def test_no_share_of_the_peak_is_shown_as_nothing(share, text):
  assert progress.mfu_text(share) == text
