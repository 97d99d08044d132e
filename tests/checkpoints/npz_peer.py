"""The .npz files of all three kinds as timm runs them."""

import functools

from tests.checkpoints import timm_peer
from vit_jax.checkpoints.formats import (
  archive,
  bigvision,
  recognise,
  timm_config,
)
from vit_jax.checkpoints.formats.table import Peer, Weights
from vit_jax.models import variants


def open_peer(path: str) -> Peer:
  """Opens an official, big_vision or BiT file with timm, in float32.

  Raises:
    ImportError: if timm is not installed.
    ValueError: if timm has no such model, or cannot read the file.
  """
  arrays = archive.load(path)
  module = recognise.format_of(arrays, recognise.ARCHIVES)
  fields = module.read(path, arrays).fields
  fields |= variants.fields_of(variants.build(**fields))
  config = timm_config.config(Weights({}, fields), {})
  timm = timm_peer.library()
  import torch

  args = config['model_args']
  if module is bigvision:
    args['no_embed_class'] = True
  model = timm.create_model(
    config['architecture'], num_classes=fields['num_classes'], **args
  )
  load = model.load_pretrained
  if fields['name'] != 'resnet':
    load = functools.partial(
      # The method has no argument for bfloat16.
      timm.models.vision_transformer._load_weights,
      model,
      load_bfloat16=any(x.dtype.name == 'bfloat16' for x in arrays.values()),
    )
  try:
    with torch.no_grad():
      load(path)
  except (KeyError, RuntimeError, ValueError) as e:
    raise ValueError(f'{path}: timm cannot read it: {e}') from e
  # timm's mean and deviation for these files, IMAGENET_INCEPTION_MEAN.
  half = (0.5, 0.5, 0.5)
  return timm_peer.peer(
    f'timm {timm.__version__}', model.eval(), fields['image_size'], half, half
  )
