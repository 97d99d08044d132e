"""Official and big_vision's .npz files as timm runs them."""

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
  """Opens an official or big_vision file with timm, in float32."""
  import timm
  import torch

  arrays = archive.load(path)
  module = recognise.format_of(arrays, recognise.ARCHIVES)
  fields = module.read(path, arrays).fields
  fields |= variants.fields_of(variants.build(**fields))
  config = timm_config.config(Weights({}, fields), {})
  args = config['model_args']
  if module is bigvision:
    args['no_embed_class'] = True
  model = timm.create_model(
    config['architecture'], num_classes=fields['num_classes'], **args
  )
  with torch.no_grad():
    # `load_pretrained` has no argument for bfloat16.
    timm.models.vision_transformer._load_weights(
      model,
      path,
      load_bfloat16=any(x.dtype.name == 'bfloat16' for x in arrays.values()),
    )
  # timm's mean and deviation for these files, IMAGENET_INCEPTION_MEAN.
  half = (0.5, 0.5, 0.5)
  return timm_peer.peer(
    f'timm {timm.__version__}', model.eval(), fields['image_size'], half, half
  )
