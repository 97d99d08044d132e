"""What a config will take on a TPU, by its real compiler where there is one."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from configs import vit
from tests.conftest import ROOT
from tests.objectives import test_every
from vit_jax.experiment import Experiment
from vit_jax.models import flops
from vit_jax.tools.plan import __main__ as plan
from vit_jax.tools.plan import costs, hlo
from vit_jax.tools.plan.search import TooLarge
from vit_jax.training import hardware, sharding

pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')


def with_compiler(test):
  found = importlib.util.find_spec('libtpu')
  missing = not (found or os.environ.get('TPU_LIBRARY_PATH'))
  skip = pytest.mark.skipif(missing, reason='needs the extra `plan`')
  return pytest.mark.slow(skip(test))


def devices(count, kind, per_chip):
  return [
    types.SimpleNamespace(device_kind=kind, coords=(i // per_chip, 0, 0))
    for i in range(count)
  ]


def on_cpus(described):
  """Returns what makes experiments, on CPUs for want of what is described."""

  def experiment(config, facts, given):
    assert given is described
    return Experiment(config, facts)

  return experiment


def lines(text):
  return {line[:9].strip(): line[10:] for line in text.splitlines()}


def test_report_of_l16():
  """One step of 100 ms on 32 cores of TPU v3, 8 images in each."""
  config = vit.get_config('l16,batch_size=256')
  program = hlo.CompiledProgram(
    (
      hlo.Start('g', hlo.Collective('all-gather', 32, 2**30)),
      hlo.Compute(90_000_000, 'a'),
      hlo.Done('g'),
      hlo.Repeat(
        2,
        (
          hlo.Start('r', hlo.Collective('all-reduce', 32, 2**30)),
          hlo.Done('r'),
          hlo.Compute(2_000_000, 'b'),
        ),
      ),
    )
  )
  step = costs.Step(program, 2 * 2**30, 2**30, 5 * 2**30, 61.7)
  facts = costs.facts_given(config, 21_843, 1_000_000)
  where = devices(32, 'TPU v3', per_chip=2), hardware.TPU_CHIPS['v3']
  experiment = Experiment(config, facts)
  cost = costs.costs(experiment, step, *where)
  text = costs.report(experiment, step, cost)
  found = lines(text)
  assert found['compiled'] == 'in 62 s'
  assert found['memory'] == (
    '5.00 GiB of 16.00 GiB at the most: parameters 2.00 GiB, optimizer '
    '1.00 GiB, all else 2.00 GiB'
  )
  # 8 images in 0.1 s; 369.5 GFLOPs each with the head, of 61.5 TFLOP/s.
  assert found['computing'].startswith('100.0 ms, MFU 48.')
  assert found['computing'].endswith(
    '80.0 images/s a core, 80.0 a device, 160.0 a chip'
  )
  # Devices lie in a line of 16 chips, whose ends have one link of 82 GB/s. The
  # gather is hidden by 90 of 94 Mcycles; 2 x 2 x 31/32 GiB are not: 50.7 ms.
  assert found['step'] == (
    '150.7 ms if what is sent hides where it can: 53.1 images/s a core, MFU '
    '31.9%'
  )
  # (2 x 2 + 1) x 31/32 GiB from each of two cores.
  assert (
    '\n          226.9 ms if nothing of it hides: 35.3 images/s a core' in text
  )
  assert found['sent'] == '4.84 GiB'
  assert '2 x all-reduce over 32: 3.88 GiB' in text
  assert '1 x all-gather over 32: 0.97 GiB' in text
  # 14 epochs: 54,688 steps of 0.1 s on 32 cores. Table 6: 783 exaFLOPs are 7
  # epochs of 303M images, these are 14M.
  assert found['schedule'].startswith('54,688 steps of 256: 5.17')
  assert 783 * 14 / (7 * 303) == pytest.approx(5.17, abs=0.01)
  assert found['schedule'].endswith(
    '3.053 to 4.595 core-days, 2.3 to 3.4 hours here'
  )
  # A step in two is of a quarter of the pixels; L/16 at 112 has 30.8 GFLOPs of
  # 123.1.
  config.data.image_size = '224,112'
  experiment = Experiment(config, facts)
  cost = costs.costs(experiment, step, *where)
  two_sizes = costs.report(experiment, step, cost)
  exaflops = re.search(r'([\d.]+) exaFLOPs', two_sizes)
  assert float(exaflops[1]) == pytest.approx(5.17 * 0.625, rel=0.005)
  days = re.search('([0-9.]+) to ([0-9.]+) core-days', two_sizes)
  assert [float(x) for x in days.groups()] == pytest.approx(
    [3.053 * 0.625, 4.595 * 0.625], rel=0.005
  )
  # 24 hours of a day on 32 cores.
  hours = re.search('([0-9.]+) to ([0-9.]+) hours here', two_sizes)
  assert [float(x) for x in hours.groups()] == pytest.approx(
    [3.053 * 0.625 * 0.75, 4.595 * 0.625 * 0.75], abs=0.06
  )
  assert two_sizes.endswith('hours here, of all sizes by their operations')


def counts(*args):
  facts = costs.facts_given(*args)
  assert not facts.several_labels
  return len(facts.class_names), facts.examples


def test_known_and_given_sizes_of_data(tmp_path):
  config = vit.get_config('b16')
  # 51,200 are held out.
  assert counts(config, 0, 0) == (21_843, 14_145_922)
  assert counts(config, 10, 0) == (10, 14_145_922)
  config.data.split = 'train'
  config.data.name = 'imagenet2012'
  assert counts(config, 0, 0) == (1_000, 1_281_167)
  config.data.name = 'digits'
  assert counts(config, 0, 0) == (10, 1_437)
  # Of a part, what it has: it has to be at hand.
  config.data.split = 'train[:100]'
  assert counts(config, 0, 0) == (10, 100)
  assert counts(config, 0, 70) == (10, 70)
  config.data.update(name='imagenet2012', dir=str(tmp_path))
  with pytest.raises(FileNotFoundError, match='imagenet2012'):
    counts(config, 0, 0)
  config.data.name = './not/there'
  assert counts(config, 7, 70) == (7, 70)
  with pytest.raises(FileNotFoundError, match='not/there'):
    counts(config, 7, 0)


def test_what_the_compiler_says_of_memory():
  message = (
    'RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, '
    'the total memory required for HLO temporaries (20.49G) exceeds available '
    'HBM (15.48G). HLO module: jit_train_step.'
  )
  reason = costs._reason(message)
  assert 'it takes 20.49 GiB of a core that has 15.48, 5.01 too much' in reason
  assert 'accum_steps' in reason
  assert costs._reason('RESOURCE_EXHAUSTED: x\ny') == 'RESOURCE_EXHAUSTED: x'


def test_profile_is_of_the_longest():
  cycles = {'a': 1, 'block_0/b': 2, 'c': 3, 'block_11/b': 4}
  events = tuple(hlo.Compute(n, name) for name, n in cycles.items())
  assert costs.profile(hlo.CompiledProgram(events), 2) == [
    ' 60.0%  block_*/b',
    ' 30.0%  c',
  ]


def test_topologies_that_are_none(monkeypatch):
  for name in ('v3x4', 'v3', 'v3:', 'v3:0x0', 'v3:2x', 'v3:2x-2'):
    with pytest.raises(
      ValueError, match=f'{name}: write a generation.* v2, v3, v4'
    ):
      costs.devices_of(name)
  monkeypatch.setattr(costs.importlib.util, 'find_spec', lambda name: None)
  monkeypatch.delenv('TPU_LIBRARY_PATH', raising=False)
  with pytest.raises(ImportError, match=r"pip install .*'\.\[plan\]'"):
    costs.devices_of('v3:2x2')


@pytest.mark.parametrize('name', ['num_classes', 'examples', 'profile'])
def test_less_than_none_is_refused(name):
  assert flags.FLAGS[name].parser.parse('0') == 0
  with pytest.raises(ValueError, match='non-negative'):
    flags.FLAGS[name].parser.parse('-1')


def run(*args):
  return subprocess.run(
    [sys.executable, '-m', 'vit_jax.plan', *args],
    cwd=ROOT,
    # The flags of the tests are not all known to that compiler.
    env={k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'},
    capture_output=True,
    text=True,
  )


TI16 = (
  'plan',
  f'--config={ROOT}/configs/vit.py:ti16',
  '--topology=v3:2x2',
  '--num_classes=9',
  '--examples=14000000',
)
SMALL = (
  '--config=configs/vit.py:ti16',
  '--config.model.scan=True',
  '--topology=v3:2x2',
)


@with_compiler
def test_the_command():
  done = run(
    *SMALL, '--config.batch_size=64', '--config.mesh.fsdp=1', '--profile=3'
  )
  assert done.returncode == 0, done.stderr
  found = lines(done.stdout)
  assert found['topology'] == (
    'v3:2x2: 8 x TPU v3, mesh data=8, fsdp=1, tensor=1; batch in 1 parts'
  )
  # 9.7M parameters of 4 bytes, and twice that for Adam.
  assert 'parameters 0.04 GiB, optimizer 0.07 GiB' in found['memory']
  assert 'all-reduce over 8' in done.stdout
  assert 'dot_general' in done.stdout


@with_compiler
def test_split_state_is_gathered_and_gradients_are_scattered():
  done = run(
    *SMALL[:1],
    '--topology=v3:4x4',
    '--config.model.depth=2',
    '--config.batch_size=256',
    '--config.mesh.fsdp=8',
  )
  assert done.returncode == 0, done.stderr
  found = {
    name: int(n)
    for n, name in re.findall(r'^ +(\d+) x ([^:]+):', done.stdout, re.M)
  }
  # Of both layers q, k, v, out and two of the MLP, of the representation layer,
  # the head, the patches and the positions.
  assert found['all-gather over 8'] == 16
  assert found['reduce-scatter over 8'] >= 12


@with_compiler
def test_neither_heads_nor_their_kernels_are_copied():
  """Heads of 80 are no even part of a TPU's 128 lanes."""
  done = run(
    '--config=configs/vit.py:h14',
    '--topology=v3:4x4',
    '--num_classes=1000',
    '--config.model.depth=2',
    '--config.batch_size=256',
    '--profile=100',
  )
  assert done.returncode == 0, done.stderr
  shares = [
    line.split(maxsplit=1)
    for line in done.stdout.splitlines()
    if re.match(' *[0-9.]+%', line)
  ]
  copied = [
    (share, name)
    for share, name in shares
    if re.search('MultiHead[^/]*/transpose$|^convert_element_type$', name)
  ]
  assert sum(float(share.rstrip('%')) for share, _ in copied) < 1.5, copied


