"""Similarity of position embeddings (ViT paper, figures 7 centre and 10)."""

from typing import Any

import numpy as np

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.models import posemb


def cosine(table_LD: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
  """Returns the cosine similarity of all pairs of patches, hwhw.

  The patches are the last rows of the table, in raster order.
  """
  h, w = grid
  x_LD = np.asarray(table_LD, np.float64)[len(table_LD) - h * w :]
  # The cosine similarity to a zero embedding is defined as 0.
  lengths_L1 = np.linalg.norm(x_LD, axis=1, keepdims=True)
  x_LD = x_LD / np.where(lengths_L1 > 0, lengths_L1, 1)
  return (x_LD @ x_LD.T).reshape(h, w, h, w)


def tables(checkpoint: Checkpoint) -> np.ndarray:
  """Returns the embeddings XLD that a model adds to its tokens.

  X is 1, or the number of layers if each layer adds its own embeddings.

  Raises ValueError if the model is not a ViT that adds position embeddings.
  """
  model: Any = checkpoint.model
  kind = getattr(model, 'posemb', 'none')
  if kind in ('none', 'relative'):
    raise ValueError(
      f'{checkpoint.path} is not a ViT that adds position embeddings to its '
      'tokens. Use one whose model.posemb is learned1d, learned2d or sincos2d.'
    )
  grid = model.grid(checkpoint.image_size)
  depth = model.depth if model.posemb_at == 'every_layer' else 1
  params = checkpoint.params['Transformer'].get('posembed_input', {})
  apply = posemb.PositionEmbedding(kind, depth).apply
  return np.asarray(
    apply({'params': params}, grid, model.class_tokens, model.width)
  )
