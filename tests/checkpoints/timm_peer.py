"""Directories of timm as timm itself runs them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats import table


def open_peer(path: str) -> table.Peer:
  """Opens a directory with timm itself, in float32."""
  import timm

  model = timm.create_model(f'local-dir:{path}', pretrained=True)
  found = timm.data.resolve_data_config(model=model)
  _, height, width = found['input_size']
  size = height, width
  framework = f'timm {timm.__version__}'
  return peer(framework, model.eval(), size, found['mean'], found['std'])


def peer(
  framework: str,
  apply: Callable[[Any], Any],
  image_size: tuple[int, int],
  mean: Sequence[float],
  std: Sequence[float],
) -> table.Peer:
  """Wraps a PyTorch model that takes scaled images as a peer.

  Args:
    framework: its name and version.
    apply: from a tensor BCHW to one of outputs.
    image_size: (H, W) in pixels.
    mean, std: of values in [0, 1].
  """
  import torch

  mean_C11, std_C11 = (
    torch.tensor(x, dtype=torch.float32)[:, None, None] for x in (mean, std)
  )

  def run(images_BHWC: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
      images = torch.from_numpy(images_BHWC).permute(0, 3, 1, 2)
      return apply((images / 255 - mean_C11) / std_C11).numpy()

  return table.Peer(framework, image_size, run)
