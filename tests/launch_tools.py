"""Stand-ins for the tools that the launch scripts call."""

import json
import os
import pathlib
import stat
import subprocess
import sys
import time

from tests.conftest import ROOT

TRAINING = ('--', '--config=configs/c.py', '--workdir=gs://b/w')
# What a shell, ssh, YAML or Kubernetes could misread.
NASTY = (
  "--config.total='10 steps'",
  '--config.a=$HOME $(date) `date` \\ \\n "x" &;|<>*?~!#',
  '--config.b=$(NAME) $$(NAME) $$',
  '--config.c=é, [1]: {2} %s @x __NAME__',
  '--config.d=',
  '',
  ' ',
  "'",
)

# Writes its name, its arguments and what it was given to read as a line.
RECORDER = f"""#!{sys.executable} -S
import json, os, sys
name = os.path.basename(sys.argv[0])
read = sys.stdin.read() if name == 'kubectl' else ''
with open(os.environ['CALLS'], 'a') as f:
  f.write(json.dumps([name, *sys.argv[1:]] + [read] * bool(read)) + '\\n')
sys.exit(int(os.environ.get('STATUS_' + name, 0)))
"""

# Two hosts are two folders, in which it runs what ssh would. $FAKE/state is
# that of the queued resource.
GCLOUD = f"""#!{sys.executable} -S
import json, os, pathlib, shutil, subprocess, sys
fake = pathlib.Path(os.environ['FAKE'])
args = sys.argv[1:]
with open(os.environ['CALLS'], 'a') as f:
  f.write(json.dumps(['gcloud', *args]) + '\\n')
state = fake / 'state'
flags = dict(a[2:].split('=', 1) for a in args if '=' in a)
action = args[3]
if 'echo running' in flags.get('command', ''):
  action = 'ask'
if (fake / 'broken').exists():
  sys.exit('gcloud: not logged in')
failures = fake / f'fail_{{action}}'
if failures.exists() and (left := int(failures.read_text())):
  failures.write_text(str(left - 1))
  sys.exit('gcloud: 503')
if action == 'create':
  assert not state.exists()
  state.write_text('ACTIVE')
  for i in range(2):
    (fake / f'host{{i}}').mkdir(exist_ok=True)
elif action == 'delete':
  assert state.read_text() in ('ACTIVE', 'SUSPENDED')
  state.unlink()
  for i in range(2):
    shutil.rmtree(fake / f'host{{i}}', ignore_errors=True)
elif action in ('list', 'describe'):
  print(state.read_text() if state.exists() else '')
else:
  if not state.exists() or state.read_text() != 'ACTIVE':
    sys.exit(255)
  hosts = range(2) if flags['worker'] == 'all' else [int(flags['worker'])]
  for i in hosts:
    home = fake / f'host{{i}}'
    if action == 'scp':
      source, target = args[4:6]
      shutil.copy(source, home / target.split(':')[1])
      continue
    path = f'{{fake}}/host_bin:/usr/bin:/bin'
    env = {{'HOME': str(home), 'PATH': path, 'FAKE': str(fake), 'HOST': str(i)}}
    status = subprocess.run(
      ['bash', '-c', flags['command']], cwd=home, env=env
    ).returncode
    if status:
      sys.exit(status)
"""

# `python3 -m pip install uv` brings a uv that makes an environment, in which
# python writes its arguments down and then does what $FAKE/plan has for this
# attempt: shell commands, one line an attempt.
PYTHON3 = r"""#!/bin/bash
mkdir -p ~/.local/bin && cat > ~/.local/bin/uv <<'UV'
#!/bin/bash
mkdir -p env/bin
echo "uv $*" >> ~/installed
printf '#!/bin/bash\necho "pip $*" >> ~/installed\n' > env/bin/pip
cat > env/bin/python <<'PYTHON'
#!/bin/bash
printf '%s\0' "$@" > ~/arguments
echo >> $FAKE/attempts$HOST
attempt=$(wc -l < $FAKE/attempts$HOST)
echo "attempt $attempt"
eval "$(sed -n ${attempt}p $FAKE/plan)"
PYTHON
chmod +x env/bin/*
UV
chmod +x ~/.local/bin/uv
"""


class Tools:
  """A folder with the stand-ins, which come before everything else on PATH."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    (folder / 'bin').mkdir()
    for name in ('python', 'kubectl', 'docker', 'sbatch', 'srun', 'scontrol'):
      self.add(name, RECORDER)
    self.add('gcloud', GCLOUD)
    (folder / 'host_bin').mkdir()
    self.add('python3', PYTHON3, 'host_bin')

  def add(self, name: str, text: str, folder: str = 'bin') -> None:
    path = self.folder / folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)

  def environment(self, **variables: str) -> dict[str, str]:
    kept = {
      k: v
      for k, v in os.environ.items()
      if not k.startswith(('SLURM', 'JAX', 'XLA'))
    }
    path = f'{self.folder}/bin:{os.environ["PATH"]}'
    ours = {'CALLS': f'{self.folder}/calls', 'FAKE': str(self.folder)}
    return kept | {'PATH': path} | ours | variables

  def start(
    self, script: str, *args: str, **variables: str
  ) -> subprocess.Popen[str]:
    # Where a shell runs the tests in the background, SIGINT is ignored, which
    # bash could not undo.
    heeding = ['/usr/bin/env', '--default-signal=INT']
    return subprocess.Popen(
      [*heeding, 'bash', f'launch/{script}', *args],
      cwd=ROOT,
      env=self.environment(**variables),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      start_new_session=True,
    )

  def run(
    self, script: str, *args: str, **variables: str
  ) -> tuple[int, str, str]:
    """Runs a script to its end: exit status, stdout and stderr."""
    process = self.start(script, *args, **variables)
    out, err = process.communicate()
    return process.returncode, out, err

  def calls(self) -> list[list[str]]:
    """Returns what was called, each a name and its arguments."""
    path = self.folder / 'calls'
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_for(path: pathlib.Path) -> None:
  while not path.exists():
    time.sleep(0.02)