@with_compiler
def test_the_search_finds_what_fits():
  """All of the batch at once does not, where everything is kept in a loop."""
  done = run(
    *SMALL[:1],
    '--topology=v3:2x2',
    '--search',
    '--config.batch_size=4096',
    '--config.model.depth=2',
    '--config.data.image_size=512',
  )
  assert done.returncode == 0, done.stderr
  assert 'fastest   --config.gather=step' in done.stdout
  found = lines(done.stdout)
  assert ' GiB of a core that has ' in done.stdout  # some did not fit
  assert float(found['memory'].split()[0]) < 16


@with_compiler
@pytest.mark.parametrize(
  ('topology', 'devices'),
  [
    ('v2:2x2', 8),
    ('v4:2x2x1', 8),
    ('v5e:2x2', 4),
    ('v6e:2x2', 4),
    ('tpu7x:2x2x1', 8),
  ],
)
def test_the_command_for_other_generations(topology, devices):
  done = run(
    *SMALL[:2],
    f'--topology={topology}',
    '--config.model.depth=2',
    '--config.batch_size=64',
  )
  assert done.returncode == 0, done.stderr
  found = lines(done.stdout)
  assert found['topology'].startswith(f'{topology}: {devices} x TPU')
  mfu = re.findall('MFU ([0-9.]+)%', done.stdout)
  assert 0 < float(mfu[2]) <= float(mfu[1]) <= float(mfu[0]) < 100


