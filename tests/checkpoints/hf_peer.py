"""Directories that `hf` writes, as transformers itself runs them."""

from typing import Any

import numpy as np

from vit_jax.checkpoints.formats import image_configs, table


def open_peer(path: str) -> table.Peer:
  """Opens a directory with transformers itself, in float32.

  Without a classifier its outputs are those of the pooler, or else the class
  token or the mean of the tokens.

  Raises ValueError if arrays are missing, left over or of another shape.
  """
  import torch
  import transformers

  config = transformers.AutoConfig.from_pretrained(path)
  model_type = config.model_type
  model, has_pooler = _load_model(path, config)

  def outputs(pixels: Any) -> Any:
    found = model(pixels)
    if 'logits' in found:
      return found.logits
    if model_type == 'ijepa':
      return found.last_hidden_state.mean(1)
    if has_pooler:
      return found.pooler_output.flatten(1)
    return found.last_hidden_state[:, 0]

  takes = None
  if model_type != 'bit':
    # One number stands for both.
    takes = tuple(np.broadcast_to(config.image_size, 2).tolist())
  _, size, _ = image_configs.of_hf(path, model_type, takes)
  processor = transformers.AutoImageProcessor.from_pretrained(path)

  def run(images_BHWC: np.ndarray) -> np.ndarray:
    pixels = processor(
      list(images_BHWC),
      do_resize=False,
      do_center_crop=False,
      input_data_format='channels_last',
      return_tensors='pt',
    )
    with torch.inference_mode():
      return outputs(pixels['pixel_values']).numpy()

  return table.Peer(f'transformers {transformers.__version__}', size, run)


def _load_model(path: str, config: Any) -> tuple[Any, bool]:
  """Returns a model of transformers, and whether the file has its pooler."""
  import torch
  import transformers

  (name,) = config.architectures
  model, report = getattr(transformers, name).from_pretrained(
    path,
    dtype=torch.float32,
    # Otherwise mismatches would be in a report that nobody sees.
    ignore_mismatched_sizes=True,
    output_loading_info=True,
  )
  # transformers gives a model without a pooler a random one.
  pooler = {'pooler.dense.weight', 'pooler.dense.bias'}
  missing = set(report['missing_keys'])
  report['missing_keys'] = missing - pooler
  for what, keys in report.items():
    if keys:
      raise ValueError(f'{path}: transformers reports {what}: {keys}.')
  return model.eval(), not pooler <= missing
