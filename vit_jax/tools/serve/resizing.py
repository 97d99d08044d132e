"""Bilinear resizing as OpenCV does it, to the bit, with NumPy alone.

Models are measured on what `data/transforms.py` makes of an image with OpenCV,
which a board does not have. These are its integer arithmetic for uint8, hence
the odd numbers of bits: 11 of the weights, of which 4 and 16 are cut off on the
way.
"""

import numpy as np

_BITS = 11


def resize(image_HWC: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """Returns uint8 pixels of another (height, width).

  As `transforms.resize`: sides more than twice too long are averaged down to
  twice the size, blurred by 1/4, 1/2, 1/4 where they are still much too long,
  and sampled.
  """
  if image_HWC.shape[:2] == tuple(size):
    return image_HWC
  twice = tuple(
    min(n, 2 * m) for n, m in zip(image_HWC.shape, size, strict=False)
  )
  if twice != image_HWC.shape[:2]:
    image_HWC = _averaged(image_HWC, twice)
  blurred = [
    axis
    for axis, (n, m) in enumerate(zip(twice, size, strict=True))
    if ((n / m) ** 2 - 1) / 6 > 1 / 4
  ]
  if blurred:
    x = image_HWC.astype(np.uint16)
    for axis in blurred:
      x = _taps(x, axis)
    bits = 2 * len(blurred)
    image_HWC = (x + (1 << bits - 1) >> bits).astype(np.uint8)
  return _sampled(image_HWC, size)


def _taps(x: np.ndarray, axis: int) -> np.ndarray:
  """Returns the sums with the weights 1, 2, 1 along an axis."""
  y = np.moveaxis(x, axis, 0)
  padded = np.concatenate([y[:1], y, y[-1:]])
  return np.moveaxis(padded[:-2] + 2 * y + padded[2:], 0, axis)


def _sampled(image_HWC: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """OpenCV's INTER_LINEAR."""
  (H, W), (h, w) = image_HWC.shape[:2], size
  (top, bottom), beta = _places(H, h)
  (left, right), alpha = _places(W, w)
  # What lies outside counts as the pixel at the border.
  left, right, top, bottom = (
    np.clip(i, 0, n - 1)
    for i, n in ((left, W), (right, W), (top, H), (bottom, H))
  )
  x = np.take(image_HWC, left, 1) * alpha[0, :, None]
  x += np.take(image_HWC, right, 1) * alpha[1, :, None]
  x >>= 4
  # In place, which takes half the time.
  above, below = np.take(x, top, 0), np.take(x, bottom, 0)
  for y, weights in zip((above, below), beta, strict=True):
    y *= weights[:, None, None]
    y >>= 16
  above += below
  above += 2
  above >>= 2
  return above.astype(np.uint8)


def _places(n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the two neighbours of each of m samples, and their weights, 2m."""
  at = ((np.arange(m) + 0.5) * (n / m) - 0.5).astype(np.float32)
  first = np.floor(at).astype(np.int32)
  part = at - first.astype(np.float32)
  weights = np.rint(np.stack([1 - part, part]) * np.float32(1 << _BITS))
  return np.stack([first, first + 1]), weights.astype(np.int32)


def _averaged(image_HWC: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """OpenCV's INTER_AREA, for sides that shrink."""
  (H, W), (h, w) = image_HWC.shape[:2], size
  if H % h == 0 and W % w == 0:
    rows, columns = H // h, W // w
    blocks = image_HWC.reshape(h, rows, w, columns, -1)
    sums = blocks.sum((1, 3), dtype=np.int32)
    if rows == columns == 2:
      return (sums + 2 >> 2).astype(np.uint8)
    share = np.float32(1 / (rows * columns))
    return np.rint(sums.astype(np.float32) * share).astype(np.uint8)
  narrow = np.zeros((H, w, 3), np.float32)
  for columns, shares in _shares(W, w):
    narrow += image_HWC[:, columns] * shares[:, None]
  small = np.zeros((h, w, 3), np.float32)
  for rows, shares in _shares(H, h):
    small += narrow[rows] * shares[:, None, None]
  return np.rint(small).astype(np.uint8)


def _shares(n: int, m: int) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns which of n pixels are averaged in each of m, and their shares.

  The first of all m, then the second of those that have one, and so on.
  """
  scale = n / m
  ends = np.arange(m) * scale
  last = np.minimum(np.floor(ends + scale).astype(int), n - 1)
  first = np.minimum(np.ceil(ends).astype(int), last)
  before = first - ends
  after = ends + scale - last
  parts = [(first - 1, np.where(before > 1e-3, before / scale, 0))]
  for k in range(int(np.max(last - first))):
    parts.append((first + k, np.where(first + k < last, 1 / scale, 0)))
  parts.append((last, np.where(after > 1e-3, after / scale, 0)))
  return [
    (np.clip(i, 0, n - 1), share.astype(np.float32)) for i, share in parts
  ]
