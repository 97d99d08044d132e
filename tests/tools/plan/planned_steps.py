"""Print the schedule of a planned training step of L/16 in numbers, as JSON.

  python -m tests.tools.plan.planned_steps v6e:4x4

`collectives` has the count and the bytes of each kind and number of devices,
`operations` those of the results of other operations, and `peak_bytes` is the
memory of a device. After a change that is meant to alter the step, write the
golden file of test_planned_steps.py anew by naming no topology:

  python -m tests.tools.plan.planned_steps > tests/golden/planned_steps.json
"""

import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version

import jax

from configs import vit
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.tools.plan import aot, costs, hlo

# The layers are equal, so two show a change as well as all 24 would.
DEPTH = 2
IMAGES_PER_DEVICE = 16
TOPOLOGIES = ('v3:4x4', 'v5e:4x4', 'v6e:4x4')
# Names and views of arrays, which cost nothing.
_FREE = {'bitcast', 'constant', 'get-tuple-element', 'parameter', 'tuple'}
_OPERATION = re.compile(r' = (\(?.*?) ([a-z][a-z\-]*)\(')


def versions() -> dict[str, str]:
  """Returns the versions that the schedule depends on."""
  return {name: version(name) for name in ('libtpu', 'jax', 'flax')}


def lowered(topology: str) -> jax.stages.Lowered:
  """Returns the training step of the first layers of L/16 for a topology."""
  devices, _ = costs.devices_of(topology)
  config = vit.get_config(
    f'l16,model.depth={DEPTH},batch_size={IMAGES_PER_DEVICE * len(devices)}'
  )
  facts = costs.facts_given(config, 0, 0)
  return aot.training(Experiment(CheckedConfig(config, devices), facts)).lower()


def schedule(step: jax.stages.Lowered, folder: str) -> tuple[str, str]:
  """Compiles a step until it is scheduled; returns its HLO and memory report.

  The code that the compiler generates afterwards changes no number here and
  takes ten times as long. The end of this process ends it.
  """
  options = {'xla_dump_to': folder, 'xla_dump_hlo_as_text': True}
  compiling = threading.Thread(target=step.compile, args=(options,))
  compiling.daemon = True
  compiling.start()
  dumped = pathlib.Path(folder)
  # The compiler writes this file after the two that are read.
  while not list(dumped.glob('*after_optimizations_after_buffer_assignment*')):
    if not compiling.is_alive():
      raise RuntimeError('The compiler ended without a schedule.')
    time.sleep(0.1)
  (program,) = dumped.glob('*.after_optimizations.txt')
  (memory,) = dumped.glob('*memory-usage-report.txt')
  return program.read_text(), memory.read_text()


def counted(program: str, memory: str) -> dict[str, object]:
  """Returns the numbers of a scheduled program."""
  computations, entry = hlo._computations(program)
  sent, others = (collections.defaultdict(lambda: [0, 0]) for _ in range(2))
  for event in hlo._events(computations, entry):
    if isinstance(event, hlo.Start):
      kind, devices, size, _ = event.collective
      _add(sent[f'{kind} over {devices}'], size)
  for line in computations[entry]:
    match = _OPERATION.search(line)
    if not match or match[2] in _FREE or match[2].endswith('-done'):
      continue
    if not hlo._collective(line):
      _add(others[match[2]], sum(hlo._sizes(match[1])))
  return {
    'collectives': dict(sorted(sent.items())),
    # Scalars, such as those of random keys, do not matter.
    'operations': {k: v for k, v in sorted(others.items()) if v[1] > 2**20},
    'peak_bytes': int(re.search(r'Total bytes: (\d+)', memory)[1]),
  }


def _add(row: list[int], size: int) -> None:
  row[0] += 1
  row[1] += size


def in_new_process(topology: str) -> dict[str, object]:
  """Returns the numbers of the step that is planned for a topology."""
  done = subprocess.run(
    [sys.executable, '-m', 'tests.tools.plan.planned_steps', topology],
    # The compiler does not know all flags of the tests.
    env={k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


if __name__ == '__main__':
  if len(sys.argv) == 1:
    steps = {name: in_new_process(name) for name in TOPOLOGIES}
    text = json.dumps({'versions': versions(), 'steps': steps}, indent=1)
    print(re.sub(r'\[\s+(\d+),\s+(\d+)\s+\]', r'[\1, \2]', text))
    sys.exit()
  jax.config.update('jax_platforms', 'cpu')
  with tempfile.TemporaryDirectory() as folder:
    step = counted(*schedule(lowered(sys.argv[1]), folder))
  print(json.dumps(step), flush=True)
  os._exit(0)
