"""Directories of transformers as transformers itself runs them."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats import image_configs, table
from vit_jax.checkpoints.formats.hf_families import FAMILIES

# The image halves of models that have one of text, too.
_TOWERS = {
  'CLIPModel': 'CLIPVisionModelWithProjection',
  'SiglipModel': 'SiglipVisionModel',
}


def open_peer(path: str) -> table.Peer:
  """Opens a directory with transformers itself, in float32.

  Without a classifier its outputs are CLIP's projection, the pooler's, or else
  the class token or the mean of the tokens.

  Raises:
    ImportError: if transformers or what it needs is not installed.
    ValueError: if arrays are missing, left over or of another shape, or the
      model takes no images.
  """
  try:
    import transformers

    with _quiet(transformers.utils.logging):
      return _open_peer(path)
  except ImportError as e:
    raise ImportError(
      'transformers cannot run: pip install transformers torch torchvision '
      f'pillow. ({e})'
    ) from e


def _open_peer(path: str) -> table.Peer:
  import torch
  import transformers

  config = transformers.AutoConfig.from_pretrained(path)
  model_type = config.model_type
  model, has_pooler = _load_model(path, config)

  def outputs(pixels: Any) -> Any:
    found = model(pixels)
    for name in ('logits', 'image_embeds'):
      if name in found:
        return found[name]
    if model_type == 'ijepa':
      return found.last_hidden_state.mean(1)
    if has_pooler:
      return found.pooler_output.flatten(1)
    return found.last_hidden_state[:, 0]

  takes = None
  if model_type != 'bit':
    of_images = getattr(config, 'vision_config', config)
    # One number stands for both.
    takes = tuple(np.broadcast_to(of_images.image_size, 2).tolist())
  p, size, _ = image_configs.of_hf(path, model_type, takes)
  processor: Any
  if any(
    os.path.exists(os.path.join(path, name))
    for name in (image_configs.FILE, image_configs.WITH_TEXT)
  ):
    processor = transformers.AutoImageProcessor.from_pretrained(path)
  else:
    processor = transformers.ViTImageProcessor(
      image_mean=list(p.mean), image_std=list(p.std)
    )

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

  name = (config.architectures or ('AutoModelForImageClassification',))[0]
  if config.model_type.startswith('siglip2'):
    raise ValueError(
      f'{path} is a {name}, to which transformers gives patches of images of '
      'any shape instead of images: nothing can be compared.'
    )
  options = {}
  if name in ('CLIPModel', 'CLIPVisionModelWithProjection'):
    # Of the configuration of both towers, not of that of images.
    options['projection_dim'] = config.projection_dim
  model, report = getattr(
    transformers, _TOWERS.get(name, name)
  ).from_pretrained(
    path,
    dtype=torch.float32,
    # Else they would be in a report that nobody sees.
    ignore_mismatched_sizes=True,
    output_loading_info=True,
    **options,
  )
  # The one thing that transformers makes up without being told to.
  pooler = {'pooler.dense.weight', 'pooler.dense.bias'}
  missing = set(report['missing_keys'])
  ignored = FAMILIES[config.model_type].ignored
  report |= {
    'missing_keys': missing - pooler,
    'unexpected_keys': {
      key for key in report['unexpected_keys'] if not re.search(ignored, key)
    },
  }
  for what, keys in report.items():
    if keys:
      raise ValueError(f'{path}: transformers reports {what}: {keys}.')
  return model.eval(), not pooler <= missing


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
  """Keeps transformers from reporting what is checked here."""
  verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
  logging.set_verbosity_error()
  logging.disable_progress_bar()
  try:
    yield
  finally:
    logging.set_verbosity(verbosity)
    if bars:
      logging.enable_progress_bar()
