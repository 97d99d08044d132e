"""How a run ends: what is waited for, in which order, and for how long."""

import types

import jax
import pytest

from vit_jax.training import dashboards, metric_log, processes, run


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
  ended._workdir, ended._shown = str(tmp_path), {'test/accuracy': 'highest'}
  ended._durations = types.SimpleNamespace(total=3)
  ended._hurried = False
  ended._tell = noting('tell')
  ended._watch = types.SimpleNamespace(stop=noting('watch'))
  ended._log = types.SimpleNamespace(close=noting('log'))
  ended._checkpoints = types.SimpleNamespace(
    wait=noting('wait'), path='checkpoints/{}'.format
  )
  ended._progress = types.SimpleNamespace(
    close=noting('progress'), images_per_s_per_core=7.0, core_days=0.5
  )
  return ended, calls


WHOLE = [
  ('tell', 'ended'),
  ('wait',),
  ('tell', 'written'),
  # Nothing is to be watched while dashboards are waited for.
  ('watch',),
  ('log', dashboards.CLOSE_S),
  ('progress',),
]


def test_a_finished_run_waits_for_all_and_says_what_it_made(
  ending, tmp_path, capsys
):
  ended, calls = ending
  ended.finish()
  assert calls == WHOLE
  out = capsys.readouterr().out
  for words in (
    'best test/accuracy   25.00% at step 3',
    'checkpoint           checkpoints/3\n',
    '7 images/s per core',
    '0.5 core-days',
    f'written              {tmp_path}/metrics.csv\n',
    f'written              {tmp_path}/curves.png\n',
  ):
    assert words in out
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')


def test_other_processes_finish_without_a_word(
  ending, tmp_path, capsys, monkeypatch
):
  ended, calls = ending
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  ended.finish()
  assert calls == WHOLE
  assert capsys.readouterr().out == ''
  assert not (tmp_path / 'curves.png').exists()


@pytest.mark.parametrize(
  ('hurried', 'count', 'wait_s'),
  [
    (False, 1, dashboards.CLOSE_S),
    (True, 1, dashboards.BRIEF_S),
    (False, 2, dashboards.BRIEF_S),
  ],
)
def test_a_run_that_is_told_to_end_waits_briefly(
  ending, monkeypatch, hurried, count, wait_s
):
  """And one of several: where all fail the others wait no longer for it."""
  ended, calls = ending
  monkeypatch.setattr(jax, 'process_count', lambda: count)
  if hurried:
    ended.hurry()
  ended.close()
  assert calls == [('watch',), ('log', wait_s), ('progress',)]
  # There are two dashboards.
  assert 2 * dashboards.BRIEF_S < processes.MEET_S
