"""What a compiled training step costs, as text."""

import collections
import re
from collections.abc import Sequence

import jax

from vit_jax.experiment import Experiment
from vit_jax.plan import hlo
from vit_jax.plan.costs import GIB, Step, costs
from vit_jax.training import hardware


def report(
  experiment: Experiment,
  step: Step,
  devices: Sequence[jax.Device],
  chip: hardware.TpuChip,
) -> str:
  """Returns what there is to say of a step that fits."""
  cost = costs(experiment, step, devices, chip)
  total, batch_size = experiment.durations.total, experiment.config.batch_size
  exaflops = total * batch_size * cost['image_flops'] / 1e18
  rows = [
    ('compiled', f'in {step.compile_s:.0f} s'),
    (
      'memory',
      f'{_gib(step.peak_bytes)} of {_gib(cost["hbm_bytes"])} at the most: '
      f'parameters {_gib(step.params_bytes)}, optimizer '
      f'{_gib(step.optimizer_bytes)}, all else '
      + _gib(step.peak_bytes - step.params_bytes - step.optimizer_bytes),
    ),
    (
      'step',
      f'{1e3 * cost["step_s"]:,.1f} ms: {cost["images_per_s"]:,.1f} images/s a '
      f'core, MFU {cost["mfu"]:.1%}, collectives not counted',
    ),
    (
      'sent',
      f'{_gib(cost["sent_bytes"])}, at least {1e3 * cost["sent_s"]:,.1f} ms',
    ),
    *(('', line) for line in _collective_lines(step.program)),
    (
      'schedule',
      f'{total:,} steps of {batch_size:,}: {exaflops:,.4g} exaFLOPs, '
      f'{total * cost["step_s"] / 86_400 * cost["cores"]:,.4g} core-days, '
      f'{total * cost["step_s"] / 3_600:,.1f} hours here',
    ),
  ]
  return '\n'.join(f'{name:<9} {text}' for name, text in rows)


def _gib(count: float) -> str:
  return f'{count / GIB:.2f} GiB'


def _collective_lines(program: hlo.CompiledProgram) -> list[str]:
  """Returns what is sent, by kind and number of devices."""
  counts: collections.Counter[tuple[str, int]] = collections.Counter()
  sent: collections.Counter[tuple[str, int]] = collections.Counter()
  for found in program.collectives:
    key = found.kind, found.devices
    counts[key] += found.count
    sent[key] += round(found.sent_bytes())
  return [
    f'{counts[kind, n]} x {kind} over {n}: {_gib(sent[kind, n])}'
    for kind, n in sorted(counts)
  ]


def profile(program: hlo.CompiledProgram, count: int) -> list[str]:
  """Returns the operations that take longest, all layers' together."""
  cycles: collections.Counter[str] = collections.Counter()
  for name, number in program.cycles.items():
    cycles[re.sub(r'block_\d+', 'block_*', name)] += number
  return [
    f'{number / program.total_cycles:6.1%}  {name}'
    for name, number in cycles.most_common(count)
  ]
