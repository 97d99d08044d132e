"""A run that needs others first: a teacher, or weights to start from.

`config.stages` names them in their order. Each is the config with some fields
changed, in WORKDIR/stages/NAME, and the last one is the config itself, in
WORKDIR. Each is a run as any other, so that the same command goes on wherever
it was stopped.
"""

import contextlib

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.checkpoints import saving
from vit_jax.checkpoints.saving import absolute
from vit_jax.evaluators import build
from vit_jax.experiment import CheckedConfig
from vit_jax.objectives.teachers import STAGES
from vit_jax.sweeps import axes
from vit_jax.train import train as train_one
from vit_jax.training.preemption import Preempted, preemption_notice


def train(config: ConfigDict, workdir: str, start_over: bool = False) -> None:
  """Trains, or resumes, the stages of a config and then what it describes.

  Args are those of `train.train`, and so is what is raised.
  """
  if config.stages and config.extend:
    raise ValueError(
      'extend trains a single run on, and this one has stages that it was made '
      f'of: {", ".join(name for name, _ in config.stages)}.'
    )
  if config.stages:
    check(config)  # before what it needs is trained for hours
  with preemption_notice() as preempted:
    for done, (stage, place) in enumerate(runs(config, workdir)):
      if done and jax.process_count() == 1 and preempted():
        raise Preempted('Preempted: every stage so far is saved.')
      if config.stages and jax.process_index() == 0:
        print(f'stage {done + 1} of {len(config.stages) + 1}: {place}')
      train_one(stage, place, start_over)


def check(config: ConfigDict) -> CheckedConfig:
  """Refuses what is wrong with any stage of a config, whatever its data are.

  Returns:
    The config of the last stage, the run itself.

  Raises:
    ValueError: naming stage, field, value and way out.
  """
  for name, fields in config.stages:
    # With the stages, by which a teacher is known that is still to be trained.
    stage = config.copy_and_resolve_references()
    with axes.naming(f'stage {name}'):
      axes.set_fields(stage, fields)
      _checked(stage)
  return _checked(config)


def _checked(config: ConfigDict) -> CheckedConfig:
  build.check(config)
  build.shown(config)
  return CheckedConfig(config)


def runs(config: ConfigDict, workdir: str) -> list[tuple[ConfigDict, str]]:
  """Returns the config and the folder of every stage, the last the run's own.

  A stage has a seed of its own, which follows from that of the config.

  Raises:
    ValueError: for fields, or stages, that there are not.
  """
  if not config.stages:
    return [(config, workdir)]
  _refuse_unknown(config)
  seeds = np.random.SeedSequence(config.seed).generate_state(len(config.stages))
  found = []
  for (name, fields), seed in zip(config.stages, seeds, strict=True):
    stage = _alone(config, workdir, {'seed': int(seed)} | fields)
    found.append((stage, str(absolute(workdir) / STAGES / name)))
  return [*found, (_alone(config, workdir, {}), workdir)]


def elapsed_s(config: ConfigDict, workdir: str) -> float:
  """Returns the seconds that a run has taken so far, with its stages."""
  total_s = 0.0
  for _, place in runs(config, workdir):
    folder = absolute(place) / saving.FOLDER
    for step in reversed(saving.steps(folder)):
      # `train` reports damaged checkpoints, and goes on from an older one.
      with contextlib.suppress(Exception):
        total_s += saving.read_meta(folder / str(step))['elapsed_s']
        break
  return total_s


def _refuse_unknown(config: ConfigDict) -> None:
  """Refuses a field that names no stage before its own."""
  before: list[str] = []
  for name, fields in (*config.stages, ('', config_lib.flatten(config))):
    for field, value in fields.items():
      if not isinstance(value, str) or not value.startswith(STAGES):
        continue
      # Files beside the stages have any name.
      if (
        not value.endswith('.npz') and value.removeprefix(STAGES) not in before
      ):
        raise ValueError(
          f'{field} is {value!r}, and the stages before it are '
          f'{", ".join(before) or "none"}.'
        )
    before.append(name)


def _alone(config: ConfigDict, workdir: str, fields: dict) -> ConfigDict:
  """Returns a config without stages, that knows where those before it are."""
  stage = config.copy_and_resolve_references()
  stage.stages = ()
  axes.set_fields(stage, fields)
  for field, value in config_lib.flatten(stage).items():
    if isinstance(value, str) and value.startswith(STAGES):
      place = str(absolute(workdir) / value)
      stage.update_from_flattened_dict({field: place})
  return stage
