"""Lets a config take its model from its initial checkpoint.

Config files must not open checkpoints, because that could start a download. So
`choose`, in a config file, leaves the model's fields open and names the model
'from_init'. After the flags are parsed, `resolve` fills in the fields.
"""

import dataclasses
import typing
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.checkpoints import opening
from vit_jax.models import variants

NAME = 'from_init'
# Fields that are not copied, besides the model's `compute_fields`: fine-tuning
# replaces the head, and `config.data` determines the image size.
_NOT_COPIED = ('num_classes', 'image_size', 'representation_size', 'head_bias')
_IMAGE_FIELDS = ('mean', 'std', 'interpolation')


def choose(config: ConfigDict, path: str) -> None:
  """Makes a config take its model and `_IMAGE_FIELDS` from a checkpoint.

  Fields that the config file or flags set later take precedence. `path` is as
  in `opening.open_checkpoint`.
  """
  open_fields: dict[str, Any] = {'dtype': placeholder(str)}
  for name in variants.ARCHITECTURES:
    for field in variants.ARCHITECTURES.load(name).own_fields():
      kind = typing.get_origin(field.type) or field.type
      if field.default is not dataclasses.MISSING:
        kind = type(field.default)
      open_fields.setdefault(field.name, placeholder(kind))
  del open_fields['num_classes']  # follows from the data
  config.init = path
  config.model = ConfigDict(open_fields | {'name': NAME})
  for field in _IMAGE_FIELDS:
    kind = type(config.data[field])
    del config.data[field]
    config.data[field] = placeholder(kind)


def resolve(config: ConfigDict) -> None:
  """Fills in the fields that `choose` left open.

  Rounds `data.image_size` by `nearest_size` if it is one number, such as '384'
  but not '384x384'. Does the same for sizes in `config.sweep`, but not in
  `--sweep`. Raises the errors of `open_checkpoint`.
  """
  if config.model.name != NAME:
    return
  checkpoint = opening.open_checkpoint(config.init)
  # Leaves out fields that the checkpoint's objective added to the model.
  fields = variants.config_of(checkpoint.model)
  left_out = {*_NOT_COPIED, *checkpoint.model.compute_fields}
  model = variants.defaults(fields['name'])
  model |= {k: v for k, v in fields.items() if k not in left_out}
  given = {k: v for k, v in config.model.items() if v is not None}
  with config.unlocked():
    config.model = ConfigDict(model | given | {'name': fields['name']})
    for field in _IMAGE_FIELDS:
      if config.data[field] is None:
        config.data[field] = getattr(checkpoint.preprocessing, field)
    config.data.image_size = _tiled(config, config.data.image_size)
    config.sweep = tuple(
      (axis, tuple((label, _all_tiled(config, x)) for label, x in values))
      for axis, values in config.sweep
    )


def _all_tiled(config: ConfigDict, fields: dict[str, Any]) -> dict[str, Any]:
  name = 'data.image_size'
  return {k: _tiled(config, x) if k == name else x for k, x in fields.items()}


def _tiled(config: ConfigDict, size: Any) -> Any:
  if not str(size).isdecimal():
    return size
  return str(nearest_size(config, int(size)))


def nearest_size(config: ConfigDict, pixels: int) -> int:
  """Returns the nearest image side that the patches tile.

  For example, returns 378 for 384 pixels and patches of 14. If two sides are
  equally near, returns the smaller. Returns `pixels` if it is below 1, if the
  model is not resolved yet, or if no side within 64 pixels fits.
  """
  if config.model.name == NAME or pixels < 1:
    return pixels

  def fits(side: int) -> bool:
    try:
      variants.build(num_classes=0, image_size=(side, side), **config.model)
      return True
    except ValueError:
      return False

  near = (pixels + sign * n for n in range(65) for sign in (-1, 1))
  return next(filter(fits, near), pixels)
