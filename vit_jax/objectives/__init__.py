"""What is learned: `objective` is the contract, each other file keeps it."""

from ml_collections import ConfigDict

from vit_jax.models.variants import nearest
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.masked import MaskedPatches
from vit_jax.objectives.objective import Objective
from vit_jax.projects.detr.objective import Detection
from vit_jax.projects.few_labels.distillation import Distillation
from vit_jax.projects.few_labels.exemplar import Exemplar
from vit_jax.projects.few_labels.pseudo_labels import PseudoLabels
from vit_jax.projects.few_labels.rotation import Rotation
from vit_jax.projects.few_labels.video import VideoInvariances
from vit_jax.projects.igpt.objective import Pixels, PixelsAndClasses

# By `config.objective.name`.
OBJECTIVES: dict[str, type[Objective]] = {
  'classification': Classification,
  'detection': Detection,
  'distillation': Distillation,
  'exemplar': Exemplar,
  'masked': MaskedPatches,
  'pixels': Pixels,
  'pixels_and_classes': PixelsAndClasses,
  'pseudo_labels': PseudoLabels,
  'rotation': Rotation,
  'video': VideoInvariances,
}


def objective_type(config: ConfigDict) -> type[Objective]:
  """Returns the objective that a config names.

  Raises:
    ValueError: if there is none of that name, or its fields are not there.
  """
  name = config.objective.name
  if name not in OBJECTIVES:
    raise ValueError(f'objective.name is {name!r}. {nearest(name, OBJECTIVES)}')
  if missing := sorted(OBJECTIVES[name].defaults.keys() - config.objective):
    raise ValueError(
      f'objective.name is {name!r}, and there is no objective.{missing[0]}: a '
      'name alone chooses no objective. Take a config of configs/ that has it, '
      f'or config_lib.choose_objective(config, {name!r}) in a config file.'
    )
  return OBJECTIVES[name]
