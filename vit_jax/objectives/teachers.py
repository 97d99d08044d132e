"""Checkpoints that are learned from."""

import functools

from ml_collections import ConfigDict

from vit_jax.checkpoints import classes, opening

# What paths in the folder of a run's stages begin with; see `sweeps.stages`.
STAGES = 'stages/'


def named(config: ConfigDict) -> opening.Checkpoint | None:
  """Returns `config.teacher`, None where a stage of the run has to train it.

  Raises:
    ValueError: if it is empty, or no checkpoint.
    FileNotFoundError: if nothing is there.
  """
  if not config.teacher:
    raise ValueError(
      'teacher is empty: name the checkpoint that is to be learned from, '
      '--config.teacher=PATH; any that opens will do.'
    )
  if config.stages and config.teacher.startswith(STAGES):
    return None
  return _opened(config.teacher)


@functools.lru_cache(maxsize=1)
def _opened(path: str) -> opening.Checkpoint:
  """Opens a teacher once, where a config is checked before it is used."""
  return opening.open_checkpoint(path)


def check_classes(
  teacher: opening.Checkpoint, class_names: tuple[str, ...], class_order: str
) -> None:
  """Refuses a teacher of other classes than the data have.

  The same classes may have other names, such as WordNet's ids: where no name is
  in both, they are compared by position.

  Raises:
    ValueError: naming them.
  """
  theirs = teacher.model.num_classes
  if theirs != len(class_names):
    raise ValueError(
      f'The teacher {teacher.path} knows {theirs} classes and the data '
      f'have {len(class_names)}: take one that was trained on them.'
    )
  if teacher.class_names == class_names:
    return
  if set(teacher.class_names) & set(class_names):
    raise ValueError(
      f'The teacher {teacher.path} knows other classes, or in another '
      f'order, than the data have: {", ".join(teacher.class_names[:3])}, ... '
      f'and {", ".join(class_names[:3])}, ...'
    )
  classes.match_by_position(teacher, class_names, class_order)
