"""Models of timm as other frameworks' peers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats.table import Peer


def library() -> Any:
  """Returns the package timm.

  Raises:
    ImportError: if it is not installed.
  """
  try:
    import timm
  except (ImportError, RuntimeError) as e:
    # The second is what a torchvision gives that was built for another torch.
    raise ImportError(
      f'timm cannot run: pip install timm, torch and torchvision. ({e})'
    ) from e
  return timm


def peer(
  model: Any,
  image_size: tuple[int, int],
  mean: Sequence[float],
  std: Sequence[float],
) -> Peer:
  """Returns a model as it runs, with the scaling of values in [0, 1]."""
  import torch

  model.eval()
  mean_C11, std_C11 = (
    torch.tensor(x, dtype=torch.float32)[:, None, None] for x in (mean, std)
  )

  def run(images_BHWC: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
      images = torch.from_numpy(images_BHWC).permute(0, 3, 1, 2)
      return model((images / 255 - mean_C11) / std_C11).numpy()

  return Peer(f'timm {library().__version__}', image_size, run)
