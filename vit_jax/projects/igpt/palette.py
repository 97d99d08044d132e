"""The colours that stand for all others in images, as iGPT predicts them."""

import logging
import math
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data import bad_images, sources, transforms
from vit_jax.data.sources import Source

_log = logging.getLogger(__name__)

# Images of the source, evenly spread, and pixels that are clustered: ten
# times as many took minutes.
IMAGES, PIXELS = 10_000, 1_000_000
# Pixels of a step of k-means, which scikit-learn advises to be above 3,000.
_STEP = 8_192


class Palette(NamedTuple):
  """Colours of a data set.

  Attributes:
    colours_KC: float32 in [-1, 1], from dark to bright.
    rmse: root mean square error of red, green and blue, of 255.
    images: how many images the pixels are of.
    pixels: how many of their pixels were clustered.
  """

  colours_KC: np.ndarray
  rmse: float
  images: int
  pixels: int


def palette(
  data: str | Mapping[str, Any],
  colours: int = 512,
  split: str = 'train',
  image_size: tuple[int, int] = (32, 32),
) -> Palette:
  """Clusters the pixels of a data set by k-means.

  Args:
    data: as `sources.data_config` takes it.
    colours: K.
    split: of the data.
    image_size: (H, W) that images are brought to.

  Raises:
    OSError: if the data are missing.
    ValueError: if there are fewer colours than that.
  """
  source = bad_images.open_checked(sources.data_config(data), split)
  images_BHWC = _images(source, image_size)
  pixels_NC = images_BHWC.reshape(-1, 3)
  if len(pixels_NC) > PIXELS:
    rows_N = np.random.default_rng(0).choice(len(pixels_NC), PIXELS, False)
    pixels_NC = pixels_NC[rows_N]
  colours_KC = fit(pixels_NC, colours)
  error = np.float32(nearest(pixels_NC, colours_KC)) - pixels_NC
  rmse = math.sqrt(np.mean(np.square(error)))
  return Palette(colours_KC, rmse, len(images_BHWC), len(pixels_NC))


def fit(pixels_NC: np.ndarray, colours: int) -> np.ndarray:
  """Returns the means of pixels' clusters, from dark to bright.

  Args:
    pixels_NC: uint8 RGB.
    colours: K.

  Returns:
    float32 KC in [-1, 1].

  Raises:
    ValueError: if there are fewer colours than that.
  """
  from sklearn.cluster import MiniBatchKMeans  # slow to import

  there = len(np.unique(pixels_NC.astype(np.int32) @ [1 << 16, 1 << 8, 1]))
  if there < colours:
    raise ValueError(
      f'--colours={colours}, and the images have {there:,} different ones: ask '
      'for at most as many.'
    )
  values_NC = pixels_NC.astype(np.float32) / np.float32(127.5) - 1
  kmeans = MiniBatchKMeans(
    colours, batch_size=_STEP, n_init=3, random_state=0, max_iter=20
  )
  with warnings.catch_warnings():
    # Batches of small data are smaller than was asked for.
    warnings.simplefilter('ignore')
    kmeans.fit(values_NC)
  found_KC = np.clip(kmeans.cluster_centers_, -1, 1).astype(np.float32)
  found_KC = found_KC[np.argsort(found_KC.sum(-1), kind='stable')]
  if found_KC.min() >= 0:
    # All images are bright. `read` would take the colours for [0, 1].
    found_KC[0] = -1
  return found_KC


def nearest(pixels_NC: np.ndarray, palette_KC: np.ndarray) -> np.ndarray:
  """Returns uint8 pixels with the colours of the palette."""
  from sklearn.metrics import pairwise_distances_argmin

  values_NC = pixels_NC.astype(np.float32) / np.float32(127.5) - 1
  found_NC = palette_KC[pairwise_distances_argmin(values_NC, palette_KC)]
  return np.rint(127.5 * (found_NC + 1)).astype(np.uint8)


def read(path: str) -> tuple[float, ...]:
  """Returns a palette as `model.palette` takes it.

  A .npy file with an array (colours, 3), or (colours, 1) of greys, of values in
  [-1, 1], or in [0, 1] as teddykoker/image-gpt has them: without a value below
  0, which a warning says.

  Raises:
    FileNotFoundError: if the file is missing.
    ValueError: if it is not a palette.
  """
  if not pathlib.Path(path).is_file():
    raise FileNotFoundError(
      f'No palette at {path}: python -m vit_jax.palette DATASET --out={path}'
    )
  try:
    found = np.load(path, allow_pickle=False)
    values = np.asarray(found, np.float32)
  except Exception as e:
    raise ValueError(f'{path} is not a .npy file of numbers: {e}') from e
  if values.ndim != 2 or values.shape[1] not in (1, 3) or len(values) < 2:
    raise ValueError(
      f'{path} has the shape {values.shape}, and a palette (colours, 3) or, of '
      'greys, (colours, 1).'
    )
  if not np.all(np.abs(values) <= 1):
    raise ValueError(f'{path} has values that are not in [-1, 1].')
  if values.min() >= 0:
    _log.warning('%s has no value below 0: it is read as of [0, 1].', path)
    values = 2 * values - 1
  values = np.broadcast_to(values, (len(values), 3))
  return tuple(values.ravel().tolist())


def _images(source: Source, size: tuple[int, int]) -> np.ndarray:
  """Returns at most `IMAGES` of a source as a model sees them, uint8 BHWC."""
  transform = transforms.EvalTransform(size)
  count = min(IMAGES, len(source))
  rows = np.linspace(0, len(source) - 1, count).astype(int)
  return np.stack([transform(source[int(i)])['image'] for i in rows])
