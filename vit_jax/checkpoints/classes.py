"""Matches the classes of a checkpoint with the classes of the data."""

import logging
import re

import numpy as np

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.data import sources

_log = logging.getLogger(__name__)


def same_classes(
  checkpoint: Checkpoint, names: tuple[str, ...], class_order: str = ''
) -> np.ndarray:
  """Returns the checkpoint's class index for each class of the data, int [N].

  Matches classes by position if the checkpoint has no names or the same names
  in the same order, or if the data have the 1,000 WordNet ids of ImageNet and
  the checkpoint 1,000 other names; otherwise by name. `class_order` is the
  field of `config.data`.

  Raises:
    ValueError: if the checkpoint has no head; if the checkpoint lacks a name to
      match, or has it twice; if the checkpoint has no names and the numbers of
      classes differ; or if the order of the classes is ambiguous.
  """
  checkpoint.check_head()
  C = checkpoint.model.num_classes
  if not checkpoint.class_names:
    if len(names) != C:
      raise ValueError(
        f'{checkpoint.path} has {C:,} classes without names, and the data have '
        f'{len(names):,}. Without names, both numbers must be equal.'
      )
    _match_by_position(checkpoint, names, class_order)
    return np.arange(C)
  if tuple(names) == tuple(checkpoint.class_names):
    return np.arange(C)
  shared = {*checkpoint.class_names} - {*checkpoint.unique_names}
  if twice := [name for name in names if name in shared]:
    raise ValueError(
      f'{checkpoint.path} has several classes named {twice[0]!r}. Give data '
      'with all classes of the checkpoint, in the same order.'
    )
  is_id = re.compile(r'n\d{8}').fullmatch
  if len(names) == C == 1000 and all(map(is_id, names)):
    # Sorted WordNet ids are in the order of ImageNet's classes.
    if not any(map(is_id, checkpoint.class_names)):
      _match_by_position(checkpoint, names, class_order)
      return np.arange(C)
  known = {name: i for i, name in enumerate(checkpoint.class_names)}
  if missing := [name for name in names if name not in known]:
    raise ValueError(
      f'{checkpoint.path} lacks {len(missing):,} of the {len(names):,} classes '
      f'of the data ({missing[0]!r}). The first class of the checkpoint is '
      f'{checkpoint.class_names[0]!r}. Fine-tune the checkpoint on the data, '
      'or give images of its classes.'
    )
  return np.array([known[name] for name in names])


def check_same(
  checkpoint: Checkpoint, names: tuple[str, ...], class_order: str
) -> None:
  """Checks that a checkpoint has the classes of the data.

  Two names at one position may differ, for example a WordNet id and a word, if
  neither occurs elsewhere in the other list. If the checkpoint has no names,
  only the number of classes must match. Raises ValueError if the classes
  differ, or their order is ambiguous.
  """
  C, theirs = checkpoint.model.num_classes, checkpoint.class_names
  way_out = (
    'Give a checkpoint with the same classes. For evaluation only, use '
    '`python -m vit_jax.evaluate`, which matches classes by name '
    'if the checkpoint has names.'
  )
  if C != len(names):
    raise ValueError(
      f'{checkpoint.path} has {C:,} classes and the data have {len(names):,}. '
      f'{way_out}'
    )
  for i, (their, our) in enumerate(zip(theirs, names, strict=False)):
    if their != our and (their in names or our in theirs):
      raise ValueError(
        f'{checkpoint.path} has {their!r} as class {i} and the data have '
        f'{our!r}. {way_out}'
      )
  if theirs != names:
    _match_by_position(checkpoint, names, class_order)


def _match_by_position(
  checkpoint: Checkpoint, names: tuple[str, ...], class_order: str
) -> None:
  """Logs which class name belongs to which class index of the checkpoint.

  Raises ValueError if the names are numbers sorted as text, but not by value,
  and `class_order` is empty.
  """
  if sources.has_two_orders(names) and not class_order:
    by_value = sorted(names, key=int)
    raise ValueError(
      f'{checkpoint.path} does not have these class names, and the names have '
      f'two orders: as text {", ".join(names[:4])}, ... (torchvision) or by '
      f'value {", ".join(by_value[:4])}, ... (timm). Choose the order '
      'that the checkpoint was trained with: --class_order=text or number; in '
      'a config, data.class_order.'
    )
  _log.info(
    'The class names of %s are missing or differ from those of the data. '
    'Classes match by position: %.500s.',
    checkpoint.path,
    ', '.join(f'{i} is {name!r}' for i, name in enumerate(names)),
  )
