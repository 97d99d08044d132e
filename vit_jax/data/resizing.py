"""The fast resize of training, prediction and serving."""

import cv2
import numpy as np

# One core per image: the loader already runs one image on every core.
cv2.setNumThreads(1)


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """Bilinear resize of uint8 [H, W, 3], antialiased along sides that shrink.

  Close to Pillow's BILINEAR at a quarter of its time. Its triangle filter grows
  with the scale n/m; relative to plain bilinear sampling it blurs with a
  variance of ((n/m)^2 - 1) / 6, which is 1/2 at the scale of two. So are the
  three taps 1/4, 1/2, 1/4: sides that are closer to that than to none get them
  before they are sampled. Sides more than twice too long are averaged down to
  twice the size first. An image that has the `size` (height, width) is returned
  itself.
  """
  if image.shape[:2] == tuple(size):
    return image
  twice = tuple(min(n, 2 * m) for n, m in zip(image.shape, size, strict=False))
  if twice != image.shape[:2]:
    image = cv2.resize(image, twice[::-1], interpolation=cv2.INTER_AREA)
  variances = [((n / m) ** 2 - 1) / 6 for n, m in zip(twice, size, strict=True)]
  taps = [3 if variance > 1 / 4 else 1 for variance in variances]
  if max(taps) > 1:
    # sigmaX=0 asks for the taps above, for which OpenCV has the fastest code.
    image = cv2.GaussianBlur(
      image, taps[::-1], sigmaX=0, borderType=cv2.BORDER_REPLICATE
    )
  return cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR)
