"""Launch scripts but tpu.sh beside stand-ins for kubectl, srun and python."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import yaml

from tests.launch_tools import NASTY, ROOT, TRAINING, Tools, wait_for
from vit_jax import main
from vit_jax.cli import flags


@pytest.fixture
def tools(tmp_path):
  return Tools(tmp_path)


def kubernetes_reads(argument):
  """As expansion.go of Kubernetes, where no $(NAME) is defined."""
  return re.sub(r'\$\$', '$', argument)


def manifest_of(tools, *options, more=()):
  args = ('--name=n', '--image=h/i:1', *options, *TRAINING, *more)
  status, out, err = tools.run('gke.sh', 'run', '--dry_run', *args)
  assert (status, err) == (0, '')
  before, *lines, after = out.splitlines()
  assert (before, after) == ("kubectl apply -f - <<'EOF'", 'EOF')
  assert tools.calls() == []
  assert tools.run('gke.sh', 'run', *args)[0] == 0
  text = '\n'.join(lines) + '\n'
  looked, applied = tools.calls()
  assert looked[:3] == ['kubectl', 'get', 'jobset/n']
  assert applied == ['kubectl', 'apply', '-f', '-', text]
  return yaml.safe_load(text)


def test_a_jobset_that_has_ended_is_not_run_again(tools):
  tools.add(
    'kubectl',
    '#!/bin/sh\n[ "$1" = get ] && echo StartupPolicyCompleted Completed\n',
  )
  args = ('--name=n', '--image=h/i:1', *TRAINING)
  status, out, err = tools.run('gke.sh', 'run', *args)
  assert (status, out) == (2, '')
  assert err == (
    'error: The JobSet n has ended (Completed). To resume, first run '
    'launch/gke.sh delete --name=n, then this command again.\n'
  )


def test_manifest_holds_what_was_asked_for(tools):
  manifest = manifest_of(
    tools,
    '--topology=2x4x4',
    '--accelerator=tpu-v5p-slice',
    '--service_account=trainer',
    '--restarts=7',
    more=NASTY,
  )
  spec = manifest['spec']
  assert manifest['metadata']['name'] == 'n'
  assert spec['failurePolicy']['maxRestarts'] == 7
  assert manifest['metadata']['labels'] == {}
  (slices,) = spec['replicatedJobs']
  assert slices['replicas'] == 1
  job = slices['template']['spec']
  assert (job['parallelism'], job['completions']) == (8, 8)  # 32 chips by 4
  # What https://cloud.google.com/tpu/docs/tpu-gke-multislice has for a slice.
  assert (job['completionMode'], job['backoffLimit']) == ('Indexed', 0)
  key = 'alpha.jobset.sigs.k8s.io/exclusive-topology'
  annotations = manifest['metadata']['annotations']
  assert annotations == {key: 'cloud.google.com/gke-nodepool'}
  pod = job['template']['spec']
  assert pod['serviceAccountName'] == 'trainer'
  assert pod['nodeSelector'] == {
    'cloud.google.com/gke-tpu-accelerator': 'tpu-v5p-slice',
    'cloud.google.com/gke-tpu-topology': '2x4x4',
  }
  (container,) = pod['containers']
  assert container['image'] == 'h/i:1'
  assert container['resources'] == {'limits': {'google.com/tpu': 4}}
  assert container['command'] == [
    *('python', '-m', 'vit_jax.main', '--distributed')
  ]
  got = [kubernetes_reads(arg) for arg in container['args']]
  assert got == [*TRAINING[1:], *NASTY]


@pytest.mark.parametrize(
  ('nodes', 'label'),
  [
    ('spot', {'gke-spot': 'true'}),
    ('reservation=ours-1', {'reservation-name': 'ours-1'}),
  ],
)
def test_manifest_of_several_slices(tools, nodes, label):
  """As https://cloud.google.com/tpu/docs/tpu-gke-multislice and Kueue's."""
  manifest = manifest_of(
    tools, '--slices=4', '--topology=4x4', f'--nodes={nodes}', '--queue=team'
  )
  assert manifest['metadata']['labels'] == {'kueue.x-k8s.io/queue-name': 'team'}
  (slices,) = manifest['spec']['replicatedJobs']
  job = slices['template']['spec']
  assert (slices['replicas'], job['parallelism']) == (4, 4)
  pod = job['template']['spec']
  ((key, value),) = label.items()
  assert pod['nodeSelector'][f'cloud.google.com/{key}'] == value
  (volume,) = pod['volumes']
  assert volume['emptyDir'] == {'medium': 'Memory'}
  (container,) = pod['containers']
  (mount,) = container['volumeMounts']
  assert mount == {'name': volume['name'], 'mountPath': '/dev/shm'}
  assert [port['containerPort'] for port in container['ports']] == [8471, 8080]


