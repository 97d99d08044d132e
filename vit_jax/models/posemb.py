"""Position embeddings (section 3.1, appendix D.4) and their resizing."""

import flax.linen as nn
import jax
import numpy as np


class Learned1D(nn.Module):
  """Adds one learned vector a token: E_pos of equation 1."""

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    _, L, D = x_BLD.shape
    table_1LD = self.param(
      'pos_embedding', nn.initializers.normal(0.02), (1, L, D)
    )
    return x_BLD + table_1LD.astype(x_BLD.dtype)


def resize(
  posemb_1LD: np.ndarray,
  old_grid: tuple[int, int],
  new_grid: tuple[int, int],
) -> np.ndarray:
  """Interpolates position embeddings for another image size (section 3.2).

  Bilinear with aligned corners, as the original code means it: position i of
  the new grid reads the old one at i * (old - 1) / (new - 1). (The original
  calls `scipy.ndimage.zoom`, which for some sizes, 16 to 30 for instance,
  zeroes the last row and column; this does not.) Tokens before the grid, the
  class token, are kept as they are.

  Args:
    posemb_1LD: float32, L = old_h * old_w, or one more for a class token.
    old_grid: (h, w) the embeddings were learned for.
    new_grid: (h, w) wanted.

  Returns:
    float32 array (1, extra + new_h * new_w, D).

  Raises:
    ValueError: if the embeddings do not belong to `old_grid`.
  """
  extra = posemb_1LD.shape[1] - old_grid[0] * old_grid[1]
  if extra not in (0, 1):
    raise ValueError(
      f'{posemb_1LD.shape[1]} position embeddings do not fit a grid of '
      f'{old_grid[0]}x{old_grid[1]} patches with or without a class token.'
    )
  if tuple(old_grid) == tuple(new_grid):
    return posemb_1LD
  D = posemb_1LD.shape[2]
  grid_hwD = np.asarray(posemb_1LD[0, extra:]).reshape(*old_grid, D)
  grid_hwD = np.einsum(
    'Hh,Ww,hwD->HWD',
    _interpolation_matrix(old_grid[0], new_grid[0]),
    _interpolation_matrix(old_grid[1], new_grid[1]),
    grid_hwD,
    optimize=True,
  ).astype(posemb_1LD.dtype)
  grid_1LD = grid_hwD.reshape(1, -1, D)
  return np.concatenate([posemb_1LD[:, :extra], grid_1LD], axis=1)


def _interpolation_matrix(old: int, new: int) -> np.ndarray:
  """Returns the (new, old) matrix of linear interpolation along one axis."""
  position = np.arange(new) * (old - 1) / max(new - 1, 1)
  below = np.minimum(position.astype(int), max(old - 2, 0))
  above_share = position - below
  matrix = np.zeros((new, old))
  rows = np.arange(new)
  matrix[rows, below] += 1 - above_share
  matrix[rows, np.minimum(below + 1, old - 1)] += above_share
  return matrix


def grid_shape(image_size: tuple[int, int], patch: int) -> tuple[int, int]:
  """Returns the patch grid (h, w) of an image (H, W) in pixels.

  Raises:
    ValueError: if the patches do not tile the image.
  """
  H, W = image_size
  if H % patch or W % patch or not H or not W:
    raise ValueError(
      f'Patches of {patch}x{patch} pixels do not tile an image of {H}x{W}: '
      'choose an image size that is a multiple of the patch size.'
    )
  return H // patch, W // patch
