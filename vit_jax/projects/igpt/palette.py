"""Colour palettes for iGPT, by k-means over the pixels of a dataset."""

import logging
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.data import bad_images, sources, transforms

_log = logging.getLogger(__name__)

# Maximum numbers of images and of pixels to cluster. Ten times as many pixels
# would take minutes.
IMAGES, PIXELS = 10_000, 1_000_000
# Pixels per step of k-means.
_STEP = 8_192


def palette(
  data: str | Mapping[str, Any],
  colours: int = 512,
  split: str = 'train',
  image_size: tuple[int, int] = (32, 32),
) -> np.ndarray:
  """Clusters the pixels of a dataset by k-means; see `fit` for the result.

  Uses at most 10,000 images, evenly spaced in the split, and at most 1,000,000
  of their pixels, drawn with a fixed seed. First checks all images of the
  split. Logs the number of pixels, and the root mean square difference between
  them and their nearest colours over all channels, which are from 0 to 255.

  Args:
    data: name of the dataset, or a dict; see `sources.data_config`.
    colours: K, number of colours.
    split: see `data.splits`.
    image_size: (H, W) that images are resized to.

  Raises ValueError if the images have fewer than K distinct colours. Also
  raises the errors of `sources.data_config` and `bad_images.open_checked`.
  """
  config = sources.data_config(data)
  source = bad_images.open_checked(config, split)
  transform = transforms.EvalTransform(image_size)
  count = min(IMAGES, len(source))
  rows = np.linspace(0, len(source) - 1, count).astype(int)
  images_BHWC = np.stack([transform(source[int(i)])['image'] for i in rows])
  pixels_NC = images_BHWC.reshape(-1, 3)
  if len(pixels_NC) > PIXELS:
    rows_N = np.random.default_rng(0).choice(len(pixels_NC), PIXELS, False)
    pixels_NC = pixels_NC[rows_N]
  colours_KC = fit(pixels_NC, colours)
  error = np.float32(nearest(pixels_NC, colours_KC)) - pixels_NC
  rmse = math.sqrt(np.mean(np.square(error)))
  _log.info(
    f'data     {config.name} {split}: {len(pixels_NC):,} pixels of '
    f'{len(images_BHWC):,} images\nerror    {rmse:.2f} of 255, root mean square'
    ' over red, green and blue'
  )
  return colours_KC


def fit(pixels_NC: np.ndarray, colours: int) -> np.ndarray:
  """Returns the cluster centres, from dark to bright, float32 KC in [-1, 1].

  Raises ValueError if the uint8 pixels have fewer than K distinct colours.
  """
  from sklearn.cluster import MiniBatchKMeans  # slow to import

  there = len(np.unique(pixels_NC.astype(np.int32) @ [1 << 16, 1 << 8, 1]))
  if there < colours:
    raise ValueError(
      f'--colours is {colours}, but the images have only {there:,} distinct '
      f'colours. Use at most --colours={there}.'
    )
  values_NC = pixels_NC.astype(np.float32) / np.float32(127.5) - 1
  kmeans = MiniBatchKMeans(
    colours, batch_size=_STEP, n_init=3, random_state=0, max_iter=20
  )
  kmeans.fit(values_NC)
  found_KC = np.clip(kmeans.cluster_centers_, -1, 1).astype(np.float32)
  found_KC = found_KC[np.argsort(found_KC.sum(-1), kind='stable')]
  if found_KC.min() >= 0:
    # Without a negative value, `read` would take the range to be [0, 1]. So the
    # darkest colour becomes black.
    found_KC[0] = -1
  return found_KC


def nearest(pixels_NC: np.ndarray, palette_KC: np.ndarray) -> np.ndarray:
  """Returns the nearest palette colour of each uint8 pixel, uint8 NC."""
  from sklearn.metrics import pairwise_distances_argmin

  values_NC = pixels_NC.astype(np.float32) / np.float32(127.5) - 1
  found_NC = palette_KC[pairwise_distances_argmin(values_NC, palette_KC)]
  return np.rint(127.5 * (found_NC + 1)).astype(np.uint8)


def read(path: str) -> tuple[float, ...]:
  """Reads a palette from a .npy file, as the values of `IGPT.palette`.

  The array has the shape (colours, 3), or (colours, 1) for greys, and values in
  [-1, 1]. If no value is negative, the range is taken to be [0, 1], as in
  teddykoker/image-gpt, and a warning is logged.

  Raises FileNotFoundError if the file is missing, and ValueError if it has no
  such array, or fewer than two colours.
  """
  path = os.path.expanduser(path)
  if not pathlib.Path(path).is_file():
    raise FileNotFoundError(
      f'No palette at {path}. Make one with: '
      f'python -m vit_jax.palette DATASET --out={path}'
    )
  try:
    found = np.load(path, allow_pickle=False)
    values = np.asarray(found, np.float32)
  except Exception as e:
    raise ValueError(f'{path} is not a .npy file of numbers: {e}') from e
  if values.ndim != 2 or values.shape[1] not in (1, 3) or len(values) < 2:
    raise ValueError(
      f'{path} has the shape {values.shape}. A palette must have the shape '
      '(colours, 3), or (colours, 1) for greys, with at least 2 colours.'
    )
  if not np.all(np.abs(values) <= 1):
    raise ValueError(
      f'{path} has values outside [-1, 1]. Scale them to [-1, 1].'
    )
  if values.min() >= 0:
    _log.warning(
      '%s has no negative value, so its range is taken to be [0, 1].', path
    )
    values = 2 * values - 1
  values = np.broadcast_to(values, (len(values), 3))
  return tuple(values.ravel().tolist())
