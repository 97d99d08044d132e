"""Train a run in stages, such as a teacher before its student.

A stage trains the config with some fields changed, in WORKDIR/stages/NAME.
After the stages, the config itself is trained in WORKDIR. Each stage is a run
like any other run, so the same command resumes the stage that was stopped.
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
  """Trains or resumes all stages of a config and then the config itself.

  `train.train` documents the arguments and errors.
  """
  if config.stages and config.extend:
    raise ValueError(
      'extend continues a single run, and this config has stages: '
      f'{", ".join(name for name, _ in config.stages)}. Remove extend or '
      'stages.'
    )
  if config.stages:
    check(config)  # before hours of training its stages
  with preemption_notice(between_runs=True) as preempted:
    for done, (stage, place) in enumerate(runs(config, workdir)):
      if done and jax.process_count() == 1 and preempted():
        raise Preempted('Preempted: every stage so far is saved.')
      if config.stages and jax.process_index() == 0:
        print(f'stage {done + 1} of {len(config.stages) + 1}: {place}')
      train_one(stage, place, start_over)


def check(config: ConfigDict) -> CheckedConfig:
  """Checks all stages without opening data; returns the run's checked config.

  Raises:
    ValueError: if a stage or the run itself cannot work.
    OSError: if a file, such as the teacher, is missing. `init` is not opened.
    ImportError: if a package is missing.
  """
  for name, fields in config.stages:
    # The copy keeps `stages`, so that checks recognise a teacher that an
    # earlier stage will train, and do not open it.
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
  """Returns the config and the workdir of every stage; the run itself is last.

  A stage that sets no seed gets one derived from the seed of the config.

  Raises:
    ValueError: if a field or a stage is unknown, or a value has the wrong type.
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
  """Returns the wall seconds of a run and its stages so far."""
  total_s = 0.0
  for _, place in runs(config, workdir):
    folder = absolute(place) / saving.FOLDER
    for step in reversed(saving.steps(folder)):
      # `train` reports a damaged checkpoint, and resumes from an older one.
      with contextlib.suppress(Exception):
        total_s += saving.read_meta(folder / str(step))['elapsed_s']
        break
  return total_s


def _refuse_unknown(config: ConfigDict) -> None:
  """Raises ValueError if a field names an unknown or later stage."""
  before: list[str] = []
  for name, fields in (*config.stages, ('', config_lib.flatten(config))):
    for field, value in fields.items():
      if not isinstance(value, str) or not value.startswith(STAGES):
        continue
      # Paths of .npz files, such as a teacher's labels, are not checked.
      if (
        not value.endswith('.npz') and value.removeprefix(STAGES) not in before
      ):
        raise ValueError(
          f'{field} is {value!r}. It must name an earlier stage. Earlier '
          f'stages: {", ".join(before) or "none"}.'
        )
    before.append(name)


def _alone(config: ConfigDict, workdir: str, fields: dict) -> ConfigDict:
  """Returns a config without stages, with `fields` and full paths to stages."""
  stage = config.copy_and_resolve_references()
  stage.stages = ()
  axes.set_fields(stage, fields)
  for field, value in config_lib.flatten(stage).items():
    if isinstance(value, str) and value.startswith(STAGES):
      place = str(absolute(workdir) / value)
      stage.update_from_flattened_dict({field: place})
  return stage
