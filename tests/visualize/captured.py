"""Rollout of weights that a model captured, all layers at once."""

import numpy as np

from vit_jax.visualize import rollout


def of_captured(attention_XBNLL, grid, class_tokens):
  """Returns the maps Bhw, heads averaged, of what the first tokens read.

  Where there are none, of what all patches do, which come last.
  """
  _, B, _, L, _ = attention_XBNLL.shape
  read_BL = np.zeros((B, L), np.float32)
  count = class_tokens or grid[0] * grid[1]
  read_BL[:, slice(count) if class_tokens else slice(L - count, L)] = 1 / count
  fused = [rollout.fuse(x_BNLL) for x_BNLL in attention_XBNLL]
  return rollout.maps(fused, read_BL, grid)
