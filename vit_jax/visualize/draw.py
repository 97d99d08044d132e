"""Draw maps, attention heads, filters and position embeddings as PNG."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageColor

from vit_jax.training import plots

# Share of the pixels that stay visible in a masked picture.
_KEEP = 0.5
_GRAY = 128


def overlay(shown_HWC: np.ndarray, map_hw: np.ndarray) -> np.ndarray:
  """Overlays the colours of a map on a grayscale photograph."""
  import matplotlib  # inside functions, because it is slow to import

  gray_HW = cv2.cvtColor(shown_HWC, cv2.COLOR_RGB2GRAY)
  map_HW = enlarge(map_hw, shown_HWC.shape[:2])
  heat_HWC = matplotlib.colormaps['inferno'](map_HW, bytes=True)[..., :3]
  return (0.45 * gray_HW[..., None] + 0.55 * heat_HWC).astype(np.uint8)


def masked(shown_HWC: np.ndarray, map_hw: np.ndarray) -> np.ndarray:
  """Keeps the pixels in the highest half of a map; fills the rest with gray."""
  stays_HW = highest(enlarge(map_hw, shown_HWC.shape[:2]), _KEEP)
  return np.where(stays_HW[..., None], shown_HWC, np.uint8(_GRAY))


def highest(map_HW: np.ndarray, share: float) -> np.ndarray:
  """Returns a mask that is true at the highest values of a map.

  It selects a `share` of the pixels, rounded to a whole number of pixels. Among
  equal values, the first in raster order are selected.
  """
  order = np.argsort(-map_HW, axis=None, kind='stable')
  found = np.zeros(map_HW.size, bool)
  found[order[: round(share * map_HW.size)]] = True
  return found.reshape(map_HW.shape)


def enlarge(map_hw: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """Enlarges a map to (height, width) by bilinear interpolation, float32."""
  return cv2.resize(np.asarray(map_hw, np.float32), size[::-1])


def class_colour(label: int) -> tuple[int, ...]:
  """Returns the colour (R, G, B) of a class."""
  # The hues of neighbouring classes differ by the golden angle.
  return ImageColor.getrgb(f'hsl({label * 137.5 % 360:.0f}, 90%, 40%)')


def png(pixels: np.ndarray, palette_XC: np.ndarray | None = None) -> bytes:
  """Encodes pixels uint8 HWC, or HW as indices of a palette, as PNG."""
  file, image = io.BytesIO(), Image.fromarray(pixels)
  if palette_XC is not None:
    image.putpalette(palette_XC.tobytes())
  image.save(file, format='png', optimize=True)
  return file.getvalue()


def pixels(png: bytes) -> np.ndarray:
  """Decodes a PNG to uint8 HWC."""
  return np.asarray(Image.open(io.BytesIO(png)).convert('RGB'))


def sheet(
  rows: Sequence[Mapping[str, np.ndarray]], names: Sequence[str]
) -> bytes:
  """Draws images HWC, keyed by column title; `names` label the rows."""
  titles = list(rows[0])
  across, down = len(titles), len(rows)
  figure = plots.figure(1.8 * across + 0.3, 1.8 * down + 0.3)
  panels = figure.subplots(down, across, squeeze=False)
  for line, row, name in zip(panels, rows, names, strict=True):
    for axes, title in zip(line, titles, strict=True):
      axes.imshow(row[title])
      axes.set(xticks=[], yticks=[])
      axes.spines[:].set_visible(False)
    line[0].set_ylabel(name, parse_math=False)
  for axes, title in zip(panels[0], titles, strict=True):
    axes.set_title(title, fontsize='medium', parse_math=False)
  return plots.png(figure, 110)


def heads(
  shown_HWC: np.ndarray,
  maps_XNhw: np.ndarray,
  query: tuple[int, int] | None,
) -> bytes:
  """Draws one token's attention in every layer (down) and head (across).

  Each map has its own scale, from 0 to its largest value. `query` is the (row,
  column) of the patch, or None for the class token.
  """
  X, N, h, w = maps_XNhw.shape
  cell = 0.6
  figure = plots.figure(3 + cell * N, max(3, cell * X * h / w + 0.8))
  photograph, axes = figure.subplots(1, 2, width_ratios=(2.4, cell * N))
  photograph.imshow(shown_HWC)
  photograph.set_axis_off()
  if query:
    from matplotlib.patches import Rectangle

    height, width = shown_HWC.shape[0] / h, shown_HWC.shape[1] / w
    corner = query[1] * width - 0.5, query[0] * height - 0.5
    for color, line in (('black', 3.5), ('#E69F00', 2)):
      frame = Rectangle(corner, width, height, fill=False, ec=color, lw=line)
      photograph.add_patch(frame)
  largest = maps_XNhw.max(axis=(2, 3), keepdims=True)
  _mosaic(axes, maps_XNhw / np.where(largest > 0, largest, 1), vmin=0, vmax=1)
  axes.set_xticks(_middles(N, w), range(1, N + 1))
  axes.set_yticks(_middles(X, h), range(1, X + 1))
  axes.set(xlabel='head', ylabel='layer')
  return plots.png(figure, 110)


def distances(pixels_XN: np.ndarray, uniform: float) -> bytes:
  """Draws the mean attention distance of every head (ViT paper, figure 11).

  `uniform` is the distance for uniform attention, in pixels.
  """
  X, N = pixels_XN.shape
  figure = plots.figure(5.2, 4.2)
  axes = figure.subplots()
  axes.scatter(
    np.repeat(np.arange(1, X + 1), N),
    pixels_XN.ravel(),
    c=np.tile(np.arange(N), X),
    cmap='viridis',
    marker='o',
    label='a head',
  )
  axes.axhline(uniform, color='0.5', ls='--', label='uniform attention')
  axes.set(xlabel='layer', ylabel='mean attention distance (pixels)')
  axes.xaxis.get_major_locator().set_params(integer=True)
  plots.tidy(axes)
  axes.legend(frameon=False, fontsize='small')
  axes.set_ylim(0, 1.08 * max(uniform, pixels_XN.max()))
  return plots.png(figure, 110)


def filters(components_XPPC: np.ndarray) -> bytes:
  """Draws filters, up to seven per row. A value of 0 is gray."""
  X = len(components_XPPC)
  across = min(7, X)
  down = -(-X // across)
  largest = np.abs(components_XPPC).max(axis=(1, 2, 3), keepdims=True)
  tiles_XPPC = np.ones((down * across, *components_XPPC.shape[1:]))
  tiles_XPPC[:X] = 0.5 + 0.5 * components_XPPC / np.where(
    largest > 0, largest, 1
  )
  figure = plots.figure(0.8 * across, 0.8 * down)
  axes = figure.subplots()
  _mosaic(axes, tiles_XPPC.reshape(down, across, *tiles_XPPC.shape[1:]))
  axes.set_axis_off()
  return plots.png(figure, 110)


def similarities(cosines_Xhwhw: np.ndarray) -> bytes:
  """Draws cosine similarities, one tile per patch (ViT, figures 7 and 10)."""
  X, h, w, _, _ = cosines_Xhwhw.shape
  across = min(4, X)
  down = -(-X // across)
  side = 5 if X == 1 else 3
  figure = plots.figure(side * across + 0.8, side * down)
  all_axes = figure.subplots(down, across, squeeze=False).ravel()
  # At most ten evenly spaced numbers label an axis.
  rows, columns = (np.arange(1, n + 1, -(-n // 10)) for n in (h, w))
  for i, (axes, tiles) in enumerate(zip(all_axes, cosines_Xhwhw, strict=False)):
    image = _mosaic(axes, tiles, vmin=-1, vmax=1, cmap='viridis')
    axes.set_xticks(_middles(w, w)[columns - 1], columns)
    axes.set_yticks(_middles(h, h)[rows - 1], rows)
    axes.set(xlabel='patch column', ylabel='patch row')
    if X > 1:
      axes.set_title(f'layer {i + 1}', fontsize='medium')
  for axes in all_axes[X:]:
    axes.set_axis_off()
  figure.colorbar(
    image, ax=list(all_axes), label='cosine similarity', aspect=40
  )
  return plots.png(figure, 110)


def _middles(count: int, side: int) -> np.ndarray:
  """Returns the positions of tile centres in a mosaic."""
  return np.arange(count) * (side + 1) + (side - 1) / 2


def _mosaic(axes: Any, tiles_YXhw: np.ndarray, **style: Any) -> Any:
  """Draws tiles YXhw (or YXhwC) with a line of one pixel between them."""
  Y, X, h, w, *rest = tiles_YXhw.shape
  lined = np.full((Y, X, h + 1, w + 1, *rest), 1.0 if rest else np.nan)
  lined[:, :, :h, :w] = tiles_YXhw
  whole = lined.swapaxes(1, 2).reshape(Y * (h + 1), -1, *rest)[:-1, :-1]
  axes.spines[:].set_visible(False)
  axes.tick_params(length=0)
  return axes.imshow(whole, interpolation='nearest', **style)
