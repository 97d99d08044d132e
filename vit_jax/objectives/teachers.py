"""The checkpoint that a student learns from."""

import functools

from ml_collections import ConfigDict

from vit_jax.checkpoints import opening

# Prefix of paths in the folder of a run's stages; see `sweeps.stages`.
STAGES = 'stages/'


def named(config: ConfigDict) -> opening.Checkpoint | None:
  """Returns `config.teacher`, None where a stage of the run has to train it.

  Raises:
    ValueError: if it is empty, or no checkpoint.
    FileNotFoundError: if nothing is there.
  """
  if not config.teacher:
    raise ValueError(
      'teacher is empty: name the checkpoint to learn from, '
      '--config.teacher=PATH; any format that opens will do.'
    )
  if config.stages and config.teacher.startswith(STAGES):
    return None
  return _opened(config.teacher)


@functools.lru_cache(maxsize=1)
def _opened(path: str) -> opening.Checkpoint:
  """Opens a teacher once, where a config is checked before it is used."""
  return opening.open_checkpoint(path)
