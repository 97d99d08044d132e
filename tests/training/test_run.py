"""The books of a run, and what is waited for at its end, and how long."""

import contextlib
import math
import types

import numpy as np
import pytest

from vit_jax import experiment
from vit_jax.training import (
  dashboards,
  durations,
  metric_log,
  processes,
  progress,
  run,
)


@pytest.fixture
def ending(tmp_path):
  """Gives a run that has come to its end, and what it does."""
  calls = []

  def noting(name):
    return lambda *args: calls.append((name, *args))

  log = metric_log.MetricLog(str(tmp_path), None)
  log.write(3, {'train/loss': 0.5, 'test/accuracy': 0.25})
  log.close()
  ended = object.__new__(run.Run)
  ended.workdir, ended.shown = str(tmp_path), {'test/accuracy': 'highest'}
  ended.durations = types.SimpleNamespace(total=3)
  ended.meta = {'config': {'early_stopping': False}}
  ended._trace = contextlib.ExitStack()
  ended._watch = types.SimpleNamespace(stop=noting('watch'))
  ended._log = log
  log.close = noting('log')
  ended.checkpoints = types.SimpleNamespace(
    wait=noting('wait'),
    path='checkpoints/{}'.format,
    latest_step=lambda: 3,
  )
  ended._progress = progress.Progress(
    total_steps=3,
    start_step=0,
    batch_size=1,
    cores=1,
    train_flops_per_image=None,
    peak_flops=None,
  )
  return ended, calls


META = {
  'elapsed_s': 60.0,
  'since_log': [],
  'evaluated': [],
  'config': {'best_metric': 'test/accuracy', 'patience': 2},
  'best': 'highest',
}


def test_a_finished_run_waits_for_all_and_says_what_it_made(
  ending, tmp_path, capsys
):
  ended, calls = ending
  assert ended.finish() == {'train/loss': 0.5, 'test/accuracy': 0.25}
  # The watchdog ends before the run waits for dashboards.
  log = ('log', dashboards.CLOSE_S)
  assert calls == [('wait',), ('watch',), log]
  out = capsys.readouterr().out
  for words in (
    'best test/accuracy   25.00% at step 3',
    'checkpoint           checkpoints/3\n',
    f'written              {tmp_path}/metrics.csv\n',
    f'written              {tmp_path}/curves.png\n',
  ):
    assert words in out
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')


def test_a_run_that_does_not_finish_waits_briefly(ending):
  """Other processes that fail too wait no longer for it."""
  ended, calls = ending
  ended.close()
  assert calls == [('watch',), ('log', dashboards.BRIEF_S)]
  # There are two dashboards.
  assert 2 * dashboards.BRIEF_S < processes.MEET_S


class Books:
  """Stands for all that a run keeps its books with, and notes the entries."""

  def __init__(self, monkeypatch, **given):
    self.rows, self.lines, self.saved, self.begun = [], [], [], []
    self.moved, self.now_s = 0, 1000.0
    clock = types.SimpleNamespace(monotonic=lambda: self.now_s)
    monkeypatch.setattr(run, 'time', clock)
    monkeypatch.setattr(run.metric_log, 'MetricLog', self._itself)
    monkeypatch.setattr(run.progress, 'Progress', self._itself)
    monkeypatch.setattr(run.processes, 'Watch', self._itself)
    monkeypatch.setattr(run.sharding, 'global_batch', self._global_batch)
    arguments = {
      'workdir': 'w',
      'mesh': 'a mesh',
      'durations': durations.Durations(5, 1, (), 2, 4, 3),
      'checkpoints': self,
      'evaluators': (),
      'shown': {},
      'meta': META,
      'start_step': 0,
      'batch_size': 16,
      'forward_flops': 7,
    }
    self.run = run.Run(**(arguments | given))

  def _itself(self, *args, **kwargs):
    return self

  def _global_batch(self, batch, mesh):
    assert mesh == 'a mesh'
    self.now_s += 2
    return batch

  # As a log.
  def write(self, step, values):
    self.rows.append((step, values))

  # As a watch and as the progress, which both are told of.
  def progress(self):
    self.moved += 1

  def first_step_done(self, step):
    self.begun.append(step)

  def update(self, step, values, wait_s):
    assert (step, values) == self.rows[-1]
    self.lines.append((step, wait_s))

  @property
  def elapsed_s(self):
    return 60 + self.now_s - 1000

  def pause(self):
    self.lines.append('pause')
    return run.contextlib.nullcontext()

  def message(self, text):
    self.lines.append(text)

  # As checkpoints.
  def latest_step(self):
    return self.saved[-1][0] if self.saved else None

  def path(self, step):
    return f'checkpoints/{step}'

  def save(self, step, state, meta, metrics):
    self.saved.append((step, state, meta, metrics))


def numbers(loss):
  return {'loss': np.float32(loss), 'grad_norm': 2.0, 'param_norm': 3.0}


