"""What a config will take on a TPU, by its real compiler where there is one."""

import importlib.util
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import vit
from tests.conftest import ROOT
from tests.objectives import test_every
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.models import flops
from vit_jax.tools.plan import costs, hlo
from vit_jax.training import hardware, sharding

pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')


def with_compiler(test):
  found = importlib.util.find_spec('libtpu')
  missing = not (found or os.environ.get('TPU_LIBRARY_PATH'))
  skip = pytest.mark.skipif(missing, reason='needs the extra `plan`')
  return pytest.mark.slow(skip(test))


def devices(count, kind, per_chip, slices=1):
  return [
    types.SimpleNamespace(
      device_kind=kind, coords=(i // per_chip, 0, 0), slice_index=index
    )
    for index in range(slices)
    for i in range(count)
  ]


def lines(text):
  return {line[:9].strip(): line[10:] for line in text.splitlines()}


def experiment_of(config, classes=10, examples=1_000_000):
  facts = costs.facts_given(config, classes, examples)
  return Experiment(CheckedConfig(config), facts)


# A program of a thousand cycles, where those do not matter.
SHORT = hlo.CompiledProgram((hlo.Compute(1000, 'a'),))
SHORT_STEP = costs.Step(SHORT, 1, 1, 1, 1.0)


def test_report_of_l16(monkeypatch):
  """One step of 100 ms on 32 cores of TPU v3, 8 images in each."""
  config = vit.get_config('l16,batch_size=256')
  program = hlo.CompiledProgram(
    (
      hlo.Start('g', hlo.Collective('all-gather', 32, 2**30)),
      hlo.Compute(90_000_000, 'a'),
      hlo.Done('g'),
      *2
      * (
        hlo.Start('r', hlo.Collective('all-reduce', 32, 2**30)),
        hlo.Done('r'),
        hlo.Compute(2_000_000, 'b'),
      ),
    )
  )
  step = costs.Step(program, 2 * 2**30, 2**30, 5 * 2**30, 61.7)
  where = devices(32, 'TPU v3', per_chip=2), hardware.TPU_CHIPS['v3']
  experiment = experiment_of(config, 21_843)
  cost = costs.Cost(experiment, program, *where)
  text = costs.report(experiment, step, cost)
  found = lines(text)
  assert found['compiled'] == 'in 62 s'
  assert found['memory'] == (
    '5.00 GiB of 16.00 GiB at peak: parameters 2.00 GiB, optimizer '
    '1.00 GiB, the rest 2.00 GiB'
  )
  # 8 images in 0.1 s; 369.5 GFLOPs each with the head, of 61.5 TFLOP/s.
  assert found['computing'].startswith('100.0 ms, MFU 48.')
  assert found['computing'].endswith(
    '80.0 images/s a core, 80.0 a device, 160.0 a chip'
  )
  # Devices lie in a line of 16 chips, whose ends have one link of 82 GB/s. The
  # gather is hidden by 90 of 94 Mcycles; 2 x 2 x 31/32 GiB are not: 50.7 ms.
  assert found['step'] == (
    '150.7 ms if communication overlaps: 53.1 images/s a core, MFU 31.9%'
  )
  # (2 x 2 + 1) x 31/32 GiB from each of two cores.
  assert (
    '\n          226.9 ms if communication does not overlap: 35.3 images/s a '
    'core' in text
  )
  assert found['sent'] == '4.84 GiB'
  assert '2 x all-reduce over 32: 3.88 GiB' in text
  assert '1 x all-gather over 32: 0.97 GiB' in text
  assert 'network' not in found
  # 14 epochs: 54,688 steps of 0.1 s on 32 cores. Table 6: 783 exaFLOPs are 7
  # epochs of 303M images, these are 14M.
  assert found['schedule'].startswith('54,688 steps of 256: 5.17')
  assert 783 * 14 / (7 * 303) == pytest.approx(5.17, abs=0.01)
  assert found['schedule'].endswith(
    '3.053 to 4.595 core-days, 2.3 to 3.4 wall-clock hours'
  )
  # Every second batch has a quarter of the pixels: L/16 at 112 has 30.8 GFLOPs
  # of 123.1.
  sizes = [(224, 224), (112, 112)]
  kind = type(experiment.objective)
  monkeypatch.setattr(kind, 'batch_sizes', lambda objective: sizes)
  experiment = experiment_of(config, 21_843)
  cost = costs.Cost(experiment, program, *where)
  two_sizes = costs.report(experiment, step, cost)
  exaflops = re.search(r'([\d.]+) exaFLOPs', two_sizes)
  assert float(exaflops[1]) == pytest.approx(5.17 * 0.625, rel=0.005)
  days = re.search('([0-9.]+) to ([0-9.]+) core-days', two_sizes)
  assert [float(x) for x in days.groups()] == pytest.approx(
    [3.053 * 0.625, 4.595 * 0.625], rel=0.005
  )
  # 24 hours of a day on 32 cores.
  hours = re.search('([0-9.]+) to ([0-9.]+) wall-clock hours', two_sizes)
  assert [float(x) for x in hours.groups()] == pytest.approx(
    [3.053 * 0.625 * 0.75, 4.595 * 0.625 * 0.75], abs=0.06
  )
  assert two_sizes.endswith('clock hours, averaged over image sizes by FLOPs')


def test_report_of_several_slices():
  """Each of 2 x 8 chips of v5e sends its part over the data-centre network."""
  config = vit.get_config('l16,batch_size=256')
  part = hlo.Collective('all-reduce', 2, 2**20, between_slices=True)
  program = hlo.CompiledProgram(
    (hlo.Compute(15_000_000, 'a'), *2 * (hlo.Start('h', part), hlo.Done('h')))
  )
  step = costs.Step(program, 2**30, 2**30, 4 * 2**30, 1.0)
  where = devices(8, 'TPU v5 lite', 1, slices=2), hardware.TPU_CHIPS['v5e']
  experiment = experiment_of(config)
  cost = costs.Cost(experiment, program, *where)
  assert (cost.chips, cost.cores, cost.devices) == (16, 16, 16)
  assert cost.sent_bytes == 0 and cost.network_bytes == 2 * 2**20
  # Two adapters of 100 Gbit/s for eight chips: 3.125 GB/s each.
  assert cost.network_s == 2 * 2**20 / 3.125e9
  for found_s in (cost.most_s, cost.least_s):
    assert found_s == pytest.approx(0.01 + cost.network_s)
  text = costs.report(experiment, step, cost)
  assert '2.0 MiB to other slices by each device, 0.7 ms' in text
  assert '2 x all-reduce over 2 slices: 0.00 GiB' in text


def test_slices_without_a_known_network_are_refused():
  with pytest.raises(
    ValueError, match='--slices is 2.*of v3.*known for v5e, v5p'
  ):
    costs.devices_of('v3:4x4', 2)


def counts(*args):
  facts = costs.facts_given(*args)
  assert not facts.several_labels
  return len(facts.class_names), facts.examples


@pytest.mark.slow
def test_known_and_given_sizes_of_data():
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
  assert (
    'it needs 20.49 GiB, but a device has 15.48 GiB, 5.01 too few' in reason
  )
  assert 'accum_steps' in reason
  assert costs._reason('RESOURCE_EXHAUSTED: x\ny') == 'RESOURCE_EXHAUSTED: x'


def test_profile_is_of_the_longest():
  cycles = {'a': 1, 'block_0/b': 2, 'c': 3, 'block_11/b': 4}
  events = tuple(hlo.Compute(n, name) for name, n in cycles.items())
  assert costs.profile(hlo.CompiledProgram(events), 2) == [
    ' 60.0%  block_*/b',
    ' 30.0%  c',
  ]


def run(*args):
  return subprocess.run(
    [sys.executable, '-m', 'vit_jax.plan', *args],
    cwd=ROOT,
    # The flags of the tests are not all known to that compiler.
    env={k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'},
    capture_output=True,
    text=True,
  )


SMALL = ('--config=configs/vit.py:ti16', '--config.model.scan=True')


@with_compiler
def test_the_command():
  """On TPU7x, sparse cores send what other TPUs' main cores send."""
  done = run(
    *SMALL,
    '--topology=tpu7x:2x2x1',
    '--config.batch_size=64',
    '--config.mesh.fsdp=1',
    '--slowest=3',
  )
  assert done.returncode == 0, done.stderr
  found = lines(done.stdout)
  assert found['topology'] == (
    'tpu7x:2x2x1: 8 x TPU7x, mesh data=8, fsdp=1, tensor=1; accum_steps 1'
  )
  # 9.7M parameters of 4 bytes, and twice that for Adam.
  assert 'parameters 0.04 GiB, optimizer 0.07 GiB' in found['memory']
  assert 'all-reduce over 8' in done.stdout
  assert 'dot_general' in done.stdout
  mfu = re.findall('MFU ([0-9.]+)%', done.stdout)
  assert 0 < float(mfu[2]) <= float(mfu[1]) <= float(mfu[0]) < 100


@with_compiler
@pytest.mark.parametrize(
  ('topology', 'count'),
  [('v2:2x2', 8), ('v4:2x2x1', 8), ('v5e:2x2', 4), ('v5p:2x2x1', 4)],
)
def test_the_compiler_knows_the_devices_of_a_topology(topology, count):
  described, _ = costs.devices_of(topology)
  mesh = sharding.make_mesh({'data': -1, 'fsdp': 1, 'tensor': 1}, described)
  assert mesh.size == len(described) == count
  assert hardware.chip_flops(described[0]) > 0


@with_compiler
def test_neither_heads_nor_their_kernels_are_copied():
  """Heads of 80 are no even part of a TPU's 128 lanes."""
  done = run(
    '--config=configs/vit.py:h14',
    '--topology=v3:4x4',
    '--num_classes=1000',
    '--config.model.depth=1',
    '--config.batch_size=256',
    '--slowest=100',
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
def test_axes_of_the_mesh_may_split_those_of_the_topology():
  """64 of the 16 x 16 chips of a v6e pod, as the width of L/16 asks for."""
  described, _ = costs.devices_of('v6e:16x16')
  mesh = sharding.make_mesh(
    {'data': -1, 'fsdp': -1, 'tensor': 1}, described, 1024
  )
  assert mesh.devices.shape == (1, 4, 64, 1)


@pytest.mark.edge
@with_compiler
def test_the_command_with_too_large_a_batch():
  done = run(
    *SMALL,
    '--topology=v3:2x2',
    '--config.batch_size=16384',
    '--config.optimizer.warmup=5%',
  )
  assert done.returncode == 1
  assert done.stderr.startswith('error: The step does not fit: it needs ')


@pytest.mark.edge
@with_compiler
def test_the_command_with_an_odd_topology():
  done = run(*SMALL, '--topology=v3:5x5')
  assert done.returncode == 2
  assert done.stderr.startswith('error: --topology=v3:5x5: ')


@pytest.mark.parametrize(
  ('kind', 'generation', 'per_chip', 'cores'),
  [
    ('TPU v5p', 'v5p', 1, 16),
    # As a topology has it, and as training does.
    ('TPU v4', 'v4', 2, 8),
  ],
)
def test_cores_and_memory_of_a_topology(kind, generation, per_chip, cores):
  chip = hardware.TPU_CHIPS[generation]
  experiment = experiment_of(vit.get_config('ti16,batch_size=64'))
  cost = costs.Cost(experiment, SHORT, devices(8, kind, per_chip), chip)
  chips = 8 // per_chip
  assert (cost.cores, cost.chips, cost.devices) == (cores, chips, 8)
  assert cost.hbm_bytes == chip.hbm_gib * costs.GIB / per_chip
  assert cost.peak_flops == chips * hardware.chip_flops(
    types.SimpleNamespace(device_kind=kind)
  )
  assert cost.computing_s == cost.least_s == cost.most_s == 1000 / chip.clock_hz
  assert cost.rate(2.0) == 64 / 2 / cores
  found = lines(costs.report(experiment, SHORT_STEP, cost))
  rates = re.search(r'([\d,.]+) a device, ([\d,.]+) a chip', found['computing'])
  assert [float(x.replace(',', '')) for x in rates.groups()] == pytest.approx(
    [64 / cost.computing_s / n for n in (8, chips)], rel=1e-3
  )
  # Bounds that are the same stand once.
  assert found['schedule'].endswith(' core-days, 0.0 wall-clock hours')


def test_operations_without_an_estimate_are_named():
  chip = hardware.TPU_CHIPS['v5p']
  experiment = experiment_of(vit.get_config('ti16,batch_size=64'))
  events = (*SHORT.events, *2 * [hlo.Compute(0, 'embedding', is_known=False)])
  step = SHORT_STEP._replace(program=hlo.CompiledProgram(events))
  cost = costs.Cost(experiment, step.program, devices(8, 'TPU v5p', 1), chip)
  found = lines(costs.report(experiment, step, cost))
  assert found['unknown'].endswith('count as 0: 2 x embedding')
  assert 'unknown' not in lines(costs.report(experiment, SHORT_STEP, cost))


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


def test_what_is_sent_is_summed_by_kind_and_devices():
  def start(kind, devices, gib):
    return hlo.Start('x', hlo.Collective(kind, devices, gib * costs.GIB))

  program = hlo.CompiledProgram(
    (
      start('all-reduce', 4, 2),
      *3 * (start('all-reduce', 4, 4), start('all-gather', 16, 1)),
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
  experiment = experiment_of(vit.get_config('ti16,batch_size=64'))
  reduction = hlo.Collective('all-reduce', 32, 2**30)
  program = hlo.CompiledProgram((hlo.Start('r', reduction), hlo.Compute(1, '')))

  def sent_s(places):
    cores = [
      types.SimpleNamespace(device_kind='TPU v2', coords=(x, 5, 0))
      for x in places
      for _ in range(2)
    ]
    cost = costs.Cost(experiment, program, cores, hardware.TPU_CHIPS['v2'])
    return cost.most_s - cost.computing_s

  both_cores = 2 * 2 * 31 / 32 * 2**30
  assert sent_s(range(3, 19)) == pytest.approx(both_cores / (2 * 62e9))
  assert sent_s(range(3, 18)) == pytest.approx(both_cores / 62e9)
  assert sent_s([3]) == 0  # within a chip


def test_all_images_that_the_model_sees_of_an_example_count():
  """Of exemplars two copies each, with and without labels."""
  experiment = experiment_of(test_every.config_of('exemplar'), examples=1437)
  cost = costs.Cost(
    experiment, SHORT, devices(8, 'TPU v3', 2), hardware.TPU_CHIPS['v3']
  )
  forward = flops.forward_flops(experiment.objective.model, (16, 16))
  assert cost.flops == cost.images * 3 * 4 * forward
  total = re.search(
    r'20 steps of 16: (\S+) exa', costs.report(experiment, SHORT_STEP, cost)
  )
  assert float(total[1]) == pytest.approx(20 * 16 * 12 * forward / 1e18, 1e-3)


def test_what_counts_is_the_size_of_training_images():
  config = test_every.config_of('classification')
  config.data.train_size = '8'
  experiment = experiment_of(config, examples=1437)
  cost = costs.Cost(
    experiment, SHORT, devices(8, 'TPU v3', 2), hardware.TPU_CHIPS['v3']
  )
  forward = flops.forward_flops(experiment.objective.model, (8, 8))
  assert cost.flops == cost.images * 3 * forward
  assert 'averaged' not in costs.report(experiment, SHORT_STEP, cost)


def test_data_at_hand_may_have_several_classes_an_image(tmp_path):
  (tmp_path / 'a.csv').write_text(
    'file,labels\n' + ''.join(f'{i}.png,a;b\n' for i in range(5))
  )
  config = vit.get_config('ti16')
  config.data.update(name=f'{tmp_path}/a.csv', split='all')
  facts = costs.facts_given(config, 0, 0)
  assert facts.several_labels
