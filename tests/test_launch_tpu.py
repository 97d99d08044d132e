"""launch/tpu.sh beside a stand-in for gcloud, with two folders for hosts."""

import os
import signal
import time

import pytest

from tests.launch_tools import NASTY, ROOT, TRAINING, Tools, wait_for

UP = ('up', '--name=t', '--poll_s=0', *TRAINING)


@pytest.fixture
def tools(tmp_path):
  return Tools(tmp_path)


# What the commands that hosts get are known by, the most telling word first.
WORDS = ('nohup', 'uv venv', 'tail', 'stopped', '/status', 'flock -n', 'true')


def actions(tools):
  """Returns what gcloud was asked to do, without the looks at the state."""
  done = [
    next(word for word in WORDS if word in call[-1])
    if call[4] == 'ssh'
    else call[4]
    for call in tools.calls()
  ]
  return [action for action in done if action != 'list']


ATTEMPT = ['true', 'flock -n', 'scp', 'uv venv', 'nohup', 'tail', '/status']


@pytest.mark.slow
def test_tpu_up_does_it_all(tools):
  (tools.folder / 'plan').write_text('exit 0')
  # A host that has just come up refuses ssh for a while.
  (tools.folder / 'fail_ssh').write_text('2')
  status, out, err = tools.run('tpu.sh', *UP, *NASTY)
  assert status == 0, err
  assert 'attempt 1' in out  # of the log
  assert actions(tools) == ['create', 'true', 'true', *ATTEMPT, 'delete']


def suspend(tools):
  """Returns what preempts the TPU; nobody sees the state half written."""
  state = tools.folder / 'state'
  return f'echo -n SUSPENDED > {state}_; mv {state}_ {state}'


def preempt(tools):
  """Returns what a host does to be preempted."""
  return f'[[ $HOST == 1 ]] || ({suspend(tools)})'


def test_tpu_up_requests_again_after_a_preemption(tools):
  (tools.folder / 'plan').write_text(f'{preempt(tools)}; exit 75\n')
  status, out, err = tools.run('tpu.sh', 'up', '--spot', *UP[1:])
  assert status == 0, err
  assert err.count('Preempted: requesting the TPU again.') == 1
  assert 'attempt 2' in out
  assert actions(tools) == ['create', *ATTEMPT, 'delete'] * 2
  created = [call for call in tools.calls() if 'create' in call]
  assert created == [created[0]] * 2
  assert '--spot' in created[0]


@pytest.mark.slow
def test_tpu_up_waits_for_the_reason_of_a_failure(tools):
  """Processes that have lost others fail before the state says why."""
  (tools.folder / 'plan').write_text('exit 134\n')
  # While it waits, after which it looks at the state.
  tools.add('sleep', f'#!/bin/bash\n[[ $1 != 4 ]] || ({suspend(tools)})\n')
  status, _, err = tools.run(
    'tpu.sh', 'up', '--name=t', '--poll_s=1', *TRAINING
  )
  assert status == 0, err
  assert actions(tools) == ['create', *ATTEMPT, 'delete'] * 2


@pytest.mark.slow
def test_tpu_up_starts_again_what_was_told_to_end(tools):
  """As maintenance does, which leaves the TPU active."""
  (tools.folder / 'plan').write_text('exit 75\nexit 0\n')
  status, _, err = tools.run('tpu.sh', *UP)
  assert status == 0, err
  assert actions(tools) == ['create', *ATTEMPT, 'stopped', *ATTEMPT, 'delete']


@pytest.mark.edge
def test_tpu_up_does_not_request_again_what_somebody_deleted(tools):
  """From elsewhere, while training runs."""
  (tools.folder / 'plan').write_text(f'rm {tools.folder}/state; exit 75\n')
  status, _, err = tools.run('tpu.sh', *UP)
  assert status == 1
  assert err.endswith('error: t was deleted. It is not requested again.\n')
  assert actions(tools).count('create') == 1


@pytest.mark.edge
def test_tpu_up_goes_on_where_gcloud_fails_now_and_then(tools):
  created = tools.folder / 'fail_create'
  refuse = f'[[ $HOST == 1 ]] || echo 3 > {created}'
  (tools.folder / 'plan').write_text(
    f'{refuse}; {preempt(tools)}; exit 75\nexit 0\n'
  )
  (tools.folder / 'fail_delete').write_text('2')
  # The first request is not made again: what is wrong with it would stay so.
  created.write_text('1')
  assert tools.run('tpu.sh', *UP)[0] == 1
  status, _, err = tools.run('tpu.sh', *UP)
  assert status == 0, err
  assert err.count('gcloud: 503') == 5
  assert actions(tools)[-1] == 'delete'
  assert not (tools.folder / 'state').exists()


@pytest.mark.edge
def test_tpu_up_says_that_a_tpu_could_not_be_deleted(tools):
  (tools.folder / 'plan').write_text('exit 0')
  (tools.folder / 'fail_delete').write_text('99')
  status, _, err = tools.run('tpu.sh', *UP)
  assert status == 1 and 'The TPU still costs money' in err
  assert actions(tools)[-5:] == ['delete'] * 5


@pytest.mark.slow
def test_tpu_up_keeps_the_tpu_after_a_failure(tools):
  (tools.folder / 'plan').write_text('exit 134')
  status, _, err = tools.run('tpu.sh', *UP)
  assert status == 134
  assert 'ended with status 134. The TPU still costs money' in err
  assert 'launch/tpu.sh delete --name=t --zone=us-east5-b' in err
  assert actions(tools) == ['create', *ATTEMPT]
  assert tools.run('tpu.sh', 'delete', '--name=t')[0] == 0
  assert not (tools.folder / 'state').exists()