def test_manifest_mounts_a_bucket(tools):
  """As https://cloud.google.com/kubernetes-engine/docs/how-to/
  cloud-storage-fuse-csi-driver-ephemeral has it."""
  (slices,) = manifest_of(tools, '--data_bucket=b_1')['spec']['replicatedJobs']
  template = slices['template']['spec']['template']
  assert template['metadata']['annotations'] == {'gke-gcsfuse/volumes': 'true'}
  volume = template['spec']['volumes'][-1]
  assert volume['csi'] == {
    'driver': 'gcsfuse.csi.storage.gke.io',
    'readOnly': True,
    'volumeAttributes': {'bucketName': 'b_1', 'mountOptions': 'implicit-dirs'},
  }
  mount = template['spec']['containers'][0]['volumeMounts'][-1]
  assert mount == {
    'name': volume['name'],
    'mountPath': '/data',
    'readOnly': True,
  }


def test_manifest_ends_on_what_would_come_again_and_restarts_on_all_else(tools):
  spec = manifest_of(tools, '--chips=8', '--topology=2x4')['spec']
  job = spec['replicatedJobs'][0]['template']['spec']
  assert (job['parallelism'], job['completions']) == (1, 1)
  (rule,) = job['podFailurePolicy']['rules']
  (container,) = job['template']['spec']['containers']
  assert rule['action'] == 'FailJob'
  assert rule['onExitCodes'] == {
    'containerName': container['name'],
    'operator': 'In',
    'values': [flags.EXIT_BAD_INPUT, main.EXIT_DIVERGED],
  }
  # What Kubernetes demands where there is such a rule.
  assert job['template']['spec']['restartPolicy'] == 'Never'
  assert spec['failurePolicy']['rules'] == [
    {
      'name': 'badInput',
      'action': 'FailJobSet',
      'onJobFailureReasons': ['PodFailurePolicy'],
    }
  ]


@pytest.mark.parametrize(
  'options',
  [
    (),
    (
      *('--accelerator=tpu7x', '--topology=4x4x4', '--slices=4'),
      *('--nodes=flex-start', '--queue=team', '--data_bucket=b'),
    ),
  ],
)
def test_manifest_has_the_schema_of_jobset(options, tools):
  jsonschema = pytest.importorskip('jsonschema')
  schema = json.loads((ROOT / 'tests/jobset_schema.json').read_text())
  validator = jsonschema.validators.validator_for(schema)(schema)
  validator.check_schema(schema)
  manifest = manifest_of(tools, *options, more=NASTY)
  validator.validate(manifest)


def test_task_of_skypilot():
  """As https://docs.skypilot.co/en/latest/reference/yaml-spec.html."""
  task = yaml.safe_load((ROOT / 'launch/sky.yaml').read_text())
  resources = task['resources']
  assert resources['accelerators'] == 'tpu-v6e-16'
  assert resources['job_recovery'] == {
    'recover_on_exit_codes': flags.EXIT_PREEMPTED
  }
  python, *words = shlex.split(task['run'])
  assert python == 'env/bin/python'
  assert ' env\n' in task['setup']  # made by uv
  assert words[:3] == ['-m', 'vit_jax.main', '--distributed']
  (folder,) = task['file_mounts']
  assert f'--config.data.dir={folder}' in words


def copied_to_image(name):
  text = (ROOT / 'launch' / name).read_text()
  return ' '.join(re.findall(r'^COPY (.*) \S+$', text, re.M)).split()


@pytest.mark.slow
def test_image_trains_as_somebody_else_than_root(tmp_path):
  """Its files and its command, without its base."""
  text = (ROOT / 'launch/Dockerfile.cpu').read_text()
  assert 'pip install --no-cache-dir -c requirements.txt -e .' in text
  (user,) = re.findall(r'^USER (.*)$', text, re.M)
  assert re.search(rf'useradd --uid=[1-9]\d+ .* {user} ', text)
  for name in copied_to_image('Dockerfile.cpu'):
    source = ROOT / name
    (shutil.copytree if source.is_dir() else shutil.copy)(
      source, tmp_path / name
    )
  python, *words = json.loads(re.search(r'^CMD (.*)$', text, re.M)[1])
  assert python == 'python'
  sizes = {'width': 16, 'depth': 1, 'mlp_dim': 16, 'heads': 2}
  done = subprocess.run(
    [
      *(sys.executable, *words, '--config.total=2 steps'),
      *(f'--config.model.{name}={size}' for name, size in sizes.items()),
    ],
    cwd=tmp_path,
    env=os.environ | {'PYTHONPATH': ''},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'runs/digits/checkpoints/2').is_dir()


