"""What the claims would take at the size of the paper: commands and core-days.

`plan` compiles each command's training step for TPUs that are not there.
"""

import math
from collections.abc import Iterator, Sequence

import jax
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.experiment import Experiment
from vit_jax.paper.claims import CLAIMS, STUDIES, FullSize
from vit_jax.paper.reproducing import Configs
from vit_jax.plan import costs
from vit_jax.plan.search import TooLarge
from vit_jax.sweeps import axes


def commands(
  names: Sequence[str], topology: str, config_of: Configs
) -> Iterator[str]:
  """Yields lines: of each study the commands, with core-days of all runs.

  Where a sweep's models differ each is compiled, else the first.

  Args:
    names: of the claims.
    topology: as `plan` takes it.
    config_of: as of `Reproduction`.

  Raises:
    ValueError: for a topology that there is not.
    ImportError: without the TPU's compiler.
  """
  # Arrays of this process belong on its own CPU.
  jax.config.update('jax_platforms', 'cpu')
  wanted = {CLAIMS[name].study for name in names}
  total = [0.0, 0.0]
  for study in (name for name in STUDIES if name in wanted):
    members = [name for name in names if CLAIMS[name].study == study]
    yield f'# {", ".join(members)}'
    for i, full in enumerate(STUDIES[study].full_size):
      yield (
        f'python -m vit_jax.main {full.flags} '
        f'--workdir=gs://BUCKET/{study}_{i + 1}'
      )
      try:
        days = core_days(full, topology, config_of)
      except TooLarge as e:
        yield f'#   does not fit {topology}: {e}'
        continue
      except FileNotFoundError as e:  # a teacher's: it is part of the program
        yield f'#   not compiled, and not counted below: {e}'
        continue
      total = [a + b for a, b in zip(total, days, strict=True)]
      yield f'#   {costs.span(days, ".3g")} core-days on {topology}, by `plan`'
  yield f'# in all {costs.span(total, ".3g")} core-days'


def core_days(
  full: FullSize, topology: str, config_of: Configs
) -> tuple[float, float]:
  """Returns the bounds of `plan` for all runs of a command."""
  config = config_of_flags(full.flags, config_of)
  trials = [config]
  if config.sweep:
    trials = [c.config for c in axes.cells(config, 'unused')]
  trials = [stage for trial in trials for stage in _stages(trial)]
  # Of the runs that the flags sweep over the first stands for all.
  runs = math.prod(
    len(config_lib.split_commas(part.rpartition('=')[2]))
    for part in full.flags.split()
    if part.startswith('--sweep=')
  )
  devices, chip = costs.devices_of(topology)
  low = high = 0.0
  for trial in trials:
    facts = costs.facts_given(trial, full.classes, full.examples)
    experiment = Experiment(trial, facts, devices)
    cost = costs.costs(
      experiment, costs.compile_step(experiment), devices, chip
    )
    steps = experiment.durations.total * costs.share_of_largest(experiment)
    days = steps / 86_400 * cost.cores * runs
    low, high = low + days * cost.least_s, high + days * cost.most_s
  return low, high


def _stages(trial: ConfigDict) -> list[ConfigDict]:
  """Returns the configs of a run's stages and its own, no teacher opened."""
  found = []
  for _, fields in trial.stages:
    found.append(trial.copy_and_resolve_references())
    axes.set_fields(found[-1], fields)
  return [*found, trial]


def config_of_flags(text: str, config_of: Configs) -> ConfigDict:
  """Returns the config of a command's flags, but for its own sweeps."""
  flags = dict(
    part.removeprefix('--').split('=', 1)
    for part in text.split()
    if not part.startswith('--sweep')
  )
  name = flags.pop('config').removeprefix('configs/').replace('.py', '')
  config = config_of(name)
  fields = {key.removeprefix('config.'): x for key, x in flags.items()}
  axes.refuse_swept(config, fields)
  config_lib.override(config, fields)
  return config