@pytest.mark.slow
def test_tpu_up_follows_training_that_runs_and_stop_ends_it(tools):
  """Also that every host hears of the stop."""
  started = tools.folder / 'attempts0'
  (tools.folder / 'plan').write_text(
    "trap 'echo saved; exit 75' TERM; while true; do sleep 0.1; done"
  )
  assert tools.run('tpu.sh', 'create', '--name=t')[0] == 0
  assert tools.run('tpu.sh', 'install', '--name=t')[0] == 0
  run = ('run', '--name=t', *TRAINING)
  assert tools.run('tpu.sh', *run) == (0, '', '')
  wait_for(started)
  status, _, err = tools.run('tpu.sh', *run)
  assert (status, err) == (2, 'error: training runs already; stop it first\n')
  # Lost connections do not say that nothing runs.
  (tools.folder / 'fail_ask').write_text('2')
  up = tools.start('tpu.sh', *UP)
  while actions(tools)[-1] != 'tail':
    time.sleep(0.02)
  assert actions(tools).count('scp') == 1  # the one of `install`
  assert tools.run('tpu.sh', 'status', '--name=t')[1].splitlines() == [
    'ACTIVE',
    'training',
    'training',
  ]
  assert tools.run('tpu.sh', 'stop', '--name=t') == (0, '', '')
  out, err = up.communicate()
  assert up.returncode == 75, err
  assert err.startswith(2 * 'gcloud: 503\n' + 'Training runs already.\n')
  assert 'The TPU still costs money' in err
  assert out.split() == ['attempt', '1', 'saved']
  assert tools.run('tpu.sh', 'status', '--name=t')[1].splitlines() == [
    'ACTIVE',
    *['not training; last exit status: 75'] * 2,
  ]
  # To stop what does not run is no mistake, and `run` resumes it.
  assert tools.run('tpu.sh', 'stop', '--name=t') == (0, '', '')
  (tools.folder / 'plan').write_text('\nexit 0')
  assert tools.run('tpu.sh', *run) == (0, '', '')
  status, out, _ = tools.run('tpu.sh', 'logs', '--name=t', '--worker=1')
  assert (status, out) == (0, 'attempt 2\n')
  assert not (tools.folder / 'host0/vit_jax/stopped').exists()


def test_a_host_that_is_preempted_tells_how_training_ended(tools):
  """It sends SIGTERM to every process, not to training alone."""
  (tools.folder / 'plan').write_text(
    "trap 'sleep 0.3; exit 75' TERM; touch ~/ready; "
    'while true; do sleep 0.1; done'
  )
  for command in ('create', 'install', 'run'):
    more = TRAINING if command == 'run' else ()
    assert tools.run('tpu.sh', command, '--name=t', *more)[0] == 0
  for host in (tools.folder / 'host0', tools.folder / 'host1'):
    wait_for(host / 'ready')
    group = int((host / 'vit_jax/pid').read_text())
    os.killpg(group, signal.SIGTERM)
    wait_for(host / 'vit_jax/status')
    while not (text := (host / 'vit_jax/status').read_text()):
      time.sleep(0.02)
    assert text == '75\n'


def test_tpu_hosts_get_the_code_and_the_arguments(tools):
  (tools.folder / 'plan').write_text('exit 0')
  for command in (
    ('create', '--name=t'),
    ('install', '--name=t'),
    ('run', '--name=t', *TRAINING, 'two\nlines', *NASTY),
  ):
    assert tools.run('tpu.sh', *command)[0] == 0
  for i in range(2):
    home = tools.folder / f'host{i}'
    wait_for(home / 'vit_jax/status')
    got = (home / 'arguments').read_text().split('\0')[:-1]
    assert tuple(got) == (
      '-m',
      'vit_jax.main',
      '--distributed',
      *TRAINING[1:],
      'two\nlines',
      *NASTY,
    )
    for path in ('vit_jax/main.py', 'configs/vit.py', 'requirements.txt'):
      ours = (ROOT / path).read_bytes()
      assert (home / 'vit_jax' / path).read_bytes() == ours
    assert not [*home.rglob('__pycache__')]
    assert (home / 'installed').read_text().splitlines() == [
      'uv venv --quiet --seed --allow-existing --python=3.12 env',
      'pip install --quiet -c requirements.txt -e .[tpu]',
    ]


@pytest.mark.edge
def test_tpu_up_ends_when_gcloud_does_not_work(tools):
  (tools.folder / 'broken').touch()
  status, _, err = tools.run('tpu.sh', *UP)
  assert (status, err) == (1, 'gcloud: not logged in\n')


@pytest.mark.edge
def test_tpu_up_ends_with_a_request_that_failed(tools):
  (tools.folder / 'state').write_text('FAILED')
  status, _, err = tools.run('tpu.sh', *UP)
  assert status == 1
  assert 'the request failed' in err
  assert actions(tools) == []


@pytest.mark.edge
def test_tpu_up_ends_with_an_installation_that_failed(tools):
  tools.add('python3', '#!/bin/bash\nexit 7', 'host_bin')
  status, _, err = tools.run('tpu.sh', *UP)
  assert status == 1
  assert 'Installing or training ended with status 1' in err
  assert actions(tools) == ['create', *ATTEMPT[:4]]