@with_compiler
def test_axes_of_the_mesh_may_split_those_of_the_topology():
  """64 of the 16 x 16 chips of a v6e pod, as the width of L/16 asks for."""
  described, _ = costs.devices_of('v6e:16x16')
  mesh = sharding.make_mesh(
    {'data': -1, 'fsdp': -1, 'tensor': 1}, described, 1024
  )
  assert mesh.devices.shape == (4, 64, 1)


@with_compiler
def test_the_command_with_too_large_a_batch():
  done = run(
    *SMALL, '--config.batch_size=16384', '--config.optimizer.warmup=5%'
  )
  assert done.returncode == 1
  assert done.stderr.startswith('error: The step does not fit: it takes ')


@with_compiler
def test_the_command_with_an_odd_topology():
  done = run(*SMALL[:2], '--topology=v3:5x5')
  assert done.returncode == 2
  assert done.stderr.startswith('error: --topology=v3:5x5: ')


def test_what_the_search_finds_is_planned(monkeypatch, capsys):
  """The compiler and its machine are stood in for; the rest is real."""
  described = devices(8, 'TPU v3', per_chip=2)
  step = costs.Step(
    hlo.CompiledProgram((hlo.Compute(94_000_000, 'a'),)), 1, 1, 1, 1.0
  )
  planned = []
  monkeypatch.setattr(
    plan, 'devices_of', lambda _: (described, hardware.TPU_CHIPS['v3'])
  )
  monkeypatch.setattr(plan, 'search', lambda *_: ({'accum_steps': 4}, step))
  monkeypatch.setattr(
    plan, 'report', lambda experiment, *_: planned.append(experiment) or ''
  )
  argv = [*TI16, '--profile=1', '--search']
  monkeypatch.setattr(sys, 'argv', argv)
  with flagsaver.flagsaver():
    plan.parse_flags(argv, required=('config', 'topology'))
    monkeypatch.setattr(plan, 'Experiment', on_cpus(described))
    plan.run([])
    assert planned[0].config.accum_steps == 4
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
      'plan      imagenet21k, 9 classes, 14,000,000 examples; batch 4,096'
    )
    assert 'fastest   --config.accum_steps=4' in said
    topology = r'topology  v3:2x2: 8 x cpu, mesh .*; batch in 4 parts'
    assert any(re.fullmatch(topology, line) for line in said)
    assert said[-1] == '100.0%  a'


