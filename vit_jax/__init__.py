"""Vision Transformer in JAX/Flax: models, training, evaluation, tools.

Exports the Python API. Each name is imported on first use, because importing
JAX takes a second.
"""

import importlib
import os
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from vit_jax.checkpoints.opening import open_checkpoint as open_checkpoint
  from vit_jax.convert.convert import convert as convert
  from vit_jax.evaluators.confusion import evaluate as evaluate
  from vit_jax.evaluators.fewshot import fewshot as fewshot
  from vit_jax.evaluators.pretrained import load as load
  from vit_jax.experiment import Experiment as Experiment
  from vit_jax.finetune import finetune as finetune
  from vit_jax.models.variants import build_model as build_model
  from vit_jax.train import train as train

__version__ = '1.0.0'  # setup.py reads it here

_MODULES = {
  'Experiment': 'experiment',
  'build_model': 'models.variants',
  'convert': 'convert.convert',
  'evaluate': 'evaluators.confusion',
  'fewshot': 'evaluators.fewshot',
  'finetune': 'finetune',
  'load': 'evaluators.pretrained',
  'open_checkpoint': 'checkpoints.opening',
  'train': 'train',
}
__all__ = list(_MODULES)

# Lets `python -m vit_jax.predict` and `python -m vit_jax.serve` find modules in
# cli/ and tools/.
__path__ += [os.path.join(__path__[0], name) for name in ('cli', 'tools')]


def __getattr__(name: str) -> Any:
  if name not in _MODULES:
    raise AttributeError(
      f'module {__name__!r} has no attribute {name!r}. Its functions and '
      f'classes: {", ".join(_MODULES)}.'
    )
  value = getattr(importlib.import_module(f'vit_jax.{_MODULES[name]}'), name)
  setattr(sys.modules[__name__], name, value)
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
  def __setattr__(self, name: str, value: Any) -> None:
    # Importing the module `vit_jax.train` would replace the function
    # `vit_jax.train` by the module.
    if not (name in _MODULES and isinstance(value, types.ModuleType)):
      super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
