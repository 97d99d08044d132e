"""Training objectives. The module `objective` defines their interface."""

from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from vit_jax.models.fields import check_value
from vit_jax.register import Register

if TYPE_CHECKING:  # at runtime, an objective is imported on first use
  from vit_jax.objectives.objective import Objective

# Objective classes by `config.objective.name`.
OBJECTIVES = Register(
  'objective.name',
  {
    'classification': 'vit_jax.objectives.classification:Classification',
    'detection': 'vit_jax.projects.detr.objective:Detection',
    'dino': 'vit_jax.projects.self_supervised.dino:DINO',
    'distillation': 'vit_jax.projects.few_labels.distillation:Distillation',
    'exemplar': 'vit_jax.projects.few_labels.s4l:Exemplar',
    'mae': 'vit_jax.projects.self_supervised.mae:MaskedAutoencoder',
    'masked': 'vit_jax.objectives.masked:MaskedPatches',
    'pixels': 'vit_jax.projects.igpt.objective:Pixels',
    'pseudo_labels': 'vit_jax.projects.few_labels.pseudo_labels:PseudoLabels',
    'rotation': 'vit_jax.projects.few_labels.s4l:Rotation',
    'segmentation': 'vit_jax.projects.segmentation.objective:Segmentation',
    'video': 'vit_jax.projects.few_labels.video:VideoInvariances',
  },
)


def objective_type(config: ConfigDict) -> type['Objective']:
  """Returns the objective class that a config names.

  Raises:
    ValueError: if the name is unknown, or a field of the objective is missing
      or invalid.
  """
  name = config.objective.name
  kind: type[Objective] = OBJECTIVES.load(name)
  if missing := sorted(kind.defaults.keys() - config.objective):
    raise ValueError(
      f'objective.name is {name!r}, but objective.{missing[0]} is missing. Do '
      'not set the name alone: use a config of configs/ with this objective, '
      f'or config_lib.choose_objective(config, {name!r}) in a config file.'
    )
  for field, valid in kind.valid.items():
    check_value(f'objective.{field}', config.objective[field], valid)
  return kind
