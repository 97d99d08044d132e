"""Opens the checkpoint of an objective's teacher."""

from ml_collections import ConfigDict

from vit_jax.checkpoints import opening

# Prefix of paths to the stages of a run; see `sweeps.stages`.
STAGES = 'stages/'


def teacher_of(config: ConfigDict) -> opening.Checkpoint | None:
  """Opens `config.teacher`; returns None if a stage trains it first.

  Also returns None for `eval_only`, which needs no teacher.

  Raises:
    ValueError: if the field is empty, or the checkpoint does not classify.

  Also raises the errors of `open_checkpoint`.
  """
  if config.eval_only:
    return None
  if not config.teacher:
    raise ValueError(
      'teacher is empty: name the checkpoint to learn from with '
      '--config.teacher=PATH, in any supported format.'
    )
  if config.stages and config.teacher.startswith(STAGES):
    return None
  teacher = opening.open_checkpoint(config.teacher)
  if 'logits' not in teacher.model.vectors:
    raise ValueError(
      f'teacher is {config.teacher}, which does not classify images. Give the '
      'checkpoint of a classifier.'
    )
  return teacher
