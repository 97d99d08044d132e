"""What is learned: `objective` is the contract, each other file keeps it."""

from vit_jax.objectives.classification import Classification
from vit_jax.objectives.masked import MaskedPatches
from vit_jax.objectives.objective import Objective

# By `config.objective.name`.
OBJECTIVES: dict[str, type[Objective]] = {
  'classification': Classification,
  'masked': MaskedPatches,
}
