"""Opens the checkpoint of an objective's teacher."""

import functools

from ml_collections import ConfigDict

from vit_jax.checkpoints import opening

# Prefix of paths to the stages of a run; see `sweeps.stages`.
STAGES = 'stages/'


def teacher_of(config: ConfigDict) -> opening.Checkpoint | None:
  """Opens `config.teacher`; returns None if a stage of the run trains it first.

  Raises:
    ValueError: if the field is empty or not the path of a checkpoint.
    FileNotFoundError: if the path does not exist.
  """
  if not config.teacher:
    raise ValueError(
      'teacher is empty: name the checkpoint to learn from with '
      '--config.teacher=PATH, in any supported format.'
    )
  if config.stages and config.teacher.startswith(STAGES):
    return None
  return _opened(config.teacher)


# Cached, because checks open a teacher before training does.
_opened = functools.lru_cache(maxsize=1)(opening.open_checkpoint)
