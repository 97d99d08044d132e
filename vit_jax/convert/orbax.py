"""Writes a workdir without optimizer state.

Training can start from this workdir with `--config.init`.
"""

import json

from vit_jax import config as config_lib
from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.checkpoints.saving import save_parameters
from vit_jax.data import atomic_files
from vit_jax.models import variants

DTYPES = ('float32',)


def write(checkpoint: Checkpoint, target: str, dtype: str) -> list[str]:
  """Writes a workdir with a single checkpoint, step 0."""
  config = config_lib.base()
  config.model = variants.config_of(checkpoint.model)
  config.data.update(vars(checkpoint.preprocessing))
  config.loss.name = checkpoint.loss
  config.data.image_size = 'x'.join(map(str, checkpoint.image_size))
  meta = {
    'config': json.loads(config.to_json()),
    'model': variants.fields_of(checkpoint.model),
    'class_names': list(checkpoint.class_names),
    'examples': 0,
    'image_size': list(checkpoint.image_size),
    'elapsed_s': 0.0,
  }
  with atomic_files.new_folder(target) as folder:
    save_parameters(str(folder), checkpoint.params, meta)
  return []
