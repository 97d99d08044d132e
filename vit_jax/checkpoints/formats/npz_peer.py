"""The .npz files of all three kinds as timm, which has loaders for them, runs
them."""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats.table import Peer

_POOLS = {'cls': 'token', 'gap': 'avg', 'map': 'map'}


def open_vit(
  path: str,
  fields: dict[str, Any],
  positions: str = 'all',
  bfloat16: bool = False,
) -> Peer:
  """Opens an official or big_vision file.

  Args:
    path: of the file.
    fields: of its model.
    positions: the tokens that have embeddings, 'all' or those of the 'grid'.
    bfloat16: whether that is what the arrays are stored as.

  Raises:
    ImportError: if timm is not installed.
    ValueError: if timm has no such model, or cannot read the file.
  """
  for field, value in {'representation_size': 0, 'posemb': 'learned1d'}.items():
    if fields.get(field, value) != value:
      raise ValueError(
        f'{path}: timm has no ViT with {field} {fields[field]!r} that reads '
        '.npz files: check another format of the model.'
      )
  vision_transformer = _timm('vision_transformer')
  model = vision_transformer.VisionTransformer(
    img_size=fields['image_size'],
    patch_size=fields['patch_size'],
    num_classes=fields['num_classes'],
    embed_dim=fields['width'],
    depth=fields['depth'],
    num_heads=fields['heads'],
    # The product is rounded down.
    mlp_ratio=(fields['mlp_dim'] + 0.5) / fields['width'],
    class_token=fields['pool'] == 'cls',
    global_pool=_POOLS[fields['pool']],
    fc_norm=False,
    no_embed_class=positions == 'grid',
    act_layer='gelu_tanh',
    **_stem(fields),
  )
  load = functools.partial(
    # The method has no argument for bfloat16.
    vision_transformer._load_weights,
    model,
    load_bfloat16=bfloat16,
  )
  return _peer(path, model, load, fields['image_size'])


def open_resnet(path: str, fields: dict[str, Any]) -> Peer:
  """Opens a BiT file; arguments and errors as `open_vit`."""
  resnetv2 = _timm('resnetv2')
  model = resnetv2.ResNetV2(
    **_stages(fields['layers'], fields['width']),
    num_classes=fields['num_classes'],
    stem_type='fixed',
    conv_layer=functools.partial(_timm_layers().StdConv2d, eps=1e-8),
  )
  return _peer(path, model, model.load_pretrained, fields['image_size'])


def _stem(fields: dict[str, Any]) -> dict[str, Any]:
  """Returns the arguments of a hybrid that differ."""
  if not fields.get('stem_width'):
    return {}
  resnetv2, layers = _timm('resnetv2'), _timm_layers()
  conv = functools.partial(layers.StdConv2dSame, eps=1e-8)
  if fields['stem_layers']:
    backbone = resnetv2.ResNetV2(
      **_stages(fields['stem_layers'], fields['stem_width']),
      num_classes=0,
      global_pool='',
      preact=False,
      stem_type='same',
      conv_layer=conv,
    )
  else:
    backbone = resnetv2.create_resnetv2_stem(
      3,
      fields['stem_width'],
      preact=False,
      stem_type='same',
      conv_layer=conv,
    )
  return {'embed_layer': functools.partial(layers.HybridEmbed, backbone)}


def _stages(layers: tuple[int, ...], width: int) -> dict[str, Any]:
  return {
    'layers': layers,
    'channels': tuple(4 * width * 2**i for i in range(len(layers))),
    'stem_chs': width,
  }


def _timm(module: str) -> Any:
  try:
    return importlib.import_module(f'timm.models.{module}')
  except (ImportError, RuntimeError) as e:
    # The second is what a torchvision gives that was built for another torch.
    raise ImportError(
      f'timm cannot run: pip install timm, torch and torchvision. ({e})'
    ) from e


def _timm_layers() -> Any:
  return importlib.import_module('timm.layers')


def _peer(
  path: str,
  model: Any,
  load: Callable[[str], None],
  image_size: tuple[int, int],
) -> Peer:
  import torch

  try:
    with torch.no_grad():
      load(path)
  except (KeyError, RuntimeError, ValueError) as e:
    raise ValueError(f'{path}: timm cannot read it: {e}') from e
  model.eval()

  def run(images_BHWC: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
      images = torch.from_numpy(images_BHWC).permute(0, 3, 1, 2)
      # timm's mean and deviation for these files, IMAGENET_INCEPTION_MEAN.
      return model((images / 255 - 0.5) / 0.5).numpy()

  version = importlib.metadata.version('timm')
  return Peer(f'timm {version}', image_size, run)
