"""The same objective for images of several sizes."""

import operator

import jax
from ml_collections import ConfigDict

from vit_jax.checkpoints import transfer
from vit_jax.data import images
from vit_jax.models import flops
from vit_jax.models.model import Model
from vit_jax.objectives import objective_type
from vit_jax.objectives.objective import Objective


def objectives_of(config: ConfigDict) -> dict[tuple[int, int], Objective]:
  """Returns the objective of each of `data.image_size`, the first one's first.

  They share the parameters of the first, which `transfer.at_size` resizes.

  Raises:
    ValueError: naming every invalid size, and why, or fields that the objective
      ignores.
  """
  kind = objective_type(config)
  on = [
    f'{field}={value!r} (off: {off!r})'
    for field, off in kind.unused.items()
    if (value := operator.attrgetter(field)(config)) != off
  ]
  if on:
    raise ValueError(
      f'objective.name={config.objective.name} makes no use of '
      f'{", ".join(on)}: switch that off.'
    )
  sizes = images.sizes_of(config.data.image_size)
  if len(sizes) > 1 and config.objective.get('buckets', 1) != 1:
    raise ValueError(
      f'data.image_size is {config.data.image_size!r} and objective.buckets '
      f'{config.objective.buckets}: buckets are sizes of a batch too. Choose '
      'one size or one bucket.'
    )
  found: dict[tuple[int, int], Objective] = {}
  wrong: dict[str, str] = {}
  for size in sizes:
    try:
      found[size] = kind.from_config(config, size)
      if len(found) > 1:
        _check_carried(found[size].model, next(iter(found)), size)
    except ValueError as e:
      wrong[f'{size[0]}x{size[1]}'] = str(e)
  if len(wrong) == len(sizes) and len({*wrong.values()}) == 1:
    raise ValueError(next(iter(wrong.values())))  # whatever the size
  if wrong:
    raise ValueError(
      f'data.image_size is {config.data.image_size!r}, with invalid sizes:\n'
      + '\n'.join(f'  {size}: {why}' for size, why in wrong.items())
    )
  return found


def _check_carried(
  model: Model, first: tuple[int, int], size: tuple[int, int]
) -> None:
  """Refuses a size to which the parameters cannot be resized."""
  jax.eval_shape(
    lambda params: transfer.at_size(model, params, first, size),
    flops.param_shapes(model, first),
  )