def test_rows_are_means_and_waits_are_those_between_them(monkeypatch):
  """The wait for the first step, which compiles, counts for no rate."""
  every_third = durations.Durations(7, 1, (), 3, 4, 3)
  books = Books(monkeypatch, durations=every_third)
  for step in range(1, 8):
    books.run.wait_for(iter([{}]))
    books.run.add_metrics(step, numbers(step))
    # Three are in flight, and no more.
    assert books.moved == max(0, step - run.MAX_IN_FLIGHT)
  assert [step for step, _ in books.rows] == [3]
  books.run._wait(0)
  assert books.begun == [1]
  # Of the steps after the row before, and those of the last one for itself.
  assert [(step, row['train/loss']) for step, row in books.rows] == [
    (3, 2.0),
    (6, 5.0),
    (7, 7.0),
  ]
  assert {row['train/grad_norm'] for _, row in books.rows} == {2.0}
  # Step 1 was done before the batch of step 5 was waited for, and step 3 before
  # that of step 7.
  assert books.lines == [(3, 4.0), (6, 2.0), (7, 0.0)]


def test_a_resumed_run_goes_on_with_the_row_that_was_begun(monkeypatch):
  meta = META | {'since_log': [{'loss': 9.0}]}
  books = Books(monkeypatch, meta=meta, start_step=3)
  books.run.add_metrics(4, {'loss': 1.0})
  books.run._wait(0)
  assert books.rows == [(4, {'train/loss': 5.0})] and books.begun == [4]
  assert meta['since_log'] == [{'loss': 9.0}]


@pytest.mark.parametrize(
  ('name', 'saved', 'last'),
  [
    ('loss', [], 'The run has no checkpoint yet.'),
    ('param_norm', [(3,)], 'The last good checkpoint is checkpoints/3.'),
  ],
)
def test_what_is_not_finite_ends_the_run(monkeypatch, name, saved, last):
  books = Books(monkeypatch)
  books.saved = saved
  books.run.add_metrics(4, numbers(0.5))
  books.run.add_metrics(5, numbers(0.25) | {name: float('inf')})
  shown = {'loss': 0.25, 'grad_norm': 2.0, 'param_norm': 3.0, name: 'inf'}
  with pytest.raises(run.Diverged) as e:
    books.run._wait(0)
  assert str(e.value).startswith(
    f'Step 5: the loss is {shown["loss"]}, the norm of the gradient '
    f'{shown["grad_norm"]} and the norm of the parameters '
    f'{shown["param_norm"]}. {last}'
  )


def test_some_steps_are_evaluated_and_more_are_saved(monkeypatch):
  """Of five steps every fourth and every third, and the last in any case."""
  books = Books(monkeypatch)
  steps = range(1, 6)
  assert [*filter(books.run.is_eval_step, steps)] == [4, 5]
  assert [*filter(books.run.is_checkpoint_step, steps)] == [3, 4, 5]


def test_an_evaluation_is_of_the_average_and_goes_into_its_checkpoint(
  monkeypatch,
):
  seen = []

  def evaluator(name, value):
    def measure(params):
      seen.append(params)
      return {name: value, 'seen': np.zeros((2, 2, 3), np.uint8)}

    return measure

  books = Books(
    monkeypatch,
    evaluators=[evaluator('test/examples', 1360.0), evaluator('a/b', 0.25)],
  )
  state = experiment.TrainState('p', 'o', 'a')
  books.run.add_metrics(4, numbers(1.0))
  books.run.evaluate(4, state)
  assert books.moved == 1 + 2  # the step, and each evaluator
  assert seen == ['a', 'a']
  ((step, found),) = books.rows[1:]
  assert step == 4 and {*found} == {'test/examples', 'seen', 'a/b'}
  assert books.lines[1:] == [
    'pause',
    'step 4 evaluated: test/examples 1,360, a/b 0.2500',
  ]
  books.now_s += 30
  books.run.add_metrics(5, numbers(8.0))
  books.run.save(4, state)
  # What was trained before, and all that has gone by since.
  (step, _, meta, metrics) = books.saved[0]
  assert (step, meta['elapsed_s'], meta['config']) == (4, 90.0, META['config'])
  assert metrics == {'test/examples': 1360.0, 'a/b': 0.25}
  # A step that was not evaluated has no metrics to be the best by.
  books.run.save(3, state)
  assert books.saved[1][3] == {}
  # Without an average it is the parameters that are measured.
  books.run.evaluate(5, state.replace(average={}))
  assert seen[2:] == ['p', 'p']


def test_a_checkpoint_has_the_steps_that_no_row_has_yet(monkeypatch):
  books = Books(monkeypatch)
  books.run.add_metrics(1, numbers(1.0))
  books.run.save(1, experiment.TrainState('p', 'o'))
  assert books.saved[0][2]['since_log'] == [numbers(1.0)]


@pytest.mark.parametrize(
  ('best', 'values', 'ends'),
  [
    ('highest', [0.3, 0.2], False),
    ('highest', [0.3, 0.2, 0.1], True),
    ('highest', [0.3, 0.3, 0.3], True),  # no better is not better
    ('highest', [0.3, 0.2, 0.4], False),
    ('lowest', [0.3, 0.4, 0.5], True),
    ('lowest', [0.3, 0.4, 0.2], False),
    ('lowest', [math.nan, 0.2, 0.3, 0.4], True),
  ],
)
def test_patience_counts_evaluations_without_a_better_one(
  monkeypatch, best, values, ends
):
  books = Books(monkeypatch, meta=META | {'best': best, 'evaluated': values})
  assert books.run.is_out_of_patience() == ends
