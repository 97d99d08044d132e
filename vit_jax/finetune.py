"""Trains a model on a folder of photos, in one call."""

import os
from collections.abc import Mapping
from typing import Any

from vit_jax import config as config_lib
from vit_jax import own
from vit_jax.evaluators import final, pretrained
from vit_jax.train import train


def finetune(
  photos: str | os.PathLike,
  init: str = '',
  *,
  minutes: float = 10,
  workdir: str | os.PathLike = '',
  fields: Mapping[str, Any] | None = None,
) -> pretrained.TrainedModel:
  """Trains on a folder of photos as configs/own.py does.

  Args:
    photos: a folder with a sub-folder for each class, or another value of
      `config.data.name`.
    init: checkpoint to start from, such as 'augreg/s16-224'; empty for new
      parameters.
    minutes: wanted length of training; `own` limits its steps and epochs.
    workdir: folder of the run; by default runs/NAME-OF-THE-FOLDER. A second
      call with the same workdir resumes the run.
    fields: config fields to set, by dotted names, as in {'data.flip': False}.

  Returns:
    The trained model, as `load` returns it.

  Raises:
    ValueError: if the photos, `minutes` or the config are invalid.

  Also raises the other errors of `train`.
  """
  folder = os.path.expanduser(os.fspath(photos))
  if os.path.isdir(folder) and not folder.startswith(('.', '/')):
    folder = os.path.join('.', folder)
  config = own.config(folder, os.fspath(init), minutes)
  config.lock()
  config_lib.override(config, {k: str(v) for k, v in (fields or {}).items()})
  name = os.path.basename(os.path.abspath(folder))
  place = os.path.expanduser(os.fspath(workdir)) or os.path.join('runs', name)
  train(config, place)
  print(final.report(config, place))
  return pretrained.load(place)