@pytest.mark.edge
@pytest.mark.parametrize('code', [1, 75])
def test_slurm_queues_again_only_what_was_preempted(code, tools):
  status, out, err = tools.run(
    'slurm.sbatch',
    *TRAINING,
    *NASTY,
    SLURM_JOB_ID='42',
    STATUS_srun=str(code),
  )
  assert (status, out, err) == (code, '', '')
  training = ['python', '-m', 'vit_jax.main', '--distributed']
  assert tools.calls() == [
    ['srun', *training, *TRAINING[1:], *NASTY],
    *[['scontrol', 'requeue', '42']] * (code == 75),
  ]


@pytest.mark.edge
def test_slurm_job_outside_of_the_repository_is_refused(tmp_path):
  done = subprocess.run(
    ['bash', ROOT / 'launch/slurm.sbatch', '--help'],
    cwd=tmp_path,
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stdout) == (2, '')
  assert f"options.sh in {tmp_path}: submit from the repository's root" in (
    done.stderr
  )


def start_processes(tools, body, *options):
  """With a python that does `body`, shell commands, in each process."""
  tools.add('python', f'#!/bin/bash\n{body}\n')
  return tools.start(
    'multi_process.sh',
    *options,
    *('--port=1', '--processes=3'),
    *('--', '--config=c', f'--workdir={tools.folder}/w', 'a b'),
  )


def test_processes_know_one_another(tools):
  body = (
    'echo $JAX_PROCESS_ID $JAX_NUM_PROCESSES $JAX_COORDINATOR_ADDRESS '
    '$JAX_PLATFORMS $JAX_CPU_COLLECTIVES_IMPLEMENTATION "$XLA_FLAGS" $# "$6"'
  )
  process = start_processes(tools, body, '--devices=5')
  out, err = process.communicate()
  assert (process.returncode, err) == (0, '')
  logs = [(tools.folder / f'w/processes/{i}.log').read_text() for i in range(3)]
  assert logs == [
    f'{i} 3 localhost:1 cpu gloo '
    '--xla_force_host_platform_device_count=5 6 a b\n'
    for i in range(3)
  ]
  assert out == logs[0]


def test_logs_are_in_the_workdir_that_training_takes(tools):
  """Whose ~ no shell expands."""
  args = ('--processes=1', '--port=1', '--', '--config=c', '--workdir=~/w')
  home = tools.folder / 'home'
  status, _, err = tools.run('multi_process.sh', *args, HOME=str(home))
  assert status == 0, err
  assert (home / 'w/processes/0.log').exists()


@pytest.mark.slow
def test_processes_are_killed_when_one_fails(tools):
  late = 'import time; time.sleep(100); print("alive")'
  body = (
    f"[[ $JAX_PROCESS_ID != 2 ]] || exit 9\nexec {sys.executable} -c '{late}'"
  )
  process = start_processes(tools, body, '--grace_s=1')
  _, err = process.communicate()
  assert process.returncode == 9
  assert err.endswith(
    f'Status 9. Each process has a log in {tools.folder}/w/processes.\n'
  )
  for i in range(3):
    assert (tools.folder / f'w/processes/{i}.log').read_text() == ''


def test_processes_that_fail_together_all_have_their_say(tools):
  body = 'sleep 0.$JAX_PROCESS_ID; echo why; exit 2'
  process = start_processes(tools, body)
  process.communicate()
  assert process.returncode == 2
  for i in range(3):
    assert (tools.folder / f'w/processes/{i}.log').read_text() == 'why\n'


@pytest.mark.fast('15')
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_processes_save_when_told_to_end(number, tools):
  body = (
    "trap 'echo saves; sleep 0.5; exit 75' TERM\n"
    f'touch {tools.folder}/ready$JAX_PROCESS_ID\n'
    'while true; do sleep 0.1; done'
  )
  process = start_processes(tools, body)
  for i in range(3):
    wait_for(tools.folder / f'ready{i}')
  if number == signal.SIGINT:  # Ctrl-C reaches all that the terminal waits for
    os.killpg(process.pid, number)
  else:
    process.send_signal(number)
  out, _ = process.communicate()
  assert process.returncode == 75
  assert out == 'saves\n'
  for i in range(3):
    assert (tools.folder / f'w/processes/{i}.log').read_text() == 'saves\n'


@pytest.mark.slow
def test_two_processes_train(tools):
  (tools.folder / 'bin/python').unlink()
  workdir = tools.folder / 'w'
  status, out, err = tools.run(
    'multi_process.sh',
    *('--devices=2', '--', '--config=configs/digits.py:model.depth=1'),
    *(f'--workdir={workdir}', '--config.total=6 steps'),
  )
  assert status == 0, err
  assert '6 steps of 64 on 4 x cpu' in out
  header, *rows = (workdir / 'metrics.csv').read_text().splitlines()
  last = dict(zip(header.split(','), rows[-1].split(','), strict=True))
  assert last['step'] == '6'
  assert (workdir / 'processes/1.log').exists()
