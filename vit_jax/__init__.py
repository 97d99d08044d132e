"""Vision Transformer in JAX/Flax: models, training, evaluation, tools.

`load` opens any checkpoint to label images with, `evaluators.pretrained` says
more. The rest of what is public: `train.train` runs a config,
`experiment.Experiment` makes one concrete,
`checkpoints.opening.open_checkpoint` gives model and parameters, `models` has
the models as Flax modules.
"""

import os
import sys
from typing import Any

from vit_jax.training import interrupts

__all__ = ['load']

if sys.argv[:1] == ['-m']:  # python -m vit_jax.COMMAND, before it is found
  interrupts.end_at_once()

# `python -m vit_jax.serve` finds the commands of tools/ without their folder.
__path__.append(os.path.join(__path__[0], 'tools'))


def __getattr__(name: str) -> Any:
  # Importing JAX takes a second, which only its users should pay.
  if name == 'load':
    from vit_jax.evaluators import pretrained

    return pretrained.load
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