def test_without_a_search_the_config_itself_is_planned(monkeypatch, capsys):
  """And what ends it has a message and a status."""
  described = devices(8, 'TPU v3', per_chip=2)
  step = costs.Step(
    hlo.CompiledProgram((hlo.Compute(94_000_000, 'a'),)), 1, 1, 1, 1.0
  )
  asked, compiled = [], []

  def devices_of(topology):
    asked.append(topology)
    return described, hardware.TPU_CHIPS['v3']

  def compile_step(experiment):
    compiled.append(experiment.config.model.width)
    return step

  def fail(ending):
    def failing(_):
      raise ending

    return failing

  monkeypatch.setattr(plan, 'devices_of', devices_of)
  monkeypatch.setattr(plan, 'compile_step', compile_step)
  monkeypatch.setattr(plan, 'Experiment', on_cpus(described))
  monkeypatch.setattr(sys, 'argv', [*TI16])
  with flagsaver.flagsaver():
    plan.parse_flags([*TI16], required=('config', 'topology'))
    plan.run([])
    said = capsys.readouterr().out.splitlines()
    assert (asked, compiled) == (['v3:2x2'], [192])
    assert [line.split()[0] for line in said[:3]] == [
      *('plan', 'topology', 'compiled')
    ]
    assert said[-1].startswith('schedule  ')
    for name, ending, status, message in (
      ('compile_step', TooLarge('9 GiB'), 1, 'The step does not fit: 9 GiB.'),
      ('devices_of', ValueError('--topology=a'), 2, '--topology=a'),
    ):
      monkeypatch.setattr(plan, name, fail(ending))
      with pytest.raises(SystemExit) as e:
        plan.run([])
      assert e.value.code == status
      assert capsys.readouterr().err == f'error: {message}\n'


