"""Position embeddings (section 3.1, appendix D.4) and their resizing."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

_init = nn.initializers.normal(0.02)


class PositionEmbedding(nn.Module):
  """Position embeddings for X = `layers` layers.

  Kinds: 'learned1d' has one vector per token; 'learned2d' concatenates D/2
  numbers for the column and D/2 for the row; 'sincos2d' is fixed.
  """

  kind: str
  layers: int = 1

  @nn.compact
  def __call__(self, grid: tuple[int, int], extra: int, D: int) -> jax.Array:
    """Returns embeddings XLD: `extra` tokens, then patches in raster order.

    Only 'learned1d' embeds the extra tokens. The other kinds need coordinates,
    which extra tokens lack, so extra tokens get zeros.
    """
    (h, w), X = grid, self.layers
    if self.kind == 'learned1d':
      return self.param('pos_embedding', _init, (X, extra + h * w, D))
    if self.kind == 'learned2d':
      x_Xwd = self.param('x_embedding', _init, (X, w, D // 2))
      y_Xhd = self.param('y_embedding', _init, (X, h, D // 2))
      tables = (x_Xwd[:, None], y_Xhd[:, :, None])
      parts = [jnp.broadcast_to(x, (X, h, w, D // 2)) for x in tables]
      table_XLD = jnp.concatenate(parts, axis=-1).reshape(X, h * w, D)
    else:
      table_XLD = jnp.tile(sincos2d(grid, D), (X, 1, 1))
    return jnp.pad(table_XLD, ((0, 0), (extra, 0), (0, 0)))


def sincos2d(grid: tuple[int, int], D: int) -> jax.Array:
  """Returns fixed sine-cosine embeddings (1, h * w, D), float32.

  The embedding of the patch in column x and row y is

    [sin(x f), cos(x f), sin(y f), cos(y f)]

  with the D/4 frequencies f_i = 10000^(-i / (D/4 - 1)). "Better plain ViT
  baselines" (2205.01580) uses them. In MoCo v3 and MAE, the divisor is D/4.
  """
  y, x = np.mgrid[: grid[0], : grid[1]].reshape(2, -1, 1)
  i = np.arange(D // 4)
  f = 10_000.0 ** (-i / max(D // 4 - 1, 1))
  table = [np.sin(x * f), np.cos(x * f), np.sin(y * f), np.cos(y * f)]
  return jnp.asarray(np.concatenate(table, axis=-1)[None], jnp.float32)


def detr_sincos2d(inside_Bhw: jax.Array, D: int) -> jax.Array:
  """Returns DETR's fixed embeddings BhwD (2005.12872), float32.

  `inside_Bhw` is false in the padding. The coordinates y and x number the
  unpadded rows and columns from 1, scaled so that the last is 2 pi. The
  first D/2 numbers alternate sin(y f_i) and cos(y f_i). The last D/2 numbers
  alternate sin(x f_i) and cos(x f_i). Here f_i = 10000^(-i / (D/4)).
  """
  inside_Bhw = inside_Bhw.astype(jnp.float32)
  periods = jnp.asarray(10_000.0 ** (np.arange(D // 4) / (D // 4)), jnp.float32)
  parts = []
  for axis in (1, 2):
    count_Bhw = jnp.cumsum(inside_Bhw, axis)
    last = jax.lax.slice_in_dim(count_Bhw, -1, None, axis=axis)
    # 1e-6 is from the original code. It avoids 0 / 0 in rows and columns that
    # are all padding.
    x_Bhw1 = (count_Bhw / (last + 1e-6) * (2 * np.pi))[..., None]
    turns = x_Bhw1 / periods[None, None, None]
    both = jnp.stack([jnp.sin(turns), jnp.cos(turns)], axis=-1)
    parts.append(both.reshape(*inside_Bhw.shape, D // 2))
  return jnp.concatenate(parts, axis=-1)


Rotation = tuple[jax.Array, jax.Array]


def rotation(
  grid: tuple[int, int], K: int, theta: float, side: int = 0
) -> Rotation:
  """Returns cosines and sines (h * w, K / 2) of 2-D rotary embeddings.

  These are the embeddings of RoFormer (2104.09864) in two dimensions. The query
  and key of a token at (y, x) consist of K/2 pairs of numbers. For j < K/4, let
  f_j = theta^(-j / (K/4)). Pair j is rotated by the angle y f_j, and pair
  j + K/4 by the angle x f_j. In row i of h rows, the coordinate y is

    i side / h                 if `side` is above 0 (EVA-02 2303.11331, ViT-5),
                               where `side` is the grid's side in training
    i                          if `side` is -1 (RoPE-ViT 2403.13298)
    2 pi (2 (i + 1/2) / h - 1) if `side` is 0 (DINOv3 2508.10104)

  and x is the same function of the column.
  """
  f = theta ** (-np.arange(K // 4) / (K // 4))
  angles = []
  for i, n in zip(np.mgrid[: grid[0], : grid[1]], grid, strict=True):
    counted = n if side == -1 else side
    y = i * counted / n if side else 2 * np.pi * (2 * (i + 0.5) / n - 1)
    angles.append(y.reshape(-1, 1) * f)
  turns = np.concatenate(angles, axis=-1)
  return jnp.float32(np.cos(turns)), jnp.float32(np.sin(turns))


def rotate(x_BLNK: jax.Array, by: Rotation) -> jax.Array:
  """Rotates queries or keys; number j forms a pair with number j + K/2.

  `by` is the result of `rotation` for the last tokens. Earlier tokens are
  rotated by the angle 0, because slicing them off would copy all tokens on a
  TPU.
  """
  extra = x_BLNK.shape[1] - len(by[0])
  cos_1L1k, sin_1L1k = (
    jnp.pad(x, ((extra, 0), (0, 0)), constant_values=nothing)[None, :, None]
    for x, nothing in zip(by, (1, 0), strict=True)
  )
  half = x_BLNK.shape[-1] // 2
  x_32 = x_BLNK.astype(jnp.float32)
  first, second = x_32[..., :half], x_32[..., half:]
  turned = [
    first * cos_1L1k - second * sin_1L1k,
    second * cos_1L1k + first * sin_1L1k,
  ]
  return jnp.concatenate(turned, axis=-1).astype(x_BLNK.dtype)


class RelativeKeys(nn.Module):
  """Attention logits of 1-D relative position embeddings (appendix D.4).

  A query's logits are its products with learned embeddings of the offset
  p_q - p_k, the difference of two patches' indices in raster order. Attention
  adds them to the content logits. A class token has no position, so its logits
  are zero.
  """

  @nn.compact
  def __call__(self, q_BLNK: jax.Array, extra: int) -> jax.Array:
    """Returns logits BNLL, float32; zero for the first `extra` tokens.

    The logits are divided by sqrt(K), like the content logits.
    """
    _, L, N, K = q_BLNK.shape
    L -= extra
    r_ONK = self.param('relative_embedding', _init, (2 * L - 1, N, K))
    logits_BNLO = jnp.einsum(
      'BLNK,ONK->BNLO',
      q_BLNK[:, extra:],
      r_ONK[::-1].astype(q_BLNK.dtype),
      preferred_element_type=jnp.promote_types(q_BLNK.dtype, jnp.float32),
    )
    logits_BNLL = _shift(logits_BNLO * K**-0.5)
    return jnp.pad(logits_BNLL, ((0, 0), (0, 0), (extra, 0), (extra, 0)))


def _shift(x_BNLO: jax.Array) -> jax.Array:
  """Selects entry k - q + L - 1 of row q, for every q and k.

  Uses reshapes instead of a gather (see `tpu_layout`). Padding makes rows 2 L
  long. From one row to the next, the selection begins one entry earlier, that
  is, 2 L - 1 entries later in the flattened array.
  """
  B, N, L, _ = x_BNLO.shape
  flat = jnp.pad(x_BNLO, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(B, N, -1)
  rows = flat[..., L - 1 : L - 1 + L * (2 * L - 1)]
  return rows.reshape(B, N, L, 2 * L - 1)[..., :L]


def resize(
  posemb_XLD: np.ndarray,
  old_grid: tuple[int, int],
  new_grid: tuple[int, int],
  extra: int,
) -> np.ndarray:
  """Interpolates position embeddings for another image size (section 3.2).

  The interpolation is bilinear with aligned corners: position i of the new grid
  reads position i * (old - 1) / (new - 1) of the old grid. The original code
  calls `scipy.ndimage.zoom`, which does the same except for a bug: for some
  sizes, such as 16 to 30, it zeroes the last row and column. Embeddings of the
  `extra` tokens before the grid are kept.

  Returns:
    Array (X, extra + new_h * new_w, D) of the same dtype.

  Raises:
    ValueError: if the embeddings do not fit `old_grid`.
  """
  if posemb_XLD.shape[1] != extra + old_grid[0] * old_grid[1]:
    raise ValueError(
      f'{posemb_XLD.shape[1]} position embeddings do not fit {extra} tokens '
      f'before a grid of {old_grid[0]}x{old_grid[1]} patches.'
    )
  if tuple(old_grid) == tuple(new_grid):
    return posemb_XLD
  X, _, D = posemb_XLD.shape
  grid_XhwD = posemb_XLD[:, extra:].reshape(X, *old_grid, D)
  for axis in (1, 2):
    grid_XhwD = _resize_axis(grid_XhwD, axis, new_grid[axis - 1])
  return posemb_XLD.__array_namespace__().concatenate(
    [posemb_XLD[:, :extra], grid_XhwD.reshape(X, -1, D)], axis=1
  )


def resize_all(
  params: Any,
  like: Any,
  old_grid: tuple[int, int],
  new_grid: tuple[int, int],
) -> Any:
  """Interpolates all position embeddings in a tree of parameters.

  These include tables with one entry per row or column, or per offset along
  one axis (axial attention). Results are JAX or NumPy arrays, like the input.

  `like` is the same tree, with the shapes for the new grid. Grids are (h, w).

  Raises:
    ValueError: if a `pos_embedding` does not fit `old_grid`, or if embeddings
      are relative in raster order and the grids differ. The same raster offset
      is then another distance in rows and columns.
  """

  def one(path: tuple[Any, ...], x: np.ndarray, target: Any) -> np.ndarray:
    *parents, name = (key.key for key in path)
    if name == 'pos_embedding':
      extra = target.shape[1] - new_grid[0] * new_grid[1]
      return resize(x, old_grid, new_grid, extra)
    if name not in _TABLE_AXES:
      return x
    axial = not {'row', 'column'}.isdisjoint(parents)
    is_raster = name == 'relative_embedding' and not axial
    if is_raster and tuple(old_grid) != tuple(new_grid):
      raise ValueError(
        f'Relative position embeddings learned for {old_grid[0]}x{old_grid[1]} '
        f'patches cannot be resized to {new_grid[0]}x{new_grid[1]}: keep the '
        'image size of the checkpoint.'
      )
    axis = _TABLE_AXES[name]
    if x.shape[axis] == target.shape[axis]:
      return x
    return _resize_axis(x, axis, target.shape[axis])

  return jax.tree_util.tree_map_with_path(one, params, like)


# The axis along which a table is interpolated. It is negative, because layers
# stacked for a scan add a first axis.
_TABLE_AXES = {
  'x_embedding': -2,
  'y_embedding': -2,
  'relative_embedding': -3,
  'relative_query': -2,
  'relative_key': -2,
  'relative_value': -2,
}


def _resize_axis(x: np.ndarray, axis: int, new: int) -> np.ndarray:
  xp = x.__array_namespace__()  # `numpy` or `jax.numpy`
  old = x.shape[axis]
  position = np.arange(new) * (old - 1) / max(new - 1, 1)
  columns = [np.interp(position, np.arange(old), one) for one in np.eye(old)]
  matrix = np.stack(columns, axis=1)  # (new, old)
  y = xp.moveaxis(xp.tensordot(matrix, x, (1, axis)), 0, axis)
  return y.astype(x.dtype)
