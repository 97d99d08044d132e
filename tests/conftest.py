"""Runs every test on eight CPU devices, whatever the machine has.

XLA reads these variables once, when JAX first looks for devices. pytest and
every xdist worker import this file before any test module, and commands that
a test starts inherit the variables.
"""

import atexit
import collections
import gc
import logging
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
from importlib.metadata import version

import pytest
from absl import flags
from absl.testing import flagsaver

ROOT = pathlib.Path(__file__).parent.parent
# Put before a command, it takes from root what no other user may do; None where
# that is impossible.
WITHOUT_ROOTS_RIGHTS: list[str] | None = []
if os.geteuid() == 0:
  WITHOUT_ROOTS_RIGHTS = (
    ['setpriv', '--bounding-set=-dac_override,-dac_read_search']
    if shutil.which('setpriv')
    else None
  )
PEERS = 'needs the extra `peers`, see requirements.txt'

# Small models are compiled often and run briefly: less optimisation takes a
# third of the time. The numbers stay within the tests' tolerances.
COMPILE_QUICKLY = (
  '--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1'
)
# Later versions know no such flag, and a flag that XLA does not know ends it.
if tuple(map(int, version('jaxlib').split('.')[:2])) < (0, 12):
  COMPILE_QUICKLY += ' --xla_cpu_use_fusion_emitters=false'

# What XLA was told from outside, for commands with flags of their own.
XLA_FLAGS_GIVEN = os.environ.setdefault(
  'XLA_FLAGS_GIVEN', os.environ.get('XLA_FLAGS', '')
)

# Tracing makes objects by the million, nearly all of which stay: looking for
# garbage among them every 700 took 7 % of the time.
gc.set_threshold(50_000, 20, 100)

os.environ['JAX_PLATFORMS'] = 'cpu'
# What one test, worker or process has compiled, the others need not.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  compiled = tempfile.mkdtemp()
  atexit.register(shutil.rmtree, compiled, ignore_errors=True)
  os.environ['JAX_COMPILATION_CACHE_DIR'] = compiled
# A program that another process is still writing, or was killed while it wrote,
# is compiled once more; JAX says so, in the midst of what a test reads.
os.environ.setdefault(
  'PYTHONWARNINGS', 'ignore:Error reading persistent compilation cache entry'
)
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'
# Where in the code each operation comes from takes a tenth of the time.
os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '0'
# An array whose axes were forgotten is an error. (Of dtypes the same cannot be
# asked: Flax's own LayerNorm multiplies bfloat16 by float32.)
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
# Each device waits in a thread for the others, and where threads are few and
# the machine is busy, some wait for ever, until XLA ends the process.
os.environ.setdefault('PJRT_NPROC', '16')
os.environ['XLA_FLAGS'] = ' '.join(
  (
    XLA_FLAGS_GIVEN,
    '--xla_force_host_platform_device_count=8',
    '--xla_cpu_collective_call_terminate_timeout_seconds=600',
    COMPILE_QUICKLY,
  )
).strip()


def pytest_itemcollected(item):
  """Marks the cases that `fast` does not name as slow."""
  fast = item.get_closest_marker('fast')
  if fast and item.callspec.id not in fast.args:
    item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter):
  """Counts skipped tests by reason, such as a package that is missing.

  A file that is skipped as a whole counts once.
  """
  skipped = terminalreporter.stats.get('skipped', ())
  reasons = collections.Counter(report.longrepr[2] for report in skipped)
  for reason, count in reasons.most_common():
    reason = reason.removeprefix('Skipped: ')
    terminalreporter.write_line(f'{count} skipped: {reason}')


@pytest.fixture(autouse=True, scope='module')
def _one_context():
  """Lowers all programs of a thread and a file in one context of MLIR's.

  JAX makes one for every program and loads all dialects into it, a tenth of the
  time. A context keeps what its programs hold, such as constants.
  """
  from jax._src.interpreters import mlir

  make, of_thread = mlir.make_ir_context, threading.local()

  def context():
    if not hasattr(of_thread, 'context'):
      of_thread.context = make()
    return of_thread.context

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(mlir, 'make_ir_context', context)
    yield


@pytest.fixture(scope='module')
def garbage_of_this_file():
  """Or `gc.collect` takes seconds, for what the files before have left."""
  gc.freeze()
  yield
  gc.unfreeze()


@pytest.fixture(autouse=True)
def _messages_of_this_test_alone():
  """Undoes what commands did to logging, in module fixtures before it too.

  Or a command of one test writes to the closed stderr of another.
  """
  _undo_logging()
  yield
  _undo_logging()


def _undo_logging():
  ours, root = logging.getLogger('vit_jax'), logging.getLogger()
  ours.setLevel(logging.NOTSET)
  ours.propagate, ours.handlers = True, []
  for handler in root.handlers[:]:
    if type(handler) is logging.StreamHandler:  # none of pytest's
      root.removeHandler(handler)


@pytest.fixture
def figures(monkeypatch):
  """A list that every figure comes to of which a PNG is made."""
  from vit_jax.training import plots

  drawn, png = [], plots.png

  def keep(figure, *args, **kwargs):
    drawn.append(figure)
    return png(figure, *args, **kwargs)

  monkeypatch.setattr(plots, 'png', keep)
  return drawn


def run_here(*args):
  """Runs the command in this process and returns its exit status.

  Starting Python for every refusal would take minutes.
  """
  from vit_jax import main

  argv = ['main', *args]
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(ROOT)
    patch.setattr(sys, 'argv', argv)
    with flagsaver.flagsaver():  # forgets the flags of the config's fields
      try:
        main.main(main.parse_flags(argv))
        status = 0
      except SystemExit as e:
        status = e.code
      flags.FLAGS.unparse_flags()
  return status


@pytest.fixture
def command(monkeypatch, capfd):
  """Gives `run_here`, which also returns the printed text."""
  monkeypatch.chdir(ROOT)

  def run(*args):
    capfd.readouterr()
    return run_here(*args), *capfd.readouterr()

  return run


@pytest.fixture(scope='session')
def torch():
  """With a torchvision that imports, which timm and transformers need."""
  torch = pytest.importorskip('torch', reason=PEERS)
  torch.set_num_threads(1)
  try:
    pytest.importorskip('torchvision', reason=PEERS)
  except RuntimeError:
    # Beside a CPU build of torch, PyPI's torchvision cannot load its operators,
    # and then stumbles over the names of these two.
    for name in ('nms', 'qnms'):
      torch.library.define(
        f'torchvision::{name}', '(Tensor a, Tensor b, float c) -> Tensor'
      )
  return torch


@pytest.fixture(scope='session')
def timm(torch):
  del torch
  return pytest.importorskip('timm', reason=PEERS)


@pytest.fixture(scope='session')
def transformers(torch):
  del torch
  transformers = pytest.importorskip('transformers', reason=PEERS)
  transformers.utils.logging.disable_progress_bar()
  return transformers


@pytest.fixture
def preempt_at(monkeypatch):
  """Gives a function that has SIGTERM come in a step; None for in none."""
  from vit_jax.training import run

  add_metrics = run.Run.add_metrics

  def at(step):
    def told(self, number, metrics):
      if number == step:
        signal.raise_signal(signal.SIGTERM)
      add_metrics(self, number, metrics)

    monkeypatch.setattr(run.Run, 'add_metrics', told)

  return at