@pytest.mark.parametrize(
  ('kind', 'generation', 'per_chip', 'cores'),
  [
    ('TPU v5p', 'v5p', 1, 16),
    # As a topology has it, and as training does.
    ('TPU v4', 'v4', 2, 8),
    ('TPU v4', 'v4', 1, 16),
    ('TPU v5 lite', 'v5e', 1, 8),
    ('TPU v3', 'v3', 2, 8),
  ],
)
def test_cores_and_memory_of_a_topology(kind, generation, per_chip, cores):
  chip = hardware.TPU_CHIPS[generation]
  config = vit.get_config('ti16,batch_size=64')
  experiment = Experiment(config, costs.facts_given(config, 9, 14_000_000))
  program = hlo.CompiledProgram((hlo.Compute(1000, 'a'),))
  step = costs.Step(program, 1, 1, 1, 1.0)
  cost = costs.costs(experiment, step, devices(8, kind, per_chip), chip)
  chips = 8 // per_chip
  assert (cost.cores, cost.chips, cost.devices) == (cores, chips, 8)
  assert cost.hbm_bytes == chip.hbm_gib * costs.GIB / per_chip
  assert cost.peak_flops == chips * hardware.chip_flops(
    types.SimpleNamespace(device_kind=kind)
  )
  assert cost.computing_s == cost.least_s == cost.most_s == 1000 / chip.clock_hz
  assert cost.rate(2.0) == 64 / 2 / cores
  found = lines(costs.report(experiment, step, cost))
  rates = re.search(r'([\d,.]+) a device, ([\d,.]+) a chip', found['computing'])
  assert [float(x.replace(',', '')) for x in rates.groups()] == pytest.approx(
    [64 / cost.computing_s / n for n in (8, chips)], rel=1e-3
  )
  # Bounds that are the same stand once.
  assert found['schedule'].endswith(' core-days, 0.0 hours here')


