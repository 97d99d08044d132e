"""Vision Transformer in JAX/Flax: models, training, evaluation, tools.

Exports the Python API. Each name is imported on first use, because importing
JAX takes a second.
"""

import os
import sys
import types
from typing import Any

from etils import epy

with epy.lazy_api_imports(globals()):
  from vit_jax.checkpoints.opening import open_checkpoint
  from vit_jax.convert.convert import convert
  from vit_jax.evaluators.confusion import evaluate
  from vit_jax.evaluators.fewshot import fewshot
  from vit_jax.evaluators.pretrained import load
  from vit_jax.experiment import Experiment
  from vit_jax.finetune import finetune
  from vit_jax.models.variants import build_model
  from vit_jax.train import train

__version__ = '1.0.0'  # setup.py reads it here

__all__ = [
  'Experiment',
  'build_model',
  'convert',
  'evaluate',
  'fewshot',
  'finetune',
  'load',
  'open_checkpoint',
  'train',
]

# Lets `python -m vit_jax.predict` and `python -m vit_jax.serve` find modules in
# cli/ and tools/.
__path__ += [os.path.join(__path__[0], name) for name in ('cli', 'tools')]


class _Package(types.ModuleType):
  def __setattr__(self, name: str, value: Any) -> None:
    # Importing the module `vit_jax.train` would replace the function
    # `vit_jax.train` by the module.
    if not (name in __all__ and isinstance(value, types.ModuleType)):
      super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