def test_bytes_are_those_of_one_device():
  mesh = sharding.make_mesh({'data': 1, 'fsdp': 8, 'tensor': 1})
  where = jax.sharding.NamedSharding
  split, whole = (
    where(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (['fsdp'], [])
  )
  tree = [
    jax.ShapeDtypeStruct((16, 3), np.float32, sharding=split),
    jax.ShapeDtypeStruct((16, 3), jnp.bfloat16, sharding=whole),
    jax.ShapeDtypeStruct((), np.int32, sharding=whole),
  ]
  assert costs._bytes(tree) == 2 * 3 * 4 + 16 * 3 * 2 + 4


def test_a_step_is_what_the_compiler_says_of_it(monkeypatch):
  mesh = sharding.make_mesh({'data': 8, 'fsdp': 1, 'tensor': 1})
  x = jax.ShapeDtypeStruct((5,), np.float32, sharding=sharding.replicated(mesh))
  state = {'params': {'a': x}, 'opt_state': [x, x], 'average': {'a': x}}
  lowered, now = object(), iter([3.0, 7.5])
  monkeypatch.setattr(
    costs.aot,
    'training',
    lambda _: types.SimpleNamespace(shapes=(state,), lower=lambda: lowered),
  )
  monkeypatch.setattr(costs.aot, 'peak_bytes', {'compiled': 99}.get)
  monkeypatch.setattr(
    costs, 'time', types.SimpleNamespace(monotonic=lambda: next(now))
  )
  monkeypatch.setattr(costs.hlo, 'read', {'text': 'a program'}.get)
  monkeypatch.setattr(costs, '_compiled', {lowered: ('compiled', 'text')}.get)
  assert costs.compile_step(None) == costs.Step('a program', 20, 60, 99, 4.5)

  def fail(message):
    def compiled(_):
      raise jax.errors.JaxRuntimeError(message)

    now = iter([0.0, 0.0])
    monkeypatch.setattr(
      costs, 'time', types.SimpleNamespace(monotonic=lambda: next(now))
    )
    monkeypatch.setattr(costs, '_compiled', compiled)

  fail('RESOURCE_EXHAUSTED: too much')
  with pytest.raises(TooLarge, match='RESOURCE_EXHAUSTED: too much'):
    costs.compile_step(None)
  fail('INTERNAL: a bug')
  with pytest.raises(jax.errors.JaxRuntimeError, match='a bug'):
    costs.compile_step(None)


def test_the_search_says_what_it_tries(monkeypatch, capsys):
  """A compiler that fits 16 images of a core, and is faster without loops."""
  chip, described = hardware.TPU_CHIPS['v3'], devices(8, 'TPU v3', per_chip=2)

  def compile_step(config):
    if 256 // 8 // config.accum_steps > 16:
      raise TooLarge('it takes 20.00 GiB of a core that has 16.00, 4.00 too')
    cycles = 94_000_000 * (2 if config.model.scan else 1)
    program = hlo.CompiledProgram((hlo.Compute(cycles, 'a'),))
    return costs.Step(program, 1, 1, 5 * costs.GIB, 61.7)

  def priced(config, step, given, of):
    assert (given, of) == (described, chip)
    seconds = step.program.total_cycles / chip.clock_hz
    # With loops all could hide, and in the middle between the bounds does not.
    sent = (0.4, 2.0) if config.model.scan else (1.0, 1.5)
    return costs.Cost(
      seconds, *(s * seconds for s in sent), 0, 256, 1e9, 1e13, 0, 4, 8, 8
    )

  def experiment(config, *given):
    assert given == ('facts', described)
    return config

  monkeypatch.setattr(plan, 'Experiment', experiment)
  monkeypatch.setattr(plan, 'compile_step', compile_step)
  monkeypatch.setattr(plan, 'costs', priced)
  config = vit.get_config('ti16,batch_size=256')
  fields, step = plan.search(config, 'facts', described, chip)
  assert step.program.total_cycles == 94_000_000
  assert (fields['accum_steps'], fields['model.scan']) == (2, False)
  head, *rows = capsys.readouterr().out.splitlines()
  assert head.split()[:7] == [
    *('images', 'parts', 'gather', 'tensor', 'layers', 'remat', 'GiB')
  ]
  assert rows[0].split()[:6] == ['32', '1', 'step', '1', 'looped', 'none']
  assert ' '.join(rows[0].split()[6:]) == ('20.00 GiB of a core that has 16.00')
  # 0.1 to 0.15 s, of 8 cores and 1e13 FLOP/s.
  assert rows[-1].split() == [
    *('16', '2', 'step', '1', 'unrolled', 'none', '5.00', '100.0-150.0'),
    *('256.0', '20.5%', '62', 's'),
  ]

  def fits_two_cores(config):
    if config.mesh.tensor < 2:
      raise TooLarge('no')
    return step

  monkeypatch.setattr(plan, 'compile_step', fits_two_cores)
  fields, _ = plan.search(config, 'facts', described, chip)
  assert (fields['gather'], fields['mesh.tensor']) == ('layer', 2)
  # 256 images on four times two cores.
  row = capsys.readouterr().out.splitlines()[-1]
  assert row.split()[:6] == ['64', '1', 'layer', '2', 'unrolled', 'none']
  monkeypatch.setattr(
    plan, 'compile_step', lambda _: (_ for _ in ()).throw(TooLarge('no'))
  )
  with pytest.raises(TooLarge, match='nothing that was tried does'):
    plan.search(config, 'facts', described, chip)


def test_a_topology_is_described_where_there_is_no_tpu(monkeypatch):
  """By a compiler that is told so, unless it is told something else."""
  for name in costs._LIBTPU:
    monkeypatch.setenv(name, '')  # for it to be as before afterwards
    monkeypatch.delenv(name)
  monkeypatch.setenv('TPU_MIN_LOG_LEVEL', '0')
  monkeypatch.setenv('TPU_LIBRARY_PATH', '/somewhere')
  installed = [None, 'libtpu']
  monkeypatch.setattr(
    costs.importlib.util, 'find_spec', lambda name: installed[0]
  )
  asked = []

  def describe(platform, topology_name):
    asked.append((platform, topology_name))
    if topology_name.endswith('9x9'):
      raise jax.errors.JaxRuntimeError('no such slice')
    return types.SimpleNamespace(devices=('a', 'b'))

  monkeypatch.setattr(costs.topologies, 'get_topology_desc', describe)
  found = costs.devices_of('v5e:2x2')
  assert found == (['a', 'b'], hardware.TPU_CHIPS['v5e'])
  assert asked == [('tpu', 'v5e:2x2')]
  told = {name: os.environ[name] for name in costs._LIBTPU}
  assert told == costs._LIBTPU | {'TPU_MIN_LOG_LEVEL': '0'}
  monkeypatch.delenv('TPU_LIBRARY_PATH')
  installed.pop(0)
  with pytest.raises(ValueError, match='^--topology=v5e:9x9: no such slice$'):
    costs.devices_of('v5e:9x9')


def test_the_text_is_the_compilers_own_where_it_writes_one():
  class Lowered:
    def __init__(self, text, *names):
      self._text, self._names = text, names

    def compile(self, options):
      assert options['xla_dump_hlo_as_text'] is True
      for name in self._names:
        path = pathlib.Path(options['xla_dump_to'], name)
        path.write_text(f'the text of {name}')
      return types.SimpleNamespace(as_text=lambda: self._text)

  compiled, text = costs._compiled(
    Lowered('JAX', 'm.before.txt', 'm.after_codegen.txt', 'm.zip')
  )
  assert text == 'the text of m.after_codegen.txt'
  assert compiled.as_text() == 'JAX'
  assert costs._compiled(Lowered('JAX', 'm.before.txt'))[1] == 'JAX'
  assert costs._compiled(Lowered(None))[1] == ''


def test_what_is_sent_is_summed_by_kind_and_devices():
  def start(kind, devices, gib):
    return hlo.Start('x', hlo.Collective(kind, devices, gib * costs.GIB))

  program = hlo.CompiledProgram(
    (
      start('all-reduce', 4, 2),
      hlo.Repeat(3, (start('all-reduce', 4, 4), start('all-gather', 16, 1))),
      start('all-gather', 2, 8),
    )
  )
  # 2 x 3/4 of 2 + 3 x 4, 15/16 of 3, half of 8.
  assert costs._collectives(program) == [
    '1 x all-gather over 2: 4.00 GiB',
    '3 x all-gather over 16: 2.81 GiB',
    '4 x all-reduce over 4: 21.00 GiB',
  ]


def test_links_are_those_of_a_slice_wherever_it_lies():
  """An axis of all 16 chips of v2 is a ring, whose chips have two links."""
  config = vit.get_config('ti16,batch_size=64')
  experiment = Experiment(config, costs.facts_given(config, 9, 14_000_000))
  reduction = hlo.Collective('all-reduce', 32, 2**30)
  program = hlo.CompiledProgram((hlo.Start('r', reduction), hlo.Compute(1, '')))
  step = costs.Step(program, 1, 1, 1, 1.0)

  def sent_s(places):
    cores = [
      types.SimpleNamespace(device_kind='TPU v2', coords=(x, 5, 0))
      for x in places
      for _ in range(2)
    ]
    cost = costs.costs(experiment, step, cores, hardware.TPU_CHIPS['v2'])
    return cost.most_s - cost.computing_s

  both_cores = 2 * 2 * 31 / 32 * 2**30
  assert sent_s(range(3, 19)) == pytest.approx(both_cores / (2 * 62e9))
  assert sent_s(range(3, 18)) == pytest.approx(both_cores / 62e9)
  assert sent_s([3]) == 0  # within a chip


def test_all_images_that_the_model_sees_of_an_example_count():
  """Of exemplars two copies each, with and without labels."""
  config = test_every.config_of('exemplar')
  experiment = Experiment(config, costs.facts_given(config, 10, 1437))
  program = hlo.CompiledProgram((hlo.Compute(1000, 'a'),))
  step = costs.Step(program, 1, 1, 1, 1.0)
  cost = costs.costs(
    experiment, step, devices(8, 'TPU v3', 2), hardware.TPU_CHIPS['v3']
  )
  forward = flops.forward_flops(experiment.objective.model, (16, 16))
  assert cost.image_flops == 3 * 4 * forward
  total = re.search(
    r'20 steps of 16: (\S+) exa', costs.report(experiment, step, cost)
  )
  assert float(total[1]) == pytest.approx(20 * 16 * 12 * forward / 1e18, 1e-3)


def test_data_at_hand_may_have_several_classes_an_image(tmp_path):
  (tmp_path / 'a.csv').write_text(
    'file,labels\n' + ''.join(f'{i}.png,a;b\n' for i in range(5))
  )
  config = vit.get_config('ti16')
  config.data.update(name=f'{tmp_path}/a.csv', split='all')
  facts = costs.facts_given(config, 0, 0)
  assert facts.several_labels
